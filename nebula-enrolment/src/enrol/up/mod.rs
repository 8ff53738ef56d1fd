//! `nebula up`: makes a bare host a member of the network in one command.

pub mod words;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use ipnet::IpNet;
use nebula_cert::{Curve, JoinToken, UnixTime, visible};
use nebula_config::go::flags::{self, Flag};
use nebula_linux::clock;
use nebula_linux::used_networks::used_networks;
use zeroize::Zeroizing;

use self::words::Words;
use super::limits::Limits;
use super::{Enrolled, Error, Files};
use crate::ca_client;

/// What the user wants.
#[derive(Debug)]
enum Order {
    /// To make the key that a token can be bound to.
    Prepare {
        place: Place,
        curve: Curve,
    },
    Join(Wish),
}

/// A host that shall join.
#[derive(Debug)]
struct Wish {
    token: JoinToken,
    place: Place,
    accepted: Vec<IpNet>,
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
    program: Program,
}

/// What carries the traffic of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    Daemon,
    /// `nebula-proxy`, which any user may run: it has no device, and takes no route of the host.
    Proxy,
}

/// Runs `nebula up`; `words` are the arguments after `up`.
#[must_use]
pub fn main(words: Zeroizing<Vec<String>>) -> ExitCode {
    let words = match Words::parse(words) {
        Ok(words) => words,
        Err(words::Error::Help) => {
            say(&format!("{ABOUT}\nFlags:\n{}", flags::describe(FLAGS)));
            return ExitCode::SUCCESS;
        }
        Err(words::Error::Usage(message)) => return misused(&message),
    };
    if let Some(warning) = words.warning() {
        eprintln!("nebula up: warning: {warning}");
    }
    let order = match Order::read(&words, words::ask) {
        Ok(order) => order,
        Err(message) => return misused(&message),
    };
    match order.fulfil(clock::unix_now()) {
        Ok(said) => {
            say(&said);
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("nebula up: {}", visible(&message));
            ExitCode::FAILURE
        }
    }
}

fn misused(message: &str) -> ExitCode {
    eprintln!("nebula up: {}; see nebula up -help", visible(message));
    ExitCode::from(2)
}

impl Order {
    /// Makes sense of the words; `ask` returns a token that is not among them.
    fn read(words: &Words, ask: impl FnOnce() -> Result<Zeroizing<String>, String>) -> Result<Self, String> {
        let place = if words.is_set("proxy") {
            Place::of_proxy(words.value("dir"), words.value("name"), |name| std::env::var_os(name))?
        } else {
            Place::of(words.value("dir").unwrap_or(USUAL_FOLDER).as_ref(), words.value("name"))?
        };
        let curve = match words.value("curve") {
            None => Curve::USUAL,
            Some("25519") => Curve::Curve25519,
            Some("P256") => Curve::P256,
            Some(other) => return Err(format!("invalid curve: {other}; it is 25519 or P256")),
        };
        if words.is_set("prepare") {
            let refused = || "-prepare comes before there is a token".to_owned();
            return (!words.names_token()).then_some(Self::Prepare { place, curve }).ok_or_else(refused);
        }
        if words.value("curve").is_some() {
            return Err("-curve is for -prepare; a join token says its curve".to_owned());
        }
        let mut accepted = Vec::new();
        for network in words.values("accept-networks").flat_map(|value| value.split(',')) {
            let network: IpNet = network.trim().parse().map_err(|_| format!("{network:?} is no network"))?;
            accepted.push(network.trunc());
        }
        let token = words.token(ask)?.parse().map_err(|error: nebula_cert::JoinTokenError| error.to_string())?;
        Ok(Self::Join(Wish { token, place, accepted, starts: !words.is_set("no-start") }))
    }

    fn fulfil(self, now: UnixTime) -> Result<String, String> {
        match self {
            Self::Join(wish) => wish.fulfil(now),
            Self::Prepare { place, curve } => {
                let key = super::prepare(&Files::new(&place.files), curve).map_err(|error| explained(&error))?;
                Ok(format!("{key}\n"))
            }
        }
    }
}

