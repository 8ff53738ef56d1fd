#!/bin/bash
# shows: a kernel without nf_tables, where iptables-legacy works: pods get their tunnels; `isolate` and `capture` are refused with the reason
# alone: the module is removed
. "${BASH_SOURCE[0]%/*}/pods.sh"
modprobe -r nf_tables
find /lib/modules -name 'nf_tables.ko*' -delete
! modprobe nf_tables 2>/dev/null || fail "nf_tables is still there"
host first 9
on first iptables-legacy -A INPUT -p tcp --dport 9999 -j DROP
[[ $(on first iptables-legacy -S INPUT) == *"--dport 9999 -j DROP"* ]] || fail "iptables-legacy does not work"
! on first nft list ruleset 2>/dev/null || fail "nft works"
town same
entry
must add open
must check open
wait_for 60 ping_from open "$LIGHTHOUSE"
must del open
entry '{"isolate": {"dns": ["192.0.2.1"]}}'
refused closed 115 "cannot isolate the pod" "nf_tables"
entry '{"capture": {"ranges": ["10.42.0.0/16"]}}'
refused captured 118 "capture" "nf_tables"
