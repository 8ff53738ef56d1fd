//! One instance, with a fake in place of the plugin: a script that swaps the status document of a fake instance. The
//! processes that the documents name are real, so that their programs are.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;

use serde_json::{Value, json};

use super::*;
use crate::host_root::HostRoot;
use nebula_cni_plugin::supervisor::process::Process;

/// A folder with an instance and a fake of the plugin.
pub(in crate::rollout) struct Site {
    pub(in crate::rollout) dir: tempfile::TempDir,
    pub(in crate::rollout) upgrade: Upgrade,
    processes: Vec<Child>,
}

impl Drop for Site {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// A process of a program that is only like itself. `/bin/sleep` runs with some bytes behind its end as well.
fn process(path: &Path, mark: &str) -> Child {
    let mut program = fs::read("/bin/sleep").unwrap();
    program.extend(mark.bytes());
    fs::write(path, program).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    let mut tries = 0;
    loop {
        match Command::new(path).arg("600").spawn() {
            // Another test was forked while the file was open.
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy && tries < 100 => {
                tries += 1;
                thread::sleep(Duration::from_millis(5));
            }
            other => return other.unwrap(),
        }
    }
}

fn document(pid: u32, change: &Value) -> String {
    let mut status = json!({"pid": pid, "state": "running", "certificate": {"not_before": 1, "not_after": 2},
        "tunnels": [{"peer": ["10.77.0.1"]}], "counters": {}});
    for (key, value) in change.as_object().unwrap() {
        status[key] = value.clone();
    }
    status.to_string()
}

impl Site {
    /// An upgraded instance says what it said before, but for `change`. `script` is what the plugin does; `$1` to `$6`
    /// are its arguments, and `become old` and `become new` swap what the instance says.
    pub(in crate::rollout) fn new(change: &Value, script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let key = Key { network: "pods".into(), container_id: "c1".into(), ifname: "eth0".into() };
        let installed = root.join(INSTANCE);
        let processes = vec![process(&root.join("before"), "old"), process(&installed, "new")];
        fs::write(root.join("old"), document(processes[0].id(), &json!({}))).unwrap();
        fs::write(root.join("new"), document(processes[1].id(), change)).unwrap();
        fs::copy(root.join("old"), root.join("now")).unwrap();
        let (socket, files) = (root.join("socket"), Files::new(&root.join("state"), &key));
        let pids = [0, 1].map(|n: usize| i32::try_from(processes[n].id()).unwrap());
        let record = json!({"version": Record::VERSION, "state": "running", "status_socket": socket,
            "process": Process::with_pid(pids[1]), "predecessor": Process::with_pid(pids[0]),
            "network": "pods", "container_id": "c1", "ifname": "eth0", "device": "nebula0", "netns": "/run/netns/x",
            "netns_id": [4, 9], "pod_address": "10.244.1.7", "pod": {"namespace": "shop", "name": "web", "uid": "u"}});
        fs::create_dir_all(files.dir()).unwrap();
        fs::write(files.record(), record.to_string()).unwrap();
        let (listener, now) = (UnixListener::bind(&socket).unwrap(), root.join("now"));
        thread::spawn(move || {
            // Nobody answers any more once the test has ended and its folder is gone.
            while let Ok((mut stream, _)) = listener.accept() {
                let Ok(text) = fs::read(&now) else { return };
                let _ = stream.write_all(&text);
            }
        });
        let path = root.join("fake-nebula-cni-plugin");
        let head = format!(
            "#!/bin/sh\ncd {}\necho \"$*\" >> calls\nbecome() {{ cp $1 swap && mv swap now; }}\n\
             done_with() {{ echo \"{{\\\"upgraded\\\": true, \\\"pid\\\": $1, \\\"version\\\": \\\"0.2.0\\\"}}\"; }}\n\
             refuse() {{ echo \"{{\\\"code\\\": $1, \\\"msg\\\": \\\"refused\\\", \\\"details\\\": \\\"$2\\\"}}\"; exit 1; }}\n\
             OLD={} NEW={}\n",
            root.display(),
            processes[0].id(),
            processes[1].id(),
        );
        fs::write(&path, format!("{head}{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let plugin = Plugin { path, host: HostRoot::default() };
        let upgrade = Upgrade { plugin, state_dir: root.join("state"), key, programs: Arc::default() };
        Self { dir, upgrade, processes }
    }

    fn run(&self, watch: Duration, has_begun: bool) -> Outcome {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let wanted = self.upgrade.programs.identify(&installed(&self.upgrade.plugin)).unwrap();
            let before = Before::of(&self.upgrade.look().await.unwrap(), 0);
            self.upgrade.carry_out(&before, &wanted, watch, has_begun).await
        })
    }

