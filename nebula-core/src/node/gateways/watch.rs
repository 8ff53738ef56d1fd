//! Decides from what is seen of a gateway whether it takes flows, and when it is probed.

use std::mem;
use std::time::{Duration, Instant};

use crate::TunnelDownReason;
use crate::index::LocalIndex;
use crate::node::prober::Flight;

/// Remembers what was seen of one gateway. Holds no tunnel and sends nothing.
#[derive(Debug)]
pub(super) struct Watch {
    state: GatewayState,
    /// When the state was entered; of an untried gateway, when the handshake began that is in progress.
    since: Instant,
    tunnel: Option<LocalIndex>,
    sent: u64,
    received: u64,
    /// Whether the last look found traffic.
    has_traffic: bool,
    /// Whether the last look found that something was sent.
    was_asked: bool,
    /// The probe of the last look. Any datagram of the gateway answers it.
    flight: Flight,
    /// When a gateway that returns is probed again, or a dead one is tried again.
    next: Instant,
    retry_after: Duration,
    has_died: bool,
    /// How often in a row it came back and died again soon.
    relapses: u32,
}

/// Whether a gateway of a subnet route takes flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GatewayState {
    /// It has no tunnel, and nothing says that it cannot have one: the first packet for it starts a handshake.
    Untried,
    /// It answers.
    Healthy,
    /// It does not answer: its flows take other gateways.
    Dead,
    /// It answers again. Its flows take other gateways until it has done so for a while.
    Returning,
}

impl GatewayState {
    /// Whether it takes flows.
    #[must_use]
    pub fn takes_flows(self) -> bool {
        matches!(self, Self::Untried | Self::Healthy)
    }

    /// The word for it in metrics and answers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Untried => "untried",
            Self::Healthy => "healthy",
            Self::Dead => "dead",
            Self::Returning => "returning",
        }
    }
}

/// What is seen of a gateway at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// Its primary tunnel, with the next counter to send and the highest one received.
    pub(super) tunnel: Option<(LocalIndex, u64, u64)>,
    /// A handshake with it is in progress.
    pub(super) handshaking: bool,
    /// In every route that it serves, another gateway answers.
    pub(super) is_spare: bool,
}

/// What to do about a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Nothing,
    /// Send a test request.
    Probe,
    /// Start a handshake.
    Connect,
}

