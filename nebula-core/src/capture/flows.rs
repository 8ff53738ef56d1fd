//! Decides what becomes of each flow of the pod, and remembers those that are translated, for all lanes together.

mod handed_over;

use std::net::SocketAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

pub(crate) use self::handed_over::{HandedOverAffinity, HandedOverCourse};
use super::chosen::Chosen;
use super::entry::State;
use super::fragments::Fragments;
use super::hash::Key;
use super::rendezvous::scramble;
use super::table::Table;
use super::translation::Translation;
use super::{Current, Directory, Endpoint, Found, Service, Target};
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{CachePadded, Mutex, MutexGuard};
use crate::wire::ip::{FlowKey, protocol};

/// Times before this count as this one. No flow lasts longer without a packet.
const MAX_PAST: Duration = Duration::from_secs(86_400);

/// What becomes of the packets of a flow of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Course {
    /// To an enrolled pod, as they are.
    Direct,
    /// To an endpoint, translated.
    Translated(Translation),
    /// From this pod, as a client, to itself, as the endpoint.
    ToSelf(Translation),
    /// From this pod, as the endpoint, to itself, as a client.
    BackToSelf(Translation),
    /// To the primary network, as they are.
    Bypass,
}

/// Why a packet has no course.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoCourse {
    /// Nothing is known about the destination.
    Unknown,
    /// Nobody may or can answer there.
    Refused,
    /// The other end of a flow is gone: the endpoint of a connection, or the pod that a tunnel led to.
    EndpointGone,
    /// All flows in the table are in use, or all ports of this one are.
    Full,
}

/// The first packet of a flow that a lane does not know, or one that changes its state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct First<'a> {
    pub(crate) flow: &'a FlowKey,
    /// It opens a TCP connection, or nothing that came before it is known.
    pub(crate) opens: bool,
    /// The endpoint of the Service that the primary network chose for it before this node captured it.
    pub(crate) led_to: Option<SocketAddr>,
    pub(crate) now: Instant,
}

/// A flow that a program opened before this node started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenedBefore {
    /// As the program knows it.
    pub flow: FlowKey,
    /// Where the primary network led it, if it was opened before it was captured: the endpoint of a Service. `None`:
    /// it gets the endpoint that an earlier instance of this node chose.
    pub led_to: Option<SocketAddr>,
}

impl From<FlowKey> for OpenedBefore {
    fn from(flow: FlowKey) -> Self {
        Self { flow, led_to: None }
    }
}

/// Translated flows, shared by all lanes. Lanes come here with the first packet of a flow, about once a second for each
/// flow in use, and when the directory changes; everything else is answered by their own [`super::OutboundCourses`] and
/// [`super::InboundCourses`].
#[derive(Debug)]
pub(crate) struct Translations {
    start: Instant,
    /// Rises with each new flow, so that a lane may remember that an inbound flow is not translated.
    added: CachePadded<AtomicU64>,
    max_flows: AtomicUsize,
    table: Mutex<Table>,
    pub(crate) fragments: Fragments,
}

impl Translations {
    /// `start` is the earliest time that will ever be passed in.
    pub(crate) fn new(start: Instant, max_flows: usize) -> Self {
        Self {
            // Flows of an earlier process were used before the start.
            start: start.checked_sub(MAX_PAST).unwrap_or(start),
            added: CachePadded::new(AtomicU64::new(0)),
            max_flows: AtomicUsize::new(max_flows.max(1)),
            table: Mutex::new(Table::default()),
            fragments: Fragments::default(),
        }
    }

    pub(crate) fn set_max_flows(&self, max_flows: usize) {
        self.max_flows.store(max_flows.max(1), Ordering::Relaxed);
    }

    /// Number of translated flows, including idle ones that were not removed yet.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Number of flows to Services that are known to leave on the primary network.
    #[cfg(all(test, not(loom)))]
    pub(super) fn bypassed(&self) -> usize {
        self.lock().bypassed.len()
    }

