#!/bin/bash
# shows: systemd as process 1 with the units of deploy/: ready when the device is there; a restart and a kill keep device and port (descriptor store) and traffic goes on; a stop removes the device; the watchdog restarts a certificate service that hangs
# systemd: yes
. "${BASH_SOURCE[0]%/*}/lib.sh"
modprobe tun
units=${BASH_SOURCE[0]%/*}/../../deploy
seen "systemd $(systemctl --version | head -n 1)"
cp "$BIN"/nebula{,-ca,-ctl} /usr/local/bin/
cp "$units"/nebula{,-ca}.service /etc/systemd/system/
systemctl daemon-reload
for unit in nebula nebula-ca; do
  # What a systemd does not know it ignores, and says so.
  unknown=$(systemd-analyze verify --man=no "/etc/systemd/system/$unit.service" 2>&1 | grep -i "$unit.*unknown" || true)
  [[ -z $unknown ]] || seen "$unknown"
done
get() { systemctl show -P "$1" nebula.service 2>/dev/null || systemctl show --value -p "$1" nebula.service; }
index() { ip -o link show neb0 | cut -d: -f1; }
port() { awk '$2 ~ /:1092$/ { print $10 }' /proc/net/udp; }
flow() { on b ping -i0.2 -W1 10.77.0.1 >"$D/pings" 2>&1 & pinging=$!; }
# The longest silence of the pings, in answers.
lost() {
  kill -INT "$pinging" && wait "$pinging" || true
  sed -n 's/.*icmp_seq=\([0-9]*\) ttl.*/\1/p' "$D/pings" | awk 'NR > 1 && $1 - last > most { most = $1 - last } { last = $1 } END { print most - 1 }'
}

# This machine is a.
host b 2
ip address add 192.0.2.1/24 dev lan
certify a 10.77.0.1/24 && certify b 10.77.0.2/24
mkdir -p /etc/nebula
cp "$D"/ca.crt "$D"/a.crt "$D"/a.key /etc/nebula/
config a | sed "s|$D/a.sock|/run/nebula/neb0.sock|; s|$D/|/etc/nebula/|g" >/etc/nebula/config.yml
systemctl start nebula.service
# Nothing to wait for.
first=$(index) socket=$(port)
[[ $(get ActiveState) == active && -n $first && -n $socket ]] || fail "$(systemctl status nebula.service 2>&1)"
[[ $(get NFileDescriptorStore) == 2 ]] || fail "systemd holds $(get NFileDescriptorStore) descriptors"
start b
wait_for 60 ping_from b 10.77.0.1

kept() {
  [[ $(index) == "$first" && $(port) == "$socket" ]] || fail "$1: device $(index), socket $(port); before $first, $socket"
  [[ $(get NFileDescriptorStore) == 2 ]] || fail "$1: systemd holds $(get NFileDescriptorStore) descriptors"
  wait_for 30 ping_from b 10.77.0.1
  seen "$1: at most $(lost) pings of 5 a second were lost in a row"
}
before=$(get MainPID)
flow
sleep 2
systemctl restart nebula.service
sleep 3
kept "a restart"
[[ $(get MainPID) != "$before" ]] || fail "the same process"
journalctl -q --no-pager -u nebula >"$D/journal" || true
for said in "The tun device of the last run goes on" "The UDP port of the last run"; do
  has "$said" "$D/journal" || fail "the journal does not say: $said: $(tail -n 20 "$D/journal")"
done
before=$(get MainPID)
flow
sleep 2
kill -9 "$before"
another() { [[ $(get ActiveState) == active && $(get MainPID) != "$before" && $(get MainPID) != 0 ]]; }
wait_for 60 another
sleep 3
kept "a kill"

before=$(get MainPID)
sed -i 's/proto: any/proto: tcp/g' /etc/nebula/config.yml
systemctl reload nebula.service
closed() { ! ping_from b 10.77.0.1; }
wait_for 30 closed
[[ $(get MainPID) == "$before" && $(get ActiveState) == active ]] || fail "after a reload: $(systemctl status nebula.service 2>&1)"
systemctl stop nebula.service
gone() { ! ip link show neb0; }
wait_for 10 gone
[[ $(get Result) == success ]] || fail "a stop: $(get Result)"
! ip link set neb0 up 2>/dev/null || fail "the device is there"

ca() { systemctl show --value -p "$1" nebula-ca.service; }
nebula-ca init --dir /var/lib/nebula-ca --tls-name 192.0.2.1 --overlay 10.42.0.0/16 >"$D/init.log"
mkdir -p /etc/systemd/system/nebula-ca.service.d
printf '[Service]\nWatchdogSec=10\n' >/etc/systemd/system/nebula-ca.service.d/test.conf
systemctl daemon-reload
systemctl start nebula-ca.service
before=$(ca MainPID)
# It tells that it lives.
sleep 15
[[ $(ca MainPID) == "$before" ]] || fail "a restart without a reason: $(systemctl status nebula-ca.service 2>&1)"
begun=$SECONDS
kill -STOP "$before"
restarted() { [[ $(ca ActiveState) == active && $(ca MainPID) != "$before" && $(ca MainPID) != 0 ]]; }
wait_for 150 restarted
seen "a certificate service that hangs is another process after $((SECONDS - begun)) s"
