# kindnet with its own plugin: a veth to the node alone, an address of one host, the gateway's address on the node's end.
#
# Chain and the file's name:  kubernetes-sigs/kindnet, pkg/node/cni.go.
# Link, addresses:            cmd/cni-kindnet/netdev.go (createPodInterface).
# The result is that of the CNI specification: the file that prints it was not at hand.
link=knet1a2b3c4d
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" up
ip -n "$POD" link set eth0 up
ip -n "$POD" addr add 10.244.1.7/32 dev eth0
ip addr add 10.244.1.1/32 dev "$link"
ip -n "$POD" route add 10.244.1.1 dev eth0 scope link
ip -n "$POD" route add default via 10.244.1.1 dev eth0 src 10.244.1.7
ip route add 10.244.1.7 dev "$link" scope host src 10.244.1.1
