//! `nebula up TOKEN`: makes a bare host a member of the network in one command.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ipnet::IpNet;
use nebula_cert::{JoinToken, UnixTime};
use zeroize::Zeroizing;

use super::{Enrolled, Error, Files};
use crate::go::flags::{self, Flag};
use crate::linux::clock;

/// The parsed command line.
#[derive(Debug)]
struct Wish {
    token: JoinToken,
    place: Place,
    starts: bool,
}

/// Where the files go, and which systemd unit uses them.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    files: PathBuf,
    config: PathBuf,
    /// `None` if no unit uses that folder.
    unit: Option<String>,
    device: String,
}

/// Runs `nebula up`; `words` are the arguments after `up`.
#[must_use]
pub fn main(words: Vec<String>) -> ExitCode {
    let wish = match read(words) {
        Ok(Some(wish)) => wish,
        Ok(None) => {
            say(&format!("{ABOUT}\nFlags:\n{}", flags::describe(FLAGS)));
            return ExitCode::SUCCESS;
        }
        Err(message) => {
            eprintln!("nebula up: {message}; see nebula up -help");
            return ExitCode::from(2);
        }
    };
    match wish.fulfil(clock::unix_now()) {
        Ok(said) => {
            say(&said);
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("nebula up: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Parses the arguments; `None` if help was requested.
fn read(words: Vec<String>) -> Result<Option<Wish>, String> {
    let mut words = Zeroizing::new(words);
    let (mut given, mut token) = (Vec::new(), None);
    loop {
        let parsed = match flags::parse(std::mem::take(&mut *words), FLAGS) {
            Ok(parsed) => parsed,
            Err(flags::Error::Help) => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let mut rest = parsed.rest().to_vec();
        given.push(parsed);
        if rest.is_empty() {
            break;
        }
        if token.replace(Zeroizing::new(rest.remove(0))).is_some() {
            return Err("there is more than one token".to_owned());
        }
        *words = rest;
    }
    let value = |name| given.iter().rev().find_map(|flags| flags.value(name));
    let place = Place::of(value("dir").unwrap_or(USUAL_FOLDER).as_ref(), value("name"))?;
    let token = match (token, value("token-file")) {
        (Some(token), None) if *token == "-" => read_token(std::io::stdin(), "standard input")?,
        (Some(token), None) => token,
        (None, Some(path)) => {
            let file = std::fs::File::open(path).map_err(|error| format!("cannot read {path}: {error}"))?;
            read_token(file, path)?
        }
        (Some(_), Some(_)) => return Err("give the token or -token-file, not both".to_owned()),
        (None, None) => return Err("the join token is missing (nebula-ca token create --join)".to_owned()),
    };
    let token = token.parse().map_err(|error: nebula_cert::JoinTokenError| error.to_string())?;
    Ok(Some(Wish { token, place, starts: value("no-start") != Some("true") }))
}

fn read_token(source: impl Read, what: &str) -> Result<Zeroizing<String>, String> {
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN_BYTES));
    let read = source.take(MAX_TOKEN_BYTES as u64).read_to_string(&mut text);
    read.map(|_| text).map_err(|error| format!("cannot read {what}: {error}"))
}

impl Place {
    fn of(folder: &Path, name: Option<&str>) -> Result<Self, String> {
        let is_plain = |name: &str| {
            let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
            (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.starts_with('-') && name.bytes().all(is_good)
        };
        let folder = std::path::absolute(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let unit = |name: &str| (folder == Path::new(USUAL_FOLDER)).then(|| name.to_owned());
        Ok(match name {
            None => Self {
                config: folder.join("config.yml"),
                unit: unit("nebula.service"),
                device: "nebula1".to_owned(),
                files: folder,
            },
            Some(name) if is_plain(name) => Self {
                files: folder.join(name),
                config: folder.join(format!("{name}.yml")),
                unit: unit(&format!("nebula@{name}.service")),
                device: name.to_owned(),
            },
            Some(name) => {
                return Err(format!("-name {name:?} must be 1 to {MAX_NAME_BYTES} letters, digits, - and _"));
            }
        })
    }
}

impl Wish {
    fn fulfil(self, now: UnixTime) -> Result<String, String> {
        let files = Files::new(&self.place.files);
        let enrolled = super::join(&self.token, &files, now).map_err(|error| match error {
            Error::File { ref source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                format!("{error} (run it as root)")
            }
            error => error.to_string(),
        })?;
        let mut said = format!(
            "enrolled {} as {} (groups: {})\n",
            enrolled.name,
            enrolled.networks.join(", "),
            if enrolled.groups.is_empty() { "none".to_owned() } else { enrolled.groups.join(", ") },
        );
        let config = &self.place.config;
        let text = configuration(&self.place, &files, &enrolled);
        let is_new = write_new(config, &text).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
        if is_new {
            let _ = writeln!(said, "wrote {} and the files in {}", config.display(), self.place.files.display());
            if files.lighthouses().is_empty() {
                said.push_str(
                    "the CA announces no lighthouse (hosts.lighthouses in its policy.jsonc): this host finds peers only by \
                     static_host_map\n",
                );
            }
        } else {
            let enrolment = files.enrolment();
            let _ = writeln!(
                said,
                "{} is there and was left as it is; for the new certificate it needs\n\npki:\n  enrolment: {}\n\nwithout \
                 pki.ca, pki.cert and pki.key",
                config.display(),
                enrolment.display()
            );
        }
        match &self.place.unit {
            Some(unit) if is_new && self.starts && Path::new(SYSTEMD).exists() => {
                systemctl(&["enable", "--now", unit])?;
                let _ = writeln!(said, "started {unit}; ask it with: nebula ctl status");
            }
            Some(unit) if Path::new(SYSTEMD).exists() => {
                let _ = writeln!(said, "start it with: systemctl enable --now {unit}");
            }
            _ => {
                let _ = writeln!(said, "start it with: nebula -config {}", config.display());
            }
        }
        Ok(said)
    }
}

/// The configuration for a new host. Trust bundle and lighthouses are read from the folder of its certificate.
fn configuration(place: &Place, files: &Files, enrolled: &Enrolled) -> String {
    let own: Vec<IpAddr> =
        enrolled.networks.iter().filter_map(|network| network.parse::<IpNet>().ok()).map(|net| net.addr()).collect();
    let lighthouses = files.lighthouses();
    let endpoints = lighthouses.iter().find(|(address, _)| own.contains(address)).map(|(_, endpoints)| endpoints);
    let port = endpoints.and_then(|endpoints| endpoints.first()?.rsplit_once(':')?.1.parse::<u16>().ok());
    let lighthouse = if endpoints.is_some() { "lighthouse:\n  am_lighthouse: true\n" } else { "" };
    format!(
        "# Written by `nebula up`. Certificate, CA and lighthouses are in the folder of this file, and are renewed there.
# Every key: /usr/share/doc/nebula-overlay/configuration.md
pki:
  enrolment: {}
{lighthouse}listen:
  port: {}
punchy:
  punch: true
tun:
  dev: {}
firewall:
  outbound:
    - {{port: any, proto: any, host: any}}
  inbound:
    - {{port: any, proto: icmp, host: any}}
",
        quoted(&files.enrolment()),
        port.unwrap_or(0),
        place.device,
    )
}

/// Quotes a path as a YAML string.
fn quoted(path: &Path) -> String {
    serde_json::Value::String(path.display().to_string()).to_string()
}

/// Writes a file unless it exists. Returns whether it was written.
fn write_new(path: &Path, text: &str) -> std::io::Result<bool> {
    match std::fs::OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(mut file) => file.write_all(text.as_bytes()).map(|()| true),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

fn systemctl(words: &[&str]) -> Result<(), String> {
    let command = format!("systemctl {}", words.join(" "));
    let output = Command::new("systemctl").args(words).output();
    let output = output.map_err(|error| format!("this host is enrolled, but {command} cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("this host is enrolled, but {command} failed: {}", errors.trim()))
}

fn say(text: &str) {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const USUAL_FOLDER: &str = "/etc/nebula";
const SYSTEMD: &str = "/run/systemd/system";
const MAX_TOKEN_BYTES: usize = 4096;
/// The length limit of device names, because the name is also the device's.
const MAX_NAME_BYTES: usize = 15;

const ABOUT: &str = "\
Usage: nebula up TOKEN [flags]

Makes this host a member of a network, as root: with the join token of `nebula-ca token create --join` it gets a
certificate, writes a configuration unless there is one, and starts nebula.service where systemd runs. nebula then renews
the certificate by itself. The service must show the key that the token names before it is told anything.

TOKEN may be - for standard input: arguments of a program are seen by all users of a host.
";

const FLAGS: &[Flag] = &[
    Flag {
        name: "dir",
        takes_value: true,
        help: "Folder for configuration, certificate and key (default /etc/nebula)",
    },
    Flag {
        name: "name",
        takes_value: true,
        help: "A further network: configuration DIR/NAME.yml, files in DIR/NAME, device NAME, unit nebula@NAME",
    },
    Flag { name: "token-file", takes_value: true, help: "File with the join token" },
    Flag { name: "no-start", takes_value: false, help: "Start nothing; say how" },
];

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn token() -> String {
        JoinToken::new("https://ca.example", [7; 32], "nebula-enrol-x").unwrap().to_text().to_string()
    }

    #[test]
    fn flags_may_stand_before_and_after_the_token() {
        for line in ["-dir /x TOKEN --no-start", "TOKEN -no-start -dir=/x", "--no-start --dir /x TOKEN"] {
            let wish = read(words(&line.replace("TOKEN", &token()))).unwrap().unwrap();
            assert_eq!(wish.token.url(), "https://ca.example");
            assert!(!wish.starts);
            assert_eq!(wish.place.config, Path::new("/x/config.yml"));
        }
        assert!(read(words("-help")).unwrap().is_none());
        for (line, said) in [
            ("", "missing"),
            ("a b", "more than one"),
            ("nonsense", "no join token"),
            ("-x", "not defined"),
            ("TOKEN -name a/b", "letters"),
            ("TOKEN -token-file x", "not both"),
        ] {
            let refused = read(words(&line.replace("TOKEN", &token()))).unwrap_err();
            assert!(refused.contains(said), "{line}: {refused}");
        }
    }

    #[test]
    fn a_token_is_read_from_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, format!("{}\n", token())).unwrap();
        let wish = read(words(&format!("-token-file {}", file.display()))).unwrap().unwrap();
        assert_eq!(wish.token.url(), "https://ca.example");
        assert!(wish.starts && wish.place.unit.as_deref() == Some("nebula.service"));
        assert!(!format!("{wish:?}").contains("nebula-enrol-x"));
    }

    #[test]
    fn a_second_network_has_its_own_files_device_and_unit() {
        let place = Place::of("/etc/nebula".as_ref(), Some("office")).unwrap();
        let expected = Place {
            files: "/etc/nebula/office".into(),
            config: "/etc/nebula/office.yml".into(),
            unit: Some("nebula@office.service".to_owned()),
            device: "office".to_owned(),
        };
        assert_eq!(place, expected);
        assert_eq!(Place::of("/tmp/x".as_ref(), None).unwrap().unit, None, "no unit looks there");
        for bad in ["", "-x", "a b", "../x", "sixteen-letters-"] {
            assert!(Place::of("/etc/nebula".as_ref(), Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_configuration_holds_no_secret_and_a_lighthouse_is_made_one() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path());
        let lighthouses = [([10, 42, 0, 1].into(), vec!["192.0.2.1:4343".to_owned()])].into();
        files.write_trust("ca", Vec::new(), lighthouses, &["10.42.0.9/16".parse().unwrap()]).unwrap();
        let place = Place::of(folder.path(), None).unwrap();
        let of = |network: &str| Enrolled {
            name: "host".to_owned(),
            networks: vec![network.to_owned()],
            groups: Vec::new(),
            not_after: 0,
            folder: folder.path().to_owned(),
        };
        let host = configuration(&place, &files, &of("10.42.0.9/16"));
        assert!(!host.contains("am_lighthouse") && host.contains("port: 0\n"), "{host}");
        assert!(!host.contains("nebula-enrol"), "{host}");
        let lighthouse = configuration(&place, &files, &of("10.42.0.1/16"));
        assert!(lighthouse.contains("am_lighthouse: true") && lighthouse.contains("port: 4343\n"), "{lighthouse}");
        for text in [host, lighthouse] {
            crate::config::parse(&text).unwrap();
        }
    }

    #[test]
    fn a_configuration_that_is_there_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yml");
        assert!(write_new(&path, "new").unwrap());
        assert!(!write_new(&path, "newer").unwrap());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
    }
}
