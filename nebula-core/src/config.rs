//! Everything a node must know before it starts: typed, and valid by construction where a type can express it. Most of
//! it can be replaced while running, see [`crate::Node::reconfigure`].

mod validation;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{CaPool, Certificate, Fingerprint, Identity, Version};

use crate::capture::Directory;
use crate::firewall::NetworkPolicy;
use crate::lighthouse::Rules;
pub use crate::lighthouse::{
    AllowList, BadPattern, CalculatedRemotes, Calculation, InterfaceRules, Lighthouse, LocalAllowList, NoDefault,
    OtherFamily, RemoteAllowList,
};
pub use crate::tunnel::cipher::Cipher;
use crate::{firewall, lighthouse};
pub use validation::{ConfigProblem, InvalidConfig};

/// Peers read only so many relays of a host; see [`Relay::relays`].
pub const MAX_RELAYS: usize = crate::wire::messages::MAX_RELAYS;

/// Maximum number of records of flows; see [`Config::flow_records`].
pub const MAX_FLOW_RECORDS: usize = 1 << 16;

/// Maximum number of tunnels that are kept; see [`Keep`].
pub const MAX_KEPT: usize = 64;

/// Whether traffic keys are agreed on by ML-KEM-768 (FIPS 203) beside X25519 or P-256, so that what is recorded today
/// stays closed when those are broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PostQuantum {
    /// Not offered: handshakes are those of Go Nebula.
    Off,
    /// With every peer that offers it, too. Nobody on the way can prevent that but by breaking the connection.
    #[default]
    Prefer,
    /// Handshakes with other peers are refused.
    Require,
}

/// Configuration of one node.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// Certificates and key of this node.
    pub identity: Identity,
    /// CAs to trust, and blocked certificates.
    pub trust: CaPool,
    /// AEAD of the data path; must be equal network-wide (it is not negotiated).
    pub cipher: Cipher,
    /// Whether handshakes agree on keys by ML-KEM, too.
    pub post_quantum: PostQuantum,
    /// Certificate version to initiate with; `None`: v1 if there is a v1 certificate, else v2.
    pub initiating_version: Option<Version>,
    /// Close tunnels whose peer certificate expired or lost its CA.
    pub disconnect_invalid: bool,
    /// Underlay endpoints known from configuration, by overlay address.
    pub static_hosts: BTreeMap<IpAddr, Vec<SocketAddr>>,
    /// Lighthouses (rendezvous).
    pub lighthouse: Lighthouse,
    /// Networks behind other nodes.
    pub subnets: Vec<SubnetRoute>,
    /// Relays.
    pub relay: Relay,
    /// Packet filter.
    pub firewall: firewall::Policy,
    /// Hole punching.
    pub punchy: Punchy,
    /// Handshake retries.
    pub handshakes: Handshakes,
    /// Liveness of tunnels.
    pub timers: Timers,
    /// Underlay networks preferred over others.
    pub preferred_ranges: Vec<IpNet>,
    /// Answer datagrams for unknown tunnels with a recv_error.
    pub send_recv_error: RecvErrorPolicy,
    /// Act on recv_errors from peers.
    pub accept_recv_error: RecvErrorPolicy,
    /// UDP port this node listens on, advertised to lighthouses with each local address.
    pub listen_port: u16,
    /// Drop packets to the IPv4 broadcast address of an own network.
    pub drop_local_broadcast: bool,
    /// Drop multicast packets.
    pub drop_multicast: bool,
    /// MTU of the overlay device in bytes: how large the packets are that path MTU discovery tries to get to each peer.
    /// A peer that runs this program is tried with larger ones, too, which hold several TCP segments. `None`: no
    /// discovery, and every packet is sent whatever the path carries.
    pub path_mtu: Option<u16>,
    /// Measure the paths to a peer that has several, by probes in its tunnel, and use the best. Direct paths are
    /// measured only with peers that do so, too.
    pub measure_paths: bool,
    /// Peers whose tunnels are kept although nobody uses them.
    pub keep: Keep,
    /// What is known about the cluster that this node is a pod of. Its packets are addressed to pods and Services, and
    /// each new flow is looked up here; see [`crate::capture`]. `None`: they are addressed to overlay nodes.
    pub capture: Option<Arc<dyn Directory>>,
    /// Policies of the network that this node is part of: a new flow must be allowed by them, too.
    pub network_policy: Option<Arc<dyn NetworkPolicy>>,
    /// Number of records of flows that are kept for [`crate::Node::flow_records`]; 0: none, and flows are not counted.
    /// More than [`MAX_FLOW_RECORDS`] are not kept.
    pub flow_records: usize,
}