    /// Changes with each new flow. 0 until there was one.
    #[inline]
    pub(crate) fn added(&self) -> u64 {
        self.added.load(Ordering::Acquire)
    }

    /// Removes idle flows.
    pub(crate) fn expire(&self, now: Instant) {
        let now = self.millis(now);
        self.lock().expire(now);
    }

    /// Notes that flows were in tunnels as they are, so that nothing of them leaves in clear.
    pub(crate) fn seal(&self, flows: &[FlowKey], now: Instant) {
        let (now, most) = (self.millis(now), self.most());
        let mut table = self.lock();
        for flow in flows {
            let key = table.key(flow);
            table.sealed.note(&key, now, most);
        }
    }

    /// Notes that the pod ends a connection that is in a tunnel as it is.
    pub(crate) fn end_sealed(&self, flow: &FlowKey, now: Instant) {
        let (now, most) = (self.millis(now), self.most());
        let mut table = self.lock();
        let key = table.key(flow);
        table.sealed.end(&key, now, most);
    }

    /// The course of a flow. `is_tracked` tells whether the firewall knows a flow with these addresses in the tunnel,
    /// which then must not get a second meaning. Returns whether the flow is a new one, too.
    pub(crate) fn course(
        &self,
        current: &Current,
        first: First<'_>,
        is_tracked: impl FnMut(&FlowKey) -> bool,
    ) -> Result<(Course, bool), NoCourse> {
        let mut table = self.lock();
        let now = self.millis(first.now);
        let choice = Choice { translations: self, current, first, now, former: None, sealed: None };
        choice.make(&mut table, is_tracked)
    }

    /// Gives a flow its course that the pod opened before this program started, so that the other end can speak
    /// first. A flow to somebody who is not known counts as one that was in a tunnel.
    pub(crate) fn resume(&self, current: &Current, before: &OpenedBefore, now: Instant) {
        let OpenedBefore { flow, led_to } = before;
        let first = First { flow, opens: true, led_to: *led_to, now };
        match self.course(current, first, |_| false) {
            Ok((_, true)) => self.lock().change(flow, |entry| entry.state = State::Resumed),
            Ok((Course::Direct, false)) => self.seal(std::slice::from_ref(flow), now),
            Err(NoCourse::Unknown) => {
                self.seal(std::slice::from_ref(flow), now);
                if let Some(endpoint) = *led_to {
                    let now = self.millis(now);
                    let mut table = self.lock();
                    let key = table.key(flow);
                    table.led.note(key, flow, endpoint, now);
                }
            }
            Ok((_, false)) | Err(_) => {}
        }
    }

    /// With another directory: gives flows that waited for their endpoint their course, so that the other end can
    /// speak first.
    pub(crate) fn resume_waiting(&self, current: &Current, now: Instant) {
        let is_peer = |target: &Target| matches!(current.directory.find(target), Found::Peer { .. });
        let found = self.lock().led.take(is_peer);
        found.iter().for_each(|flow| self.resume(current, flow, now));
    }

    /// Whether an inbound packet is the first one of a flow that was resumed: the firewall does not know yet that the
    /// pod opened it.
    pub(crate) fn is_resumed(&self, current: &Current, wire: &FlowKey, now: Instant) -> bool {
        let now = self.millis(now);
        let mut table = self.lock();
        let key = table.key(wire);
        table.of_wire(&key).is_some_and(|entry| {
            entry.state == State::Resumed
                && !entry.translation.is_own
                && entry.is_live(now)
                && entry.stands(&*current.directory)
        })
    }

