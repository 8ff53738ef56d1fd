//! All settings, typed and checked before anything touches the system.

use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use nebula_cert::{CaPool, Identity, UnixTime, Version};
use nebula_core::config::{
    CalculatedRemotes, Cipher, Handshakes, Keep, Lighthouse, LocalAllowList, MAX_KEPT, MAX_RELAYS, Punchy, Relay,
    RemoteAllowList, Timers,
};
use nebula_core::{Config, PostQuantum, firewall::Policy};

use super::section::Section;
use super::{
    Dns, HostTarget, Listen, Logging, Operation, Pki, Refusals, Refused, Remark, Resolver, StaticHosts, Stats,
    TunSettings, Value, discovery::Discovery, firewall, keys, pki,
};
use crate::go::netip;

/// A complete configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Credentials; `None` if they come from a CA service.
    pub pki: Option<Pki>,
    /// AEAD.
    pub cipher: Cipher,
    /// Certificate version to start handshakes with.
    pub initiating_version: Option<Version>,
    /// Whether keys of tunnels come from ML-KEM, too.
    pub post_quantum: PostQuantum,
    /// Whether to close tunnels whose peer's certificate became invalid.
    pub disconnect_invalid: bool,
    /// Endpoints known from configuration.
    pub static_hosts: StaticHosts,
    /// Whether this node answers queries about other nodes.
    pub am_lighthouse: bool,
    /// Overlay addresses of the lighthouses.
    pub lighthouses: Vec<IpAddr>,
    /// Interval between updates to the lighthouses; `None`: only on events.
    pub lighthouse_interval: Option<Duration>,
    /// Extra endpoints to advertise.
    pub advertise: Vec<HostTarget>,
    /// Rules that guess endpoints of peers from their overlay addresses.
    pub calculated_remotes: CalculatedRemotes,
    /// Underlay addresses that peers may have.
    pub remote_allow: RemoteAllowList,
    /// Addresses of this host that may be advertised.
    pub local_allow: LocalAllowList,
    /// DNS server of a lighthouse.
    pub dns: Option<Dns>,
    /// Overlay names for the programs of this host.
    pub resolver: Option<Resolver>,
    /// Relays.
    pub relay: Relay,
    /// Firewall rules.
    pub firewall: Policy,
    /// Hole punching.
    pub punchy: Punchy,
    /// Handshake retries.
    pub handshakes: Handshakes,
    /// Liveness checks of tunnels.
    pub timers: Timers,
    /// Peers whose tunnels are kept.
    pub keep: Keep,
    /// Number of records of flows that are kept; 0: none.
    pub flow_records: usize,
    /// Whether paths to peers are measured.
    pub measures_paths: bool,
    /// Underlay networks preferred over others.
    pub preferred_ranges: Vec<ipnet::IpNet>,
    /// Underlay socket.
    pub listen: Listen,
    /// Number of pairs of tun queue and socket.
    pub routines: usize,
    /// Overlay device.
    pub tun: TunSettings,
    /// Metrics.
    pub stats: Option<Stats>,
    /// Logging.
    pub logging: Logging,
    /// SSH debug console.
    #[cfg(feature = "ssh")]
    pub sshd: Option<super::Sshd>,
    /// How the program runs.
    pub operation: Operation,
    /// To be logged; none of them stops the start.
    pub remarks: Vec<Remark>,
}

impl Settings {
    /// Reads everything, including credentials. `now` decides which certificates have expired.
    ///
    /// # Errors
    /// Returns everything that would make the node unusable or unsafe.
    pub fn read(tree: &Value, now: UnixTime) -> Result<Self, Refusals> {
        let section = Section::new(tree);
        let pki = Pki::read(&section, now).map(Some);
        let settings = Self::with_console(Self::read_parts(tree, &section, pki), &section);
        Self::finish(settings, section)
    }

    /// Reads everything except `pki`, which must not be set but for `pki.post_quantum`: the credentials come from
    /// elsewhere.
    ///
    /// # Errors
    /// As [`Settings::read`].
    pub fn read_without_pki(tree: &Value) -> Result<Self, Refusals> {
        let section = Section::new(tree);
        let settings = Self::with_console(Self::read_without_credentials(tree, &section), &section);
        Self::finish(settings, section)
    }

