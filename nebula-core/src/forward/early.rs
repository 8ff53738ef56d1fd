//! A buffer for datagrams that arrive before their tunnel exists: those that a peer sends right after its second
//! handshake message, or that overtake that message, while the control plane still works on the handshake.
//!
//! The lane buffers them rather than the control plane, so that nothing that arrives later is delivered before them. It
//! does so only for an index that is reserved for a handshake, which nobody can guess without having seen the first
//! handshake message. An attacker who has seen it can fill the buffer; further datagrams are then dropped, as they
//! would be without a buffer.

use std::time::{Duration, Instant};

use super::piece::Piece;
use crate::Origin;
use crate::index::LocalIndex;
use crate::tunnel::TunnelTable;

/// Datagrams that wait for their tunnels, bounded in number, bytes and time.
#[derive(Debug, Default)]
pub(super) struct Early {
    runs: Vec<EarlyRun>,
    datagrams: usize,
    bytes: usize,
    /// Version of the tunnel table at the last check.
    version: u64,
    looked: Option<Instant>,
    pause: Duration,
}

/// Datagrams for one tunnel from one origin, in order of arrival.
#[derive(Debug)]
pub(super) struct EarlyRun {
    pub(super) index: LocalIndex,
    pub(super) from: Origin,
    pub(super) memory: Vec<u8>,
    /// Ranges of `memory`.
    pub(super) pieces: Vec<Piece>,
    since: Instant,
}

impl Early {
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Whether datagrams are waiting for this tunnel.
    pub(super) fn holds(&self, index: LocalIndex) -> bool {
        self.runs.iter().any(|run| run.index == index)
    }

    /// Copies datagrams out of `buffer` as far as there is room, and returns how many. `version` is the version of the
    /// tunnel table, read before the caller checked that the index is awaited.
    pub(super) fn keep(
        &mut self,
        now: Instant,
        version: u64,
        buffer: &[u8],
        pieces: &[Piece],
        (from, index): (Origin, LocalIndex),
    ) -> usize {
        let same = |run: &EarlyRun| run.index == index && run.from == from;
        let at = match self.runs.iter().rposition(|run| run.index == index) {
            Some(last) if same(&self.runs[last]) => last,
            _ if self.runs.len() >= MAX_RUNS => return 0,
            _ => {
                (self.looked, self.pause) = (Some(now), FIRST_RETRY_AFTER);
                if self.runs.is_empty() {
                    self.version = version;
                }
                self.runs.push(EarlyRun { index, from, memory: Vec::new(), pieces: Vec::new(), since: now });
                self.runs.len() - 1
            }
        };
        let run = &mut self.runs[at];
        let mut kept = 0;
        for piece in pieces {
            let datagram = &buffer[piece.range.clone()];
            if self.datagrams >= MAX_DATAGRAMS || self.bytes + datagram.len() > MAX_BYTES {
                break;
            }
            let start = run.memory.len();
            run.memory.extend_from_slice(datagram);
            run.pieces.push(piece.moved_to(start..run.memory.len()));
            (self.datagrams, self.bytes, kept) = (self.datagrams + 1, self.bytes + datagram.len(), kept + 1);
        }
        kept
    }

    /// The latest time to call [`Early::next`]; `None` if nothing is buffered.
    pub(super) fn due(&self) -> Option<Instant> {
        self.looked.filter(|_| !self.is_empty()).map(|looked| looked + self.pause)
    }

    /// Takes out the oldest run whose handshake is over or that has waited too long.
    pub(super) fn next(&mut self, now: Instant, tunnels: &TunnelTable) -> Option<EarlyRun> {
        let version = tunnels.version();
        let due = self.due()? <= now;
        if !due && version == self.version {
            return None;
        }
        let is_over = |run: &EarlyRun| now >= run.since + KEEP_FOR || !tunnels.is_reserved(run.index);
        let Some(at) = self.runs.iter().position(is_over) else {
            if due {
                self.pause *= 2;
            }
            (self.version, self.looked) = (version, Some(now));
            return None;
        };
        let run = self.runs.remove(at);
        self.datagrams -= run.pieces.len();
        self.bytes -= run.memory.len();
        Some(run)
    }
}

