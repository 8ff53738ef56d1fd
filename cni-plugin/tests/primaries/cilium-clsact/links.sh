# Cilium before 1.16, on a kernel before 6.6, or with enable-tcx=false: the programs are in a clsact queueing discipline.
#
# Sources as for ../cilium; https://github.com/cilium/cilium/issues/27632 says what was there before tcx.
link=lxc1a2b3c4d5e6f
. "$PRIMARIES/cilium/node.sh"
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" up
. "$PRIMARIES/cilium/pod.sh"
tc qdisc add dev "$link" clsact