impl Config {
    /// Defaults of Go Nebula 1.11.0, where it has the setting, and an empty firewall (which denies everything).
    #[must_use]
    pub fn new(identity: Identity, trust: CaPool) -> Self {
        Self {
            identity,
            trust,
            cipher: Cipher::Aes256Gcm,
            initiating_version: None,
            disconnect_invalid: true,
            static_hosts: BTreeMap::new(),
            lighthouse: Lighthouse::default(),
            subnets: Vec::new(),
            relay: Relay::default(),
            firewall: firewall::Policy::default(),
            punchy: Punchy::default(),
            handshakes: Handshakes::default(),
            timers: Timers::default(),
            preferred_ranges: Vec::new(),
            send_recv_error: RecvErrorPolicy::Always,
            accept_recv_error: RecvErrorPolicy::Always,
            listen_port: 0,
            drop_local_broadcast: false,
            drop_multicast: false,
            path_mtu: None,
            post_quantum: PostQuantum::default(),
            measure_paths: false,
            keep: Keep::default(),
            capture: None,
            network_policy: None,
            flow_records: 0,
        }
    }
}

/// Lookups for the parts of a node.
impl Config {
    pub(crate) fn is_own_address(&self, address: IpAddr) -> bool {
        self.identity.networks().iter().any(|network| network.addr() == address)
    }

    /// This node's overlay address for messages of this version.
    pub(crate) fn own_address(&self, form: Version) -> Option<IpAddr> {
        let mut own = self.identity.networks().iter().map(IpNet::addr);
        own.find(|address| form == Version::V2 || address.is_ipv4())
    }

    /// Version of the own certificate to initiate with.
    pub(crate) fn default_version(&self) -> Version {
        let has = |version: &Version| self.identity.certificate(*version).is_some();
        let first_held = if has(&Version::V1) { Version::V1 } else { Version::V2 };
        self.initiating_version.filter(has).unwrap_or(first_held)
    }

    /// Version of the own certificate to use with `peer`: a peer with an IPv6 address needs version 2.
    pub(crate) fn version_towards(&self, peer: IpAddr) -> Version {
        let has_v2 = self.identity.certificate(Version::V2).is_some();
        if peer.is_ipv6() && has_v2 { Version::V2 } else { self.default_version() }
    }

    /// Fingerprint of the own certificate of this version, or of the primary one if there is none.
    pub(crate) fn fingerprint(&self, version: Version) -> Fingerprint {
        let identity = &self.identity;
        identity.certificate(version).unwrap_or_else(|| identity.primary()).fingerprint()
    }

    /// Endpoints of `peer` according to this node's own configuration.
    pub(crate) fn fixed_endpoints_of(&self, peer: IpAddr) -> Cow<'_, [SocketAddr]> {
        let fixed = self.static_hosts.get(&peer).map(|fixed| Cow::Borrowed(fixed.as_slice()));
        fixed.unwrap_or_else(|| self.lighthouse.calculated_remotes.endpoints(peer).into())
    }

    /// Where `peer` may be, best first.
    pub(crate) fn endpoints_of(&self, peer: IpAddr, known: &lighthouse::Client) -> Vec<SocketAddr> {
        if self.keeps_to_relays(&[peer]) {
            return Vec::new();
        }
        known.endpoints(peer, &self.fixed_endpoints_of(peer), &self.endpoint_rules(&[peer]))
    }

    /// Every endpoint that anybody named for `peer`, whether or not it may be used; in no particular order.
    pub(crate) fn named_endpoints_of(&self, peer: IpAddr, known: &lighthouse::Client) -> Vec<SocketAddr> {
        known.named(peer, &self.fixed_endpoints_of(peer))
    }

    /// Whether the remote allow list lets a peer, by each of its overlay addresses, be at this endpoint.
    pub(crate) fn may_be_at(&self, peer: &[IpAddr], endpoint: SocketAddr) -> bool {
        !self.keeps_to_relays(peer) && self.lighthouse.remote_allow.allows(peer, endpoint.ip())
    }

    /// Whether [`Relay::force`] keeps this node from talking to a peer directly: it is no lighthouse, and no relay
    /// that this node uses.
    pub(crate) fn keeps_to_relays(&self, peer: &[IpAddr]) -> bool {
        let Relay { force, am_relay, relays, used, .. } = &self.relay;
        let is_needed = |at: &IpAddr| self.is_lighthouse(*at) || relays.contains(at) || used.contains(at);
        *force && !am_relay && !self.lighthouse.am_lighthouse && !peer.iter().any(is_needed)
    }

    /// The rules for endpoints of the peer with these overlay addresses.
    pub(crate) fn endpoint_rules<'a>(&'a self, peer: &'a [IpAddr]) -> Rules<'a> {
        Rules {
            overlay: self.identity.networks(),
            preferred: &self.preferred_ranges,
            allowed: &self.lighthouse.remote_allow,
            peer,
        }
    }

    /// Whether this endpoint is in a preferred range.
    pub(crate) fn is_preferred(&self, endpoint: SocketAddr) -> bool {
        self.preferred_ranges.iter().any(|range| range.contains(&endpoint.ip()))
    }

    pub(crate) fn is_lighthouse(&self, address: IpAddr) -> bool {
        self.lighthouse.hosts.contains(&address)
    }

    /// Whether there are lighthouses to query: lighthouses do not query each other.
    pub(crate) fn has_lighthouses(&self) -> bool {
        !self.lighthouse.am_lighthouse && !self.lighthouse.hosts.is_empty()
    }
}

