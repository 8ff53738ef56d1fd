//! A flow that is translated, as all lanes share it.

use super::translation::Translation;
use super::{Directory, Found, Target};
use crate::wire::ip::protocol;

/// Flags of a TCP header that begin or end a connection.
pub(crate) mod tcp {
    pub(crate) const FIN: u8 = 0x01;
    pub(crate) const SYN: u8 = 0x02;
    pub(crate) const RST: u8 = 0x04;
    pub(crate) const ACK: u8 = 0x10;
}

/// A translated flow with what it depends on.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) translation: Translation,
    /// Tells this flow from an earlier one with the same addresses and ports.
    pub(super) id: u64,
    /// Incarnation of the endpoint when it was chosen.
    pub(super) incarnation: u64,
    /// Version of the directory under which it was last checked.
    pub(super) version: u64,
    pub(super) last_used: u64,
    pub(super) state: State,
}

/// How far a flow has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    New,
    /// The pod opened it before this program started.
    Resumed,
    /// Something came back.
    Answered,
    /// TCP: one side has closed the connection.
    Closing,
    /// TCP: one side has reset the connection.
    Reset,
    /// TCP: its endpoint is gone. It is refused until the pod is done with it, so that nothing of it goes anywhere
    /// else.
    Gone,
}

/// Flows that may be evicted for a new one, and those that may only if there is none of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Short,
    Long,
}

impl Entry {
    pub(super) fn is_tcp(&self) -> bool {
        self.translation.original.protocol == protocol::TCP
    }

    /// An established connection may be idle for a day, as with kube-proxy.
    pub(super) fn class(&self) -> Class {
        if self.is_tcp() && matches!(self.state, State::Resumed | State::Answered) { Class::Long } else { Class::Short }
    }

    pub(super) fn is_live(&self, now: u64) -> bool {
        let timeout = match (self.is_tcp(), self.state) {
            (false, _) => UDP_TIMEOUT,
            (true, State::New) => UNANSWERED_TIMEOUT,
            (true, State::Resumed | State::Answered) => ESTABLISHED_TIMEOUT,
            (true, State::Closing) => CLOSING_TIMEOUT,
            (true, State::Reset) => RESET_TIMEOUT,
            (true, State::Gone) => GONE_TIMEOUT,
        };
        now < self.last_used.saturating_add(timeout)
    }

    /// Whether a packet that opens a connection begins a new flow, although the addresses and ports are known.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Closing | State::Reset | State::Gone)
    }

    /// Notes flags of a TCP packet in either direction.
    pub(super) fn note(&mut self, flags: u8) {
        if flags & tcp::RST != 0 {
            self.state = State::Reset;
        } else if flags & tcp::FIN != 0 && self.state != State::Reset {
            self.state = State::Closing;
        }
    }

    /// Whether the flow may keep its endpoint: a connection as long as the pod is the same one, anything else only
    /// while the Service still has it.
    pub(super) fn stands(&self, directory: &dyn Directory) -> bool {
        let Translation { original, wire, is_own, .. } = &self.translation;
        let (address, port) = if *is_own { (wire.local, wire.local_port) } else { (wire.remote, wire.remote_port) };
        if directory.incarnation(address) != Some(self.incarnation) {
            return false;
        }
        let endpoint = super::Endpoint { address, port, incarnation: self.incarnation };
        self.is_tcp()
            || match directory.find(&Target::from(original)) {
                Found::Service(service) => directory.serves(&service, &endpoint),
                Found::Peer { incarnation } => incarnation == self.incarnation,
                Found::Clear | Found::Unknown | Found::Refused => false,
            }
    }
}

/// Milliseconds, like everything here.
const UDP_TIMEOUT: u64 = 180_000;
const UNANSWERED_TIMEOUT: u64 = 120_000;
const ESTABLISHED_TIMEOUT: u64 = 86_400_000;
/// As long as the pod's own kernel keeps the ports of a closed connection.
const CLOSING_TIMEOUT: u64 = 60_000;
const RESET_TIMEOUT: u64 = 10_000;
/// Longer than kernels wait between two retransmissions.
const GONE_TIMEOUT: u64 = 180_000;
/// No flow is idle before.
pub(super) const SHORTEST_TIMEOUT: u64 = RESET_TIMEOUT;
