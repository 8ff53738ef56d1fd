//! Who serves when, while one process hands over to another: a commit in two phases, without IO.
//!
//! The old process offers, the new one prepares and says that it is ready, and the old one commits: from then on it
//! seals nothing, ever. The new one seals nothing before it has the commit, or knows that the old process is dead. So
//! there are never two that seal. Whatever gets lost is sent again. If one of them dies, the other one serves: the
//! old one if it has not committed, else the new one. A new process that has no offer yet may end instead.
//!
//! That a process is dead has to be certain: the kernel says so (a pidfd, the end of a connection that only that
//! process holds). A process that hangs is not dead; whoever supervises it has to end it.
//!
//! Programs carry the messages by any way between two processes, and call `elapsed` when nothing came for the time that
//! `wait` returns. With [`ToNew::Offer`] goes the state that [`Node::offer`](crate::Node::offer) returns, without keys,
//! so that the new process sees whether it can read that; with [`ToNew::Commit`] the one of
//! [`Node::hand_over`](crate::Node::hand_over).

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::time::Duration;

/// What the old process says. Each offer has a number, so that answers to earlier ones mean nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ToNew {
    /// Here is what I have: can you go on with that?
    Offer(u64),
    /// I have stopped; go on with what comes with this.
    Commit(u64),
    /// I go on myself.
    Withdraw(u64),
}

/// What the new process says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ToOld {
    /// I can go on, and do nothing before you say so.
    Ready(u64),
    /// I cannot.
    Refuse(u64),
    /// I serve, and need nothing more from you.
    Confirm(u64),
}

/// What the program of the old process has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum OldStep {
    /// Nothing.
    Nothing,
    /// Send this; a commit with the same state as before.
    Send(ToNew),
    /// Stop all lanes, call [`Node::hand_over`](crate::Node::hand_over), and send this with the state.
    HandOver(ToNew),
    /// Erase the state, and end the process.
    End,
}

/// What the program of the new process has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum NewStep {
    /// Nothing.
    Nothing,
    /// Send this.
    Send(ToOld),
    /// Prepare everything that may fail, and call [`New::prepared`].
    Prepare,
    /// Serve with the state that came with the commit, and send this.
    TakeOver(ToOld),
    /// The old process died: serve with the state of the offer, if there is one. It has no keys.
    Succeed,
    /// End the process: the old one goes on.
    End,
}

/// The old process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Old {
    /// Number of the last offer.
    number: u64,
    phase: OldPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum OldPhase {
    Serving,
    Offered,
    Committed { sent: u32 },
    Ended,
}

/// The new process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct New {
    phase: NewPhase,
    old_is_dead: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum NewPhase {
    Waiting,
    Preparing(u64),
    Ready(u64),
    Serving,
    Ended,
}

impl Default for Old {
    fn default() -> Self {
        Self { number: 0, phase: OldPhase::Serving }
    }
}

impl Default for New {
    fn default() -> Self {
        Self { phase: NewPhase::Waiting, old_is_dead: false }
    }
}

impl Old {
    /// Offers to hand over to a process that is there. Does nothing while another offer is under way, or after a
    /// commit.
    pub fn offer(&mut self) -> OldStep {
        if self.phase != OldPhase::Serving {
            return OldStep::Nothing;
        }
        (self.phase, self.number) = (OldPhase::Offered, self.number + 1);
        OldStep::Send(ToNew::Offer(self.number))
    }

    /// Whether this process still serves: sends, receives and seals.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(self.phase, OldPhase::Serving | OldPhase::Offered)
    }

    /// Handles a message.
    pub fn handle(&mut self, message: ToOld) -> OldStep {
        let commit = ToNew::Commit(self.number);
        match (message, self.phase) {
            (ToOld::Ready(number), OldPhase::Offered) if number == self.number => {
                self.phase = OldPhase::Committed { sent: 1 };
                OldStep::HandOver(commit)
            }
            // The commit was lost, or is on its way.
            (ToOld::Ready(number), OldPhase::Committed { .. }) if number == self.number => OldStep::Send(commit),
            // The offer was withdrawn, and the other process does not know that.
            (ToOld::Ready(number), OldPhase::Serving | OldPhase::Offered) => OldStep::Send(ToNew::Withdraw(number)),
            (ToOld::Refuse(number), OldPhase::Offered) if number == self.number => {
                self.phase = OldPhase::Serving;
                OldStep::Nothing
            }
            (ToOld::Confirm(number), OldPhase::Committed { .. }) if number == self.number => self.end(),
            _ => OldStep::Nothing,
        }
    }

    /// The new process is dead.
    pub fn new_died(&mut self) -> OldStep {
        match self.phase {
            OldPhase::Offered => self.phase = OldPhase::Serving,
            // It may have sealed.
            OldPhase::Committed { .. } => return self.end(),
            OldPhase::Serving | OldPhase::Ended => {}
        }
        OldStep::Nothing
    }

    /// How long to wait for a message until [`Old::elapsed`] is to be called; `None`: for ever.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        match self.phase {
            OldPhase::Offered => Some(READY_WITHIN),
            OldPhase::Committed { .. } => Some(REPEAT_AFTER),
            OldPhase::Serving | OldPhase::Ended => None,
        }
    }

    /// That time is over.
    pub fn elapsed(&mut self) -> OldStep {
        match self.phase {
            OldPhase::Offered => {
                self.phase = OldPhase::Serving;
                OldStep::Send(ToNew::Withdraw(self.number))
            }
            // If the new process has the commit, it serves; else it learns that this one is dead, and serves then.
            OldPhase::Committed { sent: MAX_COMMITS.. } => self.end(),
            OldPhase::Committed { sent } => {
                self.phase = OldPhase::Committed { sent: sent + 1 };
                OldStep::Send(ToNew::Commit(self.number))
            }
            OldPhase::Serving | OldPhase::Ended => OldStep::Nothing,
        }
    }

    fn end(&mut self) -> OldStep {
        self.phase = OldPhase::Ended;
        OldStep::End
    }
}

