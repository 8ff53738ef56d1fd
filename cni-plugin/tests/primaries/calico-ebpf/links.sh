# Calico with its eBPF data path: the same links, and programs on the node's end.
#
# By tcx where the kernel has it, else in a clsact queueing discipline: the description of the field bpfAttachType in public
# copies of the resource definition felixconfigurations.crd.projectcalico.org ("Default: TCX").
. "$PRIMARIES/calico/links.sh"
python3 "$TCX" "$link" ingress
python3 "$TCX" "$link" egress
