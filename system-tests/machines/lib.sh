# What the scenarios share. A scenario runs as root in a machine of its own: hosts are network namespaces on one bridge.
# shellcheck shell=bash disable=SC2034,SC2119,SC2154
set -eEuo pipefail
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
# The console, also where the output of a function is taken.
exec 3>&1
# shellcheck disable=SC2154 # the driver sets SUITE (the Debian release of the kernel) and BIN (the folder of the programs)
TOOLS=${BASH_SOURCE[0]%/*}/../../tests/tools
declare -A pid
D=$(mktemp -d) && chmod 755 "$D"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Ends the scenario, with the end of each log.
fail() {
  local log
  trap - ERR
  {
    echo "FAILED: $*"
    for log in "$D"/*.log "$D"/*/*.log "$D"/*/*/*.log; do
      [[ ! -s $log ]] || { echo "--- ${log#"$D"/}" && tail -n 12 "$log" | cut -c1-300; }
    done
  } >&3
  exit 1
}
# What was found out, for whoever reads the output.
seen() { echo "seen: $*" >&3; }

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
  local seconds=$1 end=$((SECONDS + $1))
  shift
  until "$@" >"$D/last" 2>&1; do
    ((SECONDS < end)) || fail "not within $seconds s: $* ($(tail -n 3 "$D/last"))"
    sleep 0.3
  done
}
has() { grep -qF -- "$1" "$2"; }

# host NAME NUMBER: a network namespace with the address 192.0.2.NUMBER.
host() {
  ip link show lan >/dev/null 2>&1 || { ip link add lan type bridge && ip link set lan up; }
  ip netns add "$1"
  ip link add "lan-$1" type veth peer name eth0 netns "$1"
  ip link set "lan-$1" master lan up
  ip -n "$1" link set lo up
  ip -n "$1" link set eth0 up
  ip -n "$1" address add "192.0.2.$2/24" dev eth0
}
on() { local at=$1; shift; ip netns exec "$at" "$@"; }
ping_from() { on "$1" ping -c1 -W2 "$2"; }

# certify NAME ADDRESS/PREFIX [FLAG...]: a certificate of this network, whose CA is made first.
certify() {
  local name=$1 address=$2
  shift 2
  [[ -e $D/ca.crt ]] || "$BIN/nebula-cert" ca -name machines -duration 87600h -out-crt "$D/ca.crt" -out-key "$D/ca.key"
  "$BIN/nebula-cert" sign -name "$name" -networks "$address" -ca-crt "$D/ca.crt" -ca-key "$D/ca.key" \
    -out-crt "$D/$name.crt" -out-key "$D/$name.key" "$@"
}
# config NAME [MORE]: the file for a host that knows 10.77.0.1 and 10.77.0.2 at 192.0.2.1 and 192.0.2.2.
config() {
  cat <<CONFIG
pki: {ca: $D/ca.crt, cert: $D/$1.crt, key: $D/$1.key}
static_host_map: {10.77.0.1: ['192.0.2.1:4242'], 10.77.0.2: ['192.0.2.2:4242']}
listen: {host: 0.0.0.0, port: 4242}
tun: {dev: neb0}
daemon: {control_socket: $D/$1.sock}
firewall: {outbound: [{port: any, proto: any, host: any}], inbound: [{port: any, proto: any, host: any}]}
${2-}
CONFIG
}
# start NAME [GROUP]: the daemon of a host, in a control group. Its process id is in pid[NAME] then.
start() {
  local name=$1 group=${2-}
  [[ -e $D/$name.yml ]] || config "$name" >"$D/$name.yml"
  (
    [[ -z $group ]] || echo "$BASHPID" >"$group/cgroup.procs"
    exec ip netns exec "$name" "$BIN/nebula" -config "$D/$name.yml"
  ) >>"$D/$name.log" 2>&1 &
  pid[$name]=$!
}
ctl() { local name=$1; shift; "$BIN/nebula-ctl" -s "$D/$name.sock" "$@"; }
# Two hosts, a (10.77.0.1) and b (10.77.0.2), with a tunnel.
pair() {
  host a 1 && host b 2
  certify a 10.77.0.1/24 && certify b 10.77.0.2/24
  start a && start b
  wait_for 60 ping_from a 10.77.0.2
}
# stream FROM TO SECONDS [FLAG...]: an iperf3 stream to an overlay address; prints the bits per second that arrived.
stream() {
  local from=$1 to=$2 seconds=$3
  shift 3
  on "$to" iperf3 -s -1 -D --logfile "$D/iperf.log"
  sleep 1
  on "$from" timeout $((seconds + 60)) iperf3 -J -c "$(overlay "$to")" -t "$seconds" "$@" >"$D/iperf.json" ||
    fail "iperf3 from $from to $to: $(jq -r .error "$D/iperf.json")"
  jq '.end.sum_received.bits_per_second // .end.sum.bits_per_second | floor' "$D/iperf.json"
}
overlay() { case $1 in a) echo 10.77.0.1 ;; b) echo 10.77.0.2 ;; *) return 1 ;; esac }
megabits() { echo "$(($1 / 1000000)).$(($1 / 100000 % 10)) Mbit/s"; }
# A figure of /proc/net/snmp: of UDP in one namespace.
# shellcheck disable=SC2016 # for awk
udp() { on "$1" awk -v name="$2" '$1 == "Udp:" && !n { for (i = 2; i <= NF; i++) if ($i == name) n = i; next } $1 == "Udp:" { print $n }' /proc/net/snmp; }
