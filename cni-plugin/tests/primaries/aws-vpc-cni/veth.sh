# The pod's link.
ip link add "$link" type veth peer name eth0 netns "$POD"
sysctl -qw "net.ipv6.conf.$link.accept_ra=0" "net.ipv6.conf.$link.accept_redirects=1" "net.ipv6.conf.$link.forwarding=0"
ip link set "$link" up
ip -n "$POD" link set eth0 up
ip -n "$POD" route add 169.254.1.1 dev eth0 scope link
ip -n "$POD" route add default via 169.254.1.1 dev eth0
ip -n "$POD" addr add 10.0.17.7/32 dev eth0
ip -n "$POD" neigh add 169.254.1.1 lladdr "$(cat "/sys/class/net/$link/address")" dev eth0 nud permanent