impl Watch {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            state: GatewayState::Untried,
            since: now,
            tunnel: None,
            sent: 0,
            received: 0,
            has_traffic: false,
            was_asked: false,
            flight: Flight::default(),
            next: now,
            retry_after: FIRST_RETRY,
            has_died: false,
            relapses: 0,
        }
    }

    pub(super) fn state(&self) -> GatewayState {
        self.state
    }

    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Whether it has to be looked at soon.
    pub(super) fn is_busy(&self) -> bool {
        self.has_traffic || self.flight.is_unanswered() || self.state == GatewayState::Returning
    }

    /// Takes what is seen at `now`, and says what to do. To be called every [`TICK`] while there is traffic.
    pub(super) fn look(&mut self, now: Instant, seen: Seen) -> Step {
        let (mut heard, mut asked) = (false, false);
        match seen.tunnel {
            Some((index, sent, received)) => {
                // Nobody but the gateway can complete a handshake.
                heard = self.tunnel != Some(index) || received > self.received;
                asked = self.tunnel == Some(index) && sent > self.sent;
                (self.tunnel, self.sent, self.received) = (Some(index), sent, received);
            }
            None => self.tunnel = None,
        }
        self.has_traffic = heard || asked;
        // What was sent in the tick that heard the gateway last may have been lost with it. A TCP sender repeats it
        // after 0.2 s, mostly in the same tick, and then not before 0.6 s.
        let is_owed_an_answer = mem::replace(&mut self.was_asked, asked) || asked;
        match self.state {
            GatewayState::Untried => self.look_at_untried(now, seen, heard),
            GatewayState::Healthy if self.tunnel.is_none() => {
                self.enter(now, GatewayState::Untried);
                Step::Nothing
            }
            GatewayState::Healthy => self.test(now, heard, is_owed_an_answer),
            GatewayState::Dead => self.look_at_dead(now, seen, heard),
            GatewayState::Returning => {
                if self.tunnel.is_none() {
                    self.die(now);
                    return Step::Nothing;
                }
                let step = self.test(now, heard, now >= self.next);
                if step == Step::Probe && self.flight.missed() == 0 {
                    self.next = now + RETURN_PROBE_INTERVAL;
                }
                let hold = (HOLD * 2_u32.pow(self.relapses.min(6))).min(MAX_HOLD);
                let has_held = heard && now >= self.since + hold;
                if self.state == GatewayState::Returning && (has_held || !seen.is_spare) {
                    self.enter(now, GatewayState::Healthy);
                }
                step
            }
        }
    }

    /// The counter after a probe: the probe itself is no traffic.
    pub(super) fn note_sent(&mut self, next: u64) {
        self.sent = next;
    }

    /// The highest counter after a datagram that is no sign of life. Data that came in the same tick counts as
    /// little, so the gateway may be probed once too often.
    pub(super) fn note_received(&mut self, tunnel: LocalIndex, highest: u64) {
        if self.tunnel == Some(tunnel) {
            self.received = highest;
        }
    }

    /// Its last tunnel ended.
    pub(super) fn note_down(&mut self, now: Instant, reason: TunnelDownReason) {
        self.tunnel = None;
        match reason {
            TunnelDownReason::ClosedByPeer | TunnelDownReason::Dead | TunnelDownReason::CertificateInvalid
                if self.state != GatewayState::Dead =>
            {
                self.die(now);
            }
            // It is there, or this node had no more use for the tunnel.
            _ if self.state == GatewayState::Healthy => self.enter(now, GatewayState::Untried),
            TunnelDownReason::RecvError => self.next = now,
            _ => {}
        }
    }

    fn look_at_untried(&mut self, now: Instant, seen: Seen, heard: bool) -> Step {
        if heard {
            self.enter(now, GatewayState::Healthy);
        } else if !seen.handshaking {
            self.since = now;
        } else if now >= self.since + CONNECT_WITHIN {
            self.die(now);
        }
        Step::Nothing
    }

    fn look_at_dead(&mut self, now: Instant, seen: Seen, heard: bool) -> Step {
        if heard {
            self.enter(now, if seen.is_spare { GatewayState::Returning } else { GatewayState::Healthy });
            return Step::Nothing;
        }
        if !seen.is_spare {
            // Its flows have no other gateway now.
            self.next = self.next.min(now + FIRST_RETRY);
        }
        if now < self.next {
            return Step::Nothing;
        }
        self.retry_after = if seen.is_spare { (self.retry_after * 2).min(MAX_RETRY) } else { FIRST_RETRY };
        self.next = now + self.retry_after;
        if self.tunnel.is_some() { Step::Probe } else { Step::Connect }
    }

    /// Probes a gateway that is silent although it was `asked` something, until it has left too many probes
    /// unanswered.
    fn test(&mut self, now: Instant, heard: bool, asked: bool) -> Step {
        if heard {
            self.flight = Flight::default();
            return Step::Nothing;
        }
        self.flight.lose();
        let missed = self.flight.missed();
        if missed == 0 && !asked {
            return Step::Nothing;
        }
        if missed == PROBES {
            self.die(now);
            return Step::Nothing;
        }
        self.flight.sent(now, missed);
        Step::Probe
    }

    fn die(&mut self, now: Instant) {
        let is_relapse = match self.state {
            GatewayState::Returning => true,
            GatewayState::Healthy => self.has_died && now < self.since + STABLE_AFTER,
            GatewayState::Untried | GatewayState::Dead => false,
        };
        self.relapses = if is_relapse { self.relapses.saturating_add(1) } else { 0 };
        self.has_died = true;
        self.retry_after = FIRST_RETRY;
        self.next = now + FIRST_RETRY;
        self.enter(now, GatewayState::Dead);
    }

    fn enter(&mut self, now: Instant, state: GatewayState) {
        (self.state, self.since, self.flight) = (state, now, Flight::default());
        if state == GatewayState::Returning {
            self.next = now;
        }
    }
}

/// Time between two looks at gateways while there is traffic.
pub(super) const TICK: Duration = Duration::from_millis(250);
/// A gateway that is silent is dead after so many probes, one with each look: about a second after its last datagram.
const PROBES: u32 = 3;
/// A handshake that takes longer does not keep packets from another gateway.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// A dead gateway is tried again after this time, then after twice as long, and so on up to `MAX_RETRY`.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(30);
/// A gateway that answers again takes flows after this time; after twice as long if it died soon after it had
/// returned, and so on up to `MAX_HOLD`.
const HOLD: Duration = Duration::from_secs(5);
const MAX_HOLD: Duration = Duration::from_secs(300);
const RETURN_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// A gateway that dies after so long is not one that comes and goes.
const STABLE_AFTER: Duration = Duration::from_secs(300);
