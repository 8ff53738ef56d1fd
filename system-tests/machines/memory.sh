#!/bin/bash
# shows: a daemon in a control group of version 2 with `memory.max` of 16 MiB carries a stream each way and is not killed
. "${BASH_SOURCE[0]%/*}/lib.sh"
group=/sys/fs/cgroup/daemon
has memory /sys/fs/cgroup/cgroup.controllers || fail "no memory controller of version 2"
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir "$group" "$group-other"
for limited in "$group" "$group-other"; do echo 16M >"$limited/memory.max"; done
killed() { awk '$1 == "oom_kill" { print $2 }' "$1/memory.events"; }
# Such a limit is real: what needs more is killed.
(
  echo "$BASHPID" >"$group-other/cgroup.procs"
  exec /usr/bin/python3 -c 'bytearray(40 << 20)'
) 2>/dev/null && fail "a limit of 16 MiB lets 40 MiB be"
(($(killed "$group-other") == 1)) || fail "killed: $(<"$group-other/memory.events")"

host a 1 && host b 2
certify a 10.77.0.1/24 && certify b 10.77.0.2/24
start a
start b "$group"
wait_for 60 ping_from a 10.77.0.2
grep -q "^${pid[b]}$" "$group/cgroup.procs" || fail "the daemon is not in the group: $(<"$group/cgroup.procs")"
for way in "a b" "b a"; do
  # shellcheck disable=SC2086 # two words
  speed=$(stream $way 6 -P 4)
  seen "4 streams of TCP from $way: $(megabits "$speed"), $(($(<"$group/memory.current") / 1024)) KiB in the group, $(
    awk '$1 == "anon" || $1 == "sock" { printf "%s %d KiB ", $1, $2 / 1024 }' "$group/memory.stat")"
  ((speed > 200000)) || fail "$speed bit/s"
done
(($(killed "$group") == 0)) || fail "$(<"$group/memory.events")"
kill -0 "${pid[b]}"
ping_from a 10.77.0.2
