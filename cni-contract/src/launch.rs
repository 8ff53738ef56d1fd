//! The launch contract: what an instance must know to serve one pod. The plugin writes it to
//! `<state dir>/<network>/<containerID>-<ifname>.launch` (0600), and `nebula-cni-instance --launch FILE` reads it. It
//! holds no key and no token, only paths to them.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::format::{self, Unreadable};
use crate::hash::fnv1a;
use crate::netns::NetnsId;

/// The launch contract. Fields that hold their default are left out, so that an instance of an earlier release still
/// understands a contract that uses nothing new. It refuses a key that it does not know, which may be what keeps the
/// pod closed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchSpec {
    /// Version of the format, [`LaunchSpec::VERSION`].
    pub version: u32,
    /// The pod, and where its tunnel goes.
    #[serde(flatten)]
    pub target: Target,
    /// Whose token obtains the certificate.
    #[serde(default, skip_serializing_if = "is_default")]
    pub flow: Flow,
    /// Whether the tunnel starts with a provisional certificate until the pod's init container presents the pod's
    /// token; in [`Flow::Init`] only.
    #[serde(default, skip_serializing_if = "is_default")]
    pub provisional: bool,
    /// Whether readiness waits for the certificate; ignored in [`Flow::Init`].
    pub mode: Mode,
    /// Network namespace of the UDP socket.
    #[serde(default, skip_serializing_if = "is_default")]
    pub underlay: Underlay,
    /// What the pod may reach besides the overlay; `None` if the pod is not isolated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub isolate: Option<Isolate>,
    /// Which of the pod's traffic goes through the tunnel although its programs use the addresses of the primary
    /// network; `None` if there is no capture. See [`Capture`] for what the instance does about it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub capture: Option<Capture>,
    /// Whether the pod's address in Kubernetes is its overlay address; packets for it then also arrive on the pod's own
    /// interface.
    #[serde(default, skip_serializing_if = "is_default")]
    pub renumber: bool,
    /// Address of the node on its way to the pod. With `renumber`, the pod's answers to it come from the overlay
    /// address.
    #[serde(default, skip_serializing_if = "is_default")]
    pub node_address: Option<IpAddr>,
    /// Overlay prefixes that are routed to the device before there is a certificate, so that traffic for them never
    /// leaves in the clear.
    pub overlay: Vec<IpNet>,
    /// Timeout of a strict start, in seconds; after it the instance gives up and reports why.
    pub budget_seconds: u64,
    /// Range of UDP ports the instance may choose from, inclusive. In [`Underlay::Pod`] they are ports of the pod's own
    /// namespace.
    pub port_range: (u16, u16),
    /// Where certificates come from.
    pub ca: CaAccess,
    /// Configuration of the tunnel as JSON: the keys of Nebula's config.yml except `pki`.
    pub nebula: serde_json::Value,
    /// User and group, used by nobody else on the node, that the instance switches to after setup. `None`: it keeps the
    /// user that started it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub user: Option<u32>,
    /// Unix socket on which the instance answers each connection with one JSON status document. Its directory belongs
    /// to `user`.
    pub status_socket: PathBuf,
}

/// Where a pod's tunnel goes: the attachment, the namespace, the pod and the device. The plugin's record and the launch
/// contract hold it under the same keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// CNI network name.
    pub network: String,
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_NETNS: path of the pod's network namespace.
    pub netns: PathBuf,
    /// (st_dev, st_ino) of that namespace when the plugin opened it; the instance refuses any other namespace.
    pub netns_id: NetnsId,
    /// The pod as Kubernetes knows it.
    pub pod: Pod,
    /// The pod's primary address from prevResult.
    pub pod_address: IpAddr,
    /// The pod's address of the other family from prevResult, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_address: Option<IpAddr>,
    /// Name of the tun device in the pod.
    pub device: String,
}

impl Target {
    /// Where the instance begins to look for a free UDP port: see [`port_at`]. It is the same whenever an instance of
    /// this attachment starts. That of a pod with a UID follows from it alone, so that other nodes know where the pod
    /// probably is.
    #[must_use]
    pub fn port_number(&self) -> u32 {
        match self.pod.uid.as_str() {
            "" => number_of(&[&self.network, "/", &self.container_id, "/", &self.ifname]),
            uid => port_number(uid),
        }
    }
}

