#!/bin/bash
# shows: the machine is stopped for 20 s and its clock set afterwards, and it sleeps (ACPI S3) for 20 s and is woken: each time traffic is back within 10 s
# monitor: yes
. "${BASH_SOURCE[0]%/*}/lib.sh"
pair
# What runs from now on is in memory: the device behind which this machine's files are does not come back from a sleep.
for program in /bin/busybox "$BIN/nebula-ctl"; do cp "$program" "$D/"; done
cat >"$D/after" <<'AFTER'
B=$1/busybox
up() { $B cut -d. -f1 /proc/uptime; }
# Pings until there is an answer; says after how many seconds.
back() {
  begun=$(up)
  until $B nsenter --net=/run/netns/a $B ping -c1 -W1 10.77.0.2 >/dev/null; do
    [ $(($(up) - begun)) -lt 10 ] || { echo "FAILED: no answer 10 s after $1"; return 1; }
  done
  echo "seen: after $1: an answer after $(($(up) - begun)) s; the clock went on by $(($($B date +%s) - at)) s"
}
at=$($B date +%s)
echo "machine: pause 20"
# The machine is stopped meanwhile: its own clock knows nothing of it, that of the hardware does.
$B sleep 8
$B hwclock -s -u
[ $(($($B date +%s) - at)) -ge 20 ] || { echo "FAILED: the machine was not stopped: $(($($B date +%s) - at)) s"; exit 1; }
back "a stop" || exit 1
at=$($B date +%s)
echo "machine: sleep 20"
$B sleep 3
echo mem >/sys/power/state || { echo "FAILED: this machine does not sleep"; exit 1; }
[ $(($($B date +%s) - at)) -ge 20 ] || { echo "FAILED: the machine did not sleep: $(($($B date +%s) - at)) s"; exit 1; }
back "a sleep" || exit 1
"$1/nebula-ctl" -s "$1/a.sock" --json peers
AFTER
has deep /sys/power/mem_sleep || fail "no S3: $(</sys/power/mem_sleep)"
echo deep >/sys/power/mem_sleep
"$D/busybox" sh -n "$D/after"
trap - ERR
exec "$D/busybox" sh "$D/after" "$D"
status=$?
exit "$status"
