//! Statistics: one set of counters per lane, with a counter for each drop reason and each kind of traffic.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which way a packet was going when it was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the underlay to the overlay.
    Inbound,
    /// From the overlay to the underlay.
    Outbound,
}

impl Direction {
    /// That of answers.
    #[must_use]
    pub fn opposite(self) -> Self {
        match self {
            Self::Inbound => Self::Outbound,
            Self::Outbound => Self::Inbound,
        }
    }
}

/// Everything that is counted, except drops.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Counter {
    /// Overlay packets delivered to the device, counted before they are joined.
    PacketsIn,
    /// Their bytes.
    BytesIn,
    /// Overlay packets sealed, counted after super-packets are cut.
    PacketsOut,
    /// Their bytes.
    BytesOut,
    /// Underlay datagrams received, hole punches included.
    DatagramsIn,
    /// Their bytes.
    DatagramBytesIn,
    /// Datagrams of tunnels that never arrived: counters not seen before the replay window moved past them.
    DatagramsLost,
    /// Datagrams of one byte or none, which only open a NAT mapping.
    HolePunchesIn,
    /// Handshake datagrams handed to the control plane.
    HandshakesIn,
    /// Lighthouse messages received.
    LighthouseIn,
    /// Test requests received.
    TestRequestsIn,
    /// Test replies received.
    TestRepliesIn,
    /// Close messages received.
    CloseTunnelIn,
    /// Relay control messages received.
    ControlIn,
    /// Recv_errors received.
    RecvErrorsIn,
    /// Packets handed to the control plane because there was no tunnel.
    NoTunnel,
    /// Super-packets written to the device in place of several packets.
    Coalesced,
    /// Rejected packets that were answered with a reset or an ICMP error.
    Rejected,
    /// Datagrams forwarded between two peers.
    RelayedDatagrams,
    /// Their bytes.
    RelayedBytes,
    /// Lighthouse messages received: queries for a host.
    LighthouseQueryIn,
    /// Lighthouse messages sent: queries for a host.
    LighthouseQueryOut,
    /// Lighthouse messages received: replies to queries.
    LighthouseReplyIn,
    /// Lighthouse messages sent: replies to queries.
    LighthouseReplyOut,
    /// Lighthouse messages received: updates of hosts about themselves.
    LighthouseUpdateIn,
    /// Lighthouse messages sent: updates of hosts about themselves.
    LighthouseUpdateOut,
    /// Lighthouse messages received: requests to punch towards a host.
    LighthousePunchIn,
    /// Lighthouse messages sent: requests to punch towards a host.
    LighthousePunchOut,
    /// Lighthouse messages received: acknowledgements of updates.
    LighthouseAckIn,
    /// Lighthouse messages sent: acknowledgements of updates.
    LighthouseAckOut,
    /// Lighthouse messages received: messages of unknown kind.
    LighthouseOtherIn,
    /// Lighthouse messages sent: messages of unknown kind.
    LighthouseOtherOut,
    /// Handshake datagrams sent, repeated ones included.
    HandshakesOut,
    /// Lighthouse messages sent.
    LighthouseOut,
    /// Test requests sent.
    TestRequestsOut,
    /// Test replies sent.
    TestRepliesOut,
    /// Close messages sent.
    CloseTunnelOut,
    /// Relay control messages sent.
    ControlOut,
    /// Recv_errors sent.
    RecvErrorsOut,
    /// Messages of this node sent through a relay.
    FramesOut,
    /// Datagrams sent to keep a NAT mapping open.
    KeepalivesOut,
    /// Datagrams sent to open a NAT mapping.
    HolePunchesOut,
    /// Packets that waited for a tunnel and were then sent.
    WaitingOut,
    /// Capture: flows of this node whose addresses or ports are translated.
    TranslatedFlows,
    /// Capture: packets for the primary network, counted after super-packets are cut.
    Bypassed,
    /// Capture: packets from this node to itself by way of a Service, counted after super-packets are cut.
    LoopedBack,
    /// Capture: packets kept until there is a newer directory.
    Held,
    /// Test requests sent to find out how large a packet the path to a peer carries.
    PathProbesOut,
    /// Their answers.
    PathProbesAnswered,
    /// Packets larger than the path to their peer carries that were answered with a packet-too-big.
    TooBigAnswered,
    /// Connections that were opened with a smaller maximum segment size than their ends asked for.
    SegmentSizeLowered,
    /// Handshakes with an overlay address that a host of another name has, this node included.
    AddressConflicts,
}

