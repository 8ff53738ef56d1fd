# What the plugin bridge makes: a bridge with the gateway's address, and a port of it for the pod.
ip link add "$bridge" type bridge
ip addr add 10.244.1.1/24 dev "$bridge"
ip link set "$bridge" up
ip link add veth1a2b3c4d type veth peer name eth0 netns "$POD"
ip link set veth1a2b3c4d master "$bridge" up
ip link set veth1a2b3c4d type bridge_slave hairpin on
ip -n "$POD" link set eth0 up
ip -n "$POD" addr add 10.244.1.7/24 dev eth0
ip -n "$POD" route add default via 10.244.1.1
