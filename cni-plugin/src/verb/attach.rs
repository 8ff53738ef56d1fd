//! Attachment in place: gives a pod that is already running what ADD would have given it. The node agent asks for this
//! for pods that were started before the installation, or whose attachment was lost. A later DEL of the runtime removes
//! the attachment like any other.
//!
//! The pod runs and goes on running if this fails. With the key `isolate` or `capture` its link is therefore closed
//! first (with `capture` towards other pods), and stays closed after a failure: the operator wants no clear traffic
//! of enrolled pods, and with a CA that is away for an hour each of the agent's attempts would open the pod again.
//! DEL opens the link, as does the next attempt that finds the pod no longer enrolled.

use nebula_cni_contract::clock::Deadline;

use crate::attachment::files::Files;
use crate::attachment::lock::Lock;
use crate::attachment::record::{Found, Record, State};
use crate::host::Host;
use crate::reply::{Error, code};
use crate::request::Attach;
use crate::settings::Settings;
use crate::verb::add::{Given, LOCK_TIMEOUT, Mode, give_tunnel, open_netns, required_prev_result};
use crate::verb::del::detach;

/// What became of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has a tunnel.
    Attached,
    /// It is not enrolled, so nothing was done.
    NotEnrolled,
}

/// Attaches a running pod. The request is that of an ADD; its `prevResult` is the result that the runtime keeps for
/// the pod. The pod keeps its address in Kubernetes, also with the key `renumber`: it cannot change any more.
/// `afresh` is for an attachment that looks complete here and does not work.
///
/// # Errors
/// As ADD. Code 110 if the address in the result is not on the pod's interface; such a pod must be recreated.
pub fn run(request: &Attach, afresh: bool, host: &Host<'_>) -> Result<Outcome, Error> {
    let settings = Settings { renumber: false, ..Settings::read(&request.config)? };
    let prev_result = required_prev_result(&request.config)?;
    let ifname = &request.key.ifname;
    let address = prev_result.pod_address(ifname)?;
    let netns = open_netns(request, host)?;
    let link = host.namespaces.link(&netns, ifname).map_err(|e| {
        Error::new(code::NETNS, format!("cannot look into the network namespace {}: {e}", request.netns.display()))
    })?;
    if !link.is_some_and(|link| link.addresses.iter().any(|(found, _)| *found == address)) {
        let msg =
            format!("the runtime reports {address} as the pod's address, but {ifname} in the pod does not have it");
        return Err(Error::new(code::ADDRESS, msg).details("the pod cannot be attached in place; delete it"));
    }
    let outcome = give_tunnel(request, &settings, &prev_result, host, Mode::RunningPod { afresh }, |given| {
        Ok(match given {
            Given::Tunnel(_) | Given::BySibling => Outcome::Attached,
            Given::Nothing => Outcome::NotEnrolled,
        })
    })?;
    if outcome == Outcome::NotEnrolled {
        forget(&Files::new(&settings.state_dir, &request.key), afresh, host)?;
    }
    Ok(outcome)
}

