//! The sandbox of one pod's instance. After set-up the instance becomes a user that no other process on the node has,
//! without capabilities; it can open only the files that it still needs (Landlock), and make only the system calls of a
//! program that moves packets (seccomp). The sandbox protects everything else on the node from a process that holds one
//! pod's key.
//!
//! All of this applies to a single thread in the kernel, and new threads inherit it from their creator. So every thread
//! that outlives set-up enters the sandbox, and all others are started from inside.

use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use nebula_cni_contract::launch::LaunchSpec;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use rustix::thread::{CapabilitySet, Gid, Uid};

use crate::capabilities;
use crate::errno;
use crate::system_calls;
use crate::system_calls::Filter;

/// Hides this process's memory from other processes of its user, and keeps it out of core dumps.
///
/// # Errors
/// Returns an error if the kernel refuses.
pub fn hide_memory() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0).map_err(|error| errno::of_call("setrlimit(RLIMIT_CORE)", error))?;
    prctl::set_dumpable(false).map_err(|error| errno::of_call("prctl(PR_SET_DUMPABLE)", error))
}

/// What the threads of an instance may do once it is set up.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// User and group to switch to; `None` keeps those it was started with.
    user: Option<u32>,
    /// Folder with the sockets of the instance, which removes them on exit.
    room: PathBuf,
    /// Folders with files that may be replaced at runtime: the CA service's root certificates, the resolver's
    /// configuration, and the cluster table of a captured pod.
    readable: Vec<PathBuf>,
}

/// Parts of the sandbox that this kernel does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Missing {
    /// Landlock, or a part of it that this sandbox uses.
    pub landlock: bool,
    /// The seccomp filter of system calls.
    pub seccomp: bool,
}

impl Missing {
    /// Their names, for logs.
    pub fn names(self) -> &'static str {
        match (self.landlock, self.seccomp) {
            (true, true) => "Landlock, seccomp",
            (true, false) => "Landlock",
            (false, true) => "seccomp",
            (false, false) => "nothing",
        }
    }
}

impl Confinement {
    /// The sandbox for the instance with this launch contract.
    #[must_use]
    pub fn of(spec: &LaunchSpec) -> Self {
        // A symlink to a file that another program keeps up to date.
        let resolver = std::fs::canonicalize("/etc/resolv.conf").ok();
        let table = spec.capture.as_ref().map(|capture| capture.table.as_path());
        let folders = [Some(Path::new("/etc/resolv.conf")), resolver.as_deref(), Some(&spec.ca.tls_ca_file), table];
        let folder_of = |file: Option<&Path>| Some(file?.parent()?.to_owned());
        let room = spec.status_socket.parent().unwrap_or_else(|| Path::new("/")).to_owned();
        Self { user: spec.user, room, readable: folders.into_iter().filter_map(folder_of).collect() }
    }

    /// Confines the calling thread, and threads that it starts later, for good. Returns the parts that the kernel does
    /// not support.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses to change the user; nothing is confined then.
    pub fn enter(&self) -> io::Result<Missing> {
        self.prepare().enter(CapabilitySet::empty())
    }

    /// Does the work that needs a deep stack, so that it can run on a short-lived thread: a thread that stays would
    /// keep that stack's memory.
    pub fn prepare(&self) -> Sandbox {
        Sandbox { user: self.user, files: self.files().map_err(io::Error::other), calls: system_calls::filter() }
    }

    /// Builds Landlock rules that allow access to these folders only and, on kernels that support it, forbid TCP
    /// listeners and signals to other processes.
    fn files(&self) -> Result<RulesetCreated, landlock::RulesetError> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(LANDLOCK_ABI))?
            .handle_access(AccessNet::BindTcp)?
            .scope(Scope::from_all(LANDLOCK_ABI))?
            .create()?;
        let readable = self.readable.iter().map(|folder| (folder, AccessFs::ReadFile));
        for (folder, access) in readable.chain([(&self.room, AccessFs::RemoveFile)]) {
            // A folder that does not exist holds nothing that is needed.
            if let Ok(folder) = PathFd::new(folder) {
                rules = rules.add_rule(PathBeneath::new(folder, access))?;
            }
        }
        Ok(rules)
    }
}

/// A sandbox prepared for one thread.
pub struct Sandbox {
    user: Option<u32>,
    files: io::Result<RulesetCreated>,
    calls: io::Result<Filter>,
}

impl Sandbox {
    /// Like [`Confinement::enter`], but keeps some capabilities. Its frame must not stay on the stack of whoever
    /// enters.
    #[inline(never)]
    pub fn enter(self, kept: CapabilitySet) -> io::Result<Missing> {
        if let Some(user) = self.user {
            let refused = |error: rustix::io::Errno| {
                let hint = "is it a user of this namespace? the plugin's key \"users\" says which ones are taken";
                io::Error::other(format!("cannot become user {user}: {error} ({hint})"))
            };
            rustix::thread::set_keep_capabilities(true)?;
            rustix::thread::set_thread_groups(&[]).map_err(refused)?;
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(refused)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(refused)?;
            rustix::thread::set_keep_capabilities(false)?;
            // Changing the user reset it to the system's default.
            hide_memory()?;
        }
        rustix::thread::set_no_new_privs(true)?;
        capabilities::hold(kept)?;
        let restricted = self.files.and_then(|files| files.restrict_self().map_err(io::Error::other));
        let landlock = !restricted.is_ok_and(|status| status.ruleset == RulesetStatus::FullyEnforced);
        Ok(Missing { landlock, seccomp: self.calls.and_then(|calls| calls.install()).is_err() })
    }
}

// Newer kernels can forbid more; raise this after testing it.
const LANDLOCK_ABI: ABI = ABI::V6;
