//! The properties of a peer that rules match.

use ipnet::IpNet;
use nebula_cert::Fingerprint;

use crate::tunnel::{PeerIdentity, Tunnel};

/// What the rules ask of a peer's certificate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer<'a> {
    pub(super) name: &'a str,
    pub(super) groups: &'a [String],
    pub(super) networks: &'a [IpNet],
    pub(super) unsafe_networks: &'a [IpNet],
    pub(super) issuer: Fingerprint,
    pub(super) issuer_name: &'a str,
    /// All of this in a few bytes.
    pub(super) identity: PeerIdentity,
    /// The subnet route in question, if the peer is one of several gateways of it.
    pub(super) route: Option<IpNet>,
}

impl<'a> Peer<'a> {
    /// The peer of a tunnel, as one of the gateways of `route`; `None`: as itself.
    pub(crate) fn new(tunnel: &'a Tunnel, route: Option<IpNet>) -> Self {
        let certificate = &tunnel.peer;
        Self {
            name: certificate.name(),
            groups: certificate.groups(),
            networks: certificate.networks(),
            unsafe_networks: certificate.unsafe_networks(),
            issuer: certificate.issuer_fingerprint(),
            issuer_name: certificate.issuer_name(),
            identity: tunnel.identity,
            route,
        }
    }
}
