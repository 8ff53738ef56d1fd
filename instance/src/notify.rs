//! Readiness and status to the service manager (sd_notify).

use sd_notify::NotifyState;

/// Says that the service is ready. Without a service manager nothing happens; a failure is only logged.
pub fn ready() {
    send(&[NotifyState::Ready]);
}

/// Says in one line what is going on, or why the service ends.
pub fn status(text: &str) {
    // A line break would start another assignment.
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_STATUS).collect();
    send(&[NotifyState::Status(&line)]);
}

fn send(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::error!(%error, "Failed to notify systemd");
    }
}

const MAX_STATUS: usize = 1000;
