//! Supervision by systemd: one transient service per attachment, named by a hash of its key, sandboxed, and restarted
//! when it dies; two of them while one instance takes over from another.

use std::io;
use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};

use super::cgroup;
use super::dbus::{self, Body, Connection, Method, Object, Value};
use super::process::Process;
use super::{Known, Launch, StartFailure, Supervisor, TOO_MUCH_MEMORY, read_status};
use crate::attachment::files::Files;

/// Starts instances as units of the system's systemd.
#[derive(Debug)]
pub struct Systemd;

impl Systemd {
    /// Whether systemd answers on the system bus.
    #[must_use]
    pub fn answers(clock: &dyn Clock) -> bool {
        Manager::connect(clock, Deadline::after(clock, PROBE)).and_then(|mut manager| manager.answers()).is_ok()
    }
}

/// Stops the slice of all instances, and the one above that systemd makes with it, where nothing is left in them: it
/// keeps them for ever. For an uninstallation: nobody starts an instance meanwhile.
pub fn stop_empty_slices(clock: &dyn Clock) {
    let Ok(mut manager) = Manager::connect(clock, Deadline::after(clock, STOP)) else { return };
    for slice in SLICES {
        match manager.property(slice, "Slice", "ControlGroup") {
            Ok(group) if !group.is_empty() && cgroup::is_empty(&group) => {}
            _ => return,
        }
        let _ = manager.stop(slice).and_then(|job| manager.wait(&job));
    }
}