    fn read_without_credentials(tree: &Value, section: &Section<'_>) -> Option<Self> {
        let pki = match tree.at("pki") {
            None => Ok(None),
            Some(Value::Map(pki)) if pki.keys().all(|key| key == "post_quantum") => Ok(None),
            Some(_) => {
                let cause = "pki cannot be set here except for pki.post_quantum: the CA service issues it";
                Err(Refused::new("Unsupported configuration", cause))
            }
        };
        let pki = section.keep("pki", pki);
        Self::read_parts(tree, section, pki)
    }

    /// As [`Settings::read_without_pki`], for the tunnel of one pod. A node has many of them, so limits are lower
    /// unless the configuration sets them, and there is no SSH console.
    ///
    /// # Errors
    /// As [`Settings::read`].
    pub fn read_for_pod(tree: &Value) -> Result<Self, Refusals> {
        let section = Section::new(tree);
        let settings = Self::read_without_credentials(tree, &section);
        keys::check_without_console(&section, "in a pod, whose instance has no SSH console");
        let mut settings = Self::finish(settings, section)?;
        // The CA announces lighthouses to pods.
        settings.remarks.retain(|remark| remark.key != "lighthouse.hosts" || settings.am_lighthouse);
        for (key, limit, of_a_pod) in [
            (MAX_PENDING, &mut settings.handshakes.max_pending, POD_MAX_PENDING),
            (MAX_WAITING, &mut settings.handshakes.max_waiting_bytes, POD_MAX_WAITING_BYTES),
            (firewall::FLOW_LIMIT, &mut settings.firewall.max_flows, POD_MAX_FLOWS),
        ] {
            if tree.at(key).is_none() {
                *limit = of_a_pod;
            }
        }
        if tree.at(MAX_NEW_PER_SECOND).is_none() {
            settings.handshakes.max_new_per_second = POD_MAX_NEW_PER_SECOND;
        }
        Ok(settings)
    }

    /// Reads all parts, so that an error in one does not hide errors in the next.
    fn read_parts(tree: &Value, section: &Section<'_>, pki: Option<Option<Pki>>) -> Option<Self> {
        keys::check(section, tree);
        let own = pki.as_ref().and_then(Option::as_ref).map(|pki| &pki.identity);
        let networks = own.map_or(&[][..], Identity::networks);
        let initiating_version = section.keep("pki.initiating_version", pki::initiating_version(section, own));
        let post_quantum = section.keep("pki.post_quantum", pki::post_quantum(section));
        let cipher = section.keep("cipher", cipher(section));
        let firewall = section.keep("firewall", firewall::read(section));
        let discovery = Discovery::read(section, networks);
        let resolver = discovery.as_ref().and_then(|discovery| {
            let own: Vec<_> = networks.iter().map(ipnet::IpNet::addr).collect();
            section.keep("resolver", Resolver::read(section, &own, &discovery.lighthouses))
        });
        let handshakes = section.keep("handshakes.try_interval", handshakes(section));
        let stats = section.keep("stats", Stats::read(section));
        let logging = section.keep("logging", Logging::read(section));
        let operation = section.keep("daemon", Operation::read(section));
        let listen = section.keep_at_start("listen", Listen::read(section));
        let mtu = section.keep("tun.mtu", super::tun::check_mtu(section));
        let tun = section.keep_at_start("tun", TunSettings::read(section, networks));
        let parts = (
            pki,
            initiating_version,
            post_quantum,
            cipher,
            firewall,
            discovery,
            resolver,
            handshakes,
            stats,
            logging,
            operation,
            listen,
            tun,
            mtu,
        );
        let (
            Some(pki),
            Some(initiating_version),
            Some(post_quantum),
            Some(cipher),
            Some(firewall),
            Some(discovery),
            Some(resolver),
            Some(handshakes),
            Some(stats),
            Some(logging),
            Some(operation),
            Some(listen),
            Some(tun),
            Some(()),
        ) = parts
        else {
            return None;
        };
        Some(Self {
            pki,
            cipher,
            initiating_version,
            post_quantum,
            disconnect_invalid: section.boolean("pki.disconnect_invalid", true),
            static_hosts: discovery.static_hosts,
            am_lighthouse: discovery.am_lighthouse,
            lighthouses: discovery.lighthouses,
            lighthouse_interval: discovery.interval,
            advertise: discovery.advertise,
            calculated_remotes: discovery.calculated_remotes,
            remote_allow: discovery.remote_allow,
            local_allow: discovery.local_allow,
            dns: discovery.dns,
            resolver,
            relay: relay(section),
            firewall,
            punchy: punchy(section),
            handshakes,
            timers: timers(section),
            keep: keep(section),
            flow_records: flow_records(section),
            measures_paths: section.boolean("tunnels.measure_paths", true),
            preferred_ranges: preferred_ranges(section),
            listen,
            routines: routines(section),
            tun,
            stats,
            logging,
            #[cfg(feature = "ssh")]
            sshd: None,
            operation,
            remarks: Vec::new(),
        })
    }