/// Half a millisecond of traffic at 10 Gbit/s.
const MAX_DATAGRAMS: usize = 512;
const MAX_BYTES: usize = 768 << 10;
/// Maximum number of runs. A tunnel gets another run whenever the origin of its datagrams changes.
const MAX_RUNS: usize = 32;
/// Datagrams that waited longer than this are of no use to anybody.
const KEEP_FOR: Duration = Duration::from_millis(500);
/// First interval of the backoff. The control plane spends a few hundred microseconds on a handshake.
const FIRST_RETRY_AFTER: Duration = Duration::from_micros(50);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::net::SocketAddr;

    use super::super::testing::{Side, Spec, reserved_pair};
    use super::super::{Offload, SegmentKind};
    use super::*;
    use crate::counters::{Counter, Direction};
    use crate::tunnel::cipher::Cipher;
    use crate::wire::header::{Header, MessageType};
    use crate::{DropReason, Punt, Verdict};

    /// Two nodes: the first still processes handshake message 2, the second already sends.
    fn sides() -> [Side; 2] {
        let [b, a] = reserved_pair(Cipher::Aes256Gcm);
        b.publish();
        [a, b]
    }

    fn packet(number: u8) -> Vec<u8> {
        Spec { payload: vec![number; 10], source_port: 1000 + u16::from(number), ..Spec::new(SegmentKind::Udp, false) }
            .build()
    }

    fn packets(numbers: std::ops::Range<u8>) -> Vec<(Vec<u8>, Offload)> {
        numbers.map(|number| (packet(number), Offload::default())).collect()
    }

    /// Sends these packets from `side` and returns the datagrams.
    fn datagrams(side: &mut Side, numbers: std::ops::Range<u8>) -> Vec<Vec<u8>> {
        for number in numbers {
            assert_eq!(side.send(&packet(number), Offload::default()), Verdict::Transmit);
        }
        side.sent()
    }

    fn dropped(side: &Side, reason: DropReason) -> u64 {
        side.lane.counters().dropped(Direction::Inbound, reason)
    }

    #[test]
    fn what_comes_before_its_tunnel_is_delivered_once_and_before_what_comes_later() {
        let [mut a, mut b] = sides();
        let first = datagrams(&mut b, 0..3);
        assert!(a.receive(b.endpoint, &first).is_empty());
        assert!(a.receive(b.endpoint, &first[..1]).is_empty(), "the network repeats one");
        assert!(a.receive_early().is_empty(), "no tunnel yet");
        assert!(a.lane.early_due().is_some_and(|due| due > a.now));
        a.publish();
        let later = datagrams(&mut b, 3..5);
        assert!(a.receive(b.endpoint, &later).is_empty(), "the others go first");
        assert_eq!(a.receive_early(), packets(0..5));
        assert_eq!(a.lane.early_due(), None);
        let last = datagrams(&mut b, 5..6);
        assert_eq!(a.receive(b.endpoint, &last), packets(5..6));
        assert_eq!(a.receive(b.endpoint, &first), [], "their counters are used");
        assert_eq!(dropped(&a, DropReason::Replayed), 1 + 3);
        assert_eq!(dropped(&a, DropReason::UnknownIndex), 0);
        assert_eq!(a.lane.counters().get(Counter::PacketsIn), 6);
        assert_eq!(a.lane.counters().get(Counter::DatagramsIn), 3 + 1 + 2 + 1 + 3);
        let bytes = packet(0).len() as u64;
        assert_eq!(a.lane.counters().get(Counter::BytesIn), 6 * bytes);
    }

    #[test]
    fn a_tunnel_is_noticed_at_once_and_looked_for_after_ever_longer_pauses() {
        let [mut a, mut b] = sides();
        let start = a.now;
        assert!(a.receive(b.endpoint, &datagrams(&mut b, 0..1)).is_empty());
        let mut looks = 0;
        while let Some(due) = a.lane.early_due().filter(|due| *due < start + KEEP_FOR) {
            a.now = due;
            looks += 1;
            assert!(a.receive_early().is_empty());
        }
        assert!((5..20).contains(&looks), "{looks}");
        a.publish();
        assert_eq!(a.receive_early(), packets(0..1), "the table changed");
    }

    #[test]
    fn a_handshake_that_fails_or_takes_too_long_loses_what_waits_and_says_so() {
        let [mut a, mut b] = sides();
        let (from, index) = (b.endpoint.into(), a.index().0);
        for end in [0, 1] {
            let before = dropped(&a, DropReason::UnknownIndex);
            assert!(a.receive(b.endpoint, &datagrams(&mut b, 0..2)).is_empty());
            match end {
                0 => a.now += KEEP_FOR,
                _ => {
                    a.forwarder.tunnels().release(a.index());
                    a.now = a.lane.early_due().unwrap();
                }
            }
            assert!(a.receive_early().is_empty());
            assert_eq!(dropped(&a, DropReason::UnknownIndex), before + 2);
            assert_eq!(a.lane.take_punts().collect::<Vec<_>>(), [Punt::UnknownIndex { from, index }]);
            assert_eq!(a.lane.early_due(), None);
        }
    }

    #[test]
    fn what_waits_is_checked_like_everything_else() {
        let [mut a, mut b] = sides();
        let mut forged = datagrams(&mut b, 0..1).remove(0);
        *forged.last_mut().unwrap() ^= 1;
        let good = datagrams(&mut b, 1..2).remove(0);
        let short = good[..20].to_vec();
        assert!(a.receive(b.endpoint, &[forged, short, good]).is_empty());
        a.publish();
        assert_eq!(a.receive_early(), packets(1..2));
        assert_eq!((dropped(&a, DropReason::BadTag), dropped(&a, DropReason::Truncated)), (1, 1));
    }

    #[test]
    fn a_flood_is_bounded_in_datagrams_bytes_and_sources_and_only_a_reserved_index_is_kept() {
        let [mut a, b] = sides();
        let forged = |index, len| {
            [&Header { kind: MessageType::Data, index, counter: 9 }.to_bytes()[..], &vec![0; len]].concat()
        };
        let index = a.index().0;
        assert!(a.receive(b.endpoint, &[forged(index ^ 1, 100)]).is_empty());
        assert_eq!((a.lane.early_due(), dropped(&a, DropReason::UnknownIndex)), (None, 1), "nobody's index");

        let flood = vec![forged(index, 100); MAX_DATAGRAMS + 100];
        assert!(a.receive(b.endpoint, &flood).is_empty());
        assert_eq!((a.lane.early.datagrams, dropped(&a, DropReason::UnknownIndex)), (MAX_DATAGRAMS, 101));
        a.now += KEEP_FOR;
        assert!(a.receive_early().is_empty());
        assert_eq!((a.lane.early.datagrams, a.lane.early.bytes), (0, 0));

        let flood = vec![forged(index, 8000); 200];
        assert!(a.receive(b.endpoint, &flood).is_empty());
        assert!(a.lane.early.bytes <= MAX_BYTES && a.lane.early.bytes > MAX_BYTES - 8100);
        a.now += KEEP_FOR;
        assert!(a.receive_early().is_empty());

        for port in 1..100 {
            let from = SocketAddr::new([203, 0, 113, 9].into(), port);
            assert!(a.receive(from, &[forged(index, 100)]).is_empty());
        }
        assert_eq!(a.lane.early.runs.len(), MAX_RUNS);
        assert!(a.lane.take_punts().count() <= 128);
    }
}
