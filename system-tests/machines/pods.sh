# A node with pods on a bridge, as CNI runtimes make them: certificate service and lighthouse on `control`, the plugin on `node`.
# shellcheck shell=bash disable=SC2034,SC2119,SC2154
. "${BASH_SOURCE[0]%/*}/lib.sh"
LIGHTHOUSE=10.42.255.1

# The pods' own addresses.
SUBNET=10.244.1

# town [same]: starts all of that; with `same` the certificate of a pod has its own address.
town() {
  local url=https://192.0.2.1:8443 tool="$BIN/nebula-ca" plugin
  host control 1 && host node 2
  "$tool" init --dir "$D/ca" --tls-name 192.0.2.1 --overlay 10.42.0.0/16 >"$D/init.log" 2>&1
  if [[ ${1-} == same ]]; then
    SUBNET=10.42.1
    grep -v '^ *//' "$D/ca/policy.jsonc" | jq '.pods.address = "same"' >"$D/policy" && cat "$D/policy" >"$D/ca/policy.jsonc"
  fi
  on control "$tool" serve --dir "$D/ca" --listen 192.0.2.1:8443 >>"$D/ca.log" 2>&1 &
  wait_for 60 test -S "$D/ca/control.sock"
  "$tool" token create --dir "$D/ca" --name lighthouse --network "$LIGHTHOUSE/16" >"$D/token"
  wait_for 60 on control "$BIN/nebula-enrol" -ca-url "$url" -tls-ca "$D/ca/tls.crt" -token-file "$D/token" -out-dir "$D/lighthouse"
  cat >"$D/lighthouse.yml" <<CONFIG
pki: {ca: $D/lighthouse/ca.crt, cert: $D/lighthouse/host.crt, key: $D/lighthouse/host.key}
lighthouse: {am_lighthouse: true}
listen: {host: 0.0.0.0, port: 4242}
tun: {dev: neb0}
daemon: {control_socket: $D/lighthouse.sock}
firewall: {outbound: [{port: any, proto: any, host: any}], inbound: [{port: any, proto: icmp, host: any}]}
CONFIG
  on control "$BIN/nebula" -config "$D/lighthouse.yml" >>"$D/lighthouse.log" 2>&1 &
  mkdir -p "$D/bin" "$D/instances"
  for plugin in /usr/lib/cni/{bridge,host-local} "$BIN"/nebula-cni-{plugin,instance}; do ln -s "$plugin" "$D/bin/"; done
}
# entry [MORE]: the chain of a node; MORE is JSON that is merged into our entry.
entry() {
  jq -n --arg d "$D" --arg bin "$BIN" --arg lighthouse "$LIGHTHOUSE" --arg subnet "$SUBNET.0/24" --argjson more "${1-"{}"}" '{
    cniVersion: "1.0.0", name: "machines", plugins: [
      {type: "bridge", bridge: "cni0", isGateway: true, ipam: {type: "host-local", dataDir: ($d + "/ipam"),
        ranges: [[{subnet: $subnet}]], routes: [{dst: "0.0.0.0/0"}]}},
      ({type: "nebula-cni-plugin", supervisor: "direct", instance: ($bin + "/nebula-cni-instance"), stateDir: ($d + "/state"),
        overlay: ["10.42.0.0/16"], timeoutSeconds: 60,
        ca: {url: "https://192.0.2.1:8443", tlsCaFile: ($d + "/ca/tls.crt"), tokenFile: ($d + "/ca/node.token")},
        nebula: {static_host_map: {($lighthouse): ["192.0.2.1:4242"]}, lighthouse: {hosts: [$lighthouse]},
          firewall: {outbound: [{port: "any", proto: "any", host: "any"}], inbound: [{port: "any", proto: "any", host: "any"}]}}}
        + $more)]}' >"$D/net.conflist"
}
# chain VERB POD: what the chain answers is in POD.VERB, its complaints are in POD.errors.
chain() {
  [[ -e /run/netns/$2 ]] || ip netns add "$2"
  nsenter --net=/run/netns/node "$TOOLS/cni-chain.py" --conf "$D/net.conflist" --path "$D/bin" --cache "$D/cache" --id "$2" \
    --netns "/run/netns/$2" --pod "shop/$2/uid-$2" --timeout 150 --record "$D/calls.jsonl" "$1" >"$D/$2.$1" 2>"$D/$2.errors"
}
must() { chain "$@" || fail "$* : $(tail -n 1 "$D/calls.jsonl" | jq -c 'del(.stdin, .env)') $(<"$D/$2.$1") $(<"$D/$2.errors") $(find "$D/state" -name '*.log' -exec tail -n 5 {} + || true)"; }
# refused POD CODE TEXT...: ADD fails with this code, says these texts, and leaves nothing.
refused() {
  local pod=$1 code=$2 text
  shift 2
  ! chain add "$pod" || fail "ADD of $pod succeeds"
  seen "ADD of $pod: $(jq -r '"code \(.code), \(.msg), \(.details)"' "$D/$pod.add")"
  jq -e --argjson code "$code" '.code == $code' "$D/$pod.add" >/dev/null || fail "not code $code: $(<"$D/$pod.add")"
  for text; do has "$text" "$D/$pod.add" || fail "not said: $text: $(<"$D/$pod.add")"; done
  nothing_stays "$pod"
  must del "$pod"
}
# nothing_stays [POD]: no record, no rules and no instance, of this pod or of any.
nothing_stays() {
  local left
  left=$(find "$D/state/machines" -mindepth 1 -name "${1-}*" ! -name '*.lock' ! -name released 2>/dev/null || true)
  [[ -z $left ]] || fail "left: $left"
  [[ -n ${1-} ]] && return
  ! on node nft list tables 2>/dev/null | grep nebula || fail "rules are left"
  ended() { ! pgrep -f "/nebula-cni-instance" >/dev/null; }
  wait_for 30 ended
}
# Pods without rules of ours, which show what would arrive.
add_others() { must add open && must add other; }
end_others() { must del open && must del other && nothing_stays; }
# without_rules POD: somebody removes all rules, and CHECK says so; ends with DEL.
without_rules() {
  on node nft flush ruleset
  ! chain check "$1" || fail "CHECK does not miss the rules"
  has rules "$D/$1.check" || fail "CHECK says: $(<"$D/$1.check")"
  must del "$1"
}
address() { jq -r '.ips[0].address | split("/")[0]' "$D/$1.add"; }
inside_mac() { jq -r '.interfaces[] | select(.sandbox != "" and .sandbox != null) | .mac' "$D/$1.add" | head -n 1; }
link_of() { jq -r '[.interfaces[] | select((.sandbox // "") == "" and .name != "cni0")][0].name' "$D/$1.add"; }

