//! DEL: removes an attachment. It is idempotent: whatever is already gone is not an error.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::Status;

use crate::attachment::files::Files;
use crate::attachment::foreign;
use crate::attachment::lock::Lock;
use crate::attachment::record::{Found, Record};
use crate::attachment::released;
use crate::attachment::shared::{self, Others};
use crate::host::Host;
use crate::link::host_route::HostRoute;
use crate::primary::network;
use crate::primary::settings::is_primary;
use crate::reply::{Error, code};
use crate::request::Detach;
use crate::settings::Settings;
use crate::supervisor::Known;
use crate::supervisor::kind::Kind;

/// Detaches; needs neither the namespace nor the CA nor prevResult. If the record is lost, prevResult helps to find
/// what else to undo.
///
/// # Errors
/// Code 11 if the instance does not end or another call holds the lock; code 5 if a route, a rule or a file cannot be
/// removed.
pub fn run(request: &Detach, host: &Host<'_>) -> Result<(), Error> {
    // A damaged entry has been no primary one.
    if !is_primary(&request.config).unwrap_or(false) {
        return end_tunnel(request, host);
    }
    // Without tunnels there is nothing to look for, except what an entry of before made.
    let files = Files::new(&Settings::state_dir(&request.config), &request.key);
    let had_tunnels = !matches!(request.config.value("ca"), Ok(None)) || files.record().exists();
    let ended = if had_tunnels { end_tunnel(request, host) } else { Ok(()) };
    match (ended, network::remove(&request.config, &request.key)) {
        (Err(error), Err(other)) => Err(error.also(&other)),
        (ended, removed) => ended.and(removed),
    }
}

fn end_tunnel(request: &Detach, host: &Host<'_>) -> Result<(), Error> {
    let files = Files::new(&Settings::state_dir(&request.config), &request.key);
    let reported = || match request.config.prev_result() {
        Ok(Some(result)) => result.addresses(&files.key().ifname),
        // A broken prevResult does not stop DEL, which can do without it.
        _ => Vec::new(),
    };
    if !files.dir().exists() {
        return undo(&files, host, &reported, Rules::Removed);
    }
    let lock = Lock::acquire(&files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))?;
    undo(&files, host, &reported, Rules::Removed)?;
    lock.remove();
    Ok(())
}

/// Undoes what the record names, or what can be found without one. The record stays if anything could not be undone.
/// The caller must hold the lock.
///
/// # Errors
/// The same as [`run`].
pub fn detach(files: &Files, host: &Host<'_>) -> Result<(), Error> {
    undo(files, host, &Vec::new, Rules::Removed)
}

/// Like [`detach`], but the rules of the pod's link stay, so that the pod reaches nobody in clear meanwhile.
///
/// # Errors
/// The same as [`run`].
pub(crate) fn detach_closed(files: &Files, host: &Host<'_>) -> Result<(), Error> {
    undo(files, host, &Vec::new, Rules::Kept)
}

/// What becomes of the rules of the pod's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    Removed,
    Kept,
}

