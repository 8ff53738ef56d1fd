# Functions that parts.toml names: run-tests calls each in a bash of its own, in the folder of the repository.
# shellcheck shell=bash
. .ci/install

# The only builds that are not static, because they load the module of a token. Third-party crates are those of the unit part.
pkcs11() {
  dynamic --test pkcs11 -- --include-ignored && dynamic --test service -- --ignored hardware_key
}
dynamic() {
  RUSTC_WORKSPACE_WRAPPER=$PWD/.ci/dynamic-rustc cargo test -q --workspace \
    --features nebula-core/simulator,nebula-net/tower,nebula-cert/pkcs11,nebula-ca/pkcs11 "$@"
}

build_without_console() {
  cargo build --release -p nebula-instance --bin nebula --no-default-features --target-dir target/without-console
}

# Not installed: their packages would put the machine's own names into their hands.
fetch_resolvers() {
  .ci/debian-package bookworm systemd-resolved target/peers/systemd-resolved lib/systemd/systemd-resolved &&
    .ci/debian-package bookworm openresolv target/peers/openresolv sbin/resolvconf
}
# Not installed: Debian's package starts a server.
fetch_promtool() { .ci/debian-package bookworm prometheus target/peers/prometheus usr/bin/promtool; }
fetch_newer_containerd() { .ci/debian-package sid containerd target/peers/containerd-sid usr/bin/containerd; }

# A node agent reconciles every pod in /run/nebula-cni, and an uninstallation leaves the plugin to pods in the cache of libcni. A
# part with agents gets a /run and a cache of its own, so that pods that another lane started are not in them.
own_run() {
  mkdir -p /var/lib/cni
  # shellcheck disable=SC2016 # for the inner shell
  unshare --mount --propagation slave sh -c \
    'mount -t tmpfs none /run && mkdir /run/lock && mount -t tmpfs none /var/lib/cni && exec "$@"' sh "$@"
}

# Runs a command whose tests have a systemd as their first process, in a network namespace of its own.
in_systemd() {
  local status
  systemd_at=$(mktemp -d /var/lib/nebula-test.XXXXXX) && ip netns add "${systemd_at##*/}" || return 1
  trap stop_systemd EXIT
  nsenter --net="/run/netns/${systemd_at##*/}" tests/tools/systemd-ns.sh start "$systemd_at" >/dev/null &&
    env TMPDIR="$systemd_at" tests/tools/systemd-ns.sh sh "$systemd_at" "$@"
  status=$?
  # What a failed test left to look at stays.
  ((status)) || { stop_systemd && rm -rf "$systemd_at"; }
  return "$status"
}
# Also when the tests are interrupted.
stop_systemd() {
  trap - EXIT
  tests/tools/systemd-ns.sh stop "$systemd_at"
  ip netns del "${systemd_at##*/}"
}

# The programs of Kubernetes, and the chart in front of a real API server.
kube_ready() {
  local program
  find_kube
  for program in kube-apiserver kube-proxy; do
    [[ -x $KUBE_BIN/$program ]] || {
      echo "test: $KUBE_BIN has no $program: tests/tools/kube-build.sh $KUBE_BIN makes one, or KUBE_BIN says where there is one" >&2
      return 1
    }
  done
  .ci/chart/check helm && .ci/chart/server
}
with_kube() { find_kube && "$@"; }
find_kube() {
  KUBE_BIN=$(realpath -m "${KUBE_BIN:-target/kube}")
  export KUBE_BIN
}

# Runs a command with programs of ARM64, which the kernel hands to qemu meanwhile. Not in a release build: that takes three times as long.
with_arm64() {
  local status=0 ours=0 target=aarch64-unknown-linux-gnu misc=/proc/sys/fs/binfmt_misc
  rustup target add "$target" 2>/dev/null || rustup target list --installed | grep -qx "$target" || return 1
  export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CXX_aarch64_unknown_linux_gnu=aarch64-linux-gnu-g++
  cargo build --target "$target" --bins -p nebula-instance -p nebula-cert --features nebula-cert/cli || return
  [[ -e $misc/register ]] || mount -t binfmt_misc none "$misc" || return
  if [[ ! -e $misc/qemu-aarch64 ]]; then
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >"$misc/register" && ours=1 || return
  fi
  NEBULA_BIN_DIR=$PWD/target/$target/debug "$@" || status=$?
  ((!ours)) || echo -1 >"$misc/qemu-aarch64"
  return "$status"
}
# Left out is what qemu does not hand on to the kernel as it is: questions about sockets (SOCK_DIAG, SO_MEMINFO), ethtool, seccomp, /proc/PID/exe
# and the place of the arguments, two signals and a thread of its own; and what is too slow there, as answers within a time and a model of an hour.
arm64_tests() {
  local name skips=()
  for name in listener::source::tests the_loopback_link_is_found a_program_has_the_given_arguments the_program_of_a_process_is_kept \
    sockets_of_one_kind_are_alike a_kept_socket_goes_on a_socket_that_is_not_the_configured_one buffers_change_on_a_bound_socket \
    a_driver_leaves_its_process_alone sockets_go_on_if_they_fit connected_sockets_to_the_ranges sockets_of_the_store_go_on \
    the_place_of_the_arguments a_filtered_thread version_answers_in_milliseconds a_client_that_never_reads a_flood_of_syns \
    whatever_is_done_to_the_first_six_datagrams; do
    skips+=(--skip "$name")
  done
  with_arm64 cargo test --target aarch64-unknown-linux-gnu --no-fail-fast --lib --bins --tests -p nebula-cert -p nebula-config -p nebula-core \
    -p nebula-linux -p nebula-net -p nebula-cni-contract -p nebula-instance -p nebula-cni-plugin \
    --features nebula-cert/cli,nebula-core/simulator -- "${skips[@]}"
}

try_page() { .ci/page-commands try; }

with_fips() {
  cargo build --release --target-dir target/fips --no-default-features --bins -p nebula-instance -p nebula-cert -p nebula-ca \
    --features nebula-instance/fips,nebula-cert/fips,nebula-cert/cli,nebula-ca/fips,nebula-ca/kubernetes,nebula-ca/postgres &&
    NEBULA_BIN_DIR=$PWD/target/fips/x86_64-unknown-linux-gnu/release "$@"
}
fips_library() { cargo test --target-dir target/fips -p nebula-cert --features fips --test fips; }

in_kernels() {
  local suite status=0
  export VM_ENV=NEBULA_BIN_DIR
  for suite in ${KERNELS:-trixie}; do tests/tools/vm.sh "$suite" "$@" || status=1; done
  return "$status"
}

machines() {
  local word options=()
  for word in ${KERNELS-}; do options+=(--kernel "$word"); done
  for word in ${MACHINES-}; do options+=(--only "$word"); done
  system-tests/machines/run "${options[@]}"
}
