//! Ends what belongs to the former pod when another pod takes over its address.
//!
//! The tunnel proves who the peer is, but a pod that is gone cannot say so. The directory does: by the incarnation of
//! each address.

use std::net::IpAddr;
use std::time::Instant;

use super::Node;
use super::tunnels::Live;
use crate::TunnelDownReason;
use crate::capture::Directory;

/// The incarnation of each address of a tunnel's peer, as far as it was known last.
#[derive(Debug, Default)]
pub(super) struct Incarnations(Vec<Option<u64>>);

impl Incarnations {
    /// Learns what the directory says by now. Returns whether another pod has one of the addresses.
    pub(super) fn update(&mut self, addresses: &[IpAddr], directory: &dyn Directory) -> bool {
        self.0.resize(addresses.len(), None);
        let mut replaced = false;
        for (known, address) in self.0.iter_mut().zip(addresses) {
            // A pod that is no longer listed may only be terminating.
            let Some(current) = directory.incarnation(*address) else { continue };
            replaced |= known.replace(current).is_some_and(|known| known != current);
        }
        replaced
    }
}

impl Node {
    /// The configuration has another directory than `old`. Notes the flows with pods that have left; closes the
    /// tunnels to former pods, restarts handshakes with them, and forgets the firewall's flows with them, before any
    /// packet is sent by the new directory; translated flows end with their next packet.
    pub(super) fn end_former_pods(&mut self, now: Instant, old: Option<&dyn Directory>) {
        let Some(directory) = self.config.capture.clone() else { return };
        if let Some(old) = old {
            self.forwarder.seal_flows(old, &*directory, now);
        }
        let replaced = |live: &mut Live| {
            let addresses = &live.tunnel.peer_addresses;
            live.incarnations
                .update(addresses, &*directory)
                .then(|| (live.tunnel.local_index, addresses.first().copied()))
        };
        self.end_inherited_of_former_pods();
        let former: Vec<_> = self.tunnels.iter_mut().filter_map(replaced).collect();
        for (index, peer) in former {
            self.close_tunnel(index, TunnelDownReason::PeerReplaced);
            if let Some(peer) = peer {
                self.forwarder.forget_flows(peer, now);
            }
        }
        let incarnation = |address| Some((old?.incarnation(address)?, directory.incarnation(address)?));
        for peer in self.pending.peers() {
            if incarnation(peer).is_some_and(|(old, new)| old != new) {
                self.restart_handshake(now, peer);
            }
        }
    }
}
