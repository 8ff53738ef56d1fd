# What Cilium makes on the node once: a pair with the node's address among the pods.
ip link add cilium_host type veth peer name cilium_net
ip link set cilium_net up
ip link set cilium_host up
ip addr add 10.0.1.38/32 dev cilium_host
ip route add 10.0.1.38 dev cilium_host scope link
ip route add 10.0.1.0/24 via 10.0.1.38 dev cilium_host src 10.0.1.38
