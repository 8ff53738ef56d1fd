#!/bin/bash
# A real two-node cluster for tests: kube-up.sh and cri-up.sh twice, on one machine.
#
#   kube-nodes.sh start DIR       prints nothing; DIR/control/admin.kubeconfig is the administrator's
#   kube-nodes.sh run DIR WORDS   runs a command in the network of the first node, with that kubeconfig
#   kube-nodes.sh node DIR N WORDS  runs a command as on node N (1 or 2): its network and its files
#   kube-nodes.sh kubelet DIR N   kills the kubelet of node N and starts it again; returns when the node is ready
#   kube-nodes.sh reboot DIR N    everything on node N ends at once, what is not on its disk is gone, and it starts again; returns
#                                 when the node is ready
#   kube-nodes.sh readdress DIR IPV4 IPV6   gives the second node other addresses, and starts its kubelet again with them (with PROXY)
#   kube-nodes.sh stop DIR
#
# Environment: KUBE_BIN, PREFIX (of the names of network namespaces; default kn), IMAGES (archives of mkimage.py; the one
# named localhost/pause:1 is needed), PROXY=1 (kube-proxy on both nodes, and pods and Services with IPv4 and IPv6),
# NETWORK=none (no network for pods: no plugin that makes one, no configuration of it, no route between nodes; nodes are not ready).
#
# Each node has a network namespace, a containerd, a kubelet, processes of its own (containerd is process 1) and files of its
# own where a node agent writes: /etc/cni, /opt/cni, /var/lib/cni, /var/lib/nebula-cni and /run; and in /var/log, where a kubelet
# removes what belongs to no pod of its own. The pods' network is the bridge plugin, 10.244.N.0/24, with PROXY also fd00:10:244:N::/64, with routes between the nodes. Without PROXY there is no kube-proxy:
# `service` below does its job for a ClusterIP of one endpoint.
#
#   kube-nodes.sh service DIR ADDRESS:PORT ENDPOINT:PORT   on both nodes, for their pods and for themselves
set -eu
verb=${1:?}; dir=$(mkdir -p "${2:?}" && cd "$2" && pwd); here=$(cd "$(dirname "$0")" && pwd); shift 2
prefix=${PREFIX:-kn}
first_process() { pgrep -P "$(cat "$dir/node$1/cri/pid")"; }
in_network() { nsenter --net="/run/netns/$prefix$1" "${@:2}"; }
# The first process of a node, and a kubelet that sees the same processes and files, because it mounts volumes.
first_up() {
  local node=$dir/node$1
  CONTAINERD=$node/containerd CNI_BIN=/opt/cni/bin CNI_CONF=/etc/cni/net.d NODE_NS=$prefix$1 IMAGES="${IMAGES-}" \
    "$here/cri-up.sh" start "$node/cri" >/dev/null
  ln -sf run/containerd.sock "$node/cri/containerd.sock"
  cat > "$node/kube/kubelet" <<C
#!/bin/bash
exec nsenter -t $(first_process "$1") --mount --pid bash -c 'cd "\$1" && shift && exec "\$@"' kubelet "\$PWD" "$KUBE_BIN/kubelet" "\$@"
C
  chmod 755 "$node/kube/kubelet"
}
second_address() { cat "$dir/address2" 2>/dev/null || echo 192.0.2.11; }
node_name() { case $1 in 1) echo test-node ;; 2) echo node2 ;; esac; }
# The kubelet of a node, again.
kubelet_up() {
  local part=$dir/control address=192.0.2.10
  [ "$1" = 1 ] || part=$dir/second address=$(second_address)
  PROXY=$(cat "$dir/proxy" 2>/dev/null || true) KUBE_BIN=$dir/node$1/kube NODE_NS=$prefix$1 \
    NODE_NAME=$(node_name "$1") NODE_IP=$address \
    CRI_SOCKET=$dir/node$1/cri/run/containerd.sock "$here/kube-up.sh" kubelet "$part"
}
case $verb in
start)
  for n in 1 2; do
    range6= route6=
    [ -z "${PROXY-}" ] || range6=', [{"subnet": "fd00:10:244:'$n'::/64"}]' route6=', {"dst": "::/0"}'
    ip netns add "$prefix$n"
    in_network $n ip link set lo up
    node=$dir/node$n
    mkdir -p "$node/cri" "$node/etc-cni/net.d" "$node/opt-cni/bin" "$node/var-lib-cni" "$node/var-lib-nebula-cni" "$node/var-log"
    cp -L /usr/lib/cni/{loopback,portmap} "$node/opt-cni/bin/"
    [ "${NETWORK-}" = none ] || cp -L /usr/lib/cni/{bridge,host-local} "$node/opt-cni/bin/"
    [ "${NETWORK-}" = none ] || cat > "$node/etc-cni/net.d/10-bridge.conflist" <<C
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": false, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.$n.0/24"}]$range6], "routes": [{"dst": "0.0.0.0/0"}$route6]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
C
    # The folders that a node agent writes to are the node's own, for containerd and for what it starts.
    cat > "$node/containerd" <<C