    // Only host daemons have the console, so only they link the parsers of its keys.
    #[cfg(feature = "ssh")]
    fn with_console(settings: Option<Self>, section: &Section<'_>) -> Option<Self> {
        settings.map(|settings| Self { sshd: super::Sshd::read(section), ..settings })
    }

    #[cfg(not(feature = "ssh"))]
    fn with_console(settings: Option<Self>, section: &Section<'_>) -> Option<Self> {
        let why = "in this build, which has no SSH console (feature ssh); nebula ctl answers the same questions";
        keys::check_without_console(section, why);
        settings
    }

    fn finish(settings: Option<Self>, section: Section<'_>) -> Result<Self, Refusals> {
        match settings {
            None => Err(section.into_refusals()),
            Some(settings) => Ok(Self { remarks: section.into_remarks(), ..settings }),
        }
    }

    /// The core's configuration, from credentials and what was found out at start-up.
    #[must_use]
    pub fn to_config(&self, identity: Identity, trust: CaPool, listen_port: u16, advertise: Vec<SocketAddr>) -> Config {
        let mut config = Config::new(identity, trust);
        config.static_hosts = self.static_hosts.endpoints(&Default::default());
        config.lighthouse.advertise = advertise;
        config.listen_port = listen_port;
        config.subnets = self.tun.routes.subnet_routes();
        self.apply(&mut config);
        config
    }

    /// Makes a configuration what these settings say, and leaves alone what they do not decide by themselves: the
    /// credentials; what is looked up or chosen while the node runs (static hosts, addresses to advertise, subnets, the
    /// port); and what no settings have, as the directory and the policies of a cluster.
    pub fn apply(&self, config: &mut Config) {
        config.cipher = self.cipher;
        config.initiating_version = self.initiating_version;
        config.post_quantum = self.post_quantum;
        config.disconnect_invalid = self.disconnect_invalid;
        let advertise = std::mem::take(&mut config.lighthouse.advertise);
        config.lighthouse = self.lighthouse(advertise);
        config.relay = self.relay.clone();
        config.firewall = self.firewall.clone();
        config.punchy = self.punchy.clone();
        config.handshakes = self.handshakes.clone();
        config.timers = self.timers.clone();
        config.keep = self.keep.clone();
        config.flow_records = self.flow_records;
        config.measure_paths = self.measures_paths;
        config.preferred_ranges = self.preferred_ranges.clone();
        config.send_recv_error = self.listen.send_recv_error;
        config.accept_recv_error = self.listen.accept_recv_error;
        config.path_mtu = self.tun.path_mtu();
        config.drop_local_broadcast = self.tun.drop_local_broadcast;
        config.drop_multicast = self.tun.drop_multicast;
    }
}