/// Like [`detach`]. `reported` returns the pod's addresses as ADD reported them; it is used only if there is no record.
fn undo(files: &Files, host: &Host<'_>, reported: &dyn Fn() -> Vec<IpAddr>, rules: Rules) -> Result<(), Error> {
    let mut routes = Vec::new();
    let mut lost = Vec::new();
    let mut removed = None;
    let (kinds, known) = match Record::load(&files.record()) {
        // Container ids and interface names may contain '-', so two attachments can share a file name.
        Ok(Found::Record(record)) if record.key() != *files.key() => return Ok(()),
        // Processes are recorded before they run the instance, so a record without one means that there is none.
        Ok(Found::Record(record)) => {
            routes.extend(record.host_route);
            let known = (vec![record.supervisor], Known::Recorded(record.processes()));
            removed = Some(record);
            known
        }
        Ok(Found::Foreign(why)) => return Err(foreign::refusal(&files.record(), &why)),
        Ok(Found::Nothing | Found::Garbage(_)) | Err(_) => {
            lost = reported();
            routes = lost_routes(files, host, lost.clone());
            (vec![Kind::Direct, Kind::Systemd], Known::Nothing)
        }
    };
    let device_removed = removed.as_deref().and_then(|record| remove_left_device(files, record, host));
    let stop = |kind: &Kind| host.supervisor(*kind).stop(files, known, host.clock);
    let stopped: Result<Vec<()>, String> = kinds.iter().map(stop).collect();
    let name = format!("container {} interface {}", files.key().container_id, files.key().ifname);
    drop(device_removed);
    stopped.map_err(|why| {
        Error::new(code::TRY_AGAIN, format!("{name}: the instance does not end: {why}"))
            .details("it still holds the pod's network namespace; end it by hand if this repeats")
    })?;
    // Every removal is tried. The record stays until all of them succeed, because the next DEL needs it.
    let mut outcomes = Vec::new();
    for route in &routes {
        let failed = |e| Error::new(code::IO, format!("{name}: cannot remove the route to {}: {e}", route.destination));
        outcomes.push(host.routes.remove(route).map_err(failed));
    }
    if let Some(record) = removed.as_deref().filter(|record| !record.refused.is_empty()) {
        let failed = |e| Error::new(code::IO, format!("{name}: cannot remove unreachable routes of the overlay: {e}"));
        outcomes.push(end_refusals(files, record, host).map_err(failed));
    }
    if rules == Rules::Removed {
        let failed = |what: &str, e| Error::new(code::IO, format!("{name}: cannot {what} (netlink, nf_tables): {e}"));
        let has_guard = removed.as_deref().map(|record| record.guard.is_some());
        let rules_removed = if_needed(host.guards.remove(&files.guard_tables()), has_guard);
        outcomes.push(rules_removed.map_err(|e| failed("remove the rules of the pod's link", e)));
        let ended = end_capture(files, removed.as_deref(), lost, host);
        outcomes.push(ended.map_err(|e| failed("end the capture of the pod's traffic", e)));
    }
    outcomes.into_iter().collect::<Result<(), Error>>()?;
    kinds.iter().for_each(|kind| host.supervisor(*kind).clean_up(files, host.clock));
    files.remove().map_err(|problems| {
        Error::new(code::IO, format!("{name}: state is left behind")).details(problems.join("; "))
    })?;
    if removed.as_deref().is_none_or(|record| record.capture.is_some())
        && let Err(error) = shared::remove_cluster_folder(&files.state_dir())
        && error.kind() != io::ErrorKind::NotFound
    {
        eprintln!("nebula-cni-plugin: {name}: cannot remove the folder of the cluster table: {error}");
    }
    if let Some(record) = removed
        && let Err(error) = released::note(&files.state_dir(), &record)
    {
        // The CA finds out by itself, later.
        eprintln!("nebula-cni-plugin: {name}: cannot note that its certificate is to be released: {error}");
    }
    Ok(())
}

/// Removes the device of an instance that was killed, if systemd holds it for the next one: removed by its last close,
/// it would block systemd for some 20 ms. Until the returned file is closed, no instance can start. A living instance
/// does it itself.
fn remove_left_device(files: &Files, record: &Record, host: &Host<'_>) -> Option<File> {
    if record.supervisor != Kind::Systemd {
        return None;
    }
    // An instance holds this lock as long as it lives.
    let launch = File::open(files.launch()).ok().filter(|launch| launch.try_lock().is_ok())?;
    let netns = host.namespaces.open(&record.target.netns).ok().filter(|netns| netns.id == record.target.netns_id)?;
    if let Err(error) = host.links.remove_tun(&netns, &record.target.device) {
        eprintln!("nebula-cni-plugin: cannot remove the device {}, so systemd does: {error}", record.target.device);
    }
    Some(launch)
}

/// Ends what the record keeps the node from, unless another pod needs it.
fn end_refusals(files: &Files, record: &Record, host: &Host<'_>) -> io::Result<()> {
    let _lock = shared::lock_shared(&files.state_dir())?;
    let kept = Others::than(&files.state_dir(), files.key()).refused();
    let ended = record.refused.iter().filter(|network| !kept.contains(network));
    ended.copied().try_for_each(|network| host.routes.end_refusal(network))
}