#!/bin/bash
exec unshare --mount --pid --fork --kill-child --mount-proc bash -c '
  mount --make-rshared / && mount --bind "$node/etc-cni" /etc/cni && mount --bind "$node/opt-cni" /opt/cni && mount --bind "$node/var-lib-cni" /var/lib/cni &&
  mount --bind "$node/var-lib-nebula-cni" /var/lib/nebula-cni && mount --bind "$node/var-log" /var/log &&
  mount -t tmpfs -o mode=755 run /run && mkdir /run/netns /run/containerd && mount --bind "$node/cri" /run/containerd && exec $(command -v containerd) "\$@"' containerd "\$@"
C
    chmod 755 "$node/containerd"
    mkdir -p /etc/cni /opt/cni /var/lib/cni /var/lib/nebula-cni
    ln -sf "$(command -v ctr)" "$node/ctr"
    mkdir -p "$node/kube"
    ln -sf "$KUBE_BIN"/kube-* "$node/kube/"
    first_up $n
  done
  if [ "${PROXY-}" ]; then
    export PROXY=10.244.0.0/16,fd00:10:244::/48
    echo "$PROXY" > "$dir/proxy"
    # Answers of a pod to another one of its node pass the translation, as kubeadm asks of a node; here of the pods' bridge only, because
    # that of the nodes would not send a translated packet back to the port from which it came.
    for n in 1 2; do
      in_network $n sysctl -qw net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0
      [ "${NETWORK-}" = none ] || in_network $n ip link add cni0 type bridge nf_call_iptables 1 nf_call_ip6tables 1
    done
  fi
  if [ "${NETWORK-}" = none ]; then
    export UNREADY=1
    touch "$dir/unready"
  fi
  KUBE_BIN=$dir/node1/kube NODE_NS=${prefix}1 CRI_SOCKET=$dir/node1/cri/run/containerd.sock "$here/kube-up.sh" start "$dir/control" node
  KUBE_BIN=$dir/node2/kube NODE_NS=${prefix}2 CRI_SOCKET=$dir/node2/cri/run/containerd.sock NODE_NAME=node2 NODE_IP=192.0.2.11 \
    "$here/kube-up.sh" join "$dir/second" "$dir/control"
  if [ "${NETWORK-}" != none ]; then
    in_network 1 ip route add 10.244.2.0/24 via 192.0.2.11
    in_network 2 ip route add 10.244.1.0/24 via 192.0.2.10
  fi
  if [ "${PROXY-}" ]; then
    in_network 1 ip addr add fd00:192::10/64 dev node0 nodad
    in_network 2 ip addr add fd00:192::11/64 dev eth0 nodad
    if [ "${NETWORK-}" != none ]; then
      in_network 1 ip route add fd00:10:244:2::/64 via fd00:192::11
      in_network 2 ip route add fd00:10:244:1::/64 via fd00:192::10
    fi
    for n in 1 2; do in_network $n sysctl -qw net.ipv6.conf.all.forwarding=1; done
  fi
  for n in 1 2; do
    in_network $n sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1
    # What kube-proxy and the host's network do in every cluster.
    in_network $n ip route add default via 192.0.2.1 2>/dev/null || true
  done
  # What the controller of a cloud or --allocate-node-cidrs does.
  n=0
  for name in test-node node2; do
    n=$((n + 1)); range=10.244.$n.0/24 range6=
    [ -z "${PROXY-}" ] || range6=", \"fd00:10:244:$n::/64\""
    "$0" run "$dir" kubectl patch node $name -p "{\"spec\": {\"podCIDR\": \"$range\", \"podCIDRs\": [\"$range\"$range6]}}" >/dev/null
  done
  [ "${PROXY-}" ] || { "$0" service "$dir" 10.96.0.1:443 192.0.2.10:16443; exit; }
  "$0" run "$dir" kubectl apply -f - >/dev/null <<K
{"apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": "kubernetes", "namespace": "default"},
 "subsets": [{"addresses": [{"ip": "192.0.2.10"}], "ports": [{"name": "https", "port": 16443}]}]}
