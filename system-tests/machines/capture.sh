#!/bin/bash
# shows: ADD, CHECK and DEL of a captured pod: its rules are there, and no frame to another address of the range leaves its link in clear
# bullseye: `capture` is refused with the reason (the rules need nf_tables egress, Linux 5.16), and nothing stays
. "${BASH_SOURCE[0]%/*}/pods.sh"
town same
entry
add_others
ping_from open "$(address other)" || fail "pods without capture do not reach each other"
arrived=$(sends open other)
[[ " $arrived" == *" peer "* && $arrived == *ethertype-to-peer* ]] || fail "of a pod without capture only these arrive: $arrived"

entry '{"capture": {"ranges": ["10.42.0.0/16"], "clear": "deny"}}'
if [[ $SUITE == bullseye ]]; then
  refused web 118 "cannot capture the pod's traffic" "Linux 5.16"
else
  must add web
  must check web
  on node nft list table netdev nebula-cni-capture >"$D/rules"
  has "$(link_of web)" "$D/rules" || fail "no rules for the pod's link: $(<"$D/rules")"
  ! ping_from web "$(address other)" || fail "an address of the range that nobody knows answers"
  arrived=$(sends web other)
  seen "of all frames these arrive: ${arrived:-none}"
  [[ " $arrived" != *" peer "* && $arrived != *ethertype* && $arrived != *mpls* && $arrived != *vlan* ]] || fail "in clear: $arrived"
  without_rules web
fi
entry
end_others
