# What Cilium makes in the pod's namespace.
ip -n "$POD" link set eth0 up
ip -n "$POD" addr add 10.0.1.7/32 dev eth0
ip -n "$POD" route add 10.0.1.38 dev eth0 scope link
ip -n "$POD" route add default via 10.0.1.38 dev eth0