/// The error, and what to do about it.
fn explained(error: &Error) -> String {
    match error {
        Error::File { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
            format!("{error} (run it as root)")
        }
        Error::Ca(ca_client::Error::Denied { code, .. }) if code == "token_used" => format!(
            "{error}. If this host has not used it, somebody else has its place in the network now: on the CA, see `nebula-ca \
             certificate list` and give `nebula-ca certificate revoke`"
        ),
        error => error.to_string(),
    }
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
                program: Program::Daemon,
            },
            Some(name) if is_plain(name) => Self {
                files: folder.join(name),
                config: folder.join(format!("{name}.yml")),
                unit: unit(&format!("nebula@{name}.service")),
                device: name.to_owned(),
                program: Program::Daemon,
            },
            Some(name) => {
                return Err(format!("-name {name:?} must be 1 to {MAX_NAME_BYTES} letters, digits, - and _"));
            }
        })
    }

    /// The folder of the user, by default the one that the unit of `nebula-proxy` reads; `variable` looks up the
    /// environment.
    fn of_proxy(
        folder: Option<&str>,
        name: Option<&str>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, String> {
        let path = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let config = path("XDG_CONFIG_HOME").or_else(|| path("HOME").map(|home| home.join(".config")));
        let usual = config.map(|config| config.join("nebula"));
        let folder = folder.map(PathBuf::from).or_else(|| usual.clone());
        let place = Self::of(&folder.ok_or("there is no HOME: give -dir")?, name)?;
        let is_usual = name.is_none() && usual.as_deref() == Some(&*place.files);
        let unit = is_usual.then(|| "nebula-proxy.service".to_owned());
        Ok(Self { unit, program: Program::Proxy, ..place })
    }

    /// The words for systemctl, which knows this unit.
    fn systemctl<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        let manager = if self.program == Program::Proxy { &["--user"][..] } else { &[] };
        [manager, words].concat()
    }

    /// Whether a service manager runs that knows the unit.
    fn is_managed(&self) -> bool {
        match self.program {
            Program::Daemon => Path::new(SYSTEMD).exists(),
            Program::Proxy => {
                std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|run| Path::new(&run).join("systemd").exists())
            }
        }
    }

    /// How somebody starts it.
    fn by_hand(&self) -> String {
        let config = self.config.display();
        match self.program {
            Program::Daemon => format!("nebula -config {config}"),
            Program::Proxy => format!("nebula-proxy -config {config} -socks 1080 -http 8118"),
        }
    }
}

impl Wish {
    fn fulfil(self, now: UnixTime) -> Result<String, String> {
        let files = Files::new(&self.place.files);
        let used = match self.place.program {
            Program::Daemon => used_networks(&self.place.device)
                .map_err(|error| format!("cannot see which networks this host uses already: {error}"))?,
            Program::Proxy => Vec::new(),
        };
        let limits = Limits { overlay: Vec::new(), accepted: self.accepted, used };
        let enrolled = super::join(&self.token, &files, &limits, now).map_err(|error| explained(&error))?;
        let mut said = format!("{enrolled}\n");
        if let Some(moved) = enrolled.moved() {
            let _ = writeln!(said, "{moved}");
        }
        let config = &self.place.config;
        let port = if is_free(USUAL_PORT) { USUAL_PORT } else { 0 };
        let text = configuration(&self.place, &files, &enrolled, port);
        let is_new = write_new(config, &text).map_err(|error| format!("cannot write {}: {error}", config.display()))?;
        if is_new {
            let _ = writeln!(said, "wrote {} and the files in {}", config.display(), self.place.files.display());
            if port == 0 && announced_endpoints(&files, &enrolled).is_none() {
                let _ = writeln!(
                    said,
                    "UDP port {USUAL_PORT} is in use on this host, so it takes a free one at each start (listen.port)"
                );
            }
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
            Some(unit) if self.place.is_managed() => {
                let words = self.place.systemctl(&["enable", "--now", unit]);
                if is_new && self.starts {
                    systemctl(&words)?;
                    let hint =
                        if self.place.program == Program::Daemon { "; ask it with: nebula ctl status" } else { "" };
                    let _ = writeln!(said, "started {unit}{hint}");
                } else {
                    let _ = writeln!(said, "start it with: systemctl {}", words.join(" "));
                }
            }
            _ => {
                let _ = writeln!(said, "start it with: {}", self.place.by_hand());
            }
        }
        Ok(said)
    }
}