/// Changes while a node runs.
impl Config {
    /// `wanted`, but with this configuration's value for every setting that only a restart can change.
    #[must_use]
    pub fn reloaded(&self, wanted: Self) -> Self {
        Self {
            cipher: self.cipher,
            handshakes: self.handshakes.clone(),
            lighthouse: Lighthouse { am_lighthouse: self.lighthouse.am_lighthouse, ..wanted.lighthouse },
            timers: Timers {
                connection_alive_interval: self.timers.connection_alive_interval,
                pending_deletion_interval: self.timers.pending_deletion_interval,
                ..wanted.timers
            },
            relay: Relay { used: self.relay.used.clone(), ..wanted.relay },
            listen_port: self.listen_port,
            drop_local_broadcast: self.drop_local_broadcast,
            drop_multicast: self.drop_multicast,
            ..wanted
        }
    }

    /// The parts in which `other` differs from this configuration.
    pub(crate) fn differing_parts(&self, other: &Self) -> Vec<Part> {
        // Every field is named, so that a new one is not forgotten here.
        let Self {
            identity,
            trust,
            cipher: _,
            initiating_version,
            disconnect_invalid,
            static_hosts,
            lighthouse,
            subnets,
            relay,
            firewall,
            punchy,
            handshakes: _,
            timers,
            preferred_ranges,
            send_recv_error,
            accept_recv_error,
            listen_port: _,
            drop_local_broadcast: _,
            drop_multicast: _,
            path_mtu,
            post_quantum,
            measure_paths,
            keep,
            capture,
            network_policy,
            flow_records,
        } = other;
        let parts = [
            (Part::Trust, self.trust != *trust),
            (Part::Identity, fingerprints(&self.identity) != fingerprints(identity)),
            (Part::InitiatingVersion, self.initiating_version != *initiating_version),
            (Part::Firewall, self.firewall != *firewall),
            (Part::RecvError, (self.send_recv_error, self.accept_recv_error) != (*send_recv_error, *accept_recv_error)),
            (Part::Punchy, self.punchy != *punchy),
            (Part::Timers, self.timers != *timers),
            (Part::Relay, self.relay != *relay),
            (Part::PreferredRanges, self.preferred_ranges != *preferred_ranges),
            (Part::DisconnectInvalid, self.disconnect_invalid != *disconnect_invalid),
            (Part::Subnets, self.subnets != *subnets),
            (Part::StaticHosts, self.static_hosts != *static_hosts),
            (Part::Lighthouse, self.lighthouse != *lighthouse),
            (Part::PathMtu, self.path_mtu != *path_mtu),
            (Part::PostQuantum, self.post_quantum != *post_quantum),
            (Part::MeasurePaths, self.measure_paths != *measure_paths),
            (Part::Keep, self.keep != *keep),
            (Part::FlowRecords, self.flow_records != *flow_records),
            // Before the directory, which releases packets that wait for it.
            (
                Part::NetworkPolicy,
                self.network_policy.as_ref().map(address_of) != network_policy.as_ref().map(address_of),
            ),
            (Part::Capture, self.capture.as_ref().map(address_of) != capture.as_ref().map(address_of)),
        ];
        parts.into_iter().filter_map(|(part, differs)| differs.then_some(part)).collect()
    }
}

