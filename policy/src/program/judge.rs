//! Judges flows by a program.

use core::net::IpAddr;

use super::format::{FLAG_AUDITED, FLAG_CLOSED, FLAG_ENFORCED, NONE, SectionKind, action, octets, port_key};
use super::layout::{Mask, Program, Record};
use super::protocol::{SCTP, TCP, UDP};
use super::verdict::{Decision, Peer, Reason, Tier, Verdict, Who};

/// Which policies a decision is made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum View {
    /// Those without the audit annotation.
    Enforced,
    /// All, as if none had it.
    All,
}

/// The rows that match one flow, as the masks that they follow from.
#[derive(Clone, Copy)]
struct Matches<'a> {
    peer: Mask<'a>,
    address: Mask<'a>,
    port: Mask<'a>,
    named_port: Mask<'a>,
    audited: Mask<'a>,
}

impl Matches<'_> {
    #[inline]
    fn word(&self, place: u32, view: View) -> u64 {
        let peers = self.peer.word(place) | self.address.word(place);
        let rows = peers & (self.port.word(place) | self.named_port.word(place));
        match view {
            View::Enforced => rows & !self.audited.word(place),
            View::All => rows,
        }
    }

    /// The first matching row from `from` on and before `end`.
    #[inline]
    fn first(&self, from: u32, end: u32, view: View) -> Option<u32> {
        let mut place = from / 64;
        let mut before = !0 << (from % 64);
        while place * 64 < end {
            let mut rows = self.word(place, view) & before;
            let left = end - place * 64;
            if left < 64 {
                rows &= (1 << left) - 1;
            }
            if rows != 0 {
                return Some(place * 64 + rows.trailing_zeros());
            }
            before = !0;
            place += 1;
        }
        None
    }
}

impl<'a> Program<'a> {
    /// Judges a flow between the program's pod and `peer` by its IP protocol and destination port. The port counts for
    /// TCP, UDP and SCTP only. Answers of a flow that was allowed, and ICMP errors about it, are not asked about.
    ///
    /// The caller vouches for `peer`: it is whom a certificate names, or who is known by other means to have the
    /// address of a packet in clear.
    #[must_use]
    pub fn judge(&self, peer: &Peer, protocol: u8, port: u16) -> Verdict {
        self.judge_at(peer, protocol, port, true)
    }

    /// Like [`Program::judge`], for a peer whose certificate has these groups. They count if it is no pod.
    #[must_use]
    pub fn judge_carrying(&self, peer: &Peer, groups: &[impl AsRef<str>], protocol: u8, port: u16) -> Verdict {
        let has_groups = peer.who == Who::Outside && self.layout.count(SectionKind::Groups) > 0;
        self.judge_as(peer, if has_groups { groups } else { &[] }, (protocol, port), true)
    }

    /// Like [`Program::judge`]; the pod's own node is an address as any other unless `knows_node`.
    pub(crate) fn judge_at(&self, peer: &Peer, protocol: u8, port: u16, knows_node: bool) -> Verdict {
        self.judge_as(peer, &[""; 0], (protocol, port), knows_node)
    }

    fn judge_as(
        &self,
        peer: &Peer,
        groups: &[impl AsRef<str>],
        (protocol, port): (u8, u16),
        knows_node: bool,
    ) -> Verdict {
        let has_audited = self.layout.flags & FLAG_AUDITED != 0;
        let same = |decision| Verdict { enforced: decision, audited: has_audited.then_some(decision) };
        let address = peer.address.map(|address| address.to_canonical());
        if let Some(reason) = self.always_allowed(peer.who, address).filter(|reason| knows_node || !is_node(*reason)) {
            return same(Decision::allow(reason));
        }
        let has_enforced = self.layout.flags & FLAG_ENFORCED != 0;
        let is_closed = self.layout.flags & FLAG_CLOSED != 0;
        if peer.who == Who::Unnumbered && !is_closed {
            let decide = |has_any| match has_any {
                true => Decision::deny(Reason::Unnumbered),
                false => Decision::allow(Reason::NoPolicy),
            };
            return Verdict { enforced: decide(has_enforced), audited: has_audited.then(|| decide(true)) };
        }
        let malformed = Decision::deny(Reason::Malformed);
        let Some(matches) = self.matches(peer.who, address, protocol, port) else { return same(malformed) };
        let decide = |view| self.decide(&matches, groups, view).unwrap_or(malformed);
        Verdict { enforced: decide(View::Enforced), audited: has_audited.then(|| decide(View::All)) }
    }