/// [`Target::port_number`] of the pod with this UID.
#[must_use]
pub fn port_number(uid: &str) -> u32 {
    number_of(&[uid])
}

fn number_of(parts: &[&str]) -> u32 {
    let hash = fnv1a(parts);
    (hash >> 32) as u32 ^ hash as u32
}

/// The port of `range`, given by its first and last, that an instance tries after `step` others are taken. `None` after
/// the whole range, for an empty one, and for one with port 0.
#[must_use]
pub fn port_at(number: u32, step: u32, (first, last): (u16, u16)) -> Option<u16> {
    let count = u32::from(last.checked_sub(first)?) + 1;
    if first == 0 || step >= count {
        return None;
    }
    u16::try_from((number % count + step) % count).ok().map(|offset| first + offset)
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID; empty if the runtime passed none.
    pub uid: String,
}

/// How a pod gets its certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Flow {
    /// With the node's token: before ADD returns if `mode` is strict, later if it is lazy.
    #[default]
    Node,
    /// With the pod's own token, presented by its init container. Ready then means "waiting for init", because the
    /// kubelet starts init containers only after ADD.
    Init,
}

/// The network namespace of the UDP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Underlay {
    /// The node's: works before the pod's own network does.
    #[default]
    Host,
    /// The pod's: the tunnel is subject to the primary plugin's policy and accounting.
    Pod,
}

/// What an isolated pod may still reach, and be reached from, besides the overlay.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Isolate {
    /// Prefixes that stay open in both directions.
    pub ranges: Vec<IpNet>,
    /// DNS servers (UDP and TCP port 53). Empty: any server.
    pub dns: Vec<IpAddr>,
    /// Addresses the kubelet's probes come from; by default the node's own address on the way to the pod.
    pub probes: Vec<IpAddr>,
}

/// Capture of a pod's traffic to other pods and to Services, whatever address its programs use.
///
/// The plugin makes the routing rule of the pod (`not fwmark MARK/MARK_MASK lookup ROUTE_TABLE`), the routes of that
/// table that do not need the device, the rule that marks what arrives on the pod's own interface, and the guard on the
/// node's side. The instance makes the device without an address and routes `ranges` and `services` to it in
/// [`ROUTE_TABLE`], with `sources` as their preferred source addresses. Packets that it passes through to the primary
/// network carry [`MARK`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capture {
    /// Addresses of pods.
    pub ranges: Vec<IpNet>,
    /// Cluster IPs of Services, and addresses of load balancers.
    #[serde(default, skip_serializing_if = "is_default")]
    pub services: Vec<IpNet>,
    /// First and last of the ports that Services have on all nodes. What is sent to such a port goes to the device
    /// whatever the address, by [`NODE_PORT_TABLE`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub node_ports: Option<(u16, u16)>,
    /// The pod's own addresses, at most one of each family.
    pub sources: Vec<IpAddr>,
    /// Flows to what is known not to be enrolled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub clear: Clear,
    /// Protocols in which the pod may have to answer clients that are known not to be enrolled, although it may open
    /// no flow to them: what it sends to them is passed through, and the rules on the node refuse what is no answer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub answers: Vec<u8>,
    /// Whether network policies are enforced. What the cluster table does not say is refused then.
    #[serde(default, skip_serializing_if = "is_default")]
    pub policy: bool,
    /// The cluster table, which the node agent writes and replaces by rename.
    pub table: PathBuf,
}

/// What becomes of a captured pod's flows to what is known not to be enrolled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Clear {
    /// They are passed through to the primary network.
    #[default]
    Allow,
    /// They are refused.
    Deny,
}

/// Mark of packets in a captured pod that stay on the primary network; one bit, under [`MARK_MASK`].
pub const MARK: u32 = 0x2000_0000;
/// Mask under which [`MARK`] is set and compared.
pub const MARK_MASK: u32 = 0x2000_0000;
/// Routing table of a captured pod, in its own network namespace.
pub const ROUTE_TABLE: u32 = 20_034;
/// The same for what is sent to ports of nodes.
pub const NODE_PORT_TABLE: u32 = 20_035;
/// Default path of the cluster table.
pub const CLUSTER_TABLE: &str = "/run/nebula-cni/cluster/table";

