//! DEL: takes an attachment away. Whatever is missing already is no error, however often it is asked.

use std::time::Duration;

use crate::host::{Deadline, Host};
use crate::lock::Lock;
use crate::record::{Files, Found, Record};
use crate::reply::{Error, code};
use crate::request::Detach;
use crate::settings::Settings;
use crate::supervisor::{Kind, Known};

/// Detaches; neither the namespace nor the CA nor prevResult is needed.
///
/// # Errors
/// Code 11 if the instance is alive and does not end, or if another call holds the lock; code 5 if files stay.
pub fn run(request: &Detach, host: &Host<'_>) -> Result<(), Error> {
    let files = Files::new(&Settings::state_dir(&request.config), &request.key);
    if !files.dir().exists() {
        return detach(&files, host);
    }
    let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_PATIENCE))?;
    detach(&files, host)?;
    lock.remove();
    Ok(())
}

/// Undoes what the record says was done, or what can be found without one. Everything is tried; the record stays if
/// anything is left to do. The caller holds the lock.
///
/// # Errors
/// As [`run`].
pub fn detach(files: &Files, host: &Host<'_>) -> Result<(), Error> {
    let mut route = None;
    let (kinds, known) = match Record::load(&files.record()) {
        // Container ids and interface names may hold '-', so two attachments can share a file name.
        Ok(Found::Record(record)) if record.key() != *files.key() => return Ok(()),
        // Recorded before it ran: with no process in the record there is none.
        Ok(Found::Record(record)) => {
            route = record.host_route;
            (vec![record.supervisor], Known::Recorded(record.process))
        }
        Ok(Found::Nothing | Found::Garbage(_)) | Err(_) => (vec![Kind::Direct, Kind::Systemd], Known::Nothing),
    };
    let stop = |kind: &Kind| host.supervisor(*kind).stop(files, known, host.clock);
    let stopped: Result<Vec<()>, String> = kinds.iter().map(stop).collect();
    let name = format!("container {} interface {}", files.key().container_id, files.key().ifname);
    stopped.map_err(|why| {
        Error::new(code::TRY_AGAIN, format!("{name}: the instance does not end: {why}"))
            .details("it still holds the pod's network namespace; end it by hand if this repeats")
    })?;
    if let Some(route) = route {
        let failed = |e| Error::new(code::IO, format!("{name}: cannot remove the route to {}: {e}", route.destination));
        host.routes.remove(&route).map_err(failed)?;
    }
    kinds.iter().for_each(|kind| host.supervisor(*kind).clean_up(files, host.clock));
    files
        .remove()
        .map_err(|problems| Error::new(code::IO, format!("{name}: state is left behind")).details(problems.join("; ")))
}

// A call that was interrupted freed its lock; one that works ends within its own deadline.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);
