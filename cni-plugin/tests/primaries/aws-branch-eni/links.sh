# aws-vpc-cni, a pod with a security group of its own (mode strict): a branch interface, which the node has as a VLAN, and a
# routing table for what comes by the VLAN and by the pod's link. What the node itself sends to the pod leaves by the node's
# own interface, and comes back by the VLAN.
#
# Sources as for ../aws-vpc-cni: driver.go (setupVlan, setupIIFBasedContainerRouteRules), network.go (VlanRulePriority, and the
# rule of the table local behind it), cni.go (the number of the VLAN is the "mac" of the interface that does not exist).
link=vlan1a2b3c4d5e6
. "$PRIMARIES/aws-vpc-cni/veth.sh"
ip rule add priority 20 table local
ip rule del priority 0
# A pair of devices stands in for the VLAN, which not every kernel has; its other end is the router of the VPC.
ip link add vlan.eth.1 type veth peer name vlan1 netns "$OTHER"
ip link set vlan.eth.1 up
ip -n "$OTHER" addr add 10.0.17.1/24 dev vlan1
ip -n "$OTHER" link set vlan1 up
ip -n "$OTHER" route replace 10.0.17.7 dev vlan1
# The VPC asks nobody for Ethernet addresses.
ip -n "$OTHER" neigh replace 10.0.17.7 lladdr "$(cat /sys/class/net/vlan.eth.1/address)" dev vlan1 nud permanent
ip route add 10.0.17.1 dev vlan.eth.1 scope link table 101
ip route add default via 10.0.17.1 dev vlan.eth.1 table 101
ip route add 10.0.17.7 dev "$link" scope link table 101
ip rule add iif vlan.eth.1 priority 10 table 101
ip rule add iif "$link" priority 10 table 101
