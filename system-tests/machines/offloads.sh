#!/bin/bash
# shows: a stream each way; the device takes super-packets of TCP and, from Linux 6.2 on, of UDP; the socket sends several datagrams per call
# bullseye: TCP's super-packets alone (no USO): the kernel cuts those of UDP before the device
# bookworm: TCP's super-packets alone (no USO): the kernel cuts those of UDP before the device
. "${BASH_SOURCE[0]%/*}/lib.sh"
pair
case $SUITE in bullseye | bookworm) uso=off ;; *) uso=on ;; esac
# Of a tun device these are what the program that opened it asked for, and the kernel granted.
features=$(on a ethtool -k neb0)
for feature in "tcp-segmentation-offload: on" "tx-tcp6-segmentation: on" "tx-checksum-ip-generic: on"; do
  has "$feature" <(echo "$features") || fail "not $feature: $features"
done
case $uso in
  on) has "tx-udp-segmentation: on" <(echo "$features") || fail "no USO: $features" ;;
  off) ! has "tx-udp-segmentation: on" <(echo "$features") || fail "this kernel has USO, which nobody expected" ;;
esac
for way in "a b" "b a"; do
  # shellcheck disable=SC2086 # two words
  set -- $way
  calls=$(udp "$1" OutDatagrams) reads=$(udp "$2" InDatagrams)
  speed=$(stream "$1" "$2" 3)
  ((calls = $(udp "$1" OutDatagrams) - calls, reads = $(udp "$2" InDatagrams) - reads)) || true
  segments=$(($(jq .end.sum_sent.bytes "$D/iperf.json") / 1300))
  seen "TCP from $1 to $2: $(megabits "$speed"), $segments segments in $calls sends, $reads arrivals"
  # A send that is cut by the kernel or the device counts once.
  ((speed > 200000 && segments > 3 * calls)) || fail "no batches: $segments segments in $calls sends"
done

# A program that hands the kernel ten datagrams at once, which the device gets as one packet with USO and as ten without.
on b timeout 60 /usr/bin/python3 -c '
import socket
s = socket.socket(type=socket.SOCK_DGRAM); s.bind(("10.77.0.2", 9000)); s.settimeout(40)
print("ready", flush=True)
print(*(hash(s.recv(4000)) == hash(bytes([n]) * 1200) for n in range(10)))' >"$D/got" 2>&1 &
receiver=$!
wait_for 30 has ready "$D/got"
before=$(on a cat /sys/class/net/neb0/statistics/tx_packets)
on a /usr/bin/python3 -c '
import socket
s = socket.socket(type=socket.SOCK_DGRAM); s.setsockopt(17, 103, 1200)
s.sendto(b"".join(bytes([n]) * 1200 for n in range(10)), ("10.77.0.2", 9000))'
wait "$receiver" || fail "the receiver: $(<"$D/got")"
packets=$(($(on a cat /sys/class/net/neb0/statistics/tx_packets) - before))
seen "ten datagrams of one call were $packets packets of the device"
has "True True True True True True True True True True" "$D/got" || fail "what arrived: $(<"$D/got")"
case $uso in on) ((packets < 5)) ;; off) ((packets >= 10)) ;; esac || fail "$packets packets, USO $uso"
