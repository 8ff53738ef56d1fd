# Calico with its eBPF data path: the same links, and programs on the node's end.
#
# By tcx where the kernel has it, else in a clsact queueing discipline: the field bpfAttachType of FelixConfiguration,
# projectcalico/calico, api/pkg/apis/projectcalico/v3/felixconfig.go ("Default: TCX").
. "$PRIMARIES/calico/links.sh"
python3 "$TCX" "$link" ingress
python3 "$TCX" "$link" egress
