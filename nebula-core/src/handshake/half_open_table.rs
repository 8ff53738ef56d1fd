//! Handshakes that this node answered and whose callers are not confirmed yet. Bounded in number and time, yet large
//! enough that no flood the admission lets in evicts a caller within its first second.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, VerifiedCertificate};

use super::{Agreed, Error, Excess, Exchange, Reached};
use crate::Origin;
use crate::index::{LocalIndex, RelayIndex};
use crate::tunnel::{HalfOpen, ReservedIndex, TEST_LEN};

/// A handshake that this node answered.
#[derive(Debug)]
pub(crate) struct Answered {
    pub(crate) local_index: ReservedIndex,
    /// Its ML-KEM exchange, until message 3 is accepted.
    exchange: Option<Exchange>,
    /// Its keys, shared with the lanes that receive in it; `None` until then.
    half_open: Option<Arc<HalfOpen>>,
    /// Digest of the message 3 that was accepted: repeated, it gets the same message 4.
    offer: Option<[u8; 32]>,
    /// Whom the caller claims to be: the certificate in message 1.
    pub(crate) peer: VerifiedCertificate,
    /// The own certificate in message 2.
    pub(crate) own_certificate: Fingerprint,
    /// Digest of message 1: a repeated message 1 gets the same message 2.
    pub(crate) digest: [u8; 32],
    /// The last message to the caller: 2, or 4 of an ML-KEM exchange. Header included.
    pub(crate) reply: Box<[u8]>,
    pub(crate) since: Instant,
    /// Test requests sent.
    pub(crate) tests: u32,
    sender: Sender,
    /// Who has got the reply.
    reached: Reached,
}

/// Where the last copy of message 1 came from, and how many bytes were received from and sent to that origin. The
/// source address may be forged, so what is sent there is limited (RFC 9000, section 8.1).
#[derive(Debug)]
struct Sender {
    origin: Origin,
    received: usize,
    sent: usize,
    /// What was sent beyond that limit.
    borrowed: usize,
}

impl Answered {
    pub(crate) fn new(
        (local_index, agreed): (ReservedIndex, Agreed),
        own_certificate: Fingerprint,
        digest: [u8; 32],
        reply: Vec<u8>,
        (since, origin): (Instant, Origin),
    ) -> Self {
        let sender = Sender { origin, received: 0, sent: 0, borrowed: 0 };
        let reply = reply.into_boxed_slice();
        let reached = Reached::default();
        let peer = agreed.negotiated().peer.clone();
        let (exchange, half_open) = match agreed {
            Agreed::Tunnel(done) => (None, Some(Arc::new(HalfOpen::new(done, origin.endpoint())))),
            Agreed::Exchange(exchange) => (Some(exchange), None),
        };
        Self {
            local_index,
            exchange,
            half_open,
            offer: None,
            peer,
            own_certificate,
            digest,
            reply,
            since,
            tests: 0,
            sender,
            reached,
        }
    }

    /// Its keys; `None` before the end of an ML-KEM exchange.
    pub(crate) fn half_open(&self) -> Option<&Arc<HalfOpen>> {
        self.half_open.as_ref()
    }

    /// Whether an ML-KEM secret is part of its keys, or will be.
    pub(crate) fn is_post_quantum(&self) -> bool {
        self.exchange.is_some() || self.offer.is_some()
    }

    /// Reads message 3 of an ML-KEM exchange, whose answer goes `to` there. Returns the keys, the first time.
    pub(crate) fn read_offer(
        &mut self,
        now: Instant,
        (offer, digest): (&[u8], [u8; 32]),
        to: Origin,
    ) -> Result<Option<Arc<HalfOpen>>, Error> {
        if self.offer == Some(digest) {
            return Ok(None);
        }
        let Some(exchange) = &self.exchange else { return Err(Error::Noise("there is no exchange".into())) };
        let (keys, answer) = exchange.answer(offer)?;
        let done = self.exchange.take().map(|exchange| exchange.complete(keys));
        self.half_open = done.map(|done| Arc::new(HalfOpen::new(done, to.endpoint())));
        (self.offer, self.reply) = (Some(digest), answer.into_boxed_slice());
        // Its time and its tests begin again.
        (self.since, self.tests, self.reached) = (now, 0, Reached::default());
        Ok(self.half_open.clone())
    }

    /// Where the last copy of message 1 came from.
    pub(crate) fn origin(&self) -> Origin {
        self.sender.origin
    }

