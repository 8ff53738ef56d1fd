# aws-vpc-cni with its network policy agent, which has a program on the node's end of a pod's link, in both directions.
#
# aws/aws-network-policy-agent, README.md; aws/aws-ebpf-sdk-go, pkg/tc/tc.go (TCIngressAttach makes a clsact queueing
# discipline). In mode "standard" the program may come after ADD: CHECK says so then.
. "$PRIMARIES/aws-vpc-cni/links.sh"
tc qdisc add dev "$link" clsact
