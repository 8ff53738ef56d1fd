#!/bin/bash
# shows: the clock is set a day ahead and a day back: tunnels go on while certificates are valid, doctor names the jump; one that has expired closes its tunnels, and has them again once the clock is right
. "${BASH_SOURCE[0]%/*}/lib.sh"
set_clock() { date -s "@$(($(date +%s) + $1))" >/dev/null; }
day=86400
# Certificates begin when they are made.
set_clock $((-3 * day))
certify a 10.77.0.1/24 && certify b 10.77.0.2/24 && certify short 10.77.0.2/24 -duration $((3 * 24 + 12))h
set_clock $((3 * day))
host a 1 && host b 2
start a && start b
wait_for 60 ping_from a 10.77.0.2
tunnel() { ctl "$1" --json tunnel "$2" | jq -ce '[.tunnels[] | .local_index | numbers] | select(. != [])'; }
first=$(tunnel a 10.77.0.2)
for by in "$day" "-$day" "-$day" "$day"; do
  on a ping -i0.5 -c12 -W3 10.77.0.2 >"$D/pings" &
  pings=$!
  sleep 2
  set_clock "$by"
  wait "$pings" || fail "pings: $(<"$D/pings")"
  received=$(sed -n 's/.* \([0-9]*\) received.*/\1/p' "$D/pings")
  seen "clock set by $by s: $received of 12 pings are answered"
  ((received == 12)) || fail "$(<"$D/pings")"
  ctl a doctor --json >"$D/doctor" || true
  has '"clock_jumped"' "$D/doctor" || fail "doctor: $(<"$D/doctor")"
done
[[ $(tunnel a 10.77.0.2) == "$first" ]] || fail "another tunnel: $(tunnel a 10.77.0.2), before $first"

# b gets a certificate of half a day.
cp "$D/short.crt" "$D/b.crt" && cp "$D/short.key" "$D/b.key"
kill "${pid[b]}"
wait "${pid[b]}" || true
start b
wait_for 60 ping_from a 10.77.0.2
set_clock "$day"
no_answer() { ! ping_from a 10.77.0.2; }
begun=$SECONDS
wait_for 90 no_answer
seen "an expired certificate: closed within $((SECONDS - begun)) s"
# For good.
for _ in 1 2 3; do ! ping_from a 10.77.0.2 >/dev/null || fail "an answer with an expired certificate"; done
ctl b doctor --json >"$D/doctor" && fail "doctor finds nothing wrong with b"
has '"certificate_expired"' "$D/doctor" || fail "doctor of b: $(<"$D/doctor")"
set_clock "-$day"
begun=$SECONDS
wait_for 90 ping_from a 10.77.0.2
seen "the clock is right again: an answer after $((SECONDS - begun)) s"