    /// Message 1 was received (again), in a datagram of `bytes` bytes. Returns message 2, if the sender may get it.
    fn answer(&mut self, now: Instant, origin: Origin, bytes: usize, excess: &mut Excess) -> Option<Vec<u8>> {
        self.hear(origin, bytes);
        if !self.may_send(self.reply.len(), |origin, missing| excess.take(now, origin, missing)) {
            return None;
        }
        self.reached.note(origin);
        Some(self.reply.to_vec())
    }

    /// Where the caller is, if it proved that by showing that it got message 2.
    pub(crate) fn proven(&self) -> Option<Origin> {
        match self.reached {
            Reached::Only(origin) => Some(origin),
            Reached::Nowhere | Reached::Several => None,
        }
    }

    /// Bytes that came from there and were not answered yet, if the caller was just heard there.
    pub(crate) fn unanswered_bytes(&self, heard: Origin) -> usize {
        let Sender { origin, received, sent, .. } = &self.sender;
        let before = if *origin == heard { received.saturating_sub(sent.div_ceil(MAX_AMPLIFICATION)) } else { 0 };
        before + TEST_LEN
    }

    /// A test request to the sender, if there were fewer than `most` and the sender may get another one.
    fn test(&mut self, now: Instant, most: u32, excess: &mut Excess) -> Option<Vec<u8>> {
        if !self.is_answered() || self.tests >= most {
            return None;
        }
        self.tests += 1;
        let had_excess = self.sender.borrowed > 0;
        let may = self.may_send(TEST_LEN, |origin, missing| had_excess && excess.take(now, origin, missing));
        if may { self.half_open.as_ref()?.test_request() } else { None }
    }

    fn hear(&mut self, origin: Origin, bytes: usize) {
        if self.sender.origin != origin {
            self.sender = Sender { origin, received: 0, sent: 0, borrowed: 0 };
        }
        self.sender.received = self.sender.received.saturating_add(bytes);
    }

    /// Decides whether this many bytes may be sent to the sender; if so, they count towards its limit. A message 2
    /// that is longer than three messages 1, and the tests after it, `take` what is missing from the excess.
    fn may_send(&mut self, bytes: usize, take: impl FnOnce(Origin, usize) -> bool) -> bool {
        let sender = &mut self.sender;
        let allowed = sender.received.saturating_mul(MAX_AMPLIFICATION).saturating_add(sender.borrowed);
        let missing = sender.sent.saturating_add(bytes).saturating_sub(allowed);
        if missing > 0 && !take(sender.origin, missing) {
            return false;
        }
        sender.borrowed += missing;
        sender.sent += bytes;
        true
    }

    /// Whether message 2 was sent to the present sender.
    pub(crate) fn is_answered(&self) -> bool {
        self.sender.sent > 0
    }

    /// The peer's overlay addresses, primary first.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.peer.networks().iter().map(ipnet::IpNet::addr)
    }

    /// When it is given up.
    pub(crate) fn expires(&self) -> Instant {
        self.since + EXPIRES_AFTER
    }
}

/// The source that an entry is counted for. IPv6 sources are counted per /64, since the owner of one address has them
/// all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    V4(u32),
    V6(u64),
    /// Everybody who calls through this hop of a relay.
    Relay(RelayIndex),
}

impl From<Origin> for Source {
    fn from(origin: Origin) -> Self {
        match origin {
            Origin::Relayed { hop, .. } => Self::Relay(hop),
            Origin::Direct(at) => match at.ip().to_canonical() {
                IpAddr::V4(address) => Self::V4(address.to_bits()),
                IpAddr::V6(address) => Self::V6((address.to_bits() >> 64) as u64),
            },
        }
    }
}

/// Place of an entry in the order of arrival.
type Serial = u64;

/// Number of entries of a source, and its oldest entry. The greatest rank is the source with the most entries and,
/// among those, the one with the oldest entry.
type Rank = (usize, Reverse<Serial>, Source);

/// All half-open handshakes.
#[derive(Debug)]
pub(crate) struct HalfOpenTable {
    capacity: usize,
    /// Boxed, since the nodes of the tree are half empty.
    entries: BTreeMap<LocalIndex, (Serial, Source, Box<Answered>)>,
    serial: Serial,
    by_digest: BTreeMap<[u8; 32], LocalIndex>,
    by_peer: BTreeSet<(IpAddr, Serial, LocalIndex)>,
    by_age: BTreeMap<Serial, LocalIndex>,
    by_source: BTreeSet<(Source, Serial)>,
    ranks: BTreeSet<Rank>,
    counts: BTreeMap<Source, usize>,
    excess: Excess,
}

