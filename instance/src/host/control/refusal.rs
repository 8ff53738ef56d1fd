//! Why a request failed, worded for people.

use nebula_cert::visible;

/// The error of a refused request.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the request is no JSON object: {0}")]
    NotJson(String),
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("there is no command {0} in nebula {version}; a newer `nebula ctl` needs a newer daemon", version = env!("CARGO_PKG_VERSION"))]
    UnknownCommand(String),
    #[error("unknown log level {0}; there are trace, debug, info, warn and error")]
    UnknownLevel(String),
    #[error("{0} is no protocol: tcp, udp, icmp, or a number")]
    UnknownProtocol(String),
    #[error("{0} is no address, with a port or without")]
    NotAnAddress(String),
    #[error("flows cannot be filtered so: {0}")]
    BadFilter(String),
    #[error("source and destination are of two families")]
    TwoFamilies,
    #[error("this node has no overlay address of that family")]
    NoAddressOfFamily,
    #[error("there is no tunnel with {0}")]
    NoTunnel(String),
    #[error("this daemon has not met a host that is named {0}; name it by its overlay address")]
    UnknownPeer(String),
    #[error(
        "no host of the overlay with a tunnel has the address {0}; one behind a gateway has no identity of its own"
    )]
    Nobody(std::net::IpAddr),
    #[error("this socket answers whois only; the others need the control socket")]
    OnlyIdentities,
    #[error("this node has no certificate")]
    NoCertificate,
    #[error("the node is ending")]
    Ending,
    #[error("the answer cannot be written: {0}")]
    Unwritable(String),
    #[error("{0}")]
    Reload(String),
    #[error(
        "systemd does not supervise this daemon, and another supervisor would take the upgrade for the end of the \
         daemon: restart it with that supervisor, or add --unsupervised if there is none"
    )]
    Unsupervised,
    #[error(
        "daemon.user is set, so another program could not read the configuration and the key: use `systemctl restart`, \
         which keeps the device and the port"
    )]
    Unprivileged,
    #[error(transparent)]
    Upgrade(#[from] crate::host::upgrade::attempt::Failure),
}

impl Refusal {
    /// The text as it may be printed: one line, and for a reload one for each finding.
    pub(crate) fn visible(&self) -> String {
        match self {
            Self::Reload(findings) => {
                findings.lines().map(|finding| visible(finding).into_owned()).collect::<Vec<_>>().join("\n")
            }
            other => visible(&other.to_string()).into_owned(),
        }
    }
}