    /// A pod reaches itself and its node, whatever policies say. Only who is no other pod can be either.
    fn always_allowed(&self, who: Who, address: Option<IpAddr>) -> Option<Reason> {
        let octets = octets(address?);
        let is_own = |identity| self.layout.identity == Some(identity);
        let is_at = |kind, index| self.record::<16>(kind, index).is_some_and(|record| *record.0 == octets);
        let own = self.layout.count(SectionKind::Own).min(MAX_OWN);
        let may_be_itself = match who {
            Who::Pod(identity) => is_own(identity),
            Who::Unnumbered => false,
            Who::Outside => true,
        };
        if may_be_itself && (0..own).any(|index| is_at(SectionKind::Own, index)) {
            return Some(Reason::Itself);
        }
        if who != Who::Outside {
            return None;
        }
        let nodes = (0, self.layout.count(SectionKind::Node));
        let found = self.last_until::<16>(SectionKind::Node, nodes, |record| *record.0 <= octets);
        found?.is_some_and(|record| *record.0 == octets).then_some(Reason::OwnNode)
    }

    /// What the verdicts about a peer follow from, besides protocol and port: peers with equal ones get equal verdicts.
    /// `None` if a record is outside.
    #[cfg(feature = "compile")]
    pub(crate) fn likeness(&self, peer: &Peer) -> Option<Likeness> {
        let address = peer.address.map(|address| address.to_canonical());
        let who = match peer.who {
            Who::Pod(identity) => Ok(self.class(identity.number())?),
            other => Err(other),
        };
        let mask = match address {
            Some(IpAddr::V4(address)) => {
                let number = address.to_bits();
                self.interval_mask::<8>(SectionKind::V4, 4, |record| record.u32(0) <= number)?
            }
            Some(IpAddr::V6(address)) => {
                let number = address.to_bits();
                self.interval_mask::<20>(SectionKind::V6, 16, |record| record.u128(0) <= number)?
            }
            None => NONE,
        };
        Some(Likeness { always: self.always_allowed(peer.who, address), who, mask })
    }

    /// Whether it is that of a closed pod.
    #[cfg(feature = "compile")]
    pub(crate) const fn is_closed(&self) -> bool {
        self.layout.flags & FLAG_CLOSED != 0
    }

    /// Where verdicts can change, in no order: addresses as numbers, of one family.
    #[cfg(feature = "compile")]
    pub(crate) fn address_starts(&self, is_v4: bool) -> impl Iterator<Item = u128> {
        let (v4, v6) = (SectionKind::V4, SectionKind::V6);
        let of_v4 = (0..self.layout.count(v4)).filter_map(move |n| Some(self.record::<8>(v4, n)?.u32(0).into()));
        let of_v6 = (0..self.layout.count(v6)).filter_map(move |n| Some(self.record::<20>(v6, n)?.u128(0)));
        let single = |kind| (0..self.layout.count(kind)).filter_map(move |n| self.record::<16>(kind, n));
        let single = single(SectionKind::Own).chain(single(SectionKind::Node));
        let single = single.filter_map(move |record| match core::net::Ipv6Addr::from(*record.0).to_canonical() {
            IpAddr::V4(address) => is_v4.then(|| address.to_bits().into()),
            IpAddr::V6(address) => (!is_v4).then(|| address.to_bits()),
        });
        let single = single.flat_map(|number: u128| [Some(number), number.checked_add(1)]).flatten();
        of_v4.filter(move |_| is_v4).chain(of_v6.filter(move |_| !is_v4)).chain(single)
    }

    /// The same for protocols and ports, as [`port_key`] joins them.
    #[cfg(feature = "compile")]
    pub(crate) fn port_starts(&self) -> impl Iterator<Item = u32> {
        let key = |kind| (0..self.layout.count(kind)).filter_map(move |n| Some(self.record::<8>(kind, n)?.u32(0)));
        let named = key(SectionKind::NamedPorts).flat_map(|key| [key, key.saturating_add(1)]);
        key(SectionKind::Ports).chain(named)
    }