impl HalfOpenTable {
    /// `rate` is the maximum number of handshakes answered per second; `key` is random.
    pub(crate) fn new(rate: Option<NonZeroU32>, now: Instant, key: u64) -> Self {
        // The admission lets in the rate, plus half a second's worth as a burst.
        let second =
            rate.map_or(MAX_CAPACITY, |rate| usize::try_from(rate.get()).unwrap_or(MAX_CAPACITY).saturating_mul(3) / 2);
        Self {
            capacity: second.clamp(MIN_CAPACITY, MAX_CAPACITY),
            entries: BTreeMap::new(),
            serial: 0,
            by_digest: BTreeMap::new(),
            by_peer: BTreeSet::new(),
            by_age: BTreeMap::new(),
            by_source: BTreeSet::new(),
            ranks: BTreeSet::new(),
            counts: BTreeMap::new(),
            excess: Excess::new(now, key),
        }
    }

    /// See [`Answered::answer`].
    pub(crate) fn answer(&mut self, now: Instant, index: LocalIndex, from: Origin, bytes: usize) -> Option<Vec<u8>> {
        let (.., answered) = self.entries.get_mut(&index)?;
        answered.answer(now, from, bytes, &mut self.excess)
    }

    /// See [`Answered::test`].
    pub(crate) fn test(&mut self, now: Instant, index: LocalIndex, most: u32) -> Option<Vec<u8>> {
        let (.., answered) = self.entries.get_mut(&index)?;
        answered.test(now, most, &mut self.excess)
    }

    /// A caller showed that it got what was sent to it: it is there, so nobody else was bothered.
    pub(crate) fn note_confirmed(&mut self, now: Instant, answered: &Answered) {
        self.excess.give_back(now, answered.sender.origin, answered.sender.borrowed);
    }

    /// Adds an entry. Returns the entry that was evicted to make room.
    pub(crate) fn insert(&mut self, answered: Answered) -> Option<Answered> {
        let evicted = if self.entries.len() >= self.capacity { self.surplus(answered.since) } else { None };
        let evicted = evicted.and_then(|index| self.remove(index));
        let (index, source, serial) = (*answered.local_index, Source::from(answered.origin()), self.serial);
        self.serial += 1;
        self.by_digest.insert(answered.digest, index);
        self.by_peer.extend(answered.addresses().take(MAX_INDEXED_ADDRESSES).map(|address| (address, serial, index)));
        self.by_age.insert(serial, index);
        self.change_source(source, |sources| {
            sources.insert((source, serial));
            1
        });
        self.entries.insert(index, (serial, source, Box::new(answered)));
        evicted
    }

    pub(crate) fn remove(&mut self, index: LocalIndex) -> Option<Answered> {
        let (serial, source, answered) = self.entries.remove(&index)?;
        if self.by_digest.get(&answered.digest) == Some(&index) {
            self.by_digest.remove(&answered.digest);
        }
        for address in answered.addresses().take(MAX_INDEXED_ADDRESSES) {
            self.by_peer.remove(&(address, serial, index));
        }
        self.by_age.remove(&serial);
        self.change_source(source, |sources| {
            sources.remove(&(source, serial));
            -1
        });
        Some(*answered)
    }

    /// The entry to evict when the table is full: the oldest of the source with the most entries, unless that is
    /// younger than [`EVICTABLE_AFTER`]; in that case the oldest entry of all. Addresses are easily forged, and nobody
    /// should lose an entry early because others use the same address.
    fn surplus(&self, now: Instant) -> Option<LocalIndex> {
        let (_, Reverse(serial), _) = self.ranks.last()?;
        let index = self.by_age.get(serial)?;
        let had_time = self.entries.get(index).is_some_and(|(.., it)| now >= it.since + EVICTABLE_AFTER);
        if had_time { Some(*index) } else { self.by_age.first_key_value().map(|(_, index)| *index) }
    }

    /// Keeps the ranks up to date while `change` adds or removes entries of a source; it returns the difference.
    fn change_source(&mut self, source: Source, change: impl FnOnce(&mut BTreeSet<(Source, Serial)>) -> isize) {
        let count = self.counts.remove(&source).unwrap_or_default();
        if let Some(oldest) = self.oldest_of(source) {
            self.ranks.remove(&(count, Reverse(oldest), source));
        }
        let count = count.saturating_add_signed(change(&mut self.by_source));
        if let Some(oldest) = self.oldest_of(source) {
            self.counts.insert(source, count);
            self.ranks.insert((count, Reverse(oldest), source));
        }
    }

