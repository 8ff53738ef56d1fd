//! How one instance of a pod takes over from another, on both sides.

use std::sync::Arc;
use std::time::Duration;

use nebula_core::handover;
use nebula_enrolment::ca_client::Issued;
use nebula_linux::notify;

use super::{PodTunnel, unix_seconds};
use crate::handover::channel::Channel;
use crate::handover::old::Source;
use crate::pod::capture::Capture;
use crate::pod::data_path::spawn;
use crate::pod::error::Error;
use crate::pod::events::Event;
use crate::pod::successor;

/// How far another instance has taken over from this one.
pub(super) enum Handover {
    None,
    UnderWay,
    /// This instance has stopped, and the other one does not serve.
    Stopped {
        state: Box<handover::State>,
        /// As uptime.
        since: Duration,
    },
}

impl PodTunnel {
    /// Takes over from the previous instance, or goes on with the certificate that it left.
    #[inline(never)]
    pub(super) fn begin(&mut self) -> Result<(), Error> {
        let now = unix_seconds(self.clock.now().wall);
        let Some((mut predecessor, its_certificate)) = self.predecessor.take() else {
            if let Some(issued) = self.kept.as_ref().and_then(|kept| kept.take(now)).filter(|issued| self.fits(issued))
            {
                tracing::info!("Going on with the certificate of the previous instance");
                self.install(issued, false)?;
            }
            return Ok(());
        };
        if !its_certificate.take(now).is_some_and(|issued| self.fits(&issued)) {
            let why = std::io::Error::other("its certificate cannot be read, or is no longer valid");
            return Err(predecessor.refuse(&why));
        }
        let (committed, inherited) = predecessor.commit()?;
        if let (Some(state), Some(capture)) = (&inherited, &self.capture) {
            capture.verdicts().take_over(state.attached());
        }
        self.inherited = inherited;
        self.enrolment.take_over();
        // It may have been renewed meanwhile.
        let issued = its_certificate.take(now);
        let issued = issued.ok_or_else(|| Error::Broken("the previous instance left no certificate".into()))?;
        self.install(issued, false)?;
        committed.confirm();
        notify::ready();
        Ok(())
    }

    /// Whether a certificate of an earlier instance is one for this pod.
    fn fits(&self, issued: &Issued) -> bool {
        self.contradiction(issued.identity.networks()).is_none()
    }

    /// Whether another instance may serve already.
    pub(super) fn is_handing_over(&self) -> bool {
        matches!(self.handover, Handover::UnderWay)
    }

    /// Hands over to the instance at the other end of `channel`, if that is possible now; else it is told by the end
    /// of the channel.
    #[inline(never)]
    pub(super) fn hand_over(&mut self, channel: Channel) -> Result<(), Error> {
        let source = match std::mem::replace(&mut self.handover, Handover::UnderWay) {
            Handover::UnderWay => return Ok(()),
            Handover::Stopped { state, .. } => Source::Stopped(*state),
            Handover::None => match self.path.handle().filter(|_| self.life.is_open() && !self.is_provisional) {
                Some(handle) => Source::Running(handle.clone()),
                None => {
                    self.handover = Handover::None;
                    return Ok(());
                }
            },
        };
        let runs = matches!(source, Source::Running(_));
        let (descriptors, reports) = (Arc::clone(&self.descriptors), self.reports.clone());
        let verdicts = self.capture.as_ref().map(Capture::verdicts);
        let spawned = spawn("handover", move || {
            let outcome = successor::hand_over(&channel, source, &descriptors, verdicts.as_deref());
            reports.send(Event::HandedOver(Box::new(outcome)));
        });
        match spawned {
            Err(error) if runs => {
                tracing::warn!(%error, "Another instance cannot take over; this one goes on");
                self.handover = Handover::None;
            }
            spawned => {
                spawned?;
                self.update(|status| status.is_handing_over = true);
            }
        }
        Ok(())
    }

    /// Whether another instance serves.
    #[inline(never)]
    pub(super) fn handed_over(&mut self, outcome: successor::Outcome) -> Result<bool, Error> {
        self.handover = Handover::None;
        self.update(|status| status.is_handing_over = false);
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
                self.handover = Handover::Stopped { state: Box::new(state), since: self.clock.now().uptime };
                self.update(|status| status.closed = Some(why));
            }
            successor::Outcome::Lost(cause) => return Err(Error::Broken(cause.into())),
        }
        Ok(false)
    }
}
