# Functions that jobs.toml names: run-tests calls each in a bash of its own, in the folder of the repository. Clippy, doc, tests and
# demo share their builds: one set of features for the development profile, one release build.
# shellcheck shell=bash
. .ci/install

fmt() { cargo fmt --all --check && need python3=python3 && .ci/comments; }
# As in system-tests/parts.toml. With another set crates of others would get other features, and be built again.
features=(--workspace --features nebula-core/simulator,nebula-net/tower)
clippy() { cargo clippy "${features[@]},nebula-cert/pkcs11,nebula-ca/pkcs11" --all-targets -- -D warnings; }
clippy_all() {
  clippy && cargo clippy "${features[@]}" -- -D warnings && cargo clippy -p nebula-core --no-default-features -- -D warnings
}
doc() { RUSTDOCFLAGS="-D warnings" cargo doc "${features[@]}" --no-deps --document-private-items; }
alone() { .ci/alone; }
pages() { need python3=python3 git=git && .ci/pages selftest && .ci/pages; }
scorecard() { need python3=python3 git=git /usr/lib/python3/dist-packages/yaml=python3-yaml && .ci/scorecard selftest && .ci/scorecard; }
site() { .ci/site; }
targets() { .ci/targets; }
package() { .ci/package --list; }
packages() { .ci/package && .ci/beginner; }
examples() { .ci/examples; }
crates() {
  local crate
  for crate in nebula-cert nebula-core nebula-net nebula-linux nebula-config nebula-enrolment nebula-ca nebula-cni-contract nebula-cni-policy nebula-cni-plugin nebula-ssh-console \
    nebula-instance kubectl-nebula nebula-proxy nebula-system-tests nebula-benches; do
    cargo check -p "$crate" --all-targets || { echo "crates: $crate does not compile alone"; return 1; }
  done
  cargo check -p nebula-instance --no-default-features --all-targets && .ci/alone --compile
}
instructions() { need valgrind=valgrind python3=python3 && benches/instructions && benches/connections; }
loom() { .ci/loom; }
# With the programs of `images`.
demo() { NEBULA_BIN_DIR=target/x86_64-unknown-linux-gnu/release ./demo; }
fuzz() { fuzz/run --replay; }
# `differential`, whose findings are differences from Go and no crashes, discovers nightly only.
libfuzzer() { local targets; mapfile -t targets < <(fuzz/run --list | grep -vx differential); fuzz/run --seconds 10 "${targets[@]}"; }
deny() {
  command -v cargo-deny >/dev/null || cargo install --locked cargo-deny
  local today=advisories
  # Without the database of today, the snapshot of the job `advisories` has to do.
  timeout 20 git ls-remote -q https://github.com/RustSec/advisory-db HEAD >/dev/null 2>&1 || { echo "no advisory database here"; today=; }
  cargo deny --workspace check $today licenses bans sources
}
# The second time in another folder, which no byte may tell.
release() {
  need ssh-keygen=openssh-client || return
  local version key work
  version=$(workspace_version)
  work=$(mktemp -d /var/tmp/nebula-release-job.XXXXXX) || return
  key=$work/key
  ssh-keygen -q -t ed25519 -N "" -C release -f "$key" && echo "release $(<"$key.pub")" >"$work/signers" &&
    .ci/release "$version" --out "$work/one" --key "$key" &&
    TMPDIR=$work .ci/release "$version" --out "$work/other/folder" --key "$key" &&
    cmp "$work/one/SHA256SUMS" "$work/other/folder/SHA256SUMS" &&
    .ci/release-files selftest "$work/one" "$work/signers" && .ci/release try "$work/one" && rm -rf "$work"
}
reproducible() { .ci/reproducible && .ci/reproducible nebula-instance nebula && .ci/reproducible nebula-ca nebula-ca; }
sbom() { need python3=python3 && .ci/sbom check; }
advisories() { need python3=python3 && .ci/advisories selftest && .ci/advisories; }
# With the programs of `images`.
documents() { need python3=python3 /usr/lib/python3/dist-packages/yaml=python3-yaml && .ci/documents; }
chart() { .ci/chart/check; }
kubernetes() { need python3=python3 /usr/lib/python3/dist-packages/yaml=python3-yaml && .ci/kubernetes selftest && .ci/kubernetes; }
conformance() { need python3=python3 && .ci/conformance && .ci/dependencies; }
helm() { .ci/chart/check helm; }
kube() { ./test kube; }
images() { cargo build --release --bins --features nebula-cert/cli && .ci/images; }
with_oldest() ( # ARGUMENT...: checks with the declared rust-version
  v=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
  cargo "+$v" --version >/dev/null 2>&1 || rustup_has toolchain install --profile minimal "$v" || exit
  # A check links nothing, so the C library need not be built with that toolchain.
  CC_x86_64_unknown_linux_gnu=$PWD/.ci/no-compiler cargo "+$v" check "$@"
)
msrv() { with_oldest -p nebula-cert -p nebula-core -p nebula-net; }
msrv_all() { with_oldest --workspace; }