/// A part of [`Config`] that can change while a node runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// [`Config::trust`]: live tunnels are checked again.
    Trust,
    /// [`Config::identity`]: used for new handshakes at once; live tunnels re-handshake.
    Identity,
    /// [`Config::initiating_version`], for the next handshakes.
    InitiatingVersion,
    /// [`Config::firewall`]: known flows are checked again.
    Firewall,
    /// [`Config::send_recv_error`] and [`Config::accept_recv_error`].
    RecvError,
    /// [`Config::punchy`], for punches that are not scheduled yet.
    Punchy,
    /// [`Config::timers`], each from its next use.
    Timers,
    /// [`Config::relay`]: reported to the lighthouses at once.
    Relay,
    /// [`Config::preferred_ranges`], for the next choice of an endpoint.
    PreferredRanges,
    /// [`Config::disconnect_invalid`]: live tunnels are checked.
    DisconnectInvalid,
    /// [`Config::subnets`], for the next packets.
    Subnets,
    /// [`Config::static_hosts`]: handshakes that wait for an endpoint are retried.
    StaticHosts,
    /// [`Config::lighthouse`]: this node reports to the lighthouses at once.
    Lighthouse,
    /// [`Config::path_mtu`]: every path is examined again.
    PathMtu,
    /// [`Config::post_quantum`], for the next handshakes; tunnels without ML-KEM are closed where it is required.
    PostQuantum,
    /// [`Config::measure_paths`]: everything that was measured is forgotten.
    MeasurePaths,
    /// [`Config::keep`]: missing tunnels are made at once; those that are no longer kept stay until they end.
    Keep,
    /// [`Config::flow_records`], for the next flows; the oldest records go if there are too many.
    FlowRecords,
    /// [`Config::capture`]: known flows are checked again, packets that wait for it are sent, and tunnels to pods whose
    /// address another pod has by now are closed.
    Capture,
    /// [`Config::network_policy`]: known flows are checked again if the version is another one.
    NetworkPolicy,
}

/// A directory or a policy never changes, so another one is at another place.
fn address_of<T: ?Sized>(value: &Arc<T>) -> *const () {
    Arc::as_ptr(value).cast()
}

/// The key belongs to its certificates, so their fingerprints tell identities apart.
fn fingerprints(identity: &Identity) -> [Option<Fingerprint>; 2] {
    [Version::V1, Version::V2].map(|version| identity.certificate(version).map(Certificate::fingerprint))
}

/// A network that is reached through other nodes, whose certificates must contain it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubnetRoute {
    /// Destinations; the longest prefix that contains an address wins. Own networks take precedence, unless this is
    /// [`SubnetRoute::inside`] one.
    pub network: IpNet,
    /// Nodes that accept packets for it. Each flow stays on one of them while that one answers.
    pub gateways: Vec<Gateway>,
    /// It is a part of an own network whose addresses belong to hosts without Nebula behind these nodes.
    pub inside: bool,
}

impl SubnetRoute {
    /// A network behind these nodes.
    #[must_use]
    pub fn new(network: IpNet, gateways: Vec<Gateway>) -> Self {
        Self { network, gateways, inside: false }
    }

    /// The same route for a part of an own network: nobody there has a tunnel of its own but the gateways.
    #[must_use]
    pub fn inside(self) -> Self {
        Self { inside: true, ..self }
    }
}

/// One gateway of a [`SubnetRoute`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gateway {
    /// Its overlay address.
    pub address: IpAddr,
    /// Its share of the flows, relative to the weights of the others of its priority.
    pub weight: NonZeroU32,
    /// The gateways of the lowest number of which one answers share all flows.
    pub priority: u32,
}

impl Gateway {
    /// A gateway of weight 1 and priority 0.
    #[must_use]
    pub fn new(address: IpAddr) -> Self {
        Self { address, weight: NonZeroU32::MIN, priority: 0 }
    }

    /// The same gateway with another weight.
    #[must_use]
    pub fn weighing(self, weight: NonZeroU32) -> Self {
        Self { weight, ..self }
    }

    /// The same gateway with another priority.
    #[must_use]
    pub fn with_priority(self, priority: u32) -> Self {
        Self { priority, ..self }
    }
}

/// Peers whose tunnels are kept, so that the first packet to them waits for no handshake.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Keep {
    /// Overlay addresses. No more than [`MAX_KEPT`] tunnels are kept, these first.
    pub peers: Vec<IpAddr>,
    /// Groups: tunnels to hosts with one of them in their certificate are kept once they were made.
    pub groups: Vec<String>,
}

impl Keep {
    /// Whether no tunnel is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.peers.is_empty() && self.groups.is_empty()
    }
}

/// Relay settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Relay {
    /// This node forwards datagrams between others. It uses no relays itself.
    pub am_relay: bool,
    /// Try the relays of peers as well as their endpoints.
    pub use_relays: bool,
    /// Overlay addresses of the relays through which this node can be reached; reported to lighthouses.
    pub relays: Vec<IpAddr>,
    /// A lighthouse offers the hosts with one of these groups as relays. Another node uses two of the relays that its
    /// lighthouses offer, if they have one of these groups in their certificates. Empty: neither.
    pub groups: Vec<String>,
    /// Talk to peers only through relays, for tests. Lighthouses and relays are reached directly.
    pub force: bool,
    /// Under `force`: relays of peers that this node uses. The node adds them.
    pub(crate) used: BTreeSet<IpAddr>,
}