impl Supervisor for Systemd {
    fn start(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure> {
        let unit = unit_beside(launch.files, launch.replaces).map_err(StartFailure::Spawn)?;
        let spawn = |error: dbus::Error| StartFailure::Spawn(io::Error::other(error));
        let mut manager = Manager::connect(clock, deadline).map_err(spawn)?;
        started(None).map_err(StartFailure::Record)?;
        let job = manager.start(&unit, launch).map_err(spawn)?;
        match manager.wait(&job) {
            Ok(result) if result == "done" => Ok(()),
            Ok(status) => {
                if deadline.is_over(clock) {
                    manager.deadline = Deadline::after(clock, PROBE);
                }
                let (error, said) = read_status(manager.said(&unit));
                // systemd has the same time limit for the start, and may be the first to notice that it is over.
                let was_late = manager.property(&unit, "Service", "Result").is_ok_and(|result| result == "timeout");
                match error {
                    None if was_late => Err(StartFailure::Deadline { said }),
                    error => Err(StartFailure::Ended { status, error, said }),
                }
            }
            Err(_) if deadline.is_over(clock) => {
                manager.deadline = Deadline::after(clock, PROBE);
                Err(StartFailure::Deadline { said: read_status(manager.said(&unit)).1 })
            }
            Err(error) => Err(spawn(error)),
        }
    }

    fn restart(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure> {
        let spawn = |error: dbus::Error| StartFailure::Spawn(io::Error::other(error));
        let mut manager = Manager::connect(clock, Deadline::after(clock, PROBE)).map_err(spawn)?;
        started(None).map_err(StartFailure::Record)?;
        let unit = unit_beside(launch.files, launch.replaces).map_err(StartFailure::Spawn)?;
        let _ = manager.call("ResetFailedUnit", &Body::default().text(&unit));
        manager.start(&unit, launch).map(|_| ()).map_err(spawn)
    }

    fn reload(&self, files: &Files, _: Option<Process>, clock: &dyn Clock) -> Result<(), String> {
        let mut manager = Manager::connect(clock, Deadline::after(clock, PROBE)).map_err(|error| error.to_string())?;
        let unit = manager.running(files).ok_or_else(|| format!("unit {} does not run", files.units()[0]))?;
        let body = Body::default().text(&unit).text("main").number(SIGHUP);
        manager.call("KillUnit", &body).map(drop).map_err(|error| format!("unit {unit}: {error}"))
    }

    fn is_alive(&self, files: &Files, _: Option<Process>, clock: &dyn Clock) -> bool {
        let manager = Manager::connect(clock, Deadline::after(clock, PROBE));
        manager.is_ok_and(|mut manager| manager.running(files).is_some())
    }

    fn keep_only(
        &self,
        files: &Files,
        pid: i32,
        _: [Option<Process>; 2],
        patience: Duration,
        clock: &dyn Clock,
    ) -> Result<(), String> {
        let other = unit_beside(files, Some(pid)).map_err(|error| format!("process {pid}: {error}"))?;
        let deadline = Deadline::after(clock, patience);
        let mut manager =
            Manager::connect(clock, Deadline::after(clock, STOP + patience)).map_err(|error| error.to_string())?;
        while manager.is_running(&other) && !deadline.is_over(clock) {
            clock.sleep(LOOK_AGAIN);
        }
        let killed = Body::default().text(&other).text("all").number(SIGKILL);
        let _ = manager.call("KillUnit", &killed);
        manager.end(&other)
    }

    fn stop(&self, files: &Files, _: Known, clock: &dyn Clock) -> Result<(), String> {
        let mut manager = match Manager::connect(clock, Deadline::after(clock, STOP)) {
            Ok(manager) => manager,
            // Without a bus there are no units.
            Err(dbus::Error::Io(e)) if is_absent(&e) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        // Stops both, even if one fails.
        let ends = files.units().map(|unit| manager.end(&unit));
        ends.into_iter().collect()
    }

    fn clean_up(&self, _: &Files, _: &dyn Clock) {}

    fn restarts_by_itself(&self) -> bool {
        true
    }

    fn why_ended(&self, files: &Files, clock: &dyn Clock) -> Option<String> {
        let mut manager = Manager::connect(clock, Deadline::after(clock, PROBE)).ok()?;
        let mut was_killed =
            |unit: &String| manager.property(unit, "Service", "Result").is_ok_and(|is| is == "oom-kill");
        files.units().iter().any(&mut was_killed).then(|| TOO_MUCH_MEMORY.to_owned())
    }
}

/// The unit of the attachment in which process `pid` is, if it is in one.
///
/// # Errors
/// Returns an error if there is no such process.
pub(super) fn unit_of(files: &Files, pid: i32) -> io::Result<Option<String>> {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let is_in = |unit: &String| groups.lines().any(|group| group.ends_with(&format!("/{unit}")));
    Ok(files.units().into_iter().find(is_in))
}

/// A unit of the attachment for another instance beside process `pid`.
fn unit_beside(files: &Files, pid: Option<i32>) -> io::Result<String> {
    let [first, second] = files.units();
    let taken = pid.map(|pid| unit_of(files, pid)).transpose()?.flatten();
    Ok(if taken.as_ref() == Some(&first) { second } else { first })
}

/// A connection to systemd, with the deadline of one verb.
struct Manager<'a> {
    bus: Connection,
    clock: &'a dyn Clock,
    deadline: Deadline,
}

impl<'a> Manager<'a> {
    fn connect(clock: &'a dyn Clock, deadline: Deadline) -> Result<Self, dbus::Error> {
        Ok(Self { bus: Connection::open(clock, deadline)?, clock, deadline })
    }

    fn answers(&mut self) -> Result<(), dbus::Error> {
        let get = PROPERTIES.method("Get");
        self.bus.call(&get, &Body::default().text(MANAGER.interface).text("Version"), self.clock, self.deadline)?;
        Ok(())
    }

    fn call(&mut self, member: &'static str, body: &Body) -> Result<dbus::Message, dbus::Error> {
        self.bus.call(&MANAGER.method(member), body, self.clock, self.deadline)
    }

    fn start(&mut self, unit: &str, launch: &Launch<'_>) -> Result<String, dbus::Error> {
        self.watch_jobs()?;
        let text = |path: &Path| path.display().to_string();
        let (program, file) = (text(launch.instance), text(&launch.files.launch()));
        let netns = text(launch.netns);
        let condition = [("ConditionPathExists", netns.as_str())];
        let mut argv = vec![program.as_str(), super::LAUNCH_OPTION, file.as_str()];
        let replaces = launch.replaces.map(|pid| pid.to_string());
        if let Some(pid) = &replaces {
            argv.extend([super::TAKE_OVER_OPTION, pid]);
        }
        let start_within = launch.budget.as_micros() as u64;
        let mut properties = vec![
            ("Description", Value::Text(launch.description)),
            ("ExecStart", Value::Exec(&argv)),
            ("TimeoutStartUSec", Value::U64(start_within)),
            // systemd checks this again before each restart, so that no tunnel outlives the pod's namespace.
            ("Conditions", Value::Conditions(&condition)),
        ];
        if let Some(limit) = launch.memory_limit {
            // Keys must never be swapped out.
            properties.extend([("MemoryMax", Value::U64(limit)), ("MemorySwapMax", Value::U64(0))]);
        }
        properties.extend(SERVICE);
        properties.extend(SANDBOX);
        let body = Body::default().text(unit).text("fail").properties(&properties).no_units();
        let job = self.call("StartTransientUnit", &body)?;
        Ok(job.body().text().unwrap_or_default())
    }

    /// The unit of an attachment that runs or is about to.
    fn running(&mut self, files: &Files) -> Option<String> {
        files.units().into_iter().find(|unit| self.is_running(unit))
    }

    fn is_running(&mut self, unit: &str) -> bool {
        let state = self.property(unit, "Unit", "ActiveState");
        state.is_ok_and(|state| ["active", "activating", "reloading"].contains(&state.as_str()))
    }

    /// Stops a unit, waits until it has ended, and forgets it.
    fn end(&mut self, unit: &str) -> Result<(), String> {
        let stopped = self.stop(unit).and_then(|job| self.wait(&job));
        // A failed unit stays loaded until it is reset.
        let _ = self.call("ResetFailedUnit", &Body::default().text(unit));
        match stopped {
            Ok(_) => Ok(()),
            Err(error) if error.is_no_such_unit() => Ok(()),
            Err(error) => Err(format!("unit {unit}: {error}")),
        }
    }

    fn stop(&mut self, unit: &str) -> Result<String, dbus::Error> {
        self.watch_jobs()?;
        let job = self.call("StopUnit", &Body::default().text(unit).text("replace"))?;
        Ok(job.body().text().unwrap_or_default())
    }

    fn watch_jobs(&mut self) -> Result<(), dbus::Error> {
        self.bus.subscribe(JOBS, self.clock, self.deadline)
    }

    /// Waits for a job and returns its result: "done", "failed" and so on.
    fn wait(&mut self, job: &str) -> Result<String, dbus::Error> {
        loop {
            let signal = self.bus.signal(self.clock, self.deadline)?;
            let mut body = signal.body();
            let (_, path, _) = (body.number(), body.text(), body.text());
            if signal.member == "JobRemoved" && path.as_deref() == Some(job) {
                return Ok(body.text().unwrap_or_default());
            }
        }
    }

    /// The last STATUS of the unit's instance.
    fn said(&mut self, unit: &str) -> String {
        self.property(unit, "Service", "StatusText").unwrap_or_default()
    }

    fn property(&mut self, unit: &str, interface: &str, name: &str) -> Result<String, dbus::Error> {
        let path = self.call("GetUnit", &Body::default().text(unit))?.body().text().unwrap_or_default();
        let method = Method { path: &path, ..PROPERTIES.method("Get") };
        let interface = format!("{DESTINATION}.{interface}");
        let body = Body::default().text(&interface).text(name);
        let value = self.bus.call(&method, &body, self.clock, self.deadline)?;
        Ok(value.body().text_variant().unwrap_or_default())
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

const DESTINATION: &str = "org.freedesktop.systemd1";
const PATH: &str = "/org/freedesktop/systemd1";
const MANAGER: Object = Object { destination: DESTINATION, path: PATH, interface: "org.freedesktop.systemd1.Manager" };
const PROPERTIES: Object =
    Object { destination: DESTINATION, path: PATH, interface: "org.freedesktop.DBus.Properties" };
const JOBS: &str = "type='signal',interface='org.freedesktop.systemd1.Manager',member='JobRemoved'";

// An instance exits successfully only once its pod's namespace is gone; after any other exit systemd restarts it, with
// no limit on the number of restarts.
const SERVICE: [(&str, Value<'static>); 11] = [
    ("Type", Value::Text("notify")),
    ("NotifyAccess", Value::Text("main")),
    ("Restart", Value::Text("on-failure")),
    ("RestartUSec", Value::U64(500_000)),
    ("StartLimitIntervalUSec", Value::U64(0)),
    ("TimeoutStopUSec", Value::U64(2_000_000)),
    ("LimitCORE", Value::U64(0)),
    ("OOMPolicy", Value::Text("stop")),
    ("OOMScoreAdjust", Value::I32(super::OOM_SCORE_ADJUST)),
    // For an instance that is started again: its certificate, in memory, and a tun queue and a UDP socket for each of
    // its `routines`, of which there are at most 256.
    ("FileDescriptorStoreMax", Value::U32(1 + 2 * 256)),
    // Made by systemd where the operator has none; limits in it are those of all instances together.
    ("Slice", Value::Text(SLICES[0])),
];

/// A dash in the name of a slice leads to the slice above.
const SLICES: [&str; 2] = ["nebula-cni.slice", "nebula.slice"];

// These are the privileges of setup, which creates the device and its routes in the pod's namespace. After that, and
// before it hears anybody, the instance switches to its own user, drops all of them for good, gives itself file rules
// (Landlock), and filters its system calls much more strictly than this. Nothing here needs a mount namespace
// (ProtectSystem=, ProtectProc=, PrivateTmp= and the like do): systemd makes one by reading and remounting every
// mount of the node, which took 30 to 70 ms with 300 mounts, as volumes of pods make them, of 83 ms for the start of
// a unit; without it 17. What those hide from root is closed here by capabilities and devices.
const SANDBOX: [(&str, Value<'static>); 16] = [
    ("CapabilityBoundingSet", Value::U64(BOUNDING_SET)),
    ("NoNewPrivileges", Value::Bool(true)),
    ("ProtectClock", Value::Bool(true)),
    ("ProtectHostname", Value::Bool(true)),
    ("LockPersonality", Value::Bool(true)),
    ("MemoryDenyWriteExecute", Value::Bool(true)),
    ("RestrictRealtime", Value::Bool(true)),
    ("RestrictSUIDSGID", Value::Bool(true)),
    ("RestrictNamespaces", Value::U64(CLONE_NEWNET)),
    ("RestrictAddressFamilies", Value::Allow(&["AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"])),
    ("SystemCallArchitectures", Value::Texts(&["native"])),
    ("SystemCallFilter", Value::Allow(&["@system-service", "seccomp", LANDLOCK[0], LANDLOCK[1], LANDLOCK[2]])),
    ("SystemCallFilter", Value::Deny(&["process_vm_readv", "process_vm_writev", "kcmp", "userfaultfd", "@keyring"])),
    ("DevicePolicy", Value::Text("closed")),
    ("DeviceAllow", Value::Pairs(&[("/dev/net/tun", "rw")])),
    ("UMask", Value::U32(0o077)),
];

// linux/capability.h and linux/sched.h.
const BOUNDING_SET: u64 = 1 << DAC_OVERRIDE
    | 1 << SETGID
    | 1 << SETUID
    | 1 << SETPCAP
    | 1 << NET_BIND_SERVICE
    | 1 << NET_ADMIN
    | 1 << NET_RAW
    | 1 << SYS_ADMIN;
const DAC_OVERRIDE: u64 = 1;
const SETGID: u64 = 6;
const SETUID: u64 = 7;
const SETPCAP: u64 = 8;
const NET_BIND_SERVICE: u64 = 10;
const NET_ADMIN: u64 = 12;
// For captured pods only; the instance of another one gives it up first of all.
const NET_RAW: u64 = 13;
const SYS_ADMIN: u64 = 21;
const CLONE_NEWNET: u64 = 0x4000_0000;

// systemd ignores system calls that it does not know.
const LANDLOCK: [&str; 3] = ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"];

const SIGHUP: i32 = nix::libc::SIGHUP;
const SIGKILL: i32 = nix::libc::SIGKILL;

const LOOK_AGAIN: Duration = Duration::from_millis(5);
// systemd is on the same machine: it answers at once, or something is wrong with it.
const PROBE: Duration = Duration::from_secs(2);
// Longer than TimeoutStopUSec, after which systemd sends SIGKILL.
const STOP: Duration = Duration::from_secs(6);