/// Ends the capture that the record names. Without a record, `lost` are the addresses that the pod may have had.
/// Another pod may have one of the addresses by now: a primary plugin can reassign the address of a pod whose DEL
/// comes late.
fn end_capture(files: &Files, record: Option<&Record>, lost: Vec<IpAddr>, host: &Host<'_>) -> io::Result<()> {
    let unused = |mut addresses: Vec<IpAddr>| {
        let used = Others::than(&files.state_dir(), files.key()).captured();
        addresses.retain(|address| !used.contains(address));
        addresses
    };
    let Some(record) = record else {
        return if_needed(host.captures.remove_lost(&files.capture(), &unused(lost)), None);
    };
    let Some(capture) = &record.capture else { return Ok(()) };
    // A namespace that is gone took its part along.
    let netns = host.namespaces.open(&record.target.netns).ok().filter(|netns| netns.id == record.target.netns_id);
    host.captures.remove(netns.as_ref(), capture, &unused(capture.guard.addresses().to_vec()))
}

/// Undoing needs no more than doing did: what the record does not name was never made. `recorded` is `None` without a
/// record; then nobody has made what this process may not even look for.
fn if_needed(removed: io::Result<()>, recorded: Option<bool>) -> io::Result<()> {
    use io::ErrorKind::{PermissionDenied, Unsupported};

    match (removed, recorded) {
        (Err(_), Some(false)) => Ok(()),
        // A filter of system calls answers with either.
        (Err(error), None) if matches!(error.kind(), PermissionDenied | Unsupported) => Ok(()),
        (removed, _) => removed,
    }
}

/// Finds the routes that this plugin added for a pod whose record is lost: to the addresses in `addresses` and to those
/// its instance still reports. Routes named in the record of another pod stay, because the address may have been
/// reassigned.
fn lost_routes(files: &Files, host: &Host<'_>, mut addresses: Vec<IpAddr>) -> Vec<HostRoute> {
    addresses.extend(Status::ask(&files.status_socket()).iter().flat_map(Status::addresses));
    let mut routes: Vec<_> = addresses.into_iter().filter_map(|address| host.routes.ours_to(address)).collect();
    if !routes.is_empty() {
        let kept = Others::than(&files.state_dir(), files.key()).routes();
        routes.retain(|route| !kept.contains(&route.destination));
    }
    routes
}

