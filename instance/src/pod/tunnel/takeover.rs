//! How one instance of a pod takes over from another, on both sides.

use std::sync::Arc;
use std::time::Duration;

use nebula_core::handover;
use nebula_linux::notify;

use super::{PodTunnel, unix_seconds};
use crate::handover::channel::Channel;
use crate::handover::old::Source;
use crate::pod::data_path::spawn;
use crate::pod::error::Error;
use crate::pod::events::Event;
use crate::pod::predecessor::Predecessor;
use crate::pod::successor;

/// How far another instance has taken over from this one.
pub(super) enum Handover {
    None,
    UnderWay,
    /// This instance has stopped, and the other one does not serve.
    Stopped {
        state: handover::State,
        /// As uptime.
        since: Duration,
    },
}

impl PodTunnel {
    /// Takes over from the instance before this one, or goes on with the certificate that it left.
    #[inline(never)]
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        let now = unix_seconds(self.clock.now().wall);
        if let Some(predecessor) = &mut self.predecessor
            && self.kept.as_mut().and_then(|kept| kept.take(now)).is_none()
        {
            let why = std::io::Error::other("its certificate cannot be read, or is no longer valid");
            return Err(predecessor.refuse(&why));
        }
        let committed = self.predecessor.take().map(Predecessor::commit).transpose()?;
        let (committed, inherited) = committed.unzip();
        self.inherited = inherited.flatten();
        let kept = self
            .kept
            .as_mut()
            .and_then(|kept| kept.take(now))
            .filter(|issued| self.contradiction(issued.identity.networks()).is_none());
        match (kept, committed) {
            (Some(issued), committed) => {
                tracing::info!("Going on with the certificate of the instance before this one");
                self.install(issued, false)?;
                if let Some(committed) = committed {
                    committed.confirm();
                    notify::ready();
                }
                Ok(())
            }
            (None, Some(_)) => Err(Error::Broken("the instance before this one left no certificate".into())),
            (None, None) => Ok(()),
        }
    }

    /// Hands over to the instance at the other end of `channel`, if that is possible now; else it is told by the end
    /// of the channel.
    #[inline(never)]
    pub(super) fn hand_over(&mut self, channel: Channel) -> Result<(), Error> {
        let source = match std::mem::replace(&mut self.handover, Handover::UnderWay) {
            Handover::UnderWay => return Ok(()),
            Handover::Stopped { state, .. } => Source::Stopped(state),
            Handover::None => match self.path.handle().filter(|_| self.life.is_open() && !self.is_provisional) {
                Some(handle) => Source::Running(handle.clone()),
                None => {
                    self.handover = Handover::None;
                    return Ok(());
                }
            },
        };
        let (descriptors, reports) = (Arc::clone(&self.descriptors), self.reports.clone());
        spawn("handover", move || {
            let outcome = successor::hand_over(&channel, source, &descriptors);
            reports.send(Event::HandedOver(Box::new(outcome)));
        })
    }

    /// Whether another instance serves.
    #[inline(never)]
    pub(super) fn handed_over(&mut self, outcome: successor::Outcome) -> Result<bool, Error> {
        self.handover = Handover::None;
        match outcome {
            successor::Outcome::TookOver { version } => {
                tracing::info!(version, "Another instance has taken over");
                return Ok(true);
            }
            successor::Outcome::GoesOn(failure) => {
                tracing::warn!(error = %failure, "Another instance did not take over; this one goes on");
            }
            successor::Outcome::Stopped(state) => {
                let why = "it was handed over to an instance that ended";
                tracing::error!("The tunnel is closed: {why}. Another instance may take over now");
                self.handover = Handover::Stopped { state, since: self.clock.now().uptime };
                self.update(|status| status.closed = Some(why));
            }
            successor::Outcome::Lost(cause) => return Err(Error::Broken(cause.into())),
        }
        Ok(false)
    }
}