/// One set of counters. Only one thread writes and any thread may read, so a relaxed load and store suffice, without a
/// locked instruction. Aligned, so that no two lanes write to the same cache line.
#[derive(Debug)]
#[repr(align(128))]
pub struct Counters {
    values: [AtomicU64; Counter::ALL.len()],
    dropped: [[AtomicU64; DropReason::ALL.len()]; 2],
}

impl Default for Counters {
    fn default() -> Self {
        let zero = |_| AtomicU64::new(0);
        Self { values: std::array::from_fn(zero), dropped: std::array::from_fn(|_| std::array::from_fn(zero)) }
    }
}

impl Counters {
    /// Adds to a counter. To be called only by the set's one writer.
    pub(crate) fn add(&self, counter: Counter, n: u64) {
        add(&self.values[counter as usize], n);
    }

    /// Counts a dropped packet. To be called only by the set's one writer.
    pub(crate) fn drop_one(&self, direction: Direction, reason: DropReason) {
        self.drop_many(direction, reason, 1);
    }

    /// Counts dropped packets. To be called only by the set's one writer.
    pub(crate) fn drop_many(&self, direction: Direction, reason: DropReason, n: u64) {
        add(&self.dropped[direction as usize][reason as usize], n);
    }

    /// Current value.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.values[counter as usize].load(Ordering::Relaxed)
    }

    /// Packets dropped so far, for one reason.
    #[must_use]
    pub fn dropped(&self, direction: Direction, reason: DropReason) -> u64 {
        self.dropped[direction as usize][reason as usize].load(Ordering::Relaxed)
    }

    /// Adds every counter to `sum`, by its stable name.
    pub fn add_to(&self, sum: &mut BTreeMap<&'static str, u64>) {
        for counter in Counter::ALL {
            *sum.entry(counter.name()).or_default() += self.get(counter);
        }
        for direction in [Direction::Inbound, Direction::Outbound] {
            for reason in DropReason::ALL {
                *sum.entry(reason.counter_name(direction)).or_default() += self.dropped(direction, reason);
            }
        }
    }

    /// Adds to every counter what is in `names` under its stable name. To be called only by the set's one writer.
    pub(crate) fn add_named(&self, names: &BTreeMap<String, u64>) {
        for counter in Counter::ALL {
            self.add(counter, names.get(counter.name()).copied().unwrap_or_default());
        }
        for direction in [Direction::Inbound, Direction::Outbound] {
            for reason in DropReason::ALL {
                let n = names.get(reason.counter_name(direction)).copied().unwrap_or_default();
                self.drop_many(direction, reason, n);
            }
        }
    }
}

