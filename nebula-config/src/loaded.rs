//! A configuration that was read, for a program that starts with it, and why it cannot.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_linux::clock::unix_now;
use nebula_linux::errno;

use crate::report::Report;
use crate::{Listen, Logging, NameFamily, Remark, Settings, Value, log, names};

/// A configuration whose files have been read and merged, and whose logging settings are already in force.
#[derive(Debug)]
pub struct Loaded {
    tree: Value,
    /// Remarks from merging the files.
    remarks: Vec<Remark>,
    path: PathBuf,
}

/// Why the daemon failed to start or had to stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The failure came before logging was set up, so it is printed as is.
    #[error("{0}")]
    BeforeLog(String),
    /// Starting failed.
    #[error("{message}: {cause}")]
    Start {
        /// What failed.
        message: &'static str,
        /// Why.
        cause: String,
    },
    /// Already logged, with file and line.
    #[error("the configuration is not usable")]
    Reported,
    /// The running node failed.
    #[error("Error while running: {0}")]
    Running(String),
}

impl Loaded {
    /// Reads the configuration at `path` and applies its logging settings. `complete` puts in place what an
    /// interrupted renewal has left in the folder of the enrolment: without it, the daemon would not start. A failure
    /// shows up later, where the files are needed.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or the `logging` section is invalid.
    pub fn read(path: &Path, complete: impl FnOnce(&Path)) -> Result<Self, Error> {
        let (tree, remarks) =
            crate::load(path).map_err(|error| Error::BeforeLog(format!("failed to load config: {error}")))?;
        if let Some(folder) = crate::enrolment_folder(&tree) {
            complete(&folder);
        }
        let logging = Logging::of(&tree).map_err(|refused| Error::BeforeLog(refused.to_string()))?;
        log::start(logging, log::Output::Stdout);
        Ok(Self { tree, remarks, path: path.to_owned() })
    }

    /// Checks everything that can be checked without touching the system (`-test`), and reports every problem. What Go
    /// Nebula detects only at start is a remark; with `strict`, every remark is an error.
    ///
    /// # Errors
    /// Returns an error if any check failed; the problems have been reported.
    pub fn test(self, strict: bool) -> Result<(), Error> {
        log::keep_all();
        tracing::info!("{}", printable(&self.tree));
        let report = Report::new(&self.path);
        let (refused, remarks) = match Settings::read(&self.tree, unix_now()) {
            Ok(settings) => (unresolved(&settings), settings.remarks),
            Err(refusals) => (refusals.refused, refusals.remarks),
        };
        let mut errors = 0;
        for remark in self.remarks.iter().chain(&remarks) {
            report.remark(remark, strict);
            errors += usize::from(strict);
        }
        for refused in &refused {
            let stops = strict || !refused.at_start;
            report.refused(refused, stops);
            errors += usize::from(stops);
        }
        let path = self.path.display();
        if errors > 0 {
            tracing::error!("{path} is refused: {errors} error(s), see above");
            return Err(Error::Reported);
        }
        tracing::info!("{path} is valid");
        Ok(())
    }

    /// Reads all settings and reports everything that there is to say about them.
    ///
    /// # Errors
    /// Returns an error if the node could not start with them; the reasons have been reported.
    pub fn settings(&self) -> Result<Settings, Error> {
        let report = Report::new(&self.path);
        let read = Settings::read(&self.tree, unix_now());
        let remarks = read.as_ref().map_or_else(|refusals| &refusals.remarks, |settings| &settings.remarks);
        for remark in self.remarks.iter().chain(remarks) {
            report.remark(remark, false);
        }
        read.map_err(|refusals| {
            refusals.refused.iter().for_each(|refused| report.refused(refused, true));
            Error::Reported
        })
    }

    /// The file or folder of the configuration.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the files say together.
    #[must_use]
    pub fn tree(&self) -> &Value {
        &self.tree
    }
}

/// Advertised names that cannot be resolved. As in Go, this is an error with `-test`, though a start merely skips such
/// names.
fn unresolved(settings: &Settings) -> Vec<crate::Refused> {
    let key = "lighthouse.advertise_addrs";
    let refused = |(name, error): (&str, names::Error)| {
        let cause = format!("{key}: cannot look up {name}: {error}");
        crate::Refused::new("Failed to initialize lighthouse handler", cause).at(key)
    };
    names::unresolved(&settings.advertise).into_iter().map(refused).collect()
}

/// Why the UDP socket on the underlay cannot be opened, and what to do.
#[must_use]
pub fn bind_failed(error: &std::io::Error, listen: SocketAddr) -> Error {
    Error::Start {
        message: "Failed to open udp listener",
        cause: format!("unable to bind to socket: {} ({listen}){}", errno::text(error), bind_hint(error, listen)),
    }
}

/// Suggests how to fix a failed bind.
fn bind_hint(error: &std::io::Error, listen: SocketAddr) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => format!(
            ": another program has this port, `ss -ulnp sport = :{}` names it; if it is to stay, change listen.port",
            listen.port()
        ),
        std::io::ErrorKind::AddrNotAvailable => {
            format!(": {} is no address of this machine, see listen.host", listen.ip())
        }
        std::io::ErrorKind::PermissionDenied if (1..1024).contains(&listen.port()) => {
            ": ports below 1024 need CAP_NET_BIND_SERVICE".to_owned()
        }
        _ => String::new(),
    }
}

/// The address to bind; a host name is resolved.
///
/// # Errors
/// Returns an error if the name has no address.
pub fn listen_address(listen: &Listen) -> Result<SocketAddr, Error> {
    if let Ok(ip) = listen.host.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, listen.port));
    }
    let refuse = |cause: String| Error::Start { message: "Failed to resolve listen.host", cause };
    let found = names::look_up(&listen.host, NameFamily::Both, Duration::from_secs(5));
    let found = found.map_err(|error| refuse(error.to_string()))?;
    let first = found.first().ok_or_else(|| refuse(format!("{} has no address", listen.host)))?;
    Ok(SocketAddr::new(*first, listen.port))
}

/// The merged tree as YAML, without an inline private key.
fn printable(tree: &Value) -> String {
    let mut tree = tree.clone();
    if let Value::Map(root) = &mut tree
        && let Some(Value::Map(pki)) = root.get_mut("pki")
        && let Some(Value::String(key)) = pki.get_mut("key")
        && key.contains("-----BEGIN")
    {
        "(inline key not shown)".clone_into(key);
    }
    tree.to_yaml()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_cannot_be_had_says_what_to_do() {
        let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = taken.local_addr().unwrap();
        let elsewhere: SocketAddr = "192.0.2.1:4242".parse().unwrap();
        for (listen, hint) in [(at, format!("sport = :{}", at.port())), (elsewhere, "see listen.host".to_owned())] {
            let error = std::net::UdpSocket::bind(listen).unwrap_err();
            assert!(bind_hint(&error, listen).contains(&hint), "{error}");
        }
    }

    #[test]
    fn an_inline_private_key_is_never_printed() {
        let tree = crate::parse("pki: {key: \"-----BEGIN NEBULA X25519 PRIVATE KEY-----\\nabc\", ca: /x}").unwrap();
        let text = printable(&tree);
        assert!(!text.contains("PRIVATE"), "{text}");
        assert!(text.contains("ca: /x"), "{text}");
    }
}