    /// `None` if a record is outside.
    fn matches(&self, who: Who, address: Option<IpAddr>, protocol: u8, port: u16) -> Option<Matches<'a>> {
        let empty = self.mask(NONE)?;
        let has_ports = matches!(protocol, TCP | UDP | SCTP);
        let key = port_key(protocol, if has_ports { port } else { 0 });
        let (peer, named_port) = match who {
            Who::Pod(identity) => {
                let class: Record<'_, 12> = self.record(SectionKind::Classes, self.class(identity.number())?)?;
                let first = class.u32(4);
                let listed = (first, first.checked_add(class.u32(8))?);
                let found = self.last_until::<8>(SectionKind::NamedPorts, listed, |record| record.u32(0) <= key)?;
                let named_port = match found.filter(|record| record.u32(0) == key) {
                    Some(record) => self.mask(record.u32(4))?,
                    None => empty,
                };
                (self.mask(class.u32(0))?, named_port)
            }
            Who::Outside | Who::Unnumbered => (self.mask(self.layout.outside)?, empty),
        };
        let address = match address {
            Some(IpAddr::V4(address)) => {
                let number = address.to_bits();
                self.interval::<8>(SectionKind::V4, 4, |record| record.u32(0) <= number)?
            }
            Some(IpAddr::V6(address)) => {
                let number = address.to_bits();
                self.interval::<20>(SectionKind::V6, 16, |record| record.u128(0) <= number)?
            }
            None => empty,
        };
        let port = self.interval::<8>(SectionKind::Ports, 4, |record| record.u32(0) <= key)?;
        Some(Matches { peer, address, port, named_port, audited: self.mask(self.layout.audited)? })
    }

    /// The class of a pod's identity; `None` if a record is outside.
    fn class(&self, identity: u32) -> Option<u32> {
        let dense = self.layout.count(SectionKind::Dense);
        if dense > 0 {
            return match self.record::<2>(SectionKind::Dense, identity) {
                Some(record) => Some(record.u16(0).into()),
                None if identity >= dense => Some(0),
                None => None,
            };
        }
        let runs = self.layout.count(SectionKind::Runs);
        let found = self.last_until::<8>(SectionKind::Runs, (0, runs), |record| record.u32(0) <= identity)?;
        Some(found.map_or(0, |record| record.u32(4)))
    }

    /// The mask of the interval that a key is in; empty before the first one, `None` if a record is outside.
    fn interval<const N: usize>(
        &self,
        kind: SectionKind,
        mask_at: usize,
        is_until: impl Fn(Record<'a, N>) -> bool,
    ) -> Option<Mask<'a>> {
        self.mask(self.interval_mask(kind, mask_at, is_until)?)
    }

    /// The number of that mask.
    fn interval_mask<const N: usize>(
        &self,
        kind: SectionKind,
        mask_at: usize,
        is_until: impl Fn(Record<'a, N>) -> bool,
    ) -> Option<u32> {
        let found = self.last_until(kind, (0, self.layout.count(kind)), is_until)?;
        Some(found.map_or(NONE, |record| record.u32(mask_at)))
    }

    /// The rows of NetworkPolicies that allow a group; `None` if there are none.
    fn group(&self, name: &str) -> Option<Mask<'a>> {
        let all = (0, self.layout.count(SectionKind::Groups));
        let name_of = |record: Record<'a, 12>| self.string(record.u32(0), record.u32(4));
        let is_until = |record| name_of(record).is_some_and(|found| found <= name);
        let found = self.last_until::<12>(SectionKind::Groups, all, is_until)??;
        self.mask(found.u32(8)).filter(|_| name_of(found) == Some(name))
    }

    /// `None` if a record is outside.
    fn decide(&self, matches: &Matches<'_>, groups: &[impl AsRef<str>], view: View) -> Option<Decision> {
        if self.layout.flags & FLAG_CLOSED != 0 {
            return match matches.first(self.layout.admin_end, self.layout.policies_end, view) {
                Some(row) => self.row(row, Tier::NetworkPolicy)?,
                None => Some(Decision::deny(Reason::Closed)),
            };
        }
        let rows = self.layout.count(SectionKind::Rows);
        if let Some(row) = matches.first(0, self.layout.admin_end, view)
            && let Some(decision) = self.row(row, Tier::Admin)?
        {
            return Some(decision);
        }
        let [enforced, all] = self.layout.isolating;
        let isolating = if view == View::Enforced { enforced } else { all };
        if isolating != NONE {
            let first = |matches: &Matches<'_>| matches.first(self.layout.admin_end, self.layout.policies_end, view);
            let carried = groups.iter().filter_map(|group| self.group(group.as_ref()));
            let by_group = carried.filter_map(|peer| first(&Matches { peer, address: Mask::EMPTY, ..*matches }));
            return match first(matches).into_iter().chain(by_group).min() {
                Some(row) => self.row(row, Tier::NetworkPolicy)?,
                None => Some(Decision::deny(Reason::Isolated { policy: isolating })),
            };
        }
        let decision = match matches.first(self.layout.policies_end, rows, view) {
            Some(row) => self.row(row, Tier::Baseline)?,
            None => None,
        };
        Some(decision.unwrap_or(Decision::allow(Reason::NoPolicy)))
    }

    /// What a row decides: nothing, if it passes flows to the next tier. The outer `None`: the record is outside.
    fn row(&self, row: u32, tier: Tier) -> Option<Option<Decision>> {
        let record: Record<'_, 16> = self.record(SectionKind::Rows, row)?;
        let reason = Reason::Rule { tier, policy: record.u32(0), rule: record.u16(4) };
        match record.u8(6) {
            action::ACCEPT => Some(Some(Decision::allow(reason))),
            action::DENY => Some(Some(Decision::deny(reason))),
            action::PASS => Some(None),
            _ => None,
        }
    }
}

/// See [`Program::likeness`].
#[cfg(feature = "compile")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Likeness {
    always: Option<Reason>,
    /// The class of a pod.
    who: Result<u32, Who>,
    /// By the address.
    mask: u32,
}

const fn is_node(reason: Reason) -> bool {
    matches!(reason, Reason::OwnNode)
}

/// A pod has an address of each family.
const MAX_OWN: u32 = 2;
