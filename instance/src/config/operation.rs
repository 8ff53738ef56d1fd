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
    /// Interval at which the configuration's files are checked for changes; `None`: changes wait for SIGHUP.
    pub watch: Option<Duration>,
    /// Whether threads that carry bulk traffic are scheduled before other programs.
    pub raise_priority: bool,
    /// User to run as once the system is set up: a name, or `UID:GID`.
    pub user: Option<String>,
    /// Folder of the files that this host enrolled with (`pki.enrolment`); `None`: somebody else renews the certificate.
    pub enrolment: Option<PathBuf>,
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
                Some(path) if path.starts_with('/') && path.len() <= MAX_PATH_BYTES => ControlPath::At(path.into()),
                Some(path) => {
                    let cause = format!(
                        "{CONTROL}: {path:?} is no absolute path of at most {MAX_PATH_BYTES} bytes, true or false"
                    );
                    return Err(Refused::new("Unsupported configuration", cause).at(CONTROL));
                }
            },
        };
        let watch = section.duration(WATCH, Duration::ZERO);
        let watch = (!watch.is_zero()).then(|| watch.max(MIN_WATCH_INTERVAL));
        let user = section.string("daemon.user").filter(|user| !user.is_empty());
        let enrolment = section.string("pki.enrolment").filter(|path| !path.is_empty());
        let enrolment = enrolment.map(|path| folder_of(path.as_ref()));
        Ok(Self { control, watch, raise_priority: section.boolean("daemon.raise_priority", true), user, enrolment })
    }
}

const CONTROL: &str = "daemon.control_socket";
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
