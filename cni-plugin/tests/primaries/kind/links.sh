# kind's kindnetd: the plugin ptp, a veth to the node alone with the gateway's address on the node's end.
#
# Chain and the file's name:  kubernetes-sigs/kind, images/kindnetd/cmd/kindnetd/cni.go.
# Link, addresses, result:    containernetworking/plugins, plugins/main/ptp/ptp.go.
link=veth1a2b3c4d
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" up
ip -n "$POD" link set eth0 up
ip -n "$POD" addr add 10.244.1.7/24 dev eth0
ip -n "$POD" route del 10.244.1.0/24 dev eth0
ip -n "$POD" route add 10.244.1.1 dev eth0 scope link src 10.244.1.7
ip -n "$POD" route add 10.244.1.0/24 via 10.244.1.1 dev eth0 src 10.244.1.7
ip -n "$POD" route add default via 10.244.1.1 dev eth0
ip addr add 10.244.1.1/32 dev "$link"
ip route add 10.244.1.7 dev "$link" scope host