// A killed call has released its lock, and a running one ends by its own deadline.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::link::capture::SystemCaptures;
    use crate::link::guard::{Guard, Guards};
    use crate::link::host_route::Routes;
    use crate::link::pod_link::{Links, PodLink, SystemLinks};
    use crate::request::Key;
    use crate::supervisor::direct::Direct;
    use nebula_cni_contract::clock::SystemClock;
    use nebula_cni_contract::labels::Program;
    use nebula_cni_contract::netns::{Namespaces, Netns, SystemNamespaces};

    /// Removes no route while `is_broken`.
    struct FakeRoutes {
        is_broken: Cell<bool>,
        /// Networks that are no longer refused.
        ended: RefCell<Vec<String>>,
    }

    impl Routes for FakeRoutes {
        fn like(&self, _: IpAddr, _: IpAddr) -> io::Result<HostRoute> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn add(&self, _: &HostRoute) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn ours_to(&self, _: IpAddr) -> Option<HostRoute> {
            None
        }

        fn remove(&self, _: &HostRoute) -> io::Result<()> {
            if self.is_broken.get() { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) }
        }

        fn is_used(&self, _: &HostRoute) -> bool {
            false
        }

        fn refuse(&self, _: ipnet::IpNet) -> io::Result<()> {
            Ok(())
        }

        fn end_refusal(&self, network: ipnet::IpNet) -> io::Result<()> {
            self.ended.borrow_mut().push(network.to_string());
            Ok(())
        }
    }

    /// Remembers what was removed.
    #[derive(Default)]
    struct FakeGuards {
        removed: RefCell<Vec<String>>,
        error: Cell<Option<io::ErrorKind>>,
    }

    impl Guards for FakeGuards {
        fn install(&self, _: &Guard) -> io::Result<()> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn is_in_force(&self, _: &Guard) -> io::Result<bool> {
            Ok(false)
        }

        fn remove(&self, prefix: &str) -> io::Result<()> {
            self.removed.borrow_mut().push(prefix.to_owned());
            self.error.get().map_or(Ok(()), |kind| Err(kind.into()))
        }

        fn sweep(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn host<'a>(direct: &'a Direct, routes: &'a FakeRoutes, guards: &'a FakeGuards) -> Host<'a> {
        Host {
            clock: &SystemClock,
            namespaces: &SystemNamespaces,
            direct,
            systemd: direct,
            routes,
            links: &SystemLinks,
            guards,
            captures: &SystemCaptures,
            labels: &Program,
            plugin_dir: None,
        }
    }

    #[test]
    fn a_route_that_stays_keeps_neither_the_rules_nor_the_next_call_from_being_tried() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() };
        let files = Files::new(dir.path(), &key);
        files.create_dir().unwrap();
        released::expect(dir.path(), "net", std::time::UNIX_EPOCH).unwrap();
        let text = r#"{"version": 1, "state": "running", "network": "net", "container_id": "c", "ifname": "eth0",
            "netns": "/run/netns/x", "netns_id": [4, 9], "pod": {"namespace": "a", "name": "b", "uid": "c"},
            "pod_address": "10.0.0.1", "device": "nebula0", "supervisor": "direct", "instance": "/i", "process": null,
            "host_route": {"destination": "10.42.0.1", "next_hop": "10.0.0.1", "interface": 3}, "status_socket": "/x"}"#;
        serde_json::from_str::<Record>(text).unwrap().save(&files).unwrap();
        let (direct, routes, guards) = (
            Direct::new(),
            FakeRoutes { is_broken: Cell::new(true), ended: RefCell::default() },
            FakeGuards::default(),
        );
        let host = host(&direct, &routes, &guards);
        let failed = detach(&files, &host).unwrap_err();
        assert!(failed.code == code::IO && failed.msg.contains("the route to 10.42.0.1"), "{failed:?}");
        assert_eq!(*guards.removed.borrow(), [files.guard_tables()]);
        assert!(files.record().exists(), "the next call needs it");
        routes.is_broken.set(false);
        detach(&files, &host).unwrap();
        assert!(!files.record().exists());
        assert!(released::dir(dir.path(), "net").join("c.json").exists());
    }

    /// Has no links; notes which devices are removed.
    struct FakeLinks(RefCell<Vec<String>>);

    impl Links for FakeLinks {
        fn of_pod(&self, _: &Netns, _: &str, _: IpAddr) -> Result<PodLink, String> {
            Err("there is none".into())
        }

        fn is_there(&self, _: &str, _: u32) -> Result<bool, String> {
            Ok(false)
        }

        fn harden(&self, _: &Netns, _: &str) {}

        fn remove_tun(&self, _: &Netns, name: &str) -> io::Result<()> {
            self.0.borrow_mut().push(name.to_owned());
            Ok(())
        }
    }

    #[test]
    fn the_device_of_a_dead_instance_is_removed_before_systemd_closes_it_and_that_of_a_living_one_is_not() {
        let own = SystemNamespaces.own().unwrap();
        for (supervisor, id, lives, removed) in [
            ("systemd", own, false, &["nebula0"][..]),
            ("systemd", own, true, &[]),
            ("systemd", (own.0, own.1 + 1), false, &[]),
            ("direct", own, false, &[]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let files =
                Files::new(dir.path(), &Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() });
            files.create_dir().unwrap();
            let text = format!(
                r#"{{"version": 1, "state": "running", "network": "net", "container_id": "c", "ifname": "eth0",
                "netns": "/proc/self/ns/net", "netns_id": [{}, {}], "pod": {{"namespace": "a", "name": "b", "uid": "c"}},
                "pod_address": "10.0.0.1", "device": "nebula0", "supervisor": "{supervisor}", "instance": "/i",
                "process": null, "status_socket": "/x"}}"#,
                id.0, id.1
            );
            serde_json::from_str::<Record>(&text).unwrap().save(&files).unwrap();
            std::fs::write(files.launch(), "{}").unwrap();
            let instance = File::open(files.launch()).unwrap();
            if lives {
                instance.lock().unwrap();
            }
            let (direct, guards) = (Direct::new(), FakeGuards::default());
            let routes = FakeRoutes { is_broken: Cell::new(false), ended: RefCell::default() };
            let links = FakeLinks(RefCell::default());
            detach(&files, &Host { links: &links, ..host(&direct, &routes, &guards) }).unwrap();
            assert_eq!(*links.0.borrow(), removed, "{supervisor} {id:?} {lives}");
            assert!(!files.record().exists());
        }
    }

    #[test]
    fn the_node_may_send_to_an_overlay_network_again_once_no_record_refuses_it() {
        let dir = tempfile::tempdir().unwrap();
        let key = |id: &str| Key { network: "net".into(), container_id: id.into(), ifname: "eth0".into() };
        let save = |id: &str, refused: &str| {
            let files = Files::new(dir.path(), &key(id));
            files.create_dir().unwrap();
            let text = format!(
                r#"{{"version": 1, "state": "running", "network": "net", "container_id": "{id}", "ifname": "eth0",
                "netns": "/run/netns/x", "netns_id": [4, 9], "pod": {{"namespace": "a", "name": "b", "uid": "{id}"}},
                "pod_address": "10.0.0.1", "device": "nebula0", "supervisor": "direct", "instance": "/i", "process": null,
                "refused": {refused}, "status_socket": "/x"}}"#
            );
            serde_json::from_str::<Record>(&text).unwrap().save(&files).unwrap();
            files
        };
        let one = save("c", r#"["10.42.0.0/16", "10.43.0.0/16"]"#);
        let two = save("d", r#"["10.42.0.0/16"]"#);
        let (direct, guards) = (Direct::new(), FakeGuards::default());
        let routes = FakeRoutes { is_broken: Cell::new(false), ended: RefCell::default() };
        let host = host(&direct, &routes, &guards);
        detach(&one, &host).unwrap();
        assert_eq!(*routes.ended.borrow(), ["10.43.0.0/16"]);
        detach(&two, &host).unwrap();
        assert_eq!(*routes.ended.borrow(), ["10.43.0.0/16", "10.42.0.0/16"]);
    }

    #[test]
    fn a_record_that_a_newer_program_wrote_is_left_for_it_with_all_that_it_stands_for() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() };
        let files = Files::new(dir.path(), &key);
        files.create_dir().unwrap();
        let (direct, guards) = (Direct::new(), FakeGuards::default());
        let routes = FakeRoutes { is_broken: Cell::new(false), ended: RefCell::default() };
        let host = host(&direct, &routes, &guards);
        std::fs::write(files.record(), r#"{"version":2,"state":"running"}"#).unwrap();
        let refused = detach(&files, &host).unwrap_err();
        assert!(refused.msg.contains("by a newer program (format 2, this one knows 1)"), "{refused:?}");
        assert!(refused.details.contains("install the release again"), "{refused:?}");
        assert!(files.record().exists() && guards.removed.borrow().is_empty());
        // Damage is nobody's: DEL must be able to end.
        std::fs::write(files.record(), "{").unwrap();
        detach(&files, &host).unwrap();
        assert!(!files.record().exists() && !guards.removed.borrow().is_empty());
    }

    #[test]
    fn rules_that_cannot_be_looked_for_are_an_error_only_where_there_may_be_some() {
        use io::ErrorKind::{OutOfMemory, PermissionDenied, Unsupported};

        let guard = r#", "guard": {"table": "t", "link": "v", "index": 7, "mac": [2,0,0,0,0,7], "node_mac": null,
            "is_shared": false, "own": [], "neighbours": [], "allowed": {"dns": [], "probes": [], "ranges": []}, "tunnel": null}"#;
        for (record, error, fails) in [
            (Some(guard), PermissionDenied, true),
            (Some(guard), OutOfMemory, true),
            (Some(""), PermissionDenied, false),
            (Some(""), OutOfMemory, false),
            (Some(guard), Unsupported, true),
            (None, PermissionDenied, false),
            (None, Unsupported, false),
            (None, OutOfMemory, true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let files =
                Files::new(dir.path(), &Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() });
            files.create_dir().unwrap();
            if let Some(guard) = record {
                let text = format!(
                    r#"{{"version": 1, "state": "running", "network": "net", "container_id": "c", "ifname": "eth0",
                    "netns": "/run/netns/x", "netns_id": [4, 9], "pod": {{"namespace": "a", "name": "b", "uid": "c"}},
                    "pod_address": "10.0.0.1", "device": "nebula0", "supervisor": "direct", "instance": "/i",
                    "process": null, "status_socket": "/x"{guard}}}"#
                );
                serde_json::from_str::<Record>(&text).unwrap().save(&files).unwrap();
            }
            let (direct, guards) = (Direct::new(), FakeGuards::default());
            guards.error.set(Some(error));
            let routes = FakeRoutes { is_broken: Cell::new(false), ended: RefCell::default() };
            let outcome = detach(&files, &host(&direct, &routes, &guards));
            assert_eq!(outcome.is_err(), fails, "{record:?} {error:?}: {outcome:?}");
            assert_eq!(files.record().exists(), fails && record.is_some(), "the next call needs it");
        }
    }
}
