//! Counts what the control plane says, by kind.

use super::Node;
use crate::counters::Counter;
use crate::wire::header::{Header, MessageType};
use crate::wire::messages::MetaKind;

impl Node {
    /// Counts a datagram that leaves.
    pub(super) fn count_sent(&self, datagram: &[u8]) {
        if let Some(counter) = counter_of(datagram) {
            self.lane.counters().add(counter, 1);
        }
    }

    /// Counts a lighthouse message that was sent, or else received.
    pub(super) fn count_meta(&self, kind: MetaKind, sent: bool) {
        let (received, leaving) = match kind {
            MetaKind::HostQuery => (Counter::LighthouseQueryIn, Counter::LighthouseQueryOut),
            MetaKind::HostQueryReply => (Counter::LighthouseReplyIn, Counter::LighthouseReplyOut),
            MetaKind::HostUpdateNotification => (Counter::LighthouseUpdateIn, Counter::LighthouseUpdateOut),
            MetaKind::HostPunchNotification => (Counter::LighthousePunchIn, Counter::LighthousePunchOut),
            MetaKind::HostUpdateNotificationAck => (Counter::LighthouseAckIn, Counter::LighthouseAckOut),
            MetaKind::Other(_) => (Counter::LighthouseOtherIn, Counter::LighthouseOtherOut),
        };
        self.lane.counters().add(if sent { leaving } else { received }, 1);
    }
}

/// `None` for an overlay packet, which is counted where it is sealed.
fn counter_of(datagram: &[u8]) -> Option<Counter> {
    match datagram {
        [1] => return Some(Counter::KeepalivesOut),
        [_] => return Some(Counter::HolePunchesOut),
        _ => {}
    }
    Some(match Header::parse(datagram).ok()?.kind {
        MessageType::Handshake => Counter::HandshakesOut,
        MessageType::Lighthouse => Counter::LighthouseOut,
        MessageType::TestRequest => Counter::TestRequestsOut,
        MessageType::TestReply => Counter::TestRepliesOut,
        MessageType::CloseTunnel => Counter::CloseTunnelOut,
        MessageType::Control => Counter::ControlOut,
        MessageType::RecvError => Counter::RecvErrorsOut,
        MessageType::Relay => Counter::FramesOut,
        MessageType::Data => return None,
    })
}
