//! The Debian package, installed by dpkg into a copy-on-write overlay of this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use super::repository;

/// Mounts an overlay of the machine's root in a separate mount namespace. `/run` is empty there, so no service manager
/// is found.
const IN_AN_OVERLAY: &str = r#"
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs "$1"
mkdir "$1"/upper "$1"/work "$1"/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t proc proc "$1/root/proc"
mount --rbind /dev "$1/root/dev"
mount -t tmpfs tmpfs "$1/root/run"
mount -t tmpfs tmpfs "$1/root/tmp"
cp "$2" "$1/root/tmp/ours.deb"
cp "$3" "$1/root/tmp/go.deb"
inside() { chroot "$1/root" bash -euo pipefail -c "$2"; }
# Whatever is not a folder, aside from the books of dpkg and man-db.
changed() { cd "$1/upper" && find . ! -type d ! -path './var/lib/dpkg/*' ! -path './var/cache/*' ! -path './var/log/*' | sort; }
"#;

fn in_an_overlay(package: &Path, script: &str) -> Output {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let go = debians();
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-c", &format!("{IN_AN_OVERLAY}{script}"), "-"])
        .args([folder.path(), package, &go])
        .output()
        .expect("unshare runs")
}

/// Debian's package of Go Nebula 1.11.0, as downloaded by `.ci/go-nebula`.
fn debians() -> PathBuf {
    let folders = ["sid-nebula", "sid"].map(|folder| repository("target/peers/apt").join(folder).join("deb"));
    let files = folders.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
    let mut packages = files.map(|file| file.path()).filter(|path| path.extension().is_some_and(|end| end == "deb"));
    packages.next().expect("the package of Go Nebula: run .ci/go-nebula with an empty target/peers")
}

/// The packages for hosts, for the CA and for users without root, built once.
fn packages() -> &'static [PathBuf; 3] {
    static MADE: OnceLock<(tempfile::TempDir, [PathBuf; 3])> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let paths = build(folder.path());
        (folder, paths)
    };
    &MADE.get_or_init(make).1
}

pub(super) fn package() -> &'static Path {
    &packages()[0]
}

