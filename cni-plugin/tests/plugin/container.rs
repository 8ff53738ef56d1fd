//! Control groups like those of a container, in each hierarchy of this machine. They end with everything in them.

#![allow(clippy::disallowed_methods, reason = "what waits for processes reads a clock")]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub(crate) struct Container(Vec<PathBuf>);

impl Container {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let tree = Path::new("/sys/fs/cgroup");
        let inside = fs::read_dir(tree).unwrap().map(|entry| entry.unwrap().path());
        let roots: Vec<PathBuf> = match tree.join("cgroup.procs").exists() {
            true => vec![tree.to_owned()],
            false => inside.filter(|root| root.join("cgroup.procs").exists() && !root.is_symlink()).collect(),
        };
        assert!(!roots.is_empty(), "no control groups on this machine");
        let group = |root: PathBuf| {
            let group = root.join(format!("nebula-test-caller-{}-{number}", process::id()));
            fs::create_dir(&group).unwrap();
            // Without them a group of version 1 takes no member.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let _ = fs::read(root.join(file)).map(|set| fs::write(group.join(file), set));
            }
            group
        };
        Self(roots.into_iter().map(group).collect())
    }

    /// A command that runs in these groups.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut shell = Command::new("sh");
        let joins: String =
            self.0.iter().map(|g| format!("echo $$ >'{}/cgroup.procs' || exit 9; ", g.display())).collect();
        shell.arg("-c").arg(joins + "exec \"$0\" \"$@\"").arg(program);
        shell
    }

    /// The same command, run in these groups.
    pub(crate) fn around(&self, command: &Command) -> Command {
        let mut inside = self.command(command.get_program());
        inside.args(command.get_args());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside
    }

    /// Processes in each of the groups.
    pub(crate) fn members(&self) -> Vec<String> {
        self.pids().map(|(group, pid)| format!("{pid} in {}", group.display())).collect()
    }

    /// Kills all that is in the groups, as a runtime ends a container: by `cgroup.kill` of version 2, which also
    /// reaches what is just being started, and one by one elsewhere. A process that was put there to be killed shows
    /// that it was.
    pub(crate) fn kill(&self) {
        let mut resident = self.resident();
        let until = Instant::now() + Duration::from_secs(10);
        while !self.members().is_empty() {
            assert!(Instant::now() < until, "not killed: {:?}", self.members());
            for group in &self.0 {
                let _ = fs::write(group.join("cgroup.kill"), "1");
            }
            for (_, pid) in self.pids() {
                let _ = Command::new("kill").args(["-9", &pid]).stderr(Stdio::null()).status();
            }
            // A zombie stays a member until it is waited for.
            let _ = resident.try_wait();
            thread::sleep(Duration::from_millis(10));
        }
        assert!(!resident.wait().unwrap().success());
    }

    /// The container's own process.
    fn resident(&self) -> Child {
        let mut command = self.command("sleep");
        let child = command.arg("600").spawn().unwrap();
        let is_in = |pid: u32| self.pids().filter(|(_, member)| *member == pid.to_string()).count() == self.0.len();
        let until = Instant::now() + Duration::from_secs(10);
        while !is_in(child.id()) {
            assert!(Instant::now() < until, "{} is not in all groups: {:?}", child.id(), self.members());
            thread::sleep(Duration::from_millis(10));
        }
        child
    }

    fn pids(&self) -> impl Iterator<Item = (&Path, String)> {
        self.0.iter().flat_map(|group| {
            let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
            text.lines().map(|pid| (group.as_path(), pid.to_owned())).collect::<Vec<_>>()
        })
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        for group in &self.0 {
            // What a failed test left in it; whoever it is, this test put it there.
            let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            let root = group.parent().unwrap_or(group);
            for pid in text.lines() {
                let _ = fs::write(root.join("cgroup.procs"), pid);
            }
            let _ = fs::remove_dir(group);
        }
    }
}
