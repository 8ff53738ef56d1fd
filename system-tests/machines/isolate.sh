#!/bin/bash
# shows: ADD, CHECK and DEL of pods on a bridge: an overlay address, a control group with its limit; with `isolate` no frame of a raw socket leaves the link in clear
# bullseye: ADD, CHECK and DEL; `isolate` is refused with the reason (the rules need nf_tables egress, Linux 5.16), and nothing stays
. "${BASH_SOURCE[0]%/*}/pods.sh"
town
entry
begun=$SECONDS
add_others
seen "two ADDs took $((SECONDS - begun)) s"
must check open
wait_for 60 ping_from open "$LIGHTHOUSE"
groups=$(grep -rlx --include=memory.max "$((32 << 20))" /sys/fs/cgroup || true)
for group in $groups; do cat "${group%/*}/cgroup.procs"; done >"$D/limited"
(($(wc -w <"$D/limited") == 2)) || fail "not two instances with a limit of 32 MiB: $groups"
# The listeners are not deaf: without isolation frames arrive.
arrived=$(sends open other)
[[ $arrived == *udp* && $arrived == *mpls* ]] || fail "of a pod without isolation only these arrive: $arrived"

entry '{"isolate": {"dns": ["192.0.2.1"], "probes": ["10.244.1.1"]}}'
if [[ $SUITE == bullseye ]]; then
  refused closed 115 "cannot isolate the pod" "Linux 5.16"
else
  must add closed
  must check closed
  wait_for 60 ping_from closed "$LIGHTHOUSE"
  arrived=$(sends closed other)
  [[ -z ${arrived// /} ]] || fail "these arrive in clear: $arrived"
  # A probe of the node is answered.
  wait_for 20 ping_from node "$(address closed)"
  without_rules closed
fi
end_others