impl Settings {
    /// The core's lighthouse settings. `advertise` is `lighthouse.advertise_addrs` with its names looked up.
    #[must_use]
    pub fn lighthouse(&self, advertise: Vec<SocketAddr>) -> Lighthouse {
        let mut lighthouse = Lighthouse::default();
        lighthouse.am_lighthouse = self.am_lighthouse;
        lighthouse.hosts = self.lighthouses.clone();
        lighthouse.interval = self.lighthouse_interval;
        lighthouse.advertise = advertise;
        lighthouse.calculated_remotes = self.calculated_remotes.clone();
        lighthouse.remote_allow = self.remote_allow.clone();
        lighthouse.local_allow = self.local_allow.clone();
        lighthouse
    }
}

/// 48 KB, within what an instance of a pod may need beside its flows.
const FLOW_RECORDS: usize = 192;

fn flow_records(section: &Section<'_>) -> usize {
    let kept = section.int("flows.ring", 16..=65_536).and_then(|kept| usize::try_from(kept).ok());
    if section.boolean("flows.records", true) { kept.unwrap_or(FLOW_RECORDS) } else { 0 }
}

fn cipher(section: &Section<'_>) -> Result<Cipher, Refused> {
    match section.string("cipher").as_deref() {
        None | Some("aes") => Ok(Cipher::Aes256Gcm),
        Some("chachapoly") if !Cipher::ChaCha20Poly1305.is_in_build() => Err(Refused::new(
            "cipher is not in this build",
            "cipher=chachapoly: this is a FIPS build, which has AES only: set cipher: aes on all hosts of the network",
        )),
        Some("chachapoly") => Ok(Cipher::ChaCha20Poly1305),
        Some(other) => Err(Refused::new("unknown cipher", format!("cipher={other}: it must be aes or chachapoly"))),
    }
}

fn relay(section: &Section<'_>) -> Relay {
    let am_relay = section.boolean("relay.am_relay", false);
    let parse = |text: String| {
        let relay = text.parse::<IpAddr>().ok().map(|relay| relay.to_canonical());
        if relay.is_none() {
            section.warn("relay.relays", format!("relay.relays: {text:?} is not an overlay address and is skipped"));
        }
        relay
    };
    let mut relays: Vec<_> = section.strings("relay.relays").into_iter().filter_map(parse).collect();
    if relays.len() > MAX_RELAYS {
        section.warn(
            "relay.relays",
            format!("relay.relays has {} entries, peers read the first {MAX_RELAYS}", relays.len()),
        );
        relays.truncate(MAX_RELAYS);
    }
    if am_relay && !relays.is_empty() {
        section.warn("relay.relays", "Ignoring relays from config because am_relay is true");
    }
    let mut relay = Relay::default();
    relay.am_relay = am_relay;
    relay.use_relays = section.boolean("relay.use_relays", true);
    relay.relays = relays;
    relay.groups = section.strings("relay.groups");
    relay
}

fn punchy(section: &Section<'_>) -> Punchy {
    let mut punchy = Punchy::default();
    let scalar = section.get("punchy").is_some_and(|value| !matches!(value, Value::Map(_)));
    punchy.punch = section.boolean(if scalar { "punchy" } else { "punchy.punch" }, punchy.punch);
    punchy.target_all_remotes = section.boolean("punchy.target_all_remotes", punchy.target_all_remotes);
    punchy.respond = section.boolean("punchy.respond", section.boolean("punch_back", punchy.respond));
    punchy.delay = section.duration("punchy.delay", punchy.delay);
    punchy.respond_delay = section.duration("punchy.respond_delay", punchy.respond_delay);
    punchy
}

const MAX_PENDING: &str = "handshakes.max_pending";
const MAX_NEW_PER_SECOND: &str = "handshakes.max_new_per_second";
const MAX_WAITING: &str = "handshakes.max_waiting_bytes";
// Less than 10 MB together when all limits are reached: an instance stays below 16 MB whatever its pod and its peers
// do.
const POD_MAX_PENDING: usize = 512;
/// A flood of forged handshakes at this rate takes 2.3 MB.
const POD_MAX_NEW_PER_SECOND: Option<NonZeroU32> = NonZeroU32::new(1000);
const POD_MAX_WAITING_BYTES: usize = 2 << 20;
const POD_MAX_FLOWS: usize = 1 << 15;