fn build(folder: &Path) -> [PathBuf; 3] {
    let output = Command::new(repository("deploy/debian/build")).arg(folder).output().expect("the script runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let paths: Vec<_> = String::from_utf8_lossy(&output.stdout).lines().map(PathBuf::from).collect();
    paths.try_into().expect("three packages")
}

fn said(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
#[ignore = "needs root, a release build and dpkg"]
fn the_package_installs_runs_and_leaves_nothing_after_its_purge() {
    let output = in_an_overlay(
        package(),
        r#"
inside "$1" 'dpkg -i /tmp/ours.deb >&2
  nebula -version; nebula-cert -version; nebula-enrol -version; nebula-ctl --version
  systemd-analyze verify nebula.service nebula@office.service nebula-enrol.service nebula-enrol.timer nebula-flows.service >&2
  for page in nebula nebula-cert nebula-cert-sign nebula-ctl nebula-enrol; do test -s /usr/share/man/man1/$page.1.gz; done
  for program in nebula-cert nebula; do . /usr/share/bash-completion/completions/$program; done
  test ! -e /etc/systemd/system/multi-user.target.wants/nebula.service
  cp /usr/share/doc/nebula-overlay/examples/config.yml /etc/nebula/config.yml
  dpkg -r nebula-overlay >&2; test -e /etc/nebula/config.yml
  rm /etc/nebula/config.yml; dpkg -P nebula-overlay >&2; test ! -e /etc/nebula'
echo ---; changed "$1"
"#,
    );
    let said = said(&output);
    let (versions, left) = said.split_once("---\n").expect("the mark");
    let expected =
        "Version: 0.1.0\nCompatible with: Go Nebula 1.11\nVersion: 0.1.0\nVersion: 0.1.0\nnebula-ctl 0.1.0\n";
    assert_eq!(versions, expected);
    assert_eq!(left, "", "left after the purge");
}

#[test]
#[ignore = "needs root, a release build and dpkg"]
fn the_package_of_the_ca_installs_makes_an_authority_and_leaves_it_there() {
    let output = in_an_overlay(
        &packages()[1],
        r#"
inside "$1" 'dpkg -i /tmp/ours.deb >&2
  nebula-ca --version
  systemd-analyze verify nebula-ca.service >&2
  test -s /usr/share/man/man1/nebula-ca.1.gz
  nebula-ca init --dir /var/lib/nebula-ca >&2
  nebula-ca token create --dir /var/lib/nebula-ca --name h --network 10.42.0.7/16 | cut -c1-13
  dpkg -P nebula-ca >&2; test -s /var/lib/nebula-ca/ca.key; rm -r /var/lib/nebula-ca'
echo ---; changed "$1"
"#,
    );
    assert_eq!(said(&output), "nebula-ca 0.1.0\nnebula-enrol-\n---\n");
}

#[test]
#[ignore = "needs root, a release build and dpkg"]
fn the_package_of_the_proxy_enables_nothing_and_its_program_runs_from_any_folder() {
    let output = in_an_overlay(
        &packages()[2],
        r#"
inside "$1" 'dpkg -i /tmp/ours.deb >&2
  nebula-proxy -version
  nebula-proxy up -help | head -n 1
  XDG_RUNTIME_DIR=/run systemd-analyze --user verify nebula-proxy.service >&2
  test -s /usr/share/man/man1/nebula-proxy.1.gz
  grep -c "=/usr/bin/nebula-proxy" /usr/lib/systemd/user/nebula-proxy.service
  find /etc /usr/lib/systemd -name "*nebula-proxy*" ! -path /usr/lib/systemd/user/nebula-proxy.service
  dpkg -P nebula-proxy >&2
  dpkg -x /tmp/ours.deb /tmp/home && setpriv --reuid 65534 --clear-groups /tmp/home/usr/bin/nebula-proxy -version'
echo ---; changed "$1"
"#,
    );
    assert_eq!(said(&output), "Version: 0.1.0\nUsage: nebula up [flags]\n2\nVersion: 0.1.0\n---\n");
}

#[test]
#[ignore = "needs root, a release build, dpkg and the Go peers in target/peers"]
fn the_package_takes_the_place_of_debians_and_keeps_its_configuration() {
    let output = in_an_overlay(
        package(),
        r#"
inside "$1" 'dpkg --force-depends -i /tmp/go.deb >&2; nebula -version
  mkdir -p /etc/nebula; echo "kept: true" >/etc/nebula/office.yaml
  dpkg -i /tmp/ours.deb >&2; nebula -version | head -1; cat /etc/nebula/office.yaml
  dpkg-query -W -f "\${db:Status-Abbrev}\n" nebula
  grep -o "f=/etc/nebula/%i.yaml" /usr/lib/systemd/system/nebula@.service | head -1'
"#,
    );
    let said = said(&output);
    let lines: Vec<_> = said.lines().map(str::trim).collect();
    assert_eq!(lines, ["Version: 1.11.0", "Version: 0.1.0", "kept: true", "un", "f=/etc/nebula/%i.yaml"]);
}

#[test]
#[ignore = "needs a release build and lintian"]
fn lintian_finds_no_error_and_two_builds_are_the_same_bytes() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let again = build(folder.path());
    let bytes = |path: &PathBuf| std::fs::read(path).expect("the package");
    for (package, again) in packages().iter().zip(&again) {
        assert!(bytes(package) == bytes(again), "not reproducible");
    }
    // lintian takes a static-pie program for a library, and the package has no real mail address.
    let known = "bogus-mail-host,bogus-mail-host-in-debian-changelog,shared-library-lacks-prerequisites";
    let output = Command::new("lintian")
        .args(["--fail-on", "error,warning", "--suppress-tags", known])
        .args(packages())
        .output()
        .expect("lintian runs");
    said(&output);
}
