//! One translated flow: the addresses that the pod uses, and those in the tunnel.

use std::net::IpAddr;

use crate::wire::ip::FlowKey;

/// A flow as the pod sees it, and as the other end sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Translation {
    /// What the pod sends and expects: the remote end is a Service, or a pod whose wire flow was taken.
    pub(crate) original: FlowKey,
    /// What the firewall and the tunnel carry: the remote end is the endpoint. If the endpoint is this pod itself, the
    /// flow as its server sees it: the remote end is the Service, with the port of the pod's client.
    pub(crate) wire: FlowKey,
    /// The pod itself is the endpoint: packets go back to the device.
    pub(crate) is_own: bool,
    /// What `wire` adds to the checksum of `original`, in ones' complement.
    change: Change,
}

/// A difference of checksums in ones' complement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Change {
    /// By the addresses alone: for an IPv4 header, and for a checksum that so far covers the pseudo-header only.
    pub(crate) addresses: u16,
    /// By addresses and ports.
    pub(crate) all: u16,
}

/// The addresses and ports that a packet gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rewrite {
    pub(crate) source: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
    pub(crate) change: Change,
}

impl Translation {
    pub(crate) fn new(original: FlowKey, wire: FlowKey, is_own: bool) -> Self {
        let addresses = |flow: &FlowKey| sum(flow.local) + sum(flow.remote);
        let ports = |flow: &FlowKey| u32::from(flow.local_port) + u32::from(flow.remote_port);
        let change = Change {
            addresses: difference(addresses(&original), addresses(&wire)),
            all: difference(addresses(&original) + ports(&original), addresses(&wire) + ports(&wire)),
        };
        Self { original, wire, is_own, change }
    }

    /// For a packet of the pod.
    #[inline]
    pub(crate) fn out(&self) -> Rewrite {
        let (local, remote) = ends(&self.wire);
        let (source, destination) = if self.is_own { (remote, local) } else { (local, remote) };
        Rewrite { source, destination, change: self.change }
    }

    /// For a packet to the pod.
    #[inline]
    pub(crate) fn back(&self) -> Rewrite {
        let (destination, source) = ends(&self.original);
        Rewrite { source, destination, change: self.change.reversed() }
    }
}

impl Change {
    #[inline]
    pub(crate) fn reversed(self) -> Self {
        Self { addresses: !self.addresses, all: !self.all }
    }
}

fn ends(flow: &FlowKey) -> ((IpAddr, u16), (IpAddr, u16)) {
    ((flow.local, flow.local_port), (flow.remote, flow.remote_port))
}

/// Sum of the 16-bit words of an address, not folded.
fn sum(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(v4) => {
            let bits = v4.to_bits();
            (bits >> 16) + (bits & 0xffff)
        }
        IpAddr::V6(v6) => v6.segments().into_iter().map(u32::from).sum(),
    }
}

/// What has to be added to go from one sum to another.
fn difference(from: u32, to: u32) -> u16 {
    fold(u32::from(fold(to)) + u32::from(!fold(from)))
}

fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
