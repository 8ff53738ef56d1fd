# flannel: the pod's veth is a port of the bridge cni0, which has the gateway's address. Between nodes: VXLAN.
#
# Chain and the file's name:  flannel-io/flannel, Documentation/kube-flannel.yml.
# Link, addresses, result:    it calls the plugin bridge with host-local, flannel-io/cni-plugin, flannel_linux.go;
#                             containernetworking/plugins, plugins/main/bridge (its code was not looked up).
bridge=cni0
. "$PRIMARIES/flannel/bridge.sh"
ip -n "$POD" route add 10.244.0.0/16 via 10.244.1.1
