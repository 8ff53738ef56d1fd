//! A folder of credentials, both programs, and the results expected of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template, Version};

use crate::loopback::ours;

/// A configuration and the expected result of both programs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) text: &'static str,
    /// Files next to `config.yml`; if there are any, the folder `conf` is loaded.
    pub(crate) files: &'static [(&'static str, &'static str)],
    pub(crate) expected: Expected,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Expected {
    /// Both accept, and ours has no remark.
    Good,
    /// Both accept; a remark of ours names `key`.
    Remarked(&'static str),
    /// Both refuse and name this key.
    Refused(&'static str),
    /// Both refuse, in different words.
    RefusedAs { go: &'static str, ours: &'static str },
    /// Ours exits with another code, and names `key`.
    Deviates { row: &'static str, go: i32, ours: i32, key: &'static str },
}

/// A configuration with good credentials that both accept without remarks.
pub(crate) const fn good(name: &'static str, text: &'static str) -> Case {
    Case { name, text, files: &[], expected: Expected::Good }
}

/// Accepted, with a remark of ours that contains `key`.
pub(crate) const fn remarked(name: &'static str, text: &'static str, key: &'static str) -> Case {
    Case { name, text, files: &[], expected: Expected::Remarked(key) }
}

/// Refused by both, naming `key`.
pub(crate) const fn refused(name: &'static str, text: &'static str, key: &'static str) -> Case {
    Case { name, text, files: &[], expected: Expected::Refused(key) }
}

/// Refused by both, in different words.
pub(crate) const fn refused_as(name: &'static str, text: &'static str, go: &'static str, ours: &'static str) -> Case {
    Case { name, text, files: &[], expected: Expected::RefusedAs { go, ours } }
}

/// Deliberately decided otherwise than Go: `go` and `ours` are the exit codes.
pub(crate) const fn deviates(
    name: &'static str,
    text: &'static str,
    row: &'static str,
    codes: (i32, i32),
    key: &'static str,
) -> Case {
    Case { name, text, files: &[], expected: Expected::Deviates { row, go: codes.0, ours: codes.1, key } }
}

impl Case {
    /// The same case in a folder with these files; `text` is not among them.
    pub(crate) const fn with(self, files: &'static [(&'static str, &'static str)]) -> Self {
        Self { files, ..self }
    }
}

/// The result of both programs for one configuration.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The same exit code.
    Agreed,
    /// Go panics; ours may refuse or accept.
    GoPanics,
    /// With the output of both.
    Differs(String),
}

pub(crate) struct Bench {
    folder: tempfile::TempDir,
    go: PathBuf,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let go = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/peers/sid/usr/bin/nebula");
        assert!(go.exists(), "{} is missing: run .ci/go-nebula first", go.display());
        Self { go, ..Self::without_go() }
    }

    /// A bench for checks of our program alone.
    pub(crate) fn without_go() -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_credentials(folder.path());
        Self { folder, go: PathBuf::new() }
    }

    pub(crate) fn compare(&self, case: &Case) -> Result<(), String> {
        let path = self.write(case);
        let go = run(&self.go, &path);
        let ours = run(&ours(), &path);
        let agree = |go_code: i32, ours_code: i32| match (go.0 == go_code, ours.0 == ours_code) {
            (true, true) => Ok(()),
            (false, _) => Err(format!("Go ends with {} and not {go_code}: {}", go.0, go.1)),
            (_, false) => Err(format!("ours ends with {} and not {ours_code}: {}", ours.0, ours.1)),
        };
        let named = |who: &str, (_, text): &(i32, String), key: &str| match text.contains(key) {
            true => Ok(()),
            false => Err(format!("{who} does not name {key}: {text}")),
        };
        match case.expected {
            Expected::Good => {
                agree(0, 0)?;
                if ours.1.is_empty() { Ok(()) } else { Err(format!("ours remarks: {}", ours.1)) }
            }
            Expected::Remarked(key) => agree(0, 0).and_then(|()| named("ours", &ours, key)),
            Expected::Refused(key) => {
                agree(1, 1).and_then(|()| named("Go", &go, key)).and_then(|()| named("ours", &ours, key))
            }
            Expected::RefusedAs { go: theirs, ours: own } => {
                agree(1, 1).and_then(|()| named("Go", &go, theirs)).and_then(|()| named("ours", &ours, own))
            }
            Expected::Deviates { go: theirs, ours: own, key, .. } => {
                agree(theirs, own).and_then(|()| named("ours", &ours, key))
            }
        }
    }

    /// Whether both accept, or both refuse, a file that expects its credentials in `/etc/nebula`.
    fn judge(&self, text: &str) -> Verdict {
        let path = self.folder.path().join("config.yml");
        std::fs::write(&path, text.replace("/etc/nebula", &self.folder.path().display().to_string())).unwrap();
        let (go, ours) = (run(&self.go, &path), run(&ours(), &path));
        match go.0 {
            code if code == ours.0 => Verdict::Agreed,
            2 if go.1.contains("panic:") => Verdict::GoPanics,
            _ => Verdict::Differs(format!("Go ends with {}: {}\n  ours with {}: {}", go.0, go.1, ours.0, ours.1)),
        }
    }

    /// Like [`Self::judge`] for many named texts, using all processors.
    pub(crate) fn judge_all(texts: &[(String, String)]) -> Vec<(&str, Verdict)> {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let parts = texts.chunks(texts.len().div_ceil(workers).max(1));
            let workers: Vec<_> = parts.map(|part| scope.spawn(move || Self::new().judge_part(part))).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
        })
    }

    fn judge_part<'a>(&self, texts: &'a [(String, String)]) -> Vec<(&'a str, Verdict)> {
        texts.iter().map(|(name, text)| (name.as_str(), self.judge(text))).collect()
    }

    /// Runs our `-test -strict` on a published example, with a certificate in the network of the examples.
    pub(crate) fn strict(&self, text: &str) -> Result<(), String> {
        let dir = self.folder.path();
        let path = dir.join("config.yml");
        let text = text.replace("/etc/nebula/host.crt", "/etc/nebula/example.crt");
        std::fs::write(&path, text.replace("/etc/nebula", &dir.display().to_string())).unwrap();
        let mut command = Command::new(ours());
        let output = command.args(["-test", "-strict", "-config"]).arg(&path).output().unwrap();
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stdout).into_owned()) }
    }

    /// Writes the files of a case. `$DIR` stands for the folder of credentials; a text without `pki` gets good ones.
    fn write(&self, case: &Case) -> PathBuf {
        let dir = self.folder.path().display().to_string();
        let fill = |text: &str| text.replace("$DIR", &dir);
        let with_pki = |text: &str| match text.contains("pki") || text.contains("NO_CREDENTIALS") {
            true => fill(text),
            false => fill(&format!("{PKI}{text}\n")),
        };
        if case.files.is_empty() {
            let path = self.folder.path().join("config.yml");
            std::fs::write(&path, with_pki(case.text)).unwrap();
            return path;
        }
        let conf = self.folder.path().join("conf");
        let _ = std::fs::remove_dir_all(&conf);
        for (name, text) in case.files {
            let path = conf.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, fill(&text.replace("$PKI", PKI))).unwrap();
        }
        conf.join(case.text)
    }
}