    pub(in crate::rollout) fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.dir.path().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

/// The plugin as it is meant to work.
pub(in crate::rollout) const GOOD: &str =
    "if [ \"$6\" ]; then become old; done_with $OLD; else become new; done_with $NEW; fi";
const SHORT: Duration = Duration::from_secs(1);

#[test]
fn an_instance_that_passes_keeps_the_program_and_the_plugin_is_called_once() {
    let site = Site::new(&json!({}), GOOD);
    assert_eq!(site.run(SHORT, false), Outcome::Upgraded("0.2.0".into()));
    let state_dir = site.dir.path().join("state").display().to_string();
    assert_eq!(site.calls(), [format!("upgrade {state_dir} pods c1 eth0")]);
}

#[test]
fn an_instance_that_does_not_pass_is_rolled_back_at_once() {
    for (change, fault) in [
        // It names a process that is not its own.
        (json!({"pid": std::process::id()}), Fault::Silent("another process answers in its place".into())),
        (
            json!({"state": "closed", "closed": "revoked"}),
            Fault::State(serde_json::from_str("\"closed\"").unwrap(), "revoked".into()),
        ),
        (json!({"tunnels": []}), Fault::Tunnels { before: 1, open: 0 }),
    ] {
        let site = Site::new(&change, GOOD);
        let began = SystemClock.now();
        assert_eq!(site.run(SHORT, false), Outcome::RolledBack(fault), "{change}");
        assert!(SystemClock.now() < began + Duration::from_secs(8));
        assert!(site.calls().iter().any(|call| call.ends_with(" --previous")), "{change}");
    }
}

#[test]
fn a_refusal_leaves_the_instance_as_it_is() {
    let site = Site::new(&json!({}), "refuse 11 'no certificate yet'");
    assert_eq!(site.run(SHORT, false), Outcome::Postponed("refused: no certificate yet".into()));
    let site = Site::new(&json!({}), "refuse 101 'it hands nothing over'");
    assert_eq!(site.run(SHORT, false), Outcome::Refused("refused: it hands nothing over".into()));
    let site = Site::new(&json!({}), "refuse 3 'no such attachment'");
    assert_eq!(site.run(SHORT, false), Outcome::Gone);
    let site = Site::new(&json!({}), "echo '{\"upgraded\": false, \"pid\": 7, \"version\": \"0.2.0\"}'");
    assert_eq!(site.run(SHORT, false), Outcome::Unchanged);
    assert_eq!(site.calls().len(), 1);
}

#[test]
fn a_plugin_that_dies_or_says_nonsense_is_judged_by_what_the_instance_runs() {
    let site = Site::new(&json!({}), "echo oops >&2; exit 3");
    assert!(matches!(site.run(SHORT, false), Outcome::Refused(why) if why.contains("oops")));
    let died = "if [ \"$6\" ]; then become old; done_with $OLD; else become new; kill -9 $$; fi";
    let site = Site::new(&json!({}), died);
    assert!(matches!(site.run(SHORT, false), Outcome::RolledBack(Fault::Interrupted(_))));
    let restarted = "if [ \"$6\" ]; then become old; done_with $OLD; else become new; refuse 120 'it ended'; fi";
    let site = Site::new(&json!({}), restarted);
    assert!(matches!(site.run(SHORT, false), Outcome::RolledBack(Fault::Interrupted(why)) if why.contains("it ended")));
}

#[test]
fn one_that_cannot_go_back_is_told_apart_and_a_plugin_that_is_busy_is_called_again() {
    let stuck = "if [ \"$6\" ]; then refuse 5 'no copy of it'; else become new; done_with $NEW; fi";
    let site = Site::new(&json!({"certificate": null}), stuck);
    assert_eq!(site.run(SHORT, false), Outcome::NotRolledBack(Fault::NoCertificate, "refused: no copy of it".into()));
    let busy = format!("if [ \"$6\" ] && ! [ -e was-busy ]; then touch was-busy; refuse 11 busy; fi\n{GOOD}");
    let site = Site::new(&json!({"certificate": null}), &busy);
    assert_eq!(site.run(SHORT, false), Outcome::RolledBack(Fault::NoCertificate));
}

#[test]
fn a_pod_that_ends_meanwhile_is_gone_and_no_failure() {
    let site = Site::new(&json!({}), "become new; rm state/pods/*.json; done_with $NEW");
    assert_eq!(site.run(SHORT, false), Outcome::Gone);
}

#[test]
fn what_an_agent_that_was_killed_had_begun_is_only_watched() {
    let site = Site::new(&json!({}), GOOD);
    fs::copy(site.dir.path().join("new"), site.dir.path().join("now")).unwrap();
    assert_eq!(site.run(SHORT, true), Outcome::Upgraded(String::new()));
    assert!(site.calls().is_empty());
}

#[test]
fn an_instance_that_names_a_process_of_others_or_none_is_not_trusted() {
    for pid in [json!(null), json!(0), json!(-1), json!(i32::MAX)] {
        let site = Site::new(&json!({}), GOOD);
        fs::write(site.dir.path().join("now"), document(0, &json!({"pid": pid}))).unwrap();
        assert!(matches!(site.upgrade.look_now(), Err(Unseen::Silent(_))), "{pid}");
    }
}
