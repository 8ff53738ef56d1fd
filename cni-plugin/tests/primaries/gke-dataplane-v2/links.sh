# GKE with Dataplane V2: the plugin ptp makes the link, and Cilium's has a program on the node's end of it.
#
# Chain:  GoogleCloudPlatform/netd, scripts/install-cni.sh and scripts/testdata/expected-cilium.json. The file's name: the
#         default of its setting cni_spec_name. Newer nodes have 10-gke-cni.conflist.
# Which way Google's build of Cilium attaches its programs is not public: here in a clsact queueing discipline.
. "$PRIMARIES/kind/links.sh"
tc qdisc add dev "$link" clsact
