# Cilium with veth devices and addresses of the cluster pool: a program on the node's end takes the frames, by tcx.
#
# Chain:  cilium/cilium, daemon/cmd/cni/config.go (cniConfigs). The file's name: write-cni-conf-when-ready in
#         https://docs.cilium.io/en/stable/cmdref/cilium-agent/ and install/kubernetes/cilium/templates/cilium-configmap.yaml.
# Link:   pkg/datapath/connector (its code for veth was not looked up); its name begins with lxc.
# Result: plugins/cilium-cni/cmd/cmd.go (Add, prepareIP).
# Routes: pkg/datapath/connector/ipam.go (to the address of the node's cilium_host, and by it to everything).
# Programs: by tcx from 1.16 on where the kernel has it (6.6), https://github.com/cilium/cilium/pull/30103; enable-tcx is true
#         by default.
link=lxc1a2b3c4d5e6f
. "$PRIMARIES/cilium/node.sh"
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" up
. "$PRIMARIES/cilium/pod.sh"
python3 "$TCX" "$link" ingress