    /// The course that [`Translations::course`] would return, as far as that can be told without making it so.
    pub(crate) fn preview(&self, directory: &dyn Directory, flow: &FlowKey, now: Instant) -> Result<Course, NoCourse> {
        let now = self.millis(now);
        let mut table = self.lock();
        let key = table.key(flow);
        let known = table.of_original(&key).filter(|entry| entry.is_live(now));
        let mut was_sealed = false;
        if let Some(entry) = known {
            match entry.stands(directory) {
                true => return Ok(course_of(entry.translation)),
                false if entry.is_tcp() => return Err(NoCourse::EndpointGone),
                false => was_sealed = true,
            }
        }
        if let Some(entry) = table.of_wire(&key).filter(|entry| entry.is_live(now) && entry.translation.is_own) {
            return Ok(Course::BackToSelf(entry.translation));
        }
        let was_direct = table.sealed.has(&key, now);
        let target = Target::from(flow);
        match directory.find(&target) {
            Found::Peer { .. } => Ok(Course::Direct),
            Found::Service(service) if service.clear > 0 && !was_sealed && !was_direct && table.bypassed.has(&key) => {
                Ok(Course::Bypass)
            }
            Found::Service(service) => {
                let service = if was_sealed { Service { clear: 0, ..service } } else { service };
                let kept = match table.led.endpoint(&key, now) {
                    Some(led_to) => Some(Chosen::before(directory, &service, flow, led_to).ok_or(NoCourse::Unknown)?),
                    None => table.affinities.of(directory, &target, &service, now),
                };
                match kept.or_else(|| Chosen::of(directory, &service, flow)).ok_or(NoCourse::Refused)? {
                    Chosen::Endpoint(_, endpoint) => Ok(course_of(translation(flow, &endpoint, flow.local_port))),
                    Chosen::Clear if was_direct => Err(NoCourse::EndpointGone),
                    Chosen::Clear => Ok(Course::Bypass),
                }
            }
            Found::Clear if was_direct => Err(NoCourse::EndpointGone),
            Found::Clear if was_sealed => Err(NoCourse::Refused),
            Found::Clear => Ok(Course::Bypass),
            Found::Unknown => Err(NoCourse::Unknown),
            Found::Refused => Err(NoCourse::Refused),
        }
    }

    /// How packets of an inbound flow are translated back; `None` if the flow is not a translated one.
    pub(crate) fn back(&self, current: &Current, wire: &FlowKey, now: Instant) -> Option<Translation> {
        let now = self.millis(now);
        let mut table = self.lock();
        let key = table.key(wire);
        let entry = table.of_wire(&key).filter(|entry| entry.is_live(now) && !entry.translation.is_own)?;
        let translation = entry.translation;
        if entry.version != current.version {
            if !entry.stands(&*current.directory) {
                // It stays refused for the pod, too.
                if entry.is_tcp() {
                    table.change(&translation.original, |entry| entry.state = State::Gone);
                }
                return None;
            }
            entry.version = current.version;
        }
        entry.last_used = now;
        if matches!(entry.state, State::New | State::Resumed | State::Gone) {
            table.change(&translation.original, |entry| entry.state = State::Answered);
        }
        Some(translation)
    }

    /// The flow that an ICMP error of the pod is about.
    pub(crate) fn of_original(&self, original: &FlowKey) -> Option<Translation> {
        let mut table = self.lock();
        let key = table.key(original);
        Some(table.of_original(&key)?.translation)
    }

    /// The flow that an ICMP error to the pod is about.
    pub(crate) fn of_wire(&self, wire: &FlowKey) -> Option<Translation> {
        let mut table = self.lock();
        let key = table.key(wire);
        Some(table.of_wire(&key)?.translation)
    }

    /// Notes flags of a TCP packet in either direction of a translated flow.
    pub(crate) fn note(&self, original: &FlowKey, flags: u8) {
        self.lock().change(original, |entry| entry.note(flags));
    }

    fn most(&self) -> usize {
        self.max_flows.load(Ordering::Relaxed)
    }