/// Removes what an attempt left of a pod that has ceased to be enrolled; a complete attachment only with `always`.
fn forget(files: &Files, always: bool, host: &Host<'_>) -> Result<(), Error> {
    let is_left = || match Record::load(&files.record()) {
        Ok(Found::Record(record)) => record.key() == *files.key() && (always || record.state == State::Intent),
        _ => false,
    };
    if !is_left() {
        return Ok(());
    }
    let lock = Lock::acquire(files, host.clock, Deadline::after(host.clock, LOCK_TIMEOUT))?;
    if is_left() {
        detach(files, host)?;
    }
    lock.remove();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::fs::File;
    use std::io;
    use std::net::IpAddr;
    use std::path::Path;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::link::capture::{Captures, PodCapture};
    use crate::link::guard::{Guard, Guards};
    use crate::link::host_route::SystemRoutes;
    use crate::link::pod_link::{Links, PodLink};
    use crate::request::{Env, Request, read};
    use crate::supervisor::process::Process;
    use crate::supervisor::{Known, Launch, StartFailure, Supervisor};
    use crate::verb::reconcile::{Depth, network};
    use nebula_cni_contract::clock::{Clock, SystemClock};
    use nebula_cni_contract::labels::Program;
    use nebula_cni_contract::netns::{Link, Namespaces, Netns, NetnsId};

    /// A node with one pod, whose link has rules or not, and whose instances start or not.
    #[derive(Default)]
    struct Node {
        has_rules: Cell<bool>,
        works: Cell<bool>,
        runs: Cell<bool>,
        /// What happened, in order.
        log: RefCell<Vec<&'static str>>,
    }

    impl Node {
        fn note(&self, what: &'static str) {
            let closed = if self.has_rules.get() { what } else { "open" };
            self.log.borrow_mut().push(if what.starts_with("rules") { what } else { closed });
        }
    }

    impl Namespaces for Node {
        fn open(&self, _: &Path) -> io::Result<Netns> {
            Ok(Netns { file: File::open("/proc/self/ns/net")?, id: (4, 7) })
        }

        fn own(&self) -> io::Result<NetnsId> {
            Ok((4, 1))
        }

        fn link(&self, _: &Netns, _: &str) -> io::Result<Option<Link>> {
            Ok(Some(Link { up: true, addresses: vec![(IpAddr::from([10, 244, 1, 2]), 24)], is_without_v6: false }))
        }

        fn set_mtu(&self, _: &Netns, _: &str, _: u32) -> io::Result<()> {
            Ok(())
        }
    }

    impl Links for Node {
        fn of_pod(&self, _: &Netns, _: &str, pod: IpAddr) -> Result<PodLink, String> {
            Ok(PodLink {
                name: "veth1".into(),
                index: 9,
                mac: [2; 6],
                addresses: vec![pod.into()],
                is_shared: false,
                node_mac: None,
                node_addresses: vec![],
            })
        }

        fn is_there(&self, _: &str, _: u32) -> Result<bool, String> {
            Ok(true)
        }

        fn harden(&self, _: &Netns, _: &str) {}

        fn remove_tun(&self, _: &Netns, _: &str) -> io::Result<()> {
            Ok(())
        }
    }

    impl Guards for Node {
        fn install(&self, _: &Guard) -> io::Result<()> {
            self.has_rules.set(true);
            self.note("rules installed");
            Ok(())
        }

        fn is_in_force(&self, _: &Guard) -> io::Result<bool> {
            Ok(self.has_rules.get())
        }

        fn remove(&self, _: &str) -> io::Result<()> {
            self.has_rules.set(false);
            self.note("rules removed");
            Ok(())
        }

        fn sweep(&self) -> io::Result<()> {
            Ok(())
        }
    }

    // The same switch: one of the two keys is set.
    impl Captures for Node {
        fn install(&self, _: &Netns, _: &PodCapture) -> io::Result<()> {
            self.has_rules.set(true);
            self.note("rules installed");
            Ok(())
        }

        fn missing(&self, _: &Netns, capture: &PodCapture) -> io::Result<Vec<String>> {
            self.unguarded(capture)
        }

        fn unguarded(&self, _: &PodCapture) -> io::Result<Vec<String>> {
            Ok(if self.has_rules.get() { vec![] } else { vec!["rules".into()] })
        }

        fn remove(&self, _: Option<&Netns>, _: &PodCapture, _: &[IpAddr]) -> io::Result<()> {
            self.has_rules.set(false);
            self.note("rules removed");
            Ok(())
        }

        fn remove_lost(&self, _: &str, _: &[IpAddr]) -> io::Result<()> {
            Ok(())
        }

        fn sweep(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Supervisor for Node {
        fn start(
            &self,
            _: &Launch<'_>,
            _: &dyn Clock,
            _: Deadline,
            started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
        ) -> Result<(), StartFailure> {
            self.note("start");
            started(None).map_err(StartFailure::Record)?;
            self.runs.set(self.works.get());
            match self.works.get() {
                true => Ok(()),
                false => Err(StartFailure::Deadline { said: "no CA".into() }),
            }
        }

        fn restart(
            &self,
            launch: &Launch<'_>,
            clock: &dyn Clock,
            started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
        ) -> Result<(), StartFailure> {
            self.start(launch, clock, Deadline::after(clock, launch.budget), started)
        }

        fn reload(&self, _: &Files, _: Option<Process>, _: &dyn Clock) -> Result<(), String> {
            Ok(())
        }

        fn is_alive(&self, _: &Files, _: Option<Process>, _: &dyn Clock) -> bool {
            self.runs.get()
        }

        fn keep_only(
            &self,
            _: &Files,
            _: i32,
            _: [Option<Process>; 2],
            _: Duration,
            _: &dyn Clock,
        ) -> Result<(), String> {
            Ok(())
        }
        fn stop(&self, _: &Files, _: Known, _: &dyn Clock) -> Result<(), String> {
            if self.runs.replace(false) {
                self.note("stop");
            }
            Ok(())
        }

        fn clean_up(&self, _: &Files, _: &dyn Clock) {}

        fn restarts_by_itself(&self) -> bool {
            false
        }

        fn why_ended(&self, _: &Files, _: &dyn Clock) -> Option<String> {
            None
        }
    }

    fn request(state: &Path, entry: &Value) -> Attach {
        let mut config = json!({"cniVersion": "1.0.0", "name": "net", "type": "nebula-cni-plugin", "supervisor": "direct",
            "instance": "/bin/sh", "stateDir": state, "overlay": ["10.244.0.0/16"], "enrol": {"namespaces": ["shop"]},
            "ca": {"url": "https://ca:8443", "tlsCaFile": "/x", "tokenFile": "/y"},
            "prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
                "ips": [{"address": "10.244.1.2/24", "interface": 0}]}});
        for (key, value) in entry.as_object().unwrap() {
            config[key] = value.clone();
        }
        let env = [
            ("CNI_COMMAND", "ADD"),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/run/netns/x"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=u-1"),
        ];
        let env: Env = env.into_iter().map(|(name, value)| (name.into(), value.into())).collect();
        match read(&env, config.to_string().as_bytes()).1 {
            Ok(Some(Request::Add(request))) => request,
            other => panic!("{other:?}"),
        }
    }

    fn host(node: &Node) -> Host<'_> {
        Host {
            clock: &SystemClock,
            namespaces: node,
            direct: node,
            systemd: node,
            routes: &SystemRoutes,
            links: node,
            guards: node,
            captures: node,
            labels: &Program,
            plugin_dir: None,
        }
    }

    /// The keys that close a pod's link.
    const CLOSING: [&str; 2] = ["isolate", "capture"];

    fn record(state: &Path) -> Option<Record> {
        let key = crate::request::Key { network: "net".into(), container_id: "c1".into(), ifname: "eth0".into() };
        match Record::load(&Files::new(state, &key).record()).unwrap() {
            Found::Record(record) => Some(*record),
            _ => None,
        }
    }

    #[test]
    fn a_pod_is_closed_first_and_stays_closed_until_it_has_a_tunnel() {
        for key in CLOSING {
            is_closed_first(key);
        }
    }

    fn is_closed_first(key: &str) {
        let (state, node) = (tempfile::tempdir().unwrap(), Node::default());
        let request = request(state.path(), &json!({key: true}));
        for _ in 0..2 {
            let error = run(&request, false, &host(&node)).unwrap_err();
            assert!(error.to_string().contains("no CA"), "{error}");
            assert!(node.has_rules.get(), "{:?}", node.log);
            let left = record(state.path()).unwrap();
            assert!(left.state == State::Intent && left.process.is_none());
            assert!(left.guard.is_some() || left.capture.is_some());
        }
        // Somebody removes all rules of the node.
        node.has_rules.set(false);
        network(state.path(), "net", Depth::Quick, &host(&node)).unwrap();
        assert!(node.has_rules.get());
        node.works.set(true);
        assert_eq!(run(&request, false, &host(&node)).unwrap(), Outcome::Attached);
        assert!(record(state.path()).unwrap().state == State::Running && node.has_rules.get());
        let opened = ["open", "rules removed"];
        assert!(node.log.borrow().iter().all(|what| !opened.contains(what)), "{:?}", node.log);
    }

    #[test]
    fn an_attachment_that_is_replaced_leaves_no_gap_even_if_that_fails() {
        for key in CLOSING {
            leaves_no_gap(key);
        }
    }

    fn leaves_no_gap(key: &str) {
        let (state, node) = (tempfile::tempdir().unwrap(), Node::default());
        let request = request(state.path(), &json!({key: true}));
        node.works.set(true);
        run(&request, false, &host(&node)).unwrap();
        let starts = |node: &Node| node.log.borrow().iter().filter(|what| **what == "start").count();
        run(&request, false, &host(&node)).unwrap();
        assert_eq!(starts(&node), 1, "it is in place");
        run(&request, true, &host(&node)).unwrap();
        assert_eq!(starts(&node), 2);
        node.works.set(false);
        run(&request, true, &host(&node)).unwrap_err();
        assert!(node.has_rules.get() && !node.runs.get());
        assert!(
            !node.log.borrow().contains(&"rules removed") && !node.log.borrow().contains(&"open"),
            "{:?}",
            node.log
        );
    }

    #[test]
    fn a_pod_of_another_chain_entry_is_captured_before_its_old_attachment_ends() {
        for before in [json!({}), json!({"isolate": true})] {
            let (state, node) = (tempfile::tempdir().unwrap(), Node { works: true.into(), ..Node::default() });
            run(&request(state.path(), &before), false, &host(&node)).unwrap();
            node.log.borrow_mut().clear();
            let captured = json!({"capture": {"policy": {"clear": "enforce"}}});
            run(&request(state.path(), &captured), true, &host(&node)).unwrap();
            let made = record(state.path()).unwrap();
            assert!(made.guard.is_none() && made.capture.unwrap().guard.judges_by_policy());
            // What isolated it goes once the rules of capture are there; here the two are one switch.
            let is_isolated = before != json!({});
            let removed = is_isolated.then_some("rules removed");
            let expected = ["rules installed", "stop"].into_iter().chain(removed).chain(["rules installed", "start"]);
            assert_eq!(*node.log.borrow(), expected.collect::<Vec<_>>(), "{before}");
        }
    }

    #[test]
    fn a_pod_that_is_no_longer_enrolled_is_opened_again() {
        for key in CLOSING {
            let (state, node) = (tempfile::tempdir().unwrap(), Node::default());
            run(&request(state.path(), &json!({key: true})), false, &host(&node)).unwrap_err();
            let other = json!({key: true, "enrol": {"namespaces": ["pay"]}});
            assert_eq!(run(&request(state.path(), &other), false, &host(&node)).unwrap(), Outcome::NotEnrolled);
            assert!(!node.has_rules.get() && record(state.path()).is_none());
        }
    }

    #[test]
    fn a_pod_whose_record_a_newer_program_wrote_is_not_touched() {
        let (state, node) = (tempfile::tempdir().unwrap(), Node { has_rules: true.into(), ..Node::default() });
        node.runs.set(true);
        node.works.set(true);
        let request = request(state.path(), &json!({"isolate": true}));
        let path = Files::new(state.path(), &request.key).record();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        for newer in [r#"{"version":2}"#, r#"{"version":1,"state":"asleep"}"#] {
            std::fs::write(&path, newer).unwrap();
            for afresh in [false, true] {
                let refused = run(&request, afresh, &host(&node)).unwrap_err();
                assert!(refused.msg.contains("c1-eth0.json cannot be used: it was written by a"), "{refused:?}");
            }
            network(state.path(), "net", Depth::Thorough, &host(&node)).unwrap();
            assert!(node.runs.get() && node.has_rules.get() && node.log.borrow().is_empty(), "{:?}", node.log);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), newer);
        }
    }

    #[test]
    fn without_isolation_nothing_of_a_failed_attachment_is_left() {
        let (state, node) = (tempfile::tempdir().unwrap(), Node::default());
        run(&request(state.path(), &json!({})), false, &host(&node)).unwrap_err();
        assert!(!node.has_rules.get() && record(state.path()).is_none());
        assert!(!state.path().join("net").exists());
    }
}
