//! The status that an instance reports on its socket.

mod parts;
mod seen_flows;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use parts::{
    Certificate, ClusterTable, DroppedPacket, FollowedSettings, LostPeer, PolicyRefusal, PolicyVerdicts, RefusedCaller,
    TableState, Trouble, Tunnel, warning_time,
};
pub use seen_flows::{FLOWS_PATH, SeenFlow, SeenFlows, seen_flows};

/// The status document, which the instance writes. A field that a document lacks, because an instance of another
/// release wrote it, reads as absent, empty or false.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Process id of the instance.
    pub pid: Option<i32>,
    /// Release of its program; `None`: it is an earlier one than 0.1.0.
    pub version: Option<String>,
    /// `namespace/name` of its pod.
    pub pod: String,
    /// UID of its pod.
    pub uid: Option<String>,
    /// Tun device in the pod.
    pub device: String,
    /// UDP port of the tunnel.
    pub port: Option<u16>,
    /// What the instance does for its pod.
    pub state: InstanceState,
    /// The pod's overlay addresses with their prefix lengths.
    pub overlay: Vec<String>,
    /// Groups of the certificate.
    pub groups: Vec<String>,
    /// The certificate in use.
    pub certificate: Option<Certificate>,
    /// Why the path is closed although there was a certificate.
    pub closed: Option<String>,
    /// Another instance is taking over: what this document says may no longer hold in a moment.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_handing_over: bool,
    /// Why there is no certificate, or no newer one.
    pub last_error: Option<String>,
    /// Whether that is what the CA says, and not that it was not reached.
    pub denied: bool,
    /// Whether the pod's own token obtains the certificate; `None`: the instance is of an earlier release.
    pub own_token: Option<bool>,
    /// One entry for each tunnel, up to a limit.
    pub tunnels: Vec<Tunnel>,
    /// Counters by name; those of drops are named `dropped_DIRECTION_REASON`.
    pub counters: BTreeMap<String, u64>,
    /// The pod's init container should have shown its token long ago.
    pub init_overdue: bool,
    /// The cluster table of a captured pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<ClusterTable>,
    /// What network policies said about the flows of a captured pod, by direction and policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policy_verdicts: Vec<PolicyVerdicts>,
    /// The settings that it follows; `None`: it is of a release that keeps those of its start.
    pub settings: Option<FollowedSettings>,
    /// What went wrong lately; `None` while there is no certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<Trouble>,
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

impl Status {
    /// Reads the status of the instance behind a socket.
    ///
    /// # Errors
    /// Returns the system's error; `InvalidData` if the answer is not a status document.
    pub fn ask(socket: &Path) -> io::Result<Self> {
        serde_json::from_slice(&document(socket)?).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// The first overlay address of the same family as `address`.
    pub fn counterpart(&self, address: IpAddr) -> Option<IpAddr> {
        self.addresses().find(|overlay| overlay.is_ipv4() == address.is_ipv4())
    }

    /// The overlay addresses.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
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

/// The body of an instance's answer over HTTP. `unsupported` is said of an instance that does not know the path.
pub(crate) fn body_of<'a>(answer: &'a [u8], unsupported: &str, invalid: impl Fn() -> io::Error) -> io::Result<&'a str> {
    let text = str::from_utf8(answer).map_err(|_| invalid())?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(&invalid)?;
    match head.split_ascii_whitespace().nth(1) {
        Some("200") => Ok(body),
        Some("404") => Err(io::Error::new(io::ErrorKind::Unsupported, unsupported)),
        _ => Err(invalid()),
    }
}

/// Parses ADDRESS/PREFIX.
pub fn parse_network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    Some((address.parse().ok()?, prefix.parse().ok()?))
}

pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const MAX_STATUS: u64 = 4 << 20;