    fn millis(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_millis() as u64
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One decision about a flow.
struct Choice<'a> {
    translations: &'a Translations,
    current: &'a Current,
    first: First<'a>,
    now: u64,
    /// The wire form of the flow of the same pod, addresses and ports that ended before this one.
    former: Option<FlowKey>,
    /// The wire form of this flow so far, if its endpoint is gone: what once went into a tunnel never leaves in clear.
    sealed: Option<FlowKey>,
}

impl Choice<'_> {
    fn make(
        mut self,
        table: &mut Table,
        mut is_tracked: impl FnMut(&FlowKey) -> bool,
    ) -> Result<(Course, bool), NoCourse> {
        let flow = self.first.flow;
        let key = table.key(flow);
        if let Some(course) = self.known(table, &key)? {
            return Ok((course, false));
        }
        let is_taken = match table.of_wire(&key) {
            Some(entry) if !entry.is_live(self.now) => {
                let original = entry.translation.original;
                let original = table.key(&original);
                table.remove(&original);
                false
            }
            // The pod answers itself.
            Some(entry) if entry.translation.is_own => {
                entry.last_used = self.now;
                let translation = entry.translation;
                table.change(&translation.original, |entry| entry.state = State::Answered);
                return Ok((Course::BackToSelf(translation), false));
            }
            Some(_) => true,
            None => false,
        };
        let directory = &*self.current.directory;
        let target = Target::from(flow);
        let endpoint = match directory.find(&target) {
            Found::Peer { .. } if !is_taken => {
                table.remove(&key);
                // Nothing of a connection is in the tunnel yet.
                if self.first.opens {
                    table.sealed.forget(&key);
                } else {
                    table.sealed.note(&key, self.now, self.translations.most());
                }
                return Ok((Course::Direct, false));
            }
            // Answers could not be told from those of the other flow, so this one gets another port.
            Found::Peer { incarnation } => Endpoint { address: flow.remote, port: flow.remote_port, incarnation },
            Found::Service(service) => match self.of_service(table, &key, target, service)? {
                Chosen::Endpoint(_, endpoint) => endpoint,
                Chosen::Clear => return Ok((Course::Bypass, false)),
            },
            Found::Clear => return self.in_clear(table, &key).map(|()| (Course::Bypass, false)),
            Found::Unknown => return Err(NoCourse::Unknown),
            Found::Refused => return Err(NoCourse::Refused),
        };
        let free = |wire: &FlowKey| {
            (self.sealed == Some(*wire) || !table.has(&table.key(wire)))
                && (self.former == Some(*wire) || !is_tracked(wire))
        };
        let translation = with_free_port(flow, &endpoint, free).ok_or(NoCourse::Full)?;
        if self.sealed.is_some() {
            table.remove(&key);
        }
        let made = (endpoint.incarnation, self.current.version);
        if !table.insert(translation, made, self.now, self.translations.most()) {
            return Err(NoCourse::Full);
        }
        self.translations.added.fetch_add(1, Ordering::Release);
        Ok((course_of(translation), true))
    }

    /// Lets a flow leave in clear, unless it was in a tunnel: it is refused until it ends.
    fn in_clear(&self, table: &mut Table, key: &Key) -> Result<(), NoCourse> {
        if self.sealed.is_some() {
            return Err(NoCourse::Refused);
        }
        if self.first.opens {
            table.sealed.forget(key);
        } else if table.sealed.holds(key, self.now)
            || table.sealed.may_have_lost(key, self.now) && !(key.is_tcp() && table.bypassed.has(key))
        {
            return Err(NoCourse::EndpointGone);
        }
        if key.is_tcp() {
            table.bypassed.note(key);
        }
        Ok(())
    }

