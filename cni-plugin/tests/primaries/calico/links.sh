# Calico without eBPF: a veth to the node alone, addresses of one host, a gateway by proxy ARP.
#
# Chain:  projectcalico/calico, charts/calico/templates/calico-config.yaml. The file's name: cni-plugin/pkg/install/install.go.
# Link, addresses, settings:  cni-plugin/pkg/dataplane/linux/dataplane_linux.go (DoNetworking, SetupRoutes, configureSysctls).
# Result:  cni-plugin/pkg/k8s/k8s.go. It lists one interface, with the name of the node's end and the pod's namespace, and
#          addresses that name no interface; the gateway is taken out of it (cni-plugin/pkg/plugin/plugin.go).
link=cali1a2b3c4d5e6
ip link add "$link" type veth peer name eth0 netns "$POD"
ip link set "$link" address ee:ee:ee:ee:ee:ee
sysctl -qw "net.ipv6.conf.$link.accept_dad=0"
ip netns exec "$POD" sysctl -qw net.ipv6.conf.eth0.accept_dad=0
ip link set "$link" up
ip -n "$POD" link set eth0 up
ip -n "$POD" route add 169.254.1.1 dev eth0 scope link
ip -n "$POD" route add default via 169.254.1.1 dev eth0
ip -n "$POD" route add default via fe80::ecee:eeff:feee:eeee dev eth0
ip -n "$POD" addr add 192.168.88.7/32 dev eth0
ip -n "$POD" addr add fd00:88::7/128 dev eth0
sysctl -qw "net.ipv4.conf.$link.route_localnet=1" "net.ipv4.neigh.$link.proxy_delay=0" "net.ipv4.conf.$link.proxy_arp=1"
sysctl -qw "net.ipv4.conf.$link.forwarding=1" "net.ipv6.conf.$link.proxy_ndp=1" "net.ipv6.conf.$link.forwarding=1"
ip route add 192.168.88.7 dev "$link" scope link
ip route add fd00:88::7 dev "$link"