K
  ;;
service)
  for n in 1 2; do
    for chain in PREROUTING OUTPUT; do
      in_network $n iptables -w -t nat -A $chain -d "${1%:*}" -p tcp --dport "${1##*:}" -j DNAT --to-destination "$2"
    done
    in_network $n iptables -w -t nat -A POSTROUTING -d "${2%:*}" -p tcp --dport "${2##*:}" -j MASQUERADE
  done ;;
reboot)
  n=$1 node=$dir/node$1
  outer=$(cat "$node/cri/pid")
  kill -KILL "$(first_process "$n")"
  for _ in $(seq 50); do kill -0 "$outer" 2>/dev/null || break; sleep 0.1; done
  # Control groups, containerd's state and the pods' bridge are in memory; the pods' links went with their namespaces.
  find /sys/fs/cgroup -depth -type d \( -path "*/$(node_name "$n")/*" -o -path '*/nebula-cni/pods/*' \) -exec rmdir {} \; 2>/dev/null || true
  rm -rf "$node/cri/run"
  [ -e "$dir/unready" ] || in_network "$n" ip link delete cni0
  IMAGES= first_up "$n"
  kubelet_up "$n" ;;
kubelet)
  case $1 in 1) part=$dir/control ;; 2) part=$dir/second ;; esac
  # nsenter passes no signal on, and ends with its child.
  pkill -KILL -P "$(cat "$part/kubelet.pid")"
  for _ in $(seq 50); do kill -0 "$(cat "$part/kubelet.pid")" 2>/dev/null || break; sleep 0.1; done
  kubelet_up "$1" ;;
readdress)
  # As when a lease of DHCP ends: the old address goes with the routes that need it. The API server has the address of the first node.
  in_network 2 ip addr del "$(second_address)/24" dev eth0
  in_network 2 ip -6 addr flush dev eth0 scope global
  in_network 2 ip addr add "$1/24" dev eth0
  in_network 2 ip addr add "$2/64" dev eth0 nodad
  in_network 2 ip route add default via 192.0.2.1
  echo "$1" > "$dir/address2"
  "$0" kubelet "$dir" 2 ;;
run) KUBECONFIG=$dir/control/admin.kubeconfig exec nsenter --net="/run/netns/${prefix}1" "$@" ;;
node)
  n=$1; shift
  exec nsenter -t "$(first_process "$n")" --mount --pid --net "$@" ;;
stop)
  "$here/kube-up.sh" stop "$dir/second" || true
  "$here/kube-up.sh" stop "$dir/control" || true
  for n in 1 2; do
    if [ -e "$dir/node$n/cri/pid" ]; then
      first=$(first_process "$n" || true)
      "$here/cri-up.sh" stop "$dir/node$n/cri" || true
      # unshare and nsenter pass no signal on. With its first process all of a node's processes end, the kubelet among them.
      [ -z "$first" ] || kill -KILL "$first" 2>/dev/null || true
    fi
    ip netns del "$prefix$n" 2>/dev/null || true
  done ;;
*) sed -n '2,23s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