impl Relay {
    /// Under [`Relay::force`], this relay is reached directly from now on.
    pub(crate) fn note_used(&mut self, relay: IpAddr) {
        if self.force && self.used.len() < MAX_USED {
            self.used.insert(relay);
        }
    }
}

/// More relays than a test needs.
const MAX_USED: usize = 256;

impl Default for Relay {
    fn default() -> Self {
        Self {
            am_relay: false,
            use_relays: true,
            relays: Vec::new(),
            groups: Vec::new(),
            force: false,
            used: BTreeSet::new(),
        }
    }
}

/// Hole punching settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Punchy {
    /// Keep NAT mappings of idle tunnels open.
    pub punch: bool,
    /// Keep NAT mappings towards every known endpoint of the peer open, and not only towards that of the tunnel.
    pub target_all_remotes: bool,
    /// Also start a handshake towards a peer that asked a lighthouse for this node.
    pub respond: bool,
    /// Delay before punching.
    pub delay: Duration,
    /// Delay before responding.
    pub respond_delay: Duration,
}

impl Default for Punchy {
    fn default() -> Self {
        Self {
            punch: false,
            target_all_remotes: false,
            respond: false,
            delay: Duration::from_secs(1),
            respond_delay: Duration::from_secs(5),
        }
    }
}

/// Handshake settings.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Handshakes {
    /// Backoff unit: after attempt n, wait n times this.
    pub try_interval: Duration,
    /// Attempts before giving up. A peer that was restarted, and for which packets wait, is tried for half a minute.
    pub retries: u32,
    /// Maximum number of incoming handshakes answered per second; `None` for no limit. Beyond it, handshakes are
    /// dropped, those of the busiest sources first; their retries get through later. Go Nebula has no such limit.
    pub max_new_per_second: Option<NonZeroU32>,
    /// Maximum number of this node's own handshakes in flight. Beyond it, those without a known endpoint are evicted,
    /// the oldest first.
    pub max_pending: usize,
    /// Maximum number of bytes in packets that wait for these handshakes, over all peers. Beyond it, the oldest packets
    /// of the peer that holds most are evicted.
    pub max_waiting_bytes: usize,
}

impl Default for Handshakes {
    fn default() -> Self {
        Self {
            try_interval: Duration::from_millis(100),
            retries: 10,
            // This costs about half a core. A fleet that reconnects all at once is served after a few retries.
            max_new_per_second: NonZeroU32::new(4000),
            // Less than a kilobyte each, or ten kilobytes once the peer has an endpoint.
            max_pending: 4096,
            // Packets may be 64 KiB super-packets, so limiting their number would not limit memory.
            max_waiting_bytes: 8 << 20,
        }
    }
}

/// Liveness settings, and when to look for a better path for a live tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timers {
    /// Time between two checks of a tunnel.
    pub connection_alive_interval: Duration,
    /// Time a silent peer has to answer a test packet.
    pub pending_deletion_interval: Duration,
    /// Close tunnels that carried nothing for this long; `None`: keep them.
    pub inactivity_timeout: Option<Duration>,
    /// Number of datagrams to a peer after which better endpoints are tried; `None`: never.
    pub try_promote: Option<NonZeroU64>,
    /// Number of datagrams to a peer after which the lighthouses are queried again; `None`: never.
    pub requery_every: Option<NonZeroU64>,
    /// Minimum time between two such queries about one peer.
    pub requery_wait: Duration,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            connection_alive_interval: Duration::from_secs(5),
            pending_deletion_interval: Duration::from_secs(10),
            inactivity_timeout: None,
            try_promote: NonZeroU64::new(1000),
            requery_every: NonZeroU64::new(5000),
            requery_wait: Duration::from_secs(60),
        }
    }
}

/// Peers to exchange recv_errors with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecvErrorPolicy {
    /// Everybody.
    #[default]
    Always,
    /// Nobody.
    Never,
    /// Private underlay addresses only.
    Private,
}

impl RecvErrorPolicy {
    /// Whether recv_errors are exchanged with this underlay address.
    pub(crate) fn covers(self, address: IpAddr) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Private => match address {
                IpAddr::V4(v4) => v4.is_private(),
                IpAddr::V6(v6) => v6.is_unique_local(),
            },
        }
    }
}
