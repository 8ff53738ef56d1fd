//! DEL: takes an attachment away. Whatever is missing already is no error, however often it is asked.

use std::net::IpAddr;
use std::time::Duration;

use crate::attachment::lock::Lock;
use crate::attachment::record::{self, Files, Found, Record};
use crate::clock::Deadline;
use crate::host::Host;
use crate::instance_status::Status;
use crate::link::host_route::HostRoute;
use crate::reply::{Error, code};
use crate::request::Detach;
use crate::settings::Settings;
use crate::supervisor::Known;
use crate::supervisor::kind::Kind;

/// Detaches; neither the namespace nor the CA nor prevResult is needed. Where the record is lost, prevResult tells what
/// else is to be undone.
///
/// # Errors
/// Code 11 if the instance is alive and does not end, or if another call holds the lock; code 5 if files stay.
pub fn run(request: &Detach, host: &Host<'_>) -> Result<(), Error> {
    let files = Files::new(&Settings::state_dir(&request.config), &request.key);
    let reported = || match request.config.prev_result() {
        Ok(Some(result)) => result.addresses(&files.key().ifname),
        // Whatever is wrong with it, an attachment can be taken away without.
        _ => Vec::new(),
    };
    if !files.dir().exists() {
        return undo(&files, host, &reported);
    }
    let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))?;
    undo(&files, host, &reported)?;
    lock.remove();
    Ok(())
}

/// Undoes what the record says was done, or what can be found without one. Everything is tried; the record stays if
/// anything is left to do. The caller holds the lock.
///
/// # Errors
/// As [`run`].
pub fn detach(files: &Files, host: &Host<'_>) -> Result<(), Error> {
    undo(files, host, &Vec::new)
}

/// As [`detach`]. `reported`: the pod's addresses as ADD reported them, used only if there is no record.
fn undo(files: &Files, host: &Host<'_>, reported: &dyn Fn() -> Vec<IpAddr>) -> Result<(), Error> {
    let mut routes = Vec::new();
    let (kinds, known) = match Record::load(&files.record()) {
        // Container ids and interface names may hold '-', so two attachments can share a file name.
        Ok(Found::Record(record)) if record.key() != *files.key() => return Ok(()),
        // Recorded before it ran: with no process in the record there is none.
        Ok(Found::Record(record)) => {
            routes.extend(record.host_route);
            (vec![record.supervisor], Known::Recorded(record.process))
        }
        Ok(Found::Nothing | Found::Garbage(_)) | Err(_) => {
            routes = lost_routes(files, host, reported());
            (vec![Kind::Direct, Kind::Systemd], Known::Nothing)
        }
    };
    let stop = |kind: &Kind| host.supervisor(*kind).stop(files, known, host.clock);
    let stopped: Result<Vec<()>, String> = kinds.iter().map(stop).collect();
    let name = format!("container {} interface {}", files.key().container_id, files.key().ifname);
    stopped.map_err(|why| {
        Error::new(code::TRY_AGAIN, format!("{name}: the instance does not end: {why}"))
            .details("it still holds the pod's network namespace; end it by hand if this repeats")
    })?;
    for route in routes {
        let failed = |e| Error::new(code::IO, format!("{name}: cannot remove the route to {}: {e}", route.destination));
        host.routes.remove(&route).map_err(failed)?;
    }
    host.guards
        .remove(&files.guard_tables())
        .map_err(|e| Error::new(code::IO, format!("{name}: cannot remove the rules of the pod's link: {e}")))?;
    kinds.iter().for_each(|kind| host.supervisor(*kind).clean_up(files, host.clock));
    files
        .remove()
        .map_err(|problems| Error::new(code::IO, format!("{name}: state is left behind")).details(problems.join("; ")))
}

/// Routes that a plugin made to the addresses of a pod whose record is lost: those `reported`, and those its instance
/// still tells. One that belongs to a pod that has its record stays: the address may have been given on.
fn lost_routes(files: &Files, host: &Host<'_>, mut addresses: Vec<IpAddr>) -> Vec<HostRoute> {
    addresses.extend(Status::ask(&files.status_socket()).iter().flat_map(Status::addresses));
    let mut routes: Vec<_> = addresses.into_iter().filter_map(|address| host.routes.ours_to(address)).collect();
    if !routes.is_empty() {
        let kept = record::host_routes(&files.state_dir());
        routes.retain(|route| kept.iter().all(|kept| kept.destination != route.destination));
    }
    routes
}

// A call that was interrupted freed its lock; one that works ends within its own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
