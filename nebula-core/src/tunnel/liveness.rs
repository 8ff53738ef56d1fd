//! Decides at each traffic check whether a tunnel is kept, probed, renewed or given up (dead peer detection).

use crate::output::TunnelDownReason;

/// Remembers between two checks whether the peer still owes an answer. Holds no tunnel and sends nothing.
#[derive(Debug, Default)]
pub(crate) struct Liveness {
    awaiting_answer: bool,
}

/// What the caller knows about the tunnel at this check.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Facts {
    /// Authenticated traffic came in since the last check.
    pub(crate) received: bool,
    /// Something was sent since the last check.
    pub(crate) sent: bool,
    /// This tunnel carries packets to the peer.
    pub(crate) primary: bool,
    /// The peer's certificate must not be used any longer.
    pub(crate) certificate_refused: bool,
    /// It was idle for so long that it may be closed.
    pub(crate) inactive: bool,
    /// No send counter is left.
    pub(crate) exhausted: bool,
    /// The own certificate, its version or the counters call for a new handshake.
    pub(crate) outdated: bool,
    /// This node is the side that changes its primary tunnel, and this tunnel qualifies: the peer uses it.
    pub(crate) may_become_primary: bool,
}

/// What to do about the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The peer is alive; check again after the alive interval. `punch`: nothing was sent, so keep the NAT mapping
    /// open.
    Alive { next: Next, punch: bool },
    /// Nothing was sent, so silence means nothing; keep the NAT mapping open and check again after the alive interval.
    Idle,
    /// Send a probe and check again after the deletion interval.
    Probe,
    /// Check again after the deletion interval without a probe: a spare tunnel may die.
    Await,
    /// Tell the peer and remove the tunnel.
    Close(TunnelDownReason),
    /// Remove the tunnel silently.
    Remove(TunnelDownReason),
}

/// What else a live tunnel needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Nothing,
    /// Negotiate a successor.
    Rehandshake,
    /// Make this tunnel the primary, because the peer uses it.
    BecomePrimary,
}

impl Liveness {
    /// Whether the peer owes an answer.
    pub(crate) fn is_awaiting(&self) -> bool {
        self.awaiting_answer
    }

    /// Decides what to do, once per check.
    #[must_use]
    pub(crate) fn decide(&mut self, facts: Facts) -> Decision {
        if facts.certificate_refused {
            return Decision::Close(TunnelDownReason::CertificateInvalid);
        }
        if facts.exhausted {
            return Decision::Remove(TunnelDownReason::CounterExhausted);
        }
        if facts.received {
            self.awaiting_answer = false;
            let next = match (facts.primary, facts.outdated, facts.may_become_primary) {
                (true, true, _) => Next::Rehandshake,
                (false, _, true) => Next::BecomePrimary,
                _ => Next::Nothing,
            };
            return Decision::Alive { next, punch: !facts.sent };
        }
        if self.awaiting_answer {
            return Decision::Remove(TunnelDownReason::Dead);
        }
        if facts.primary && !facts.sent {
            return if facts.inactive { Decision::Close(TunnelDownReason::Inactive) } else { Decision::Idle };
        }
        self.awaiting_answer = true;
        if facts.primary { Decision::Probe } else { Decision::Await }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet_primary() -> Facts {
        Facts {
            received: false,
            sent: false,
            primary: true,
            certificate_refused: false,
            inactive: false,
            exhausted: false,
            outdated: false,
            may_become_primary: false,
        }
    }

    #[test]
    fn an_idle_primary_is_kept_for_ever() {
        let mut liveness = Liveness::default();
        for _ in 0..100 {
            assert_eq!(liveness.decide(quiet_primary()), Decision::Idle);
        }
    }

    #[test]
    fn an_inactive_primary_is_closed_but_not_while_an_answer_is_owed() {
        let mut liveness = Liveness::default();
        let inactive = Facts { inactive: true, ..quiet_primary() };
        assert_eq!(liveness.decide(inactive), Decision::Close(TunnelDownReason::Inactive));
        assert_eq!(liveness.decide(Facts { sent: true, ..inactive }), Decision::Probe);
    }

    #[test]
    fn an_unanswered_primary_is_probed_once_and_then_dead() {
        let mut liveness = Liveness::default();
        assert_eq!(liveness.decide(Facts { sent: true, ..quiet_primary() }), Decision::Probe);
        assert_eq!(liveness.decide(quiet_primary()), Decision::Remove(TunnelDownReason::Dead));
    }

    #[test]
    fn an_answer_to_the_probe_makes_the_tunnel_live_again() {
        let mut liveness = Liveness::default();
        let sent = Facts { sent: true, ..quiet_primary() };
        assert_eq!(liveness.decide(sent), Decision::Probe);
        let answered = Facts { received: true, ..sent };
        assert_eq!(liveness.decide(answered), Decision::Alive { next: Next::Nothing, punch: false });
        assert_eq!(liveness.decide(sent), Decision::Probe);
    }

    #[test]
    fn a_silent_spare_tunnel_dies_without_being_probed() {
        let mut liveness = Liveness::default();
        let spare = Facts { primary: false, ..quiet_primary() };
        assert_eq!(liveness.decide(spare), Decision::Await);
        assert_eq!(liveness.decide(spare), Decision::Remove(TunnelDownReason::Dead));
    }

    #[test]
    fn a_refused_certificate_closes_even_a_busy_tunnel() {
        let facts = Facts { received: true, sent: true, certificate_refused: true, ..quiet_primary() };
        assert_eq!(Liveness::default().decide(facts), Decision::Close(TunnelDownReason::CertificateInvalid));
    }

    #[test]
    fn only_a_primary_that_receives_is_renewed() {
        let outdated = Facts { received: true, outdated: true, ..quiet_primary() };
        assert_eq!(Liveness::default().decide(outdated), Decision::Alive { next: Next::Rehandshake, punch: true });
        let silent = Facts { received: false, ..outdated };
        assert_eq!(Liveness::default().decide(silent), Decision::Idle);
        let spare = Facts { primary: false, ..outdated };
        assert_eq!(Liveness::default().decide(spare), Decision::Alive { next: Next::Nothing, punch: true });
    }

    #[test]
    fn a_spare_tunnel_the_peer_uses_becomes_primary() {
        let facts = Facts { received: true, primary: false, may_become_primary: true, ..quiet_primary() };
        assert_eq!(Liveness::default().decide(facts), Decision::Alive { next: Next::BecomePrimary, punch: true });
    }
}