# sends FROM TO: frames of every kind from a pod; prints, in one line, the names of those that arrived on the node, on the other pod or outside.
sends() {
  local at n=0 parameters listeners=()
  # Frames of the last time told the others wrong addresses.
  for at in "$1" "$2" node control; do ip -n "$at" neighbour flush all; done
  for at in "node $(link_of "$1")" "$2 own" "control own"; do
    # shellcheck disable=SC2086 # two words
    set -- "$1" "$2" $at
    mkfifo "$D/end$n"
    on "$3" /usr/bin/python3 "$TOOLS/frames.py" listen "$4" <"$D/end$n" >"$D/heard$n" &
    listeners+=($!)
    eval "exec $((10 + n))<>\"$D/end$n\""
    n=$((n + 1))
  done
  for n in 0 1 2; do wait_for 240 has ready "$D/heard$n"; done
  parameters=$(jq -nc --arg mac "$(inside_mac "$1")" --arg gateway "$(on node cat /sys/class/net/cni0/address)" --arg peer "$(inside_mac "$2")" \
    --arg node "$SUBNET.1" --arg own "$(address "$1")" --arg other "$(address "$2")" '{mac: $mac, gateway_mac: $gateway, peer_mac: $peer, own4: $own,
      out4: "192.0.2.1", dns4: "192.0.2.1", node4: $node, peer4: $other}')
  on "$1" /usr/bin/python3 "$TOOLS/frames.py" send eth0 out "$parameters" >"$D/sent"
  (($(jq length "$D/sent") > 25)) || fail "sent only: $(<"$D/sent")"
  exec 10>&- 11>&- 12>&-
  wait "${listeners[@]}"
  rm "$D"/end?
  tail -qn +2 "$D"/heard? | jq -s . >"$D/heard"
  (($(jq length "$D/heard") == 3)) || fail "not three listeners: $(<"$D/heard")"
  jq -r '.[][][0]' "$D/heard" | { grep -aEx '[a-z0-9. -]+' || true; } | sort -u | tr '\n' ' '
}