/// When an instance is ready, in [`Flow::Node`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Once it has its certificate and the data path is open.
    #[default]
    Strict,
    /// At once; the data path stays closed until the certificate arrives.
    Lazy,
}

/// Where a launch contract is whole while the file at `path` is overwritten.
#[must_use]
pub fn copy_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".copy");
    PathBuf::from(name)
}

/// Opens the launch contract of `path`: the copy if there is one, since the file may be torn then.
///
/// # Errors
/// Returns the file system's error.
pub fn open(path: &Path) -> io::Result<File> {
    match File::open(copy_of(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => File::open(path),
        opened => opened,
    }
}

/// Tells contracts apart: an instance reports the hash of the one that it follows.
#[must_use]
pub fn contract_hash(text: &[u8]) -> String {
    format!("{:016x}", fnv1a(&[&String::from_utf8_lossy(text)]))
}

/// How to reach the CA service and authenticate to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaAccess {
    /// `https://host:port`.
    pub url: String,
    /// PEM file with the TLS roots of the CA service.
    pub tls_ca_file: PathBuf,
    /// File with the node's token, which proves the node's identity. Its agent keeps a credential beside it,
    /// [`CaAccess::credential_beside`].
    pub token_file: PathBuf,
    /// Name that the TLS certificate of the service must be for. `None`: the host of `url`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub server_name: Option<String>,
}

impl CaAccess {
    /// The node credential, which is shown where the token is refused: it outlives the agent's pod, with which the
    /// token ends.
    #[must_use]
    pub fn credential_beside(token_file: &Path) -> PathBuf {
        token_file.with_file_name("node-credential")
    }
}

/// Whether the CA refuses the node's token itself, and not what was asked with it.
#[must_use]
pub fn is_refusal_of_token(code: &str) -> bool {
    ["token_rejected", "service_token_expired", "agent_gone"].contains(&code)
}

/// The URL of a request for `path` at the CA service `url`. With `server_name` that is its host: the TLS certificate is
/// checked against it, and the request goes to the host of `url` all the same. A malformed `url` is returned as it is,
/// because the HTTP client says what is wrong with it.
#[must_use]
pub fn request_url(url: &str, server_name: Option<&str>, path: &str) -> String {
    let known = format!("{}{path}", url.trim_end_matches('/'));
    let (Some(name), Some(rest)) = (server_name, known.strip_prefix("https://")) else { return known };
    let (authority, rest) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    // The colons inside the brackets of an IPv6 address do not separate a port.
    let port = authority.rfind(':').map(|at| &authority[at..]).filter(|port| !port.contains(']')).unwrap_or_default();
    let name = if name.contains(':') { format!("[{name}]") } else { name.to_owned() };
    format!("https://{name}{port}{rest}")
}

/// Parses `https://ADDRESS:PORT`; returns `None` if the URL contains a host name.
#[must_use]
pub fn ca_address(url: &str) -> Option<(IpAddr, u16)> {
    let authority = url.strip_prefix("https://")?.split('/').next()?;
    if let Ok(address) = authority.parse::<std::net::SocketAddr>() {
        return Some((address.ip(), address.port()));
    }
    let address = authority.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(authority);
    Some((address.parse().ok()?, 443))
}

/// Why an instance ended before it was ready, sent as one line of JSON in the STATUS of sd_notify; a successful start
/// is reported by READY instead. The other side may be of another release, so a line that does not parse is treated as
/// plain text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "start_error", rename_all = "snake_case")]
pub enum StartError {
    /// The CA service refused a certificate.
    Refused {
        /// Error code of the CA; `None` if the instance refused what the CA issued.
        #[serde(default, skip_serializing_if = "is_default")]
        code: Option<String>,
        /// Explanation of the refusal.
        message: String,
    },
    /// A file, the URL or the TLS certificate of the CA service is wrong, so that another attempt would fail as well.
    Misconfigured {
        /// What is wrong, and what to do about it.
        cause: String,
    },
    /// The CA service could not be reached in time.
    Unavailable {
        /// Why it could not be reached.
        cause: String,
    },
    /// Something else failed.
    Failed {
        /// What was attempted.
        what: String,
        /// Why it failed.
        cause: String,
    },
}