const PKI: &str = "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key}\n";

/// Exit code, and the messages at warning level or above (Go's panics go to standard error).
fn run(program: &Path, config: &Path) -> (i32, String) {
    let Output { status, stdout, stderr } =
        Command::new(program).args(["-test", "-config"]).arg(config).output().unwrap();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    let heard = |line: &&str| {
        !line.contains("level=INFO")
            && !line.contains("\"level\":\"INFO\"")
            && !line.contains("level=DEBUG")
            && !EXPECTED_REMARKS.iter().any(|remark| line.contains(remark))
    };
    let mut text = stdout.lines().filter(heard).collect::<Vec<_>>().join("\n");
    text.push_str(String::from_utf8_lossy(&stderr).lines().next().unwrap_or_default());
    (status.code().unwrap_or(-1), text)
}

/// Almost no configuration in the table has a lighthouse.
const EXPECTED_REMARKS: &[&str] = &["No lighthouse.hosts configured"];

fn write_credentials(folder: &Path) {
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    for (suffix, curve) in [("", Curve::Curve25519), ("-p256", Curve::P256)] {
        let ca_key = SigningKey::generate(curve).unwrap();
        let key = PrivateKey::generate(curve).unwrap();
        let networks: &[&str] = &["10.42.0.7/16"];
        let template = |version, name: &str, public_key: Vec<u8>, networks: &[&str], not_after| Template {
            version,
            curve,
            networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
            public_key,
            ..Template::new(name, 1..=not_after)
        };
        let ca = template(Version::V2, "ca", ca_key.public_key().to_vec(), &[], LATE).self_sign(&ca_key).unwrap();
        let old_ca = template(Version::V2, "old", ca_key.public_key().to_vec(), &[], 2).self_sign(&ca_key).unwrap();
        let sign = |version, networks: &[&str], not_after| -> Certificate {
            template(version, "host", key.public_key().to_vec(), networks, not_after).sign(&ca, &ca_key).unwrap()
        };
        let (v1, v2) = (sign(Version::V1, networks, LATE), sign(Version::V2, networks, LATE));
        let elsewhere = sign(Version::V1, &["10.43.0.7/16"], LATE);
        // In the network used by the published examples.
        write(&format!("example{suffix}.crt"), &sign(Version::V2, &["192.168.100.9/24"], LATE).to_pem());
        write(&format!("ca{suffix}.crt"), &ca.to_pem());
        write(&format!("ca{suffix}.key"), ca_key.to_pem().as_str());
        write(&format!("old-ca{suffix}.crt"), &old_ca.to_pem());
        write(&format!("host{suffix}.crt"), &v2.to_pem());
        write(&format!("host{suffix}.key"), key.to_pem().as_str());
        write(&format!("v1{suffix}.crt"), &v1.to_pem());
        write(&format!("both{suffix}.crt"), &format!("{}{}", v1.to_pem(), v2.to_pem()));
        write(&format!("twice{suffix}.crt"), &format!("{}{}", v2.to_pem(), v2.to_pem()));
        write(&format!("differ{suffix}.crt"), &format!("{}{}", elsewhere.to_pem(), v2.to_pem()));
        write(&format!("expired{suffix}.crt"), &sign(Version::V2, networks, 2).to_pem());
        write(&format!("dual{suffix}.crt"), &sign(Version::V2, &["10.42.0.7/16", "fd42::7/64"], LATE).to_pem());
        write(&format!("cas{suffix}.crt"), &format!("{}# beside\n{}", old_ca.to_pem(), ca.to_pem()));
        write(&format!("ca-and-host{suffix}.crt"), &format!("{}{}", ca.to_pem(), v2.to_pem()));
    }
    let ssh_key = folder.join("ssh.key");
    let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(ssh_key).status();
    assert!(made.unwrap().success());
    write("other.key", PrivateKey::generate(Curve::Curve25519).unwrap().to_pem().as_str());
    write("junk.crt", "this is no certificate\n");
    write("empty.crt", "");
}

const LATE: i64 = 5_000_000_000;
