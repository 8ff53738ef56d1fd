//! The facts behind `doctor` and `why`: about the node, the kernel and the configuration on disk. The program that
//! shows them draws the conclusions.

mod host;
mod peer;
mod traffic;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{Certificate, UnixTime};
use nebula_config::Settings;
use nebula_core::TunnelStatus;
use nebula_core::diagnosis::Diagnosis;
use nebula_core::io::Handle;
use nebula_linux::{errno, kernel_view};

use super::probe::{Found, Underlay, probe};
use crate::host::dns::Registered;
use crate::host::documents::{Facts, KernelRoute, PeerFacts, Validity};

/// Where the facts come from.
pub(super) struct Sources<'a> {
    pub(super) handle: &'a Handle,
    pub(super) settings: &'a Settings,
    /// Name of the device.
    pub(super) device: &'a str,
    pub(super) udp: SocketAddr,
    /// How the overlay's names are registered with the host's resolver.
    pub(super) names: Option<Arc<Registered>>,
    pub(super) now: UnixTime,
}

/// This node's wall clock and monotonic clock, read at the same moment.
#[derive(Clone, Copy)]
struct Clocks {
    now: Instant,
    unix: UnixTime,
}

impl Clocks {
    fn ago(self, at: Instant) -> u64 {
        self.now.saturating_duration_since(at).as_secs()
    }
}

impl Sources<'_> {
    /// Everything known about this host, and about every peer whose handshake is in progress or has failed.
    pub(super) fn everything(&self) -> Facts {
        self.known_about(|diagnosis| {
            let peers: BTreeSet<_> = diagnosis.attempts.iter().map(|attempt| attempt.peer).collect();
            peers.into_iter().collect()
        })
    }

    /// What is known already about why there is no tunnel with the peers of a diagnosis. Nothing is sent.
    pub(super) fn known_about(&self, peers: impl FnOnce(&Diagnosis) -> Vec<IpAddr>) -> Facts {
        let Some((now, diagnosis)) = self.handle.diagnosis() else { return Facts::default() };
        let clocks = Clocks { now, unix: self.now };
        let peers = peers(&diagnosis).into_iter().take(MAX_PEERS);
        let peers = peers.map(|peer| self.peer(peer, &diagnosis, clocks, &[])).collect();
        self.facts(&diagnosis, clocks, peers)
    }

    /// Everything known about one peer. If there is no tunnel, starts a handshake and sends a probe datagram to each
    /// known endpoint.
    pub(super) fn about(&self, peer: IpAddr) -> Facts {
        let reachable = || self.handle.tunnels().iter().any(|tunnel| tunnel.peer.contains(&peer));
        let networks = self.settings.pki.iter().flat_map(|pki| pki.identity.networks());
        let in_overlay = networks.clone().any(|own| own.contains(&peer) && own.addr() != peer);
        if in_overlay {
            self.handle.inquire(peer);
        }
        if in_overlay && !reachable() {
            self.handle.connect(peer);
        }
        let mut known = self.handle.whereabouts(peer);
        for _ in 0..MAX_POLLS {
            let asked = known.lighthouses.iter().all(|it| known.answers.contains_key(it) || known.heard.contains(it));
            if !in_overlay || asked && (reachable() || !known.pending) {
                break;
            }
            std::thread::sleep(POLL_INTERVAL);
            known = self.handle.whereabouts(peer);
        }
        let probes = if reachable() { Vec::new() } else { self.probe(peer, &known.endpoints) };
        let Some((now, diagnosis)) = self.handle.diagnosis() else { return Facts::default() };
        let clocks = Clocks { now, unix: self.now };
        let told = self.peer(peer, &diagnosis, clocks, &probes);
        self.facts(&diagnosis, clocks, vec![told])
    }

    /// Probes the endpoints of a peer: by the node's own port, which shows whether UDP passes where handshakes have
    /// to, and by another one, to which the kernel reports what the way refuses.
    fn probe(&self, peer: IpAddr, endpoints: &[SocketAddr]) -> Vec<(SocketAddr, Found)> {
        self.handle.probe(peer);
        let probes = probe(self.underlay(), endpoints);
        // The second one is for those that were lost.
        self.handle.probe(peer);
        std::thread::sleep(PROBE_ANSWER_WITHIN);
        probes
    }

    fn underlay(&self) -> Underlay {
        Underlay { address: self.udp.ip(), mark: self.settings.listen.so_mark }
    }

    fn facts(&self, diagnosis: &Diagnosis, clocks: Clocks, peers: Vec<PeerFacts>) -> Facts {
        let tunnels = self.handle.tunnels();
        Facts {
            host: self.host(diagnosis, clocks, &tunnels),
            peers,
            callers: diagnosis.callers.iter().map(|caller| peer::refusal(caller, clocks)).collect(),
            unheard: diagnosis.unheard.iter().filter_map(|caller| peer::unheard(caller, clocks)).collect(),
            sends: diagnosis.sends.iter().map(|failure| traffic::send_failure(failure, clocks)).collect(),
            drops: diagnosis.drops.iter().map(|it| self.dropped(it, clocks, &tunnels)).collect(),
            doubles: diagnosis.doubles.iter().map(|double| traffic::double(double, clocks)).collect(),
            own_elsewhere: diagnosis.elsewhere.iter().map(|told| traffic::elsewhere(told, clocks)).collect(),
            same_names: self.same_names(&tunnels),
            relays_refused: diagnosis.relays.iter().map(|refused| traffic::refused_relaying(refused, clocks)).collect(),
            clocks: diagnosis.clocks.iter().map(|clock| self.clock(clock)).collect(),
            unsafe_routes: self.unsafe_routes(&tunnels),
            paths: self.paths(&tunnels),
            ..Facts::default()
        }
    }
}

fn validity(certificate: &Certificate, now: UnixTime) -> Validity {
    Validity {
        name: certificate.name().to_owned(),
        version: certificate.version().number().into(),
        fingerprint: certificate.fingerprint().to_string(),
        seconds_left: Some(certificate.not_after() - now),
        begins_in_seconds: (certificate.not_before() - now).max(0),
        lifetime_seconds: Some(certificate.not_after() - certificate.not_before()),
    }
}

/// The tunnel with a peer, if there is one.
fn tunnel_with(tunnels: &[TunnelStatus], peer: IpAddr) -> Option<&TunnelStatus> {
    tunnels.iter().find(|tunnel| tunnel.peer.contains(&peer))
}

/// The kernel's route for a packet to `destination`; `device` is the overlay device.
pub(super) fn kernel_route(destination: IpAddr, device: &str, mark: u32) -> KernelRoute {
    match kernel_view::route_to(destination, mark) {
        Ok(taken) => KernelRoute {
            to_overlay: taken.device.as_deref() == Some(device),
            local: taken.local,
            device: taken.device,
            mtu: taken.mtu,
            ..KernelRoute::default()
        },
        Err(error) => KernelRoute {
            errno: error.raw_os_error().map(errno::symbol),
            text: Some(errno::text(&error)),
            ..KernelRoute::default()
        },
    }
}

fn system_text(code: i32) -> String {
    errno::text(&std::io::Error::from_raw_os_error(code))
}

// Each item costs several requests to the kernel and to the control thread.
const MAX_PEERS: usize = 32;
const MAX_ROUTES: usize = 64;
// Longer than the round trip of most paths.
const PROBE_ANSWER_WITHIN: Duration = Duration::from_millis(300);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
// Three seconds: most handshakes succeed or fail within that time.
const MAX_POLLS: u32 = 60;
