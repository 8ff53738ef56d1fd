# aws-vpc-cni, a pod with an address of the node's second network interface: a veth to the node alone, a gateway with a fixed
# neighbour, and rules by the pod's address on the node.
#
# Chain:  aws/amazon-vpc-cni-k8s, misc/10-aws.conflist, with the values that aws-node fills in (cmd/aws-vpc-cni/main.go).
# Link, addresses, rules:  cmd/routed-eni-cni-plugin/driver/driver.go (run, setupVeth, setupIPBasedContainerRouteRules).
#         Priorities of the rules: pkg/networkutils/network.go.
# Result: cmd/routed-eni-cni-plugin/cni.go (add): a third interface that does not exist, whose "sandbox" is a number. In
#         pciID and socketPath are numbers too, which libcni does not pass on for this version.
link=eni1a2b3c4d5e6
. "$PRIMARIES/aws-vpc-cni/veth.sh"
ip route add 10.0.17.7 dev "$link" scope link
ip rule add to 10.0.17.7 priority 512 table main
ip rule add from 10.0.17.7 priority 1536 table 2
ip route add default via 192.0.2.2 dev under table 2