impl New {
    /// Whether this process serves: sends, receives and seals.
    #[must_use]
    pub fn serves(&self) -> bool {
        self.phase == NewPhase::Serving
    }

    /// Handles a message.
    pub fn handle(&mut self, message: ToNew) -> NewStep {
        match (message, self.phase) {
            (ToNew::Offer(number), NewPhase::Waiting) => {
                self.phase = NewPhase::Preparing(number);
                NewStep::Prepare
            }
            (ToNew::Commit(number), NewPhase::Ready(ready)) if number == ready => {
                self.phase = NewPhase::Serving;
                NewStep::TakeOver(ToOld::Confirm(number))
            }
            (ToNew::Commit(number), NewPhase::Serving) => NewStep::Send(ToOld::Confirm(number)),
            // The old process never commits an offer that it has withdrawn.
            (ToNew::Withdraw(number), NewPhase::Ready(offer) | NewPhase::Preparing(offer)) if number == offer => {
                self.end()
            }
            _ => NewStep::Nothing,
        }
    }

    /// Everything is prepared, or something failed.
    pub fn prepared(&mut self, is_ready: bool) -> NewStep {
        let NewPhase::Preparing(number) = self.phase else { return NewStep::Nothing };
        match is_ready {
            true if self.old_is_dead => self.succeed(),
            true => {
                self.phase = NewPhase::Ready(number);
                NewStep::Send(ToOld::Ready(number))
            }
            false => {
                self.phase = NewPhase::Ended;
                NewStep::Send(ToOld::Refuse(number))
            }
        }
    }

    /// The old process is dead.
    pub fn old_died(&mut self) -> NewStep {
        self.old_is_dead = true;
        match self.phase {
            // A commit may have been lost with it; it seals no more in any case.
            NewPhase::Waiting | NewPhase::Ready(_) => self.succeed(),
            NewPhase::Preparing(_) | NewPhase::Serving | NewPhase::Ended => NewStep::Nothing,
        }
    }

    /// How long to wait for a message until [`New::elapsed`] is to be called; `None`: for ever.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        match self.phase {
            NewPhase::Waiting => Some(OFFER_WITHIN),
            NewPhase::Ready(_) => Some(REPEAT_AFTER),
            NewPhase::Preparing(_) | NewPhase::Serving | NewPhase::Ended => None,
        }
    }

    /// That time is over.
    pub fn elapsed(&mut self) -> NewStep {
        match self.phase {
            NewPhase::Waiting => self.end(),
            // It must not give up: the old process may have committed. That one answers as long as it lives.
            NewPhase::Ready(number) => NewStep::Send(ToOld::Ready(number)),
            NewPhase::Preparing(_) | NewPhase::Serving | NewPhase::Ended => NewStep::Nothing,
        }
    }

    fn succeed(&mut self) -> NewStep {
        self.phase = NewPhase::Serving;
        NewStep::Succeed
    }

    fn end(&mut self) -> NewStep {
        self.phase = NewPhase::Ended;
        NewStep::End
    }
}

/// A new process that is started gets its offer at once.
const OFFER_WITHIN: Duration = Duration::from_secs(10);
/// Reading configuration and certificates takes less than a second; a busy host may be slow.
const READY_WITHIN: Duration = Duration::from_secs(10);
const REPEAT_AFTER: Duration = Duration::from_millis(200);
/// For ten seconds.
const MAX_COMMITS: u32 = if cfg!(test) { 3 } else { 50 };
