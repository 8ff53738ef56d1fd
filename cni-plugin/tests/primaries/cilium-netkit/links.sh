# Cilium with bpf.datapathMode=netkit (Linux 6.8): the programs run in the driver of the pod's device, before any rule.
#
# https://docs.cilium.io/en/stable/operations/performance/tuning/#netkit-device-mode; cilium/cilium,
# pkg/datapath/connector/netkit.go: without Ethernet addresses by default (mode L3), and what the pod sends is dropped until
# a program is there (PeerPolicy). The driver: drivers/net/netkit.c of Linux.
link=lxc1a2b3c4d5e6f
. "$PRIMARIES/cilium/node.sh"
# Debian 12's ip knows none of the driver's settings: both ends are in mode L3 and pass everything on.
ip link add "$link" type netkit
ip link set "$link" up
ip link set nk0 netns "$POD" name eth0
. "$PRIMARIES/cilium/pod.sh"
