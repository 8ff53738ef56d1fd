# OVN-Kubernetes: the pod's veth is a port of the Open vSwitch bridge br-int, and the node has a port of its own there.
#
# Chain and the file's name:  ovn-kubernetes/ovn-kubernetes, go-controller/pkg/config/cni.go and config.go (CNIConfFileName):
#                             a single configuration.
# Link, addresses:            go-controller/pkg/cni/helper_linux.go (setupInterface). The link's name: the first 15 letters of
#                             the container's id; the pod's Ethernet address: 0a:58 and its IPv4 address.
# Result:                     go-controller/pkg/cni/cni.go (getCNIResult).
#
# A bridge of the kernel stands in for Open vSwitch here, which not every kernel has. The router 10.244.1.1 is missing: a pod
# of the same switch is asked instead.
link=1a2b3c4d5e6f7a8
ip link add br-int type bridge
ip link set br-int up
ip link add ovn-k8s-mp0 type veth peer name mp0-port
ip link set mp0-port master br-int up
ip addr add 10.244.1.2/24 dev ovn-k8s-mp0
ip link set ovn-k8s-mp0 up
ip link add "$link" type veth peer name eth0 address 0a:58:0a:f4:01:07 netns "$POD"
ip link set "$link" master br-int up
ip -n "$POD" addr add 10.244.1.7/24 dev eth0
ip -n "$POD" link set eth0 up
ip -n "$POD" route add default via 10.244.1.1
ip link add other-port type veth peer name ovn0 netns "$OTHER"
ip link set other-port master br-int up
ip -n "$OTHER" link set ovn0 up
ip -n "$OTHER" route replace 10.244.1.7 dev ovn0
