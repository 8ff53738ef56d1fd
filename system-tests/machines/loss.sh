#!/bin/bash
# shows: a path that loses 5 % each way and reorders (netem): TCP goes on, and every byte arrives
. "${BASH_SOURCE[0]%/*}/lib.sh"
# Else what the socket sends at once is one packet to netem, and lost whole.
for host in a b; do config "$host" | sed 's/port: 4242}/port: 4242, udp_offloads: false}/' >"$D/$host.yml"; done
pair
for host in a b; do
  tc -n "$host" qdisc add dev eth0 root netem delay 10ms loss 5% reorder 25% 50%
done
head -c 2000000 /dev/urandom >"$D/sent"
on b timeout 200 /usr/bin/python3 -c '
import shutil, socket, sys
server = socket.create_server(("10.77.0.2", 9000)); print("ready", flush=True)
shutil.copyfileobj(server.accept()[0].makefile("rb"), open(sys.argv[1], "wb"))' "$D/got" >"$D/receiver" 2>&1 &
receiver=$!
wait_for 30 has ready "$D/receiver"
begun=$SECONDS
# shellcheck disable=SC2016 # for the inner shell
on a timeout 180 bash -c 'cat "$0" >/dev/tcp/10.77.0.2/9000' "$D/sent" || fail "the sender ended with $?"
wait "$receiver" || fail "the receiver ended with $? and $(stat -c %s "$D/got") bytes: $(<"$D/receiver")"
cmp "$D/sent" "$D/got"
lost=$(tc -n a -s qdisc show dev eth0 | sed -n 's/.*dropped \([0-9]*\),.*/\1/p')
seen "2 MB in $((SECONDS - begun)) s, $lost datagrams lost on the way there"
((lost > 20)) || fail "the path lost only $lost datagrams"
speed=$(stream b a 5)
seen "a stream back: $(megabits "$speed"), $(jq .end.sum_sent.retransmits "$D/iperf.json") repeated segments"
((speed > 50000)) || fail "a stream back of $speed bit/s"
