//! Runs a program of the node as the node itself would: in the node's own namespaces, so that an instance that the
//! program starts belongs to the node and outlives the agent's container.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sched::{CloneFlags, setns};

/// First argument that makes the agent's program enter the node's namespaces and become another program.
pub const VERB: &str = "on-host";

/// Becomes the program in `arguments`. Returns only on failure. The process must have one thread only.
#[must_use]
pub fn run(arguments: &[OsString]) -> String {
    let [program, rest @ ..] = arguments else { return "on-host: no program".to_owned() };
    if let Err(error) = enter() {
        return format!("cannot enter the node's namespaces (the agent's pod needs hostPID and privileges): {error}");
    }
    let error = Command::new(program).args(rest).exec();
    format!("cannot run {} on the node: {error}", program.display())
}

/// Enters the namespaces of the node's first process.
fn enter() -> io::Result<()> {
    let spaces = [
        ("cgroup", CloneFlags::CLONE_NEWCGROUP),
        ("net", CloneFlags::CLONE_NEWNET),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("uts", CloneFlags::CLONE_NEWUTS),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ];
    // All are opened first: afterwards /proc is another one.
    let open = |(name, kind)| Ok((File::open(format!("/proc/1/ns/{name}"))?, kind));
    for (file, kind) in spaces.into_iter().map(open).collect::<io::Result<Vec<(File, CloneFlags)>>>()? {
        setns(file, kind)?;
    }
    std::env::set_current_dir("/")
}
