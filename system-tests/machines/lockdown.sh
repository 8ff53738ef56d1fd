#!/bin/bash
# shows: `lockdown=confidentiality`: two daemons and their stream, and a pod with `isolate`
# bullseye: the same without `isolate`
# append: lockdown=confidentiality
. "${BASH_SOURCE[0]%/*}/pods.sh"
mount -t securityfs security /sys/kernel/security
has "[confidentiality]" /sys/kernel/security/lockdown || fail "lockdown: $(</sys/kernel/security/lockdown)"
# It is real: the kernel's memory cannot be read.
! head -c1 /proc/kcore >/dev/null 2>&1 || fail "/proc/kcore can be read"
host a 3 && host b 4
certify a 10.77.0.1/24 && certify b 10.77.0.2/24
for name in a b; do config "$name" | sed 's/192.0.2.1:/192.0.2.3:/; s/192.0.2.2:/192.0.2.4:/' >"$D/$name.yml"; done
start a && start b
wait_for 60 ping_from a 10.77.0.2
speed=$(stream a b 2)
seen "TCP: $(megabits "$speed")"
((speed > 200000)) || fail "$speed bit/s"
town
if [[ $SUITE == bullseye ]]; then entry; else entry '{"isolate": {"dns": ["192.0.2.1"]}}'; fi
must add web
must check web
wait_for 60 ping_from web "$LIGHTHOUSE"
must del web
nothing_stays
