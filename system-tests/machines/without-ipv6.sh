#!/bin/bash
# shows: a kernel without IPv6 (`ipv6.disable=1`): the overlay has its IPv4 addresses, `listen.host: '::'` means all of IPv4, log and doctor say so
# append: ipv6.disable=1
. "${BASH_SOURCE[0]%/*}/lib.sh"
[[ ! -e /proc/net/if_inet6 ]] || fail "this kernel has IPv6"
host a 1 && host b 2
certify a 10.77.0.1/24,fd77::1/64 && certify b 10.77.0.2/24,fd77::2/64
config a | sed "s/host: 0.0.0.0/host: '::'/" >"$D/a.yml"
has "host: '::'" "$D/a.yml"
start a && start b
wait_for 60 ping_from a 10.77.0.2
wait_for 20 ping_from b 10.77.0.1
has "IPv6 is switched off here" "$D/a.log"
ctl a doctor --json >"$D/doctor" || true
has '"ipv6_off"' "$D/doctor" || fail "doctor: $(<"$D/doctor")"
[[ $(on a ip -o address show dev neb0) == *"10.77.0.1/24"* ]] || fail "the device: $(on a ip address show dev neb0)"
speed=$(stream a b 2)
seen "TCP: $(megabits "$speed")"
((speed > 200000)) || fail "$speed bit/s"
