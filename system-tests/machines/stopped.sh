#!/bin/bash
# shows: the machine is stopped for 20 s, as a hypervisor does, and its clock set afterwards: traffic is back within 10 s
# monitor: yes
. "${BASH_SOURCE[0]%/*}/lib.sh"
pair
before=$(date +%s)
echo "machine: pause 20"
# The machine is stopped meanwhile: its own clock knows nothing of it, that of the hardware does.
sleep 8
(($(date +%s) - before < 20)) || fail "its own clock went on while it was stopped"
busybox hwclock -s -u
went=$(($(date +%s) - before))
((went >= 20)) || fail "it was not stopped: the clock went on by $went s"
begun=$SECONDS
wait_for 10 ping_from a 10.77.0.2
seen "the clock went on by $went s; an answer after $((SECONDS - begun)) s"
