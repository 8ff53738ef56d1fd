//! GC: removes attachments that the runtime no longer knows, unless the pod's namespace still exists: another runtime
//! may use the same network name, and its attachments are not in this runtime's list.

use std::time::Duration;

use nebula_cni_contract::clock::Deadline;

use crate::attachment::files::Files;
use crate::attachment::lock::Lock;
use crate::attachment::record::{self, Found, Record};
use crate::host::Host;
use crate::primary::network;
use crate::primary::settings::is_primary;
use crate::reply::{Error, code};
use crate::request::Collect;
use crate::settings::Settings;
use crate::verb::del::detach;

/// Removes stale attachments. Without a list nothing is done; an empty list means that no attachment is valid.
///
/// # Errors
/// Lists the attachments that could not be removed, after all were tried.
pub fn run(request: &Collect, host: &Host<'_>) -> Result<(), Error> {
    let tunnels = end_tunnels(request, host);
    if !is_primary(&request.config)? {
        return tunnels;
    }
    match (tunnels, network::collect(request, host)) {
        (Err(error), Err(other)) => Err(error.also(&other)),
        (tunnels, links) => tunnels.and(links),
    }
}

fn end_tunnels(request: &Collect, host: &Host<'_>) -> Result<(), Error> {
    let Some(valid) = &request.valid else { return Ok(()) };
    let state_dir = Settings::state_dir(&request.config);
    let paths = record::list(&state_dir, &request.config.name)
        .map_err(|e| Error::new(code::IO, format!("cannot list the records in {}: {e}", state_dir.display())))?;
    let mut problems = Vec::new();
    for path in paths {
        // A damaged record names no pod; its instance ends with the pod's namespace, or DEL removes it.
        let Ok(Found::Record(record)) = Record::load(&path) else { continue };
        let key = record.key();
        let is_valid = valid.iter().any(|(id, ifname)| (id, ifname) == (&key.container_id, &key.ifname));
        let has_netns =
            host.namespaces.open(&record.target.netns).is_ok_and(|netns| netns.id == record.target.netns_id);
        if is_valid || has_netns {
            continue;
        }
        let files = Files::new(&state_dir, &key);
        let done = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))
            .and_then(|lock| detach(&files, host).map(|()| lock.remove()));
        problems.extend(done.err().map(|e| e.to_string()));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(Error::new(code::IO, "some attachments could not be collected").details(problems.join("; ")))
}

const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
