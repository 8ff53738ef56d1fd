# Azure CNI in mode transparent, with overlay addresses: a veth to the node alone, a gateway with a fixed neighbour.
#
# Chain:  Azure/azure-container-networking, cni/azure-linux-swift-overlay-dualstack.conflist. The file's name
#         and its mode of addresses: operators' notes of such nodes (pages under
#         https://learn.microsoft.com/en-us/troubleshoot/azure/azure-kubernetes/ name the file), not read at its source.
# Link, addresses:  network/transparent_endpointclient_linux.go. The link's name begins with azv.
# Result: cni/network/network.go: one interface, which names no namespace, and addresses that name no interface.
link=azv1a2b3c4d5e6
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" up
ip route add 10.244.1.7 dev "$link"
sysctl -qw "net.ipv4.conf.$link.proxy_arp=1"
ip -n "$POD" link set eth0 up
ip -n "$POD" addr add 10.244.1.7/16 dev eth0
ip -n "$POD" route del 10.244.0.0/16 dev eth0
ip -n "$POD" route add 169.254.1.1 dev eth0 scope link
ip -n "$POD" route add default via 169.254.1.1 dev eth0
ip -n "$POD" neigh add 169.254.1.1 lladdr "$(cat "/sys/class/net/$link/address")" dev eth0 nud permanent