/// The configuration for a new host, which listens on `port` unless it is a lighthouse. Trust bundle and lighthouses
/// are read from the folder of its certificate.
fn configuration(place: &Place, files: &Files, enrolled: &Enrolled, port: u16) -> String {
    let endpoints = announced_endpoints(files, enrolled);
    let announced = endpoints.as_ref().and_then(|all| all.first()?.rsplit_once(':')?.1.parse::<u16>().ok());
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
  respond: true
tun:
  dev: {}
firewall:
  outbound:
    - {{port: any, proto: any, host: any}}
  inbound:
    - {{port: any, proto: icmp, host: any}}
",
        quoted(&files.enrolment()),
        announced.unwrap_or(port),
        place.device,
    )
}

/// Where the CA says that this host is, if it is a lighthouse.
fn announced_endpoints(files: &Files, enrolled: &Enrolled) -> Option<Vec<String>> {
    let own: Vec<IpAddr> =
        enrolled.networks.iter().filter_map(|network| network.parse::<IpNet>().ok()).map(|net| net.addr()).collect();
    files.lighthouses().into_iter().find(|(address, _)| own.contains(address)).map(|(_, endpoints)| endpoints)
}

/// Whether a daemon could listen on this UDP port.
fn is_free(port: u16) -> bool {
    let bind = |address: IpAddr| std::net::UdpSocket::bind((address, port));
    match bind(Ipv6Addr::UNSPECIFIED.into()) {
        Ok(_) => true,
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => false,
        // There is no IPv6.
        Err(_) => bind(Ipv4Addr::UNSPECIFIED.into()).is_ok(),
    }
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
/// As in most networks: whoever sees a host behind a NAT again finds it where it was.
const USUAL_PORT: u16 = 4242;
const SYSTEMD: &str = "/run/systemd/system";
/// The length limit of device names, because the name is also the device's.
const MAX_NAME_BYTES: usize = 15;

const ABOUT: &str = "\
Usage: nebula up [flags]
       nebula up -prepare [flags]
       nebula-proxy up [flags]

Makes this host a member of a network, as root: with the join token of `nebula-ca token create --join` it gets a
certificate, writes a configuration unless there is one, and starts nebula.service where systemd runs. nebula then renews
the certificate by itself. The service must show the key that the token names before it is told anything.

The token is asked for on a terminal, without being shown, else read from standard input. It may be an argument, too, but
every user of a host can read the arguments of its programs, and the first one to use a token is the one it is for. A token
that is bound to this host's key is worth nothing to others: nebula up -prepare prints what nebula-ca token create --key
takes.
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
    Flag {
        name: "prepare",
        takes_value: false,
        help: "Only make the key of this host, and print its public half for nebula-ca token create --key",
    },
    Flag { name: "curve", takes_value: true, help: "With -prepare: 25519 or P256, as the CA (default 25519)" },
    Flag {
        name: "accept-networks",
        takes_value: true,
        help: "Networks, with commas, that the certificate may have although they are public, special or in use here, or \
               that other hosts may reach through this one",
    },
    Flag {
        name: "proxy",
        takes_value: false,
        help: "For nebula-proxy, as the user who will run it: folder ~/.config/nebula, no device, unit nebula-proxy of the \
               user. `nebula-proxy up` says so by itself",
    },
    Flag { name: "no-start", takes_value: false, help: "Start nothing; say how" },
];

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Order, String> {
        let words = line.split_whitespace().map(str::to_owned).collect();
        let Ok(words) = Words::parse(Zeroizing::new(words)) else { panic!("{line} is no line") };
        let networks = ["10.42.0.0/16".parse().unwrap()];
        let token = JoinToken::new("https://ca.example", [7; 32], "nebula-enrol-x", &networks).unwrap().to_text();
        Order::read(&words, || Ok(token))
    }

    #[test]
    fn an_order_says_where_the_files_go_and_what_the_user_accepts() {
        let line = "--no-start --dir /x -accept-networks 192.168.1.7/24,fd00::/8 -accept-networks 0.0.0.0/0";
        let Ok(Order::Join(wish)) = read(line) else { panic!("a wish") };
        assert_eq!((wish.token.url(), wish.starts), ("https://ca.example", false));
        assert_eq!(wish.place.config, Path::new("/x/config.yml"));
        let accepted: Vec<_> = wish.accepted.iter().map(ToString::to_string).collect();
        assert_eq!(accepted, ["192.168.1.0/24", "fd00::/8", "0.0.0.0/0"]);
        assert!(!format!("{wish:?}").contains("nebula-enrol-x"));
        let Ok(Order::Join(wish)) = read("") else { panic!("a wish") };
        assert!(wish.starts && wish.place.unit.as_deref() == Some("nebula.service"));
        let Ok(Order::Prepare { place, curve }) = read("-prepare -curve P256 -name office") else { panic!("an order") };
        assert_eq!((place.device.as_str(), curve), ("office", Curve::P256));
        for (line, said) in [
            ("nonsense", "no join token"),
            ("-name a/b", "letters"),
            ("-accept-networks 10.0.0.0", "no network"),
            ("-prepare TOKEN", "before there is a token"),
            ("-prepare -token-file x", "before there is a token"),
            ("-prepare -curve X", "invalid curve"),
            ("-curve P256", "-curve is for -prepare"),
        ] {
            let refused = read(line).unwrap_err();
            assert!(refused.contains(said), "{line}: {refused}");
        }
    }

    #[test]
    fn a_second_network_has_its_own_files_device_and_unit() {
        let place = Place::of("/etc/nebula".as_ref(), Some("office")).unwrap();
        let expected = Place {
            files: "/etc/nebula/office".into(),
            config: "/etc/nebula/office.yml".into(),
            unit: Some("nebula@office.service".to_owned()),
            device: "office".to_owned(),
            program: Program::Daemon,
        };
        assert_eq!(place, expected);
        assert_eq!(Place::of("/tmp/x".as_ref(), None).unwrap().unit, None, "no unit looks there");
        for bad in ["", "-x", "a b", "../x", "sixteen-letters-"] {
            assert!(Place::of("/etc/nebula".as_ref(), Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_user_of_the_proxy_has_the_files_at_home_and_a_unit_of_his_own() {
        let home = |name: &str| (name == "HOME").then(|| "/users/u".into());
        let place = Place::of_proxy(None, None, home).unwrap();
        assert_eq!(
            (place.config.as_path(), place.files.as_path()),
            ("/users/u/.config/nebula/config.yml".as_ref(), "/users/u/.config/nebula".as_ref())
        );
        assert_eq!(place.unit.as_deref(), Some("nebula-proxy.service"));
        assert_eq!(place.systemctl(&["enable", "x"]), ["--user", "enable", "x"]);
        assert!(place.by_hand().starts_with("nebula-proxy -config /users/u/.config/nebula/config.yml -socks"));
        let place = Place::of_proxy(None, None, |name| (name == "XDG_CONFIG_HOME").then(|| "/c".into())).unwrap();
        assert_eq!(place.files, Path::new("/c/nebula"));
        for (folder, name) in [(Some("/tmp/x"), None), (None, Some("office"))] {
            assert_eq!(Place::of_proxy(folder, name, home).unwrap().unit, None, "no unit reads {folder:?} {name:?}");
        }
        assert!(Place::of_proxy(None, None, |_| None).unwrap_err().contains("-dir"));
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
            before: Vec::new(),
        };
        let host = configuration(&place, &files, &of("10.42.0.9/16"), 4242);
        assert!(!host.contains("am_lighthouse") && host.contains("port: 4242\n"), "{host}");
        assert!(configuration(&place, &files, &of("10.42.0.9/16"), 0).contains("\n  port: 0\n"));
        assert!(host.contains("punchy:\n  punch: true\n  respond: true\n"), "{host}");
        assert!(!host.contains("nebula-enrol"), "{host}");
        let lighthouse = configuration(&place, &files, &of("10.42.0.1/16"), 4242);
        assert!(lighthouse.contains("am_lighthouse: true") && lighthouse.contains("port: 4343\n"), "{lighthouse}");
        for text in [host, lighthouse] {
            nebula_config::parse(&text).unwrap();
        }
    }

    #[test]
    fn a_port_that_somebody_has_is_not_free_whatever_the_family() {
        for taken in ["0.0.0.0:0", "127.0.0.1:0"] {
            let socket = std::net::UdpSocket::bind(taken).unwrap();
            let port = socket.local_addr().unwrap().port();
            assert!(!is_free(port), "{taken}");
            drop(socket);
            assert!(is_free(port));
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