fn add(value: &AtomicU64, n: u64) {
    value.store(value.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

macro_rules! counter_names {
    ($($variant:ident $name:literal,)*) => {
        impl Counter {
            /// Every counter.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];
            /// Name in metrics; stable.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

counter_names! {
    PacketsIn "packets_in",
    BytesIn "bytes_in",
    PacketsOut "packets_out",
    BytesOut "bytes_out",
    DatagramsIn "datagrams_in",
    DatagramBytesIn "datagram_bytes_in",
    DatagramsLost "datagrams_lost",
    HolePunchesIn "hole_punches_in",
    HandshakesIn "handshakes_in",
    LighthouseIn "lighthouse_in",
    TestRequestsIn "test_requests_in",
    TestRepliesIn "test_replies_in",
    CloseTunnelIn "close_tunnel_in",
    ControlIn "control_in",
    RecvErrorsIn "recv_errors_in",
    NoTunnel "no_tunnel",
    Coalesced "coalesced",
    Rejected "rejected",
    RelayedDatagrams "relayed_datagrams",
    RelayedBytes "relayed_bytes",
    LighthouseQueryIn "lighthouse_query_in",
    LighthouseQueryOut "lighthouse_query_out",
    LighthouseReplyIn "lighthouse_reply_in",
    LighthouseReplyOut "lighthouse_reply_out",
    LighthouseUpdateIn "lighthouse_update_in",
    LighthouseUpdateOut "lighthouse_update_out",
    LighthousePunchIn "lighthouse_punch_in",
    LighthousePunchOut "lighthouse_punch_out",
    LighthouseAckIn "lighthouse_ack_in",
    LighthouseAckOut "lighthouse_ack_out",
    LighthouseOtherIn "lighthouse_other_in",
    LighthouseOtherOut "lighthouse_other_out",
    HandshakesOut "handshakes_out",
    LighthouseOut "lighthouse_out",
    TestRequestsOut "test_requests_out",
    TestRepliesOut "test_replies_out",
    CloseTunnelOut "close_tunnel_out",
    ControlOut "control_out",
    RecvErrorsOut "recv_errors_out",
    FramesOut "frames_out",
    KeepalivesOut "keepalives_out",
    HolePunchesOut "hole_punches_out",
    WaitingOut "waiting_out",
    TranslatedFlows "translated_flows",
    Bypassed "bypassed",
    LoopedBack "looped_back",
    Held "held_for_directory",
    PathProbesOut "path_probes_out",
    PathProbesAnswered "path_probes_answered",
    TooBigAnswered "too_big_answered",
    SegmentSizeLowered "segment_size_lowered",
    AddressConflicts "address_conflicts",
}

macro_rules! drop_names {
    ($($variant:ident $name:literal,)*) => {
        impl DropReason {
            /// Every reason.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];
            /// Name in logs; stable.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
            /// Name in metrics; stable.
            #[must_use]
            pub const fn counter_name(self, direction: Direction) -> &'static str {
                match (self, direction) {
                    $(
                        (Self::$variant, Direction::Inbound) => concat!("dropped_in_", $name),
                        (Self::$variant, Direction::Outbound) => concat!("dropped_out_", $name),
                    )*
                }
            }
        }
    };
}

// In the order of the enum, because a reason is an index into the array of its counters.
drop_names! {
    Truncated "truncated",
    UnknownType "unknown_type",
    FromOverlay "from_overlay",
    UnknownIndex "unknown_index",
    Replayed "replayed",
    TooOld "too_old",
    BadTag "bad_tag",
    BadPacket "bad_packet",
    ToSelf "to_self",
    Broadcast "broadcast",
    NoRoute "no_route",
    RemoteAddress "remote_address",
    LocalAddress "local_address",
    NoRule "no_rule",
    ConntrackFull "conntrack_full",
    CounterExhausted "counter_exhausted",
    NoEndpoint "no_endpoint",
    PendingFull "pending_full",
    PuntQueueFull "punt_queue_full",
    BadHandshake "bad_handshake",
    Relay "relay",
    BadMessage "bad_message",
    BadOffload "bad_offload",
    AddressNotAllowed "address_not_allowed",
    HandshakeLimit "handshake_limit",
    EndpointRefused "endpoint_refused",
    UnknownDestination "unknown_destination",
    Refused "refused",
    EndpointGone "endpoint_gone",
    FragmentWithoutFirst "fragment_without_first",
    HoldFull "hold_full",
    TooBig "too_big",
    NetworkPolicy "network_policy",
}

/// Why a packet was dropped. Each has its own counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DropReason {
    /// Underlay: shorter than a header, or than header and tag.
    Truncated,
    /// Underlay: unknown version, type or subtype.
    UnknownType,
    /// Underlay: came from inside the own overlay networks (tunnel in tunnel).
    FromOverlay,
    /// Underlay: no tunnel has this index.
    UnknownIndex,
    /// Underlay: counter already seen.
    Replayed,
    /// Underlay: counter below the replay window, so it is unknown whether it was seen.
    TooOld,
    /// Underlay: authentication failed.
    BadTag,
    /// Overlay: not an IP packet that can be parsed.
    BadPacket,
    /// Overlay: destination is this node itself.
    ToSelf,
    /// Overlay: broadcast or multicast, dropped by configuration.
    Broadcast,
    /// Overlay: no route to the destination.
    NoRoute,
    /// Overlay: the remote address does not belong to the peer's certificate.
    RemoteAddress,
    /// Overlay: the local address does not belong to this node's certificate.
    LocalAddress,
    /// Firewall: no rule allows it.
    NoRule,
    /// Conntrack is full of live flows.
    ConntrackFull,
    /// The send counter of the tunnel is used up.
    CounterExhausted,
    /// There is no path to the peer: no endpoint and no relay, or nobody there answered a handshake.
    NoEndpoint,
    /// Too many packets wait for this peer's handshake.
    PendingFull,
    /// The queue to the control plane is full.
    PuntQueueFull,
    /// Handshake message that is invalid or unexpected.
    BadHandshake,
    /// Relayed frame or relay request that is not allowed or cannot be served.
    Relay,
    /// Control message that cannot be parsed, or that this peer is not allowed to send.
    BadMessage,
    /// A super-packet whose offload description contradicts its bytes.
    BadOffload,
    /// Handshake with an underlay address that the allow lists exclude.
    AddressNotAllowed,
    /// New handshake above the limit per second, or above the share of its source.
    HandshakeLimit,
    /// Endpoint in a lighthouse message to which nobody should be sent: loopback, link-local, multicast, broadcast,
    /// inside the overlay, without a port, or excluded by the allow lists.
    EndpointRefused,
    /// Capture: the directory still knew nothing about the destination when the packet had waited long enough.
    UnknownDestination,
    /// Capture: a Service without an endpoint to choose, or a destination that policy excludes.
    Refused,
    /// Capture: the other end of the flow is gone, and nothing of the flow may go to anybody else; the pod got a reset
    /// or an ICMP error.
    EndpointGone,
    /// Capture: a later fragment to a Service, whose first fragment was not seen.
    FragmentWithoutFirst,
    /// Capture: too many packets to unknown destinations wait already.
    HoldFull,
    /// Overlay: larger than the path to the peer carries, and must not be fragmented. The sender was told.
    TooBig,
    /// Policies of the network refuse it, although a rule allows it.
    NetworkPolicy,
}

impl DropReason {
    /// Whether rules or policies refuse what the packet's flow is, not this packet alone.
    pub(crate) fn is_refused_flow(self) -> bool {
        matches!(self, Self::NoRule | Self::NetworkPolicy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_and_reason_is_its_own_index_and_has_its_own_name() {
        for (at, counter) in Counter::ALL.into_iter().enumerate() {
            assert_eq!(at, counter as usize);
        }
        for (at, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(at, reason as usize);
        }
        let mut sum = BTreeMap::new();
        Counters::default().add_to(&mut sum);
        assert_eq!(sum.len(), Counter::ALL.len() + 2 * DropReason::ALL.len());
    }

    #[test]
    fn sets_of_several_lanes_add_up() {
        let [a, b] = [Counters::default(), Counters::default()];
        a.add(Counter::PacketsIn, 2);
        b.add(Counter::PacketsIn, 3);
        b.drop_one(Direction::Outbound, DropReason::NoRule);
        let mut sum = BTreeMap::new();
        a.add_to(&mut sum);
        b.add_to(&mut sum);
        assert_eq!((sum["packets_in"], sum["dropped_out_no_rule"], sum["dropped_in_no_rule"]), (5, 1, 0));
    }
}