    /// What a flow to a Service gets. A flow goes on as it began.
    fn of_service(&self, table: &mut Table, key: &Key, target: Target, service: Service) -> Result<Chosen, NoCourse> {
        let First { flow, opens, .. } = self.first;
        let was_direct = !opens && table.sealed.holds(key, self.now);
        if !opens && !was_direct && self.sealed.is_none() && service.clear > 0 && table.bypassed.goes_on(key) {
            return Ok(Chosen::Clear);
        }
        // A connection of which nothing is known may have been in a tunnel.
        let is_doubtful = flow.protocol == protocol::TCP && !opens && service.ready > 0;
        let clear = if self.sealed.is_some() || is_doubtful { 0 } else { service.clear };
        let service = Service { clear, ..service };
        let directory = &*self.current.directory;
        let led_to = self.first.led_to.or_else(|| table.led.endpoint(key, self.now).filter(|_| !opens));
        let kept = match led_to {
            Some(endpoint) => Some(Chosen::before(directory, &service, flow, endpoint).ok_or(NoCourse::Unknown)?),
            None => table.affinities.of(directory, &target, &service, self.now),
        };
        let chosen = kept.or_else(|| Chosen::of(directory, &service, flow)).ok_or(NoCourse::Refused)?;
        if !is_doubtful {
            table.affinities.note(target, &service, chosen, self.now);
        }
        table.led.forget(key);
        match chosen {
            Chosen::Endpoint(..) => table.bypassed.forget(key),
            Chosen::Clear if was_direct => return Err(NoCourse::EndpointGone),
            // Of Services without an enrolled endpoint, which may get one, only connections are worth the memory.
            Chosen::Clear if service.ready > 0 || flow.protocol == protocol::TCP => table.bypassed.note(key),
            Chosen::Clear => {}
        }
        if opens {
            table.sealed.forget(key);
        }
        Ok(chosen)
    }

    /// The course of a flow that is known and may go on.
    fn known(&mut self, table: &mut Table, key: &Key) -> Result<Option<Course>, NoCourse> {
        let opens = self.first.opens;
        let Some(entry) = table.of_original(key) else { return Ok(None) };
        let translation = entry.translation;
        if !entry.is_live(self.now) || opens && entry.is_over() {
            self.former = Some(translation.wire);
            table.remove(key);
            return Ok(None);
        }
        if entry.version != self.current.version && !entry.stands(&*self.current.directory) {
            if entry.is_tcp() && opens {
                table.remove(key);
                return Ok(None);
            }
            entry.last_used = self.now;
            if entry.is_tcp() {
                // The reset ends the connection; the program opens another one, to another endpoint.
                table.change(&translation.original, |entry| entry.state = State::Gone);
                return Err(NoCourse::EndpointGone);
            }
            self.sealed = Some(translation.wire);
            return Ok(None);
        }
        (entry.version, entry.last_used) = (self.current.version, self.now);
        Ok(Some(course_of(translation)))
    }
}

fn course_of(translation: Translation) -> Course {
    if translation.is_own { Course::ToSelf(translation) } else { Course::Translated(translation) }
}

/// The translation of a flow to an endpoint. `port` stands for the port of the pod.
fn translation(flow: &FlowKey, endpoint: &Endpoint, port: u16) -> Translation {
    let is_own = endpoint.address == flow.local;
    let wire = if is_own {
        FlowKey { local_port: endpoint.port, remote_port: port, ..*flow }
    } else {
        FlowKey { local_port: port, remote: endpoint.address, remote_port: endpoint.port, ..*flow }
    };
    Translation::new(*flow, wire, is_own)
}

/// The pod's own port, unless another flow to the endpoint has that; then any port that is free.
fn with_free_port(flow: &FlowKey, endpoint: &Endpoint, mut free: impl FnMut(&FlowKey) -> bool) -> Option<Translation> {
    let mut with = |port| Some(translation(flow, endpoint, port)).filter(|made| free(&made.wire));
    if let Some(own) = with(flow.local_port) {
        return Some(own);
    }
    // An endpoint may tell a privileged port from another.
    let (from, to) = if flow.local_port < 1024 { (512, 1023) } else { (32_768, u16::MAX) };
    let (count, start) = (u32::from(to - from) + 1, scramble(flow) as u32);
    (0..MAX_PORTS_TRIED).map(|n| from + (start.wrapping_add(n) % count) as u16).find_map(with)
}

const MAX_PORTS_TRIED: u32 = 128;
