//! Readiness and status to the service manager (sd_notify).

use sd_notify::NotifyState;

/// Says that the service is ready. Without a service manager nothing happens; a failure is only logged.
pub fn ready() {
    if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
        tracing::error!(%error, "Failed to notify systemd");
    }
}

/// Says in one line what is going on, or why the service ends.
pub fn status(text: &str) {
    // A line break would start another assignment.
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_STATUS).collect();
    if let Err(error) = sd_notify::notify(&[NotifyState::Status(&line)]) {
        // Who only waited for readiness has gone by now.
        tracing::debug!(%error, "Nobody takes the status");
    }
}

const MAX_STATUS: usize = 1000;
