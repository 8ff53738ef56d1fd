//! `daemon.*`: how the program itself runs. Go Nebula has none of these keys.

use std::path::PathBuf;
use std::time::Duration;

use super::announced::folder_of;
use super::section::Section;
use super::{Refused, Value};

/// How the program runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Path of the control socket.
    pub control: ControlPath,
    /// The socket where other programs can look up the identity of an overlay address.
    pub whois: Option<Whois>,
    /// Interval at which the configuration's files are checked for changes; `None`: changes wait for SIGHUP.
    pub watch: Option<Duration>,
    /// Whether threads that carry bulk traffic are scheduled before other programs.
    pub raise_priority: bool,
    /// User to run as once the system is set up: a name, or `UID:GID`.
    pub user: Option<String>,
    /// Folder of the files that this host enrolled with (`pki.enrolment`); `None`: somebody else renews the
    /// certificate.
    pub enrolment: Option<PathBuf>,
}

/// A socket that answers `whois` only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whois {
    /// Path of the socket.
    pub path: PathBuf,
    /// Who may use it: a name in `/etc/group`, or a number; `None`: everybody.
    pub group: Option<String>,
}

/// Where the control socket is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlPath {
    /// In `/run/nebula`, named after the device, if that directory exists or can be created.
    Usual,
    /// There is no control socket.
    Off,
    /// At this path.
    At(PathBuf),
}

impl Operation {
    pub(super) fn read(section: &Section<'_>) -> Result<Self, Refused> {
        let control = match section.get(CONTROL) {
            None | Some(Value::Null) => ControlPath::Usual,
            Some(Value::Bool(true)) => ControlPath::Usual,
            Some(Value::Bool(false)) => ControlPath::Off,
            Some(_) => match section.string(CONTROL).filter(|path| !path.is_empty()) {
                None => ControlPath::Off,
                Some(path) => ControlPath::At(socket_path(CONTROL, &path, ", true or false")?),
            },
        };
        let text = |key: &str| section.string(key).filter(|text| !text.is_empty());
        let whois = text(WHOIS).map(|path| socket_path(WHOIS, &path, "")).transpose()?;
        let whois = whois.map(|path| Whois { path, group: text("daemon.whois_group") });
        let watch = section.duration(WATCH, Duration::ZERO);
        let watch = (!watch.is_zero()).then(|| watch.max(MIN_WATCH_INTERVAL));
        let raise_priority = section.boolean("daemon.raise_priority", true);
        let enrolment = text("pki.enrolment").map(|path| folder_of(path.as_ref()));
        Ok(Self { control, whois, watch, raise_priority, user: text("daemon.user"), enrolment })
    }
}

/// `others` are what else the key accepts.
fn socket_path(key: &str, path: &str, others: &str) -> Result<PathBuf, Refused> {
    if path.starts_with('/') && path.len() <= MAX_PATH_BYTES {
        return Ok(path.into());
    }
    let cause = format!("{key}: {path:?} is no absolute path of at most {MAX_PATH_BYTES} bytes{others}");
    Err(Refused::new("Unsupported configuration", cause).at(key))
}

const CONTROL: &str = "daemon.control_socket";
const WHOIS: &str = "daemon.whois_socket";
const WATCH: &str = "daemon.watch_files";
// Size of `sun_path` without the terminating zero.
const MAX_PATH_BYTES: usize = 107;
const MIN_WATCH_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Operation, Refused> {
        Operation::read(&Section::new(&super::super::parse(text).unwrap()))
    }

    #[test]
    fn the_socket_for_whois_has_a_path_and_perhaps_a_group() {
        assert_eq!(read("daemon: {whois_group: web}").unwrap().whois, None);
        let whois = read("daemon: {whois_socket: /run/w.sock, whois_group: web}").unwrap().whois;
        assert_eq!(whois, Some(Whois { path: "/run/w.sock".into(), group: Some("web".to_owned()) }));
        assert_eq!(read("daemon: {whois_socket: w.sock}").unwrap_err().key, WHOIS);
    }

    #[test]
    fn the_control_socket_has_its_usual_place_another_one_or_none() {
        for (text, expected) in [
            ("{}", ControlPath::Usual),
            ("daemon: {control_socket: true}", ControlPath::Usual),
            ("daemon: {control_socket: false}", ControlPath::Off),
            ("daemon: {control_socket: ''}", ControlPath::Off),
            ("daemon: {control_socket: /x/y.sock}", ControlPath::At("/x/y.sock".into())),
        ] {
            assert_eq!(read(text).unwrap().control, expected, "{text}");
        }
        for wrong in ["nebula.sock", &format!("/{}", "x".repeat(107))] {
            let refused = read(&format!("daemon: {{control_socket: {wrong}}}")).unwrap_err();
            assert_eq!(refused.key, CONTROL);
        }
    }

    #[test]
    fn the_user_stays_unless_another_one_is_named() {
        for (text, expected) in [("{}", None), ("daemon: {user: ''}", None), ("daemon: {user: nebula}", Some("nebula"))]
        {
            assert_eq!(read(text).unwrap().user.as_deref(), expected, "{text}");
        }
        assert_eq!(read("daemon: {user: '990:980'}").unwrap().user.as_deref(), Some("990:980"));
    }

    #[test]
    fn files_are_watched_only_on_request_and_not_all_the_time() {
        assert_eq!(read("{}").unwrap().watch, None);
        assert_eq!(read("daemon: {watch_files: 0s}").unwrap().watch, None);
        assert_eq!(read("daemon: {watch_files: 30s}").unwrap().watch, Some(Duration::from_secs(30)));
        assert_eq!(read("daemon: {watch_files: 1ns}").unwrap().watch, Some(MIN_WATCH_INTERVAL));
    }
}