impl StartError {
    /// Encodes the error as one line for the STATUS. Long texts are truncated so that it fits into one sd_notify
    /// message.
    #[must_use]
    pub fn to_line(&self) -> String {
        let cut = |text: &String| text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TEXT).collect();
        let cut = match self {
            Self::Refused { code, message } => Self::Refused { code: code.as_ref().map(cut), message: cut(message) },
            Self::Misconfigured { cause } => Self::Misconfigured { cause: cut(cause) },
            Self::Unavailable { cause } => Self::Unavailable { cause: cut(cause) },
            Self::Failed { what, cause } => Self::Failed { what: cut(what), cause: cut(cause) },
        };
        serde_json::to_string(&cut).unwrap_or_default()
    }

    /// Parses such a line; returns `None` if it is plain text.
    #[must_use]
    pub fn from_line(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { code: Some(code), message } => write!(f, "{message} ({code})"),
            Self::Refused { code: None, message } => f.write_str(message),
            Self::Misconfigured { cause } | Self::Unavailable { cause } => f.write_str(cause),
            Self::Failed { what, cause } => write!(f, "{what}: {cause}"),
        }
    }
}

// Two texts of this many characters, at up to four bytes each, fit into the 4 KiB that receivers of sd_notify read.
const MAX_TEXT: usize = 450;