fn handshakes(section: &Section<'_>) -> Result<Handshakes, Refused> {
    let mut handshakes = Handshakes::default();
    handshakes.try_interval = section.duration("handshakes.try_interval", handshakes.try_interval);
    if handshakes.try_interval.is_zero() {
        return Err(Refused::new("Unsupported configuration", "handshakes.try_interval must be above zero"));
    }
    let retries = section.int("handshakes.retries", 1..=1000).and_then(|n| u32::try_from(n).ok());
    let cap = section.int("handshakes.max_new_per_second", 0..=i64::from(u32::MAX)).and_then(|n| u32::try_from(n).ok());
    let size = |key, range| section.int(key, range).and_then(|n| usize::try_from(n).ok());
    handshakes.retries = retries.unwrap_or(handshakes.retries);
    handshakes.max_new_per_second = cap.map_or(handshakes.max_new_per_second, NonZeroU32::new);
    handshakes.max_pending = size(MAX_PENDING, 1..=1 << 20).unwrap_or(handshakes.max_pending);
    handshakes.max_waiting_bytes = size(MAX_WAITING, 1..=1 << 30).unwrap_or(handshakes.max_waiting_bytes);
    Ok(handshakes)
}

fn timers(section: &Section<'_>) -> Timers {
    let mut timers = Timers::default();
    let inactivity = section.duration("tunnels.inactivity_timeout", Duration::from_secs(600));
    let every = |path: &str, default: Option<NonZeroU64>| match section.int(path, 0..=i64::from(u32::MAX)) {
        Some(packets) => NonZeroU64::new(packets.unsigned_abs()),
        None => default,
    };
    timers.connection_alive_interval = seconds(section, "timers.connection_alive_interval", 5);
    timers.pending_deletion_interval = seconds(section, "timers.pending_deletion_interval", 10);
    timers.inactivity_timeout = section.boolean("tunnels.drop_inactive", false).then_some(inactivity);
    timers.try_promote = every("counters.try_promote", timers.try_promote);
    timers.requery_every = every("counters.requery_every_packets", timers.requery_every);
    timers.requery_wait = section.duration("timers.requery_wait_duration", timers.requery_wait);
    timers
}

fn keep(section: &Section<'_>) -> Keep {
    let parse = |text: String| {
        let peer = text.parse::<IpAddr>().ok().map(|peer| peer.to_canonical());
        if peer.is_none() {
            section.warn(KEEP, format!("{KEEP}: {text:?} is not an overlay address and is skipped"));
        }
        peer
    };
    let mut keep = Keep::default();
    keep.peers = section.strings(KEEP).into_iter().filter_map(parse).collect();
    keep.groups = section.strings("tunnels.keep_groups");
    if keep.peers.len() > MAX_KEPT {
        section.warn(KEEP, format!("{KEEP} has {} entries, the first {MAX_KEPT} are kept", keep.peers.len()));
        keep.peers.truncate(MAX_KEPT);
    }
    keep
}

const KEEP: &str = "tunnels.keep";

fn seconds(section: &Section<'_>, path: &str, default: u64) -> Duration {
    let given = section.int(path, 1..=86_400).map(i64::unsigned_abs);
    Duration::from_secs(given.unwrap_or(default))
}

fn preferred_ranges(section: &Section<'_>) -> Vec<ipnet::IpNet> {
    let parse = |text: String| {
        let range = netip::prefix(&text);
        if range.is_none() {
            section.warn("preferred_ranges", format!("preferred_ranges: {text:?} is not a prefix and is skipped"));
        }
        range
    };
    section.strings("preferred_ranges").into_iter().filter_map(parse).collect()
}

fn routines(section: &Section<'_>) -> usize {
    let read = |path: &str| section.int(path, 1..=MAX_ROUTINES).and_then(|n| usize::try_from(n).ok());
    if let Some(routines) = read("routines") {
        return routines;
    }
    let old = read("listen.routines").max(read("tun.routines"));
    if old.is_some() {
        section.warn("routines", "listen.routines and tun.routines are deprecated, use routines");
    }
    old.unwrap_or(1)
}

/// Number of a node's relays that its peers accept.
// Each routine costs two threads and their buffers; a larger number is a typo.
const MAX_ROUTINES: i64 = 256;