    fn oldest_of(&self, source: Source) -> Option<Serial> {
        self.by_source.range((source, 0)..=(source, Serial::MAX)).next().map(|(_, serial)| *serial)
    }

    pub(crate) fn get_mut(&mut self, index: LocalIndex) -> Option<&mut Answered> {
        self.entries.get_mut(&index).map(|(.., answered)| &mut **answered)
    }

    pub(crate) fn contains(&self, index: LocalIndex) -> bool {
        self.entries.contains_key(&index)
    }

    /// The entry that the message 1 with this digest opened.
    pub(crate) fn opened_by(&self, digest: &[u8; 32]) -> Option<LocalIndex> {
        self.by_digest.get(digest).copied()
    }

    /// Callers that claim to be the peer with this address, newest first. Only the first addresses of a certificate are
    /// indexed.
    pub(crate) fn of_peer(&self, address: IpAddr) -> impl Iterator<Item = &Answered> {
        let range = (address, 0, LocalIndex(0))..=(address, Serial::MAX, LocalIndex(u32::MAX));
        let entries = self.by_peer.range(range).rev().filter_map(|(.., index)| self.entries.get(index));
        entries.map(|(.., answered)| &**answered)
    }

    /// Iterates in order of the local indexes.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Answered> {
        self.entries.values().map(|(.., answered)| &**answered)
    }

    /// Whether so many callers are unconfirmed that most must be forged, or a whole fleet has just come back.
    pub(crate) fn is_crowded(&self) -> bool {
        self.entries.len() > self.capacity / 2
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

/// Bytes that may be sent to an unconfirmed caller for each byte it sent.
const MAX_AMPLIFICATION: usize = 3;
/// Longer than the caller takes until the first traffic check of its tunnel, whose test confirms it.
const EXPIRES_AFTER: Duration = Duration::from_secs(10);
/// No younger entry is evicted while there are older ones.
const EVICTABLE_AFTER: Duration = Duration::from_secs(1);
/// Addresses by which an entry can be found: a certificate may hold very many.
const MAX_INDEXED_ADDRESSES: usize = 8;
/// Lower bound, for the smallest rates.
const MIN_CAPACITY: usize = 64;
/// About 25 MB. In [`EVICTABLE_AFTER`] a control plane answers fewer handshakes than this.
const MAX_CAPACITY: usize = 1 << 14;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::forward::testing;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn table(rate: u32) -> HalfOpenTable {
        HalfOpenTable::new(NonZeroU32::new(rate), base(), 7)
    }

    struct Callers {
        peer: VerifiedCertificate,
        next: u32,
    }

    impl Callers {
        fn new() -> Self {
            Self { peer: testing::verified(&["10.1.0.2/16", "fd00::2/64"]), next: 1 }
        }

        fn call(&mut self, since: Instant, from: SocketAddr) -> Answered {
            let local_index = LocalIndex(self.next);
            self.next += 1;
            let done = testing::negotiated(local_index, self.peer.clone(), false);
            let mut digest = [0; 32];
            digest[..4].copy_from_slice(&local_index.0.to_be_bytes());
            let fingerprint = self.peer.fingerprint();
            let made = (ReservedIndex::lone(local_index), Agreed::Tunnel(done));
            Answered::new(made, fingerprint, digest, vec![0; 100], (since, from.into()))
        }
    }

    fn source(number: u32) -> SocketAddr {
        SocketAddr::from((std::net::Ipv4Addr::from_bits(number), 4242))
    }

    #[test]
    fn nobody_is_pushed_out_within_a_second_at_the_highest_rate_of_the_admission() {
        for forged_source in [|n| source(n), |_| source(7)] {
            let (start, mut table, mut callers) = (base(), table(1000), Callers::new());
            let mut now = start;
            for number in 0..5000 {
                now = start + Duration::from_millis(number);
                let _evicted = table.insert(callers.call(now, forged_source(number as u32)));
            }
            // Its address is among the forged ones, too.
            let genuine = callers.call(now, source(7));
            let index = *genuine.local_index;
            let _evicted = table.insert(genuine);
            // The burst that the bucket allows, then the rate.
            for number in 0..1500 {
                let at = now + Duration::from_millis(u64::from(number).saturating_sub(500));
                assert!(table.contains(index), "after {number}");
                let _evicted = table.insert(callers.call(at, forged_source(9000 + number)));
            }
            assert_eq!(table.len(), 1500);
        }
    }

    #[test]
    fn after_a_second_the_source_with_most_entries_loses_its_oldest_one_first() {
        let (start, mut table, mut callers) = (base(), table(100), Callers::new());
        let quiet = callers.call(start, source(1));
        let index = *quiet.local_index;
        let _evicted = table.insert(quiet);
        for number in 0..1000 {
            let evicted = table.insert(callers.call(start + Duration::from_millis(10 * number), source(2)));
            assert!(evicted.is_none_or(|evicted| evicted.origin() == source(2).into()));
        }
        assert!(table.contains(index));
    }

    #[test]
    fn an_entry_is_found_by_every_address_of_its_peer_and_nothing_is_left_of_it() {
        let (start, mut table, mut callers) = (base(), table(10), Callers::new());
        for number in 0..500 {
            let _evicted = table.insert(callers.call(start, source(number / 3)));
        }
        assert_eq!(table.len(), MIN_CAPACITY);
        for address in ["10.1.0.2", "fd00::2"] {
            let found: Vec<_> = table.of_peer(address.parse().unwrap()).map(|it| it.local_index.0).collect();
            assert_eq!(found, (437..=500).rev().collect::<Vec<_>>(), "youngest first");
        }
        for index in table.iter().map(|it| *it.local_index).collect::<Vec<_>>() {
            assert!(table.remove(index).is_some() && table.remove(index).is_none());
        }
        let left = table.by_digest.len() + table.by_peer.len() + table.by_age.len() + table.by_source.len();
        assert_eq!((left, table.ranks.len(), table.counts.len()), (0, 0, 0));
    }

    #[test]
    fn whoever_sends_gets_three_times_as_much_at_most_and_another_address_starts_over() {
        let mut answered = Callers::new().call(base(), source(1));
        let may = |answered: &mut Answered, bytes| answered.may_send(bytes, |_, _| false);
        answered.hear(source(1).into(), 100);
        assert!(!may(&mut answered, 301) && !answered.is_answered());
        assert!(may(&mut answered, 250) && may(&mut answered, 50) && !may(&mut answered, 1));
        answered.hear(source(1).into(), 100);
        assert!(may(&mut answered, 300));
        answered.hear(source(1).into(), 1000);
        answered.hear(source(2).into(), 10);
        assert!(!may(&mut answered, 31) && may(&mut answered, 30));
    }

    #[test]
    fn a_message_2_that_is_longer_takes_what_is_missing_from_the_excess_and_a_caller_that_is_there_gives_it_back() {
        let (now, mut table) = (base(), table(100));
        let mut callers = Callers::new();
        for _ in 0..10_000 {
            let answered = callers.call(now, source(1));
            let index = *answered.local_index;
            table.insert(answered);
            // Message 2 has 100 bytes.
            assert!(table.answer(now, index, source(1).into(), 10).is_some());
            assert!(table.test(now, index, 1).is_some());
            let confirmed = table.remove(index).unwrap();
            assert_eq!(confirmed.sender.borrowed, 100 - 30 + TEST_LEN);
            table.note_confirmed(now, &confirmed);
        }
        let unconfirmed = (0..10_000).filter(|_| {
            let answered = callers.call(now, source(1));
            let index = *answered.local_index;
            table.insert(answered);
            let is_answered = table.answer(now, index, source(1).into(), 10).is_some();
            table.remove(index);
            is_answered
        });
        assert_eq!(unconfirmed.count(), (128 << 10) / 70);
    }

    #[test]
    fn a_caller_is_tested_only_after_message_2_and_at_most_as_often_as_asked() {
        let mut answered = Callers::new().call(base(), source(1));
        let (now, mut excess) = (base(), Excess::new(base(), 7));
        assert_eq!(answered.test(now, 2, &mut excess), None, "there is no message 2 yet");
        assert_eq!(answered.answer(now, source(1).into(), 1000, &mut excess).unwrap().len(), 100);
        let tests = std::iter::from_fn(|| answered.test(now, 2, &mut excess)).collect::<Vec<_>>();
        assert!(tests.len() == 2 && tests[0] != tests[1], "each has a counter of its own");
    }
}