pub fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl LaunchSpec {
    /// Current version of the contract.
    pub const VERSION: u32 = 1;

    /// Reads the contract.
    ///
    /// # Errors
    /// Refuses one of a higher version, and one with a key that this release does not know.
    pub fn parse(text: &[u8]) -> Result<Self, Unreadable> {
        format::read(text, Self::VERSION)
    }

    /// Socket to which an instance that was asked to stop may send its last descriptor of the device (one datagram,
    /// SCM_RIGHTS). If nobody listens there, the instance closes the device itself.
    #[must_use]
    pub fn device_socket(&self) -> PathBuf {
        self.status_socket.with_extension("device")
    }

    /// Socket on which an instance listens for the one that takes over from it (seqpacket).
    #[must_use]
    pub fn successor_socket(&self) -> PathBuf {
        self.status_socket.with_extension("successor")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorded::hold;

    #[test]
    fn every_port_of_a_range_is_tried_once_and_begins_at_that_of_the_uid() {
        let range = (61_000, 61_009);
        let number = port_number("5f3c");
        let mut tried: Vec<u16> = (0..).map_while(|step| port_at(number, step, range)).collect();
        assert_eq!((tried[0], tried.len()), (61_000 + (number % 10) as u16, 10));
        tried.sort_unstable();
        assert_eq!(tried, (61_000..=61_009).collect::<Vec<u16>>());
        assert_eq!(port_at(number, 0, (65_535, 65_535)), Some(65_535));
        assert!(port_at(u32::MAX, 65_534, (1, 65_535)).is_some());
        assert_eq!([(0, 9), (9, 8)].map(|range| port_at(number, 0, range)), [None, None]);
        // The agents of all nodes compute it, also those of another release.
        assert_eq!(port_number("5f3c"), 0x3320d951);
    }

    const OF_THE_RELEASE_BEFORE: &str = r#"{"version":1,"network":"n","container_id":"c","ifname":"eth0",
        "netns":"/run/netns/x","netns_id":[4,4026532000],"pod":{"namespace":"a","name":"b","uid":"u"},
        "pod_address":"10.4.0.7","device":"nebula0","mode":"strict","overlay":["10.42.0.0/16"],"budget_seconds":18,
        "port_range":[61000,65535],"ca":{"url":"https://ca:8443","tls_ca_file":"/a","token_file":"/b"},
        "nebula":{"listen":{"batch":64}},"status_socket":"/run/nebula-cni/.x/pod.status"}"#;

    #[test]
    fn a_contract_of_the_release_before_is_read_and_written_with_the_same_keys_in_the_same_order() {
        let spec: LaunchSpec = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
        assert_eq!((spec.target.device.as_str(), spec.target.netns_id), ("nebula0", (4, 4_026_532_000)));
        let compact: String = OF_THE_RELEASE_BEFORE.split_whitespace().collect();
        assert_eq!(serde_json::to_string(&spec).unwrap(), compact);
    }

    #[test]
    fn the_contracts_of_each_release_are_read_and_keep_their_keys() {
        let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
        for file in ["launch-isolated.json", "launch-captured.json"] {
            hold::<LaunchSpec>(&documents, env!("CARGO_PKG_VERSION"), file).unwrap();
        }
    }

    #[test]
    fn a_newer_contract_is_refused_by_its_version_and_one_with_an_unknown_word_by_that() {
        let newer = OF_THE_RELEASE_BEFORE.replacen("\"version\":1", "\"version\":2,\"colour\":1", 1);
        assert_eq!(LaunchSpec::parse(newer.as_bytes()), Err(Unreadable::Newer { found: 2, known: 1 }));
        let word = OF_THE_RELEASE_BEFORE.replacen("\"strict\"", "\"patient\"", 1);
        let refused = LaunchSpec::parse(word.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains("of another release: unknown variant `patient`"), "{refused}");
        assert!(LaunchSpec::parse(OF_THE_RELEASE_BEFORE.as_bytes()).is_ok());
    }

    #[test]
    fn a_contract_with_an_unknown_or_a_missing_key_is_refused() {
        let unknown = OF_THE_RELEASE_BEFORE.replacen("\"version\"", "\"colour\":1,\"version\"", 1);
        assert!(serde_json::from_str::<LaunchSpec>(&unknown).unwrap_err().to_string().contains("unknown field"));
        let missing = OF_THE_RELEASE_BEFORE.replacen("\"ifname\":\"eth0\",", "", 1);
        assert!(serde_json::from_str::<LaunchSpec>(&missing).is_err());
    }

    #[test]
    fn capture_is_written_only_when_it_is_on_and_without_what_is_the_default() {
        let capture: Capture = serde_json::from_str(
            r#"{"ranges":["10.244.0.0/16"],"sources":["10.244.1.7"],"table":"/run/nebula-cni/cluster/table"}"#,
        )
        .unwrap();
        assert_eq!(capture.clear, Clear::Allow);
        let mut spec: LaunchSpec = serde_json::from_str(OF_THE_RELEASE_BEFORE).unwrap();
        assert_eq!(spec.capture, None);
        spec.capture = Some(capture);
        let text = serde_json::to_string(&spec).unwrap();
        assert!(text.contains(r#""sources":["10.244.1.7"],"table":"#), "{text}");
        assert_eq!(serde_json::from_str::<LaunchSpec>(&text).unwrap(), spec);
        let strict = text.replacen(r#""sources""#, r#""clear":"deny","colour":1,"sources""#, 1);
        assert!(serde_json::from_str::<LaunchSpec>(&strict).unwrap_err().to_string().contains("colour"));
    }

    #[test]
    fn a_start_error_survives_its_line_and_fits_into_a_message() {
        let long = "\u{1f980}\n\"".repeat(4000);
        for error in [
            StartError::Refused { code: Some("wrong_node".into()), message: "pod is on another node".into() },
            StartError::Refused { code: None, message: "no token".into() },
            StartError::Misconfigured { cause: "no such file".into() },
            StartError::Unavailable { cause: "connection refused".into() },
            StartError::Failed { what: "tun".into(), cause: "permission denied".into() },
        ] {
            assert_eq!(StartError::from_line(&error.to_line()), Some(error));
        }
        let line = StartError::Failed { what: long.clone(), cause: long }.to_line();
        assert!(line.len() < 4000 && !line.contains(char::is_control), "{}", line.len());
        assert!(StartError::from_line(&line).is_some());
    }

    #[test]
    fn a_line_of_another_release_is_no_start_error() {
        for line in ["", "running", "ca-denied: no such pod", "{}", "{\"start_error\":\"of_next_year\"}", "[1]"] {
            assert_eq!(StartError::from_line(line), None, "{line}");
        }
    }

    #[test]
    fn the_address_of_the_ca_is_read_from_its_url_unless_it_is_a_name() {
        for (url, expected) in [
            ("https://192.0.2.1:8443", Some(("192.0.2.1", 8443))),
            ("https://[fd00::1]:8443/", Some(("fd00::1", 8443))),
            ("https://[fd00::1]", Some(("fd00::1", 443))),
            ("https://192.0.2.1/x", Some(("192.0.2.1", 443))),
            ("https://ca.example:8443", None),
        ] {
            assert_eq!(ca_address(url), expected.map(|(address, port)| (address.parse().unwrap(), port)), "{url}");
        }
    }
}
