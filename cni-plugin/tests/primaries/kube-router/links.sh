# kube-router: the pod's veth is a port of the bridge kube-bridge. Between nodes: routes by BGP, or IPIP.
#
# Chain and the file's name:  cloudnativelabs/kube-router, daemonset/kubeadm-kuberouter-all-features-hostport.yaml. It writes
#                             the node's range into the file itself (KUBE_ROUTER_CNI_CONF_FILE).
# Link, addresses, result:    containernetworking/plugins, plugins/main/bridge (its code was not looked up).
bridge=kube-bridge
. "$PRIMARIES/flannel/bridge.sh"
