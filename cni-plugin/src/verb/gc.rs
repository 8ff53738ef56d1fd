//! GC: takes away attachments the runtime no longer knows, unless their pod's namespace is still there: another runtime
//! may share the network's name, and its list is not in ours.

use std::time::Duration;

use crate::attachment::lock::Lock;
use crate::attachment::record::{self, Files, Found, Record};
use crate::clock::Deadline;
use crate::host::Host;
use crate::reply::{Error, code};
use crate::request::Collect;
use crate::settings::Settings;
use crate::verb::del::detach;

/// Collects. Without a list nothing is done; an empty list means that nothing is valid.
///
/// # Errors
/// All that could not be taken away, after everything was tried.
pub fn run(request: &Collect, host: &Host<'_>) -> Result<(), Error> {
    let Some(valid) = &request.valid else { return Ok(()) };
    let state_dir = Settings::state_dir(&request.config);
    let paths = record::list(&state_dir, &request.config.name)
        .map_err(|e| Error::new(code::IO, format!("cannot list the records in {}: {e}", state_dir.display())))?;
    let mut problems = Vec::new();
    for path in paths {
        // A damaged record names nobody; its attachment ends with its pod's namespace or by DEL.
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
