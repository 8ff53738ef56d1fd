//! The status an instance reports on its socket, as far as the plugin and the node agent need it.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// A part of the status document.
#[derive(Debug, Clone, Deserialize)]
pub struct Status {
    /// Process id of the instance.
    pub pid: Option<i32>,
    /// UID of its pod.
    pub uid: Option<String>,
    /// What the instance does for its pod.
    #[serde(default)]
    pub state: InstanceState,
    /// The pod's overlay addresses with their prefix lengths.
    #[serde(default)]
    pub overlay: Vec<String>,
    /// The certificate in use.
    pub certificate: Option<Certificate>,
    /// Why the path is closed although there was a certificate.
    #[serde(default)]
    pub closed: Option<String>,
    /// Why there is no certificate, or no newer one.
    #[serde(default)]
    pub last_error: Option<String>,
    /// Whether that is what the CA says, and not that it was not reached.
    #[serde(default)]
    pub denied: bool,
    /// Whether the pod's own token obtains the certificate; `None`: the instance is of an earlier release.
    pub own_token: Option<bool>,
    /// One entry for each tunnel, up to a limit.
    #[serde(default)]
    pub tunnels: Vec<IgnoredAny>,
    /// Counters by name; those of drops are named `dropped_DIRECTION_REASON`.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// The pod's init container should have shown its token long ago.
    #[serde(default)]
    pub init_overdue: bool,
    /// The cluster table of a captured pod.
    pub table: Option<ClusterTable>,
    /// The settings that it follows; `None`: it is of a release that keeps those of its start.
    pub settings: Option<FollowedSettings>,
}

/// What an instance does for its pod, by the word in its status document.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InstanceState {
    /// The tunnel carries the pod's packets.
    Running,
    /// As [`InstanceState::Running`], with a certificate that has no groups yet.
    Provisional,
    /// There is no certificate yet, and nothing leaves the pod.
    Waiting,
    /// There was a certificate, and nothing leaves the pod any more.
    Closed,
    /// A word that this release does not know, or none: nothing is to be concluded from it.
    #[default]
    #[serde(other)]
    Unknown,
}

impl InstanceState {
    /// The word in the document; `unknown` for all that are none of the others.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Provisional => "provisional",
            Self::Waiting => "waiting",
            Self::Closed => "closed",
            Self::Unknown => "unknown",
        }
    }
}

/// A part of what the status document says about the settings of the tunnel.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct FollowedSettings {
    /// [`crate::launch::contract_hash`] of the contract that they are from.
    pub contract: String,
    /// How often it was told to read its contract again.
    #[serde(default)]
    pub reloads: u64,
    /// MTU of the device that belongs to them.
    pub device_mtu: Option<u32>,
    /// Why those that came last are not in force.
    pub refused: Option<String>,
    /// Keys of Nebula's configuration whose change takes effect at the next start.
    #[serde(default)]
    pub at_the_next_start: Vec<String>,
}

/// A part of what the status document says about the cluster table.
#[derive(Debug, Clone, Deserialize)]
pub struct ClusterTable {
    /// `used`, `kept` (the one that was written last cannot be used) or `missing`.
    #[serde(default)]
    pub state: String,
    /// Version of the table in use.
    pub version: Option<u64>,
    /// Why the file that is there is not used.
    pub problem: Option<String>,
}

/// A part of what the status document says about the certificate.
#[derive(Debug, Clone, Deserialize)]
pub struct Certificate {
    /// When it expires, in seconds since 1970.
    pub not_after: i64,
}

impl Status {
    /// Reads the status of the instance behind a socket.
    ///
    /// # Errors
    /// Returns the system's error; `InvalidData` if the answer is not a status document.
    pub fn ask(socket: &Path) -> io::Result<Self> {
        serde_json::from_slice(&document(socket)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// The first overlay address of the same family as `address`.
    pub(crate) fn counterpart(&self, address: IpAddr) -> Option<IpAddr> {
        self.addresses().find(|overlay| overlay.is_ipv4() == address.is_ipv4())
    }

    /// The overlay addresses.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.overlay.iter().filter_map(|network| Some(parse_network(network)?.0))
    }
}

/// Reads the whole status document of the instance behind a socket, as its bytes.
///
/// # Errors
/// Returns the system's error.
pub fn document(socket: &Path) -> io::Result<Vec<u8>> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    let mut bytes = Vec::new();
    stream.take(MAX_STATUS).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Parses ADDRESS/PREFIX.
pub(crate) fn parse_network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    Some((address.parse().ok()?, prefix.parse().ok()?))
}

const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const MAX_STATUS: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agreed_status_document_is_understood() {
        let status: Status = serde_json::from_str(
            r#"{"pod":"a/b","uid":"u","device":"nebula0","overlay":["fd42::7/64","10.42.0.7/16"],"groups":[],
                "certificate":{"name":"n","fingerprint":"f","not_before":1,"not_after":2},"state":"running",
                "port":4242,"tunnels":[],"counters":{},"pid":123}"#,
        )
        .unwrap();
        assert_eq!(status.counterpart("10.4.0.7".parse().unwrap()), "10.42.0.7".parse().ok());
        assert_eq!(status.counterpart("fd00::1".parse().unwrap()), "fd42::7".parse().ok());
        assert_eq!((status.pid, status.certificate.unwrap().not_after), (Some(123), 2));
        assert_eq!(status.state, InstanceState::Running);
        let waiting: Status = serde_json::from_str(r#"{"state":"waiting","certificate":null}"#).unwrap();
        assert!(waiting.certificate.is_none());
        assert_eq!(waiting.counterpart("10.4.0.7".parse().unwrap()), None);
    }

    #[test]
    fn a_state_of_another_release_is_unknown_and_so_is_none() {
        let state = |text: &str| serde_json::from_str::<Status>(text).unwrap().state;
        assert_eq!(state(r#"{"state":"draining","certificate":null}"#), InstanceState::Unknown);
        assert_eq!(state(r#"{"pid":7,"certificate":null}"#), InstanceState::Unknown);
        let all = [
            InstanceState::Running,
            InstanceState::Provisional,
            InstanceState::Waiting,
            InstanceState::Closed,
            InstanceState::Unknown,
        ];
        for known in all {
            assert_eq!(serde_json::to_value(known).unwrap(), known.word(), "what is written is the word that is shown");
            assert_eq!(state(&format!(r#"{{"state":"{}"}}"#, known.word())), known);
        }
    }

    #[test]
    fn the_documents_of_earlier_releases_are_understood() {
        // Without own_token, init_overdue and settings; then without settings; then without reloads and what waits.
        for (text, own_token, contract) in [
            (r#"{"pid":1,"uid":"u","state":"closed","closed":"revoked","last_error":null,"denied":true}"#, None, None),
            (r#"{"pid":1,"uid":"u","state":"closed","own_token":false,"init_overdue":true}"#, Some(false), None),
            (
                r#"{"state":"closed","own_token":true,"settings":{"contract":"c","device_mtu":1300}}"#,
                Some(true),
                Some("c"),
            ),
        ] {
            let status: Status = serde_json::from_str(text).unwrap();
            assert_eq!((status.state, status.own_token), (InstanceState::Closed, own_token), "{text}");
            assert_eq!(status.settings.map(|settings| settings.contract).as_deref(), contract, "{text}");
        }
    }
}
