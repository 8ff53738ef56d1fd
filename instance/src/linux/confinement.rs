//! The sandbox of one pod's instance. After set-up the instance becomes a user that no other process on the node has,
//! without capabilities; it can open only the files that it still needs (Landlock), and make only the system calls of a
//! program that moves packets (seccomp). The sandbox protects everything else on the node from a process that holds one
//! pod's key.
//!
//! The kernel keeps all of this for each thread, and a new thread has it from the one that starts it. So every thread
//! that outlives set-up enters the sandbox, and all others are started from inside.

use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use nebula_cni_plugin::launch::LaunchSpec;
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use rustix::thread::{CapabilitySet, Gid, Uid};

use crate::linux::capabilities;
use crate::linux::system_calls;
use crate::linux::system_calls::Filter;

/// Makes the memory of this process unreadable for other processes of its user, and keeps it out of core files.
///
/// # Errors
/// The kernel refuses.
pub fn hide_memory() -> io::Result<()> {
    setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
    Ok(prctl::set_dumpable(false)?)
}

/// What the threads of an instance may do when it is set up.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// User and group. `None`: as it was started.
    user: Option<u32>,
    /// Folder with the sockets of the instance, which it removes at its end.
    room: PathBuf,
    /// Folders of files that may be replaced while it runs: the roots of the CA service, and what names are looked up
    /// with.
    readable: Vec<PathBuf>,
}

/// Parts of the sandbox that this kernel does not offer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Missing {
    /// Landlock, or a part of it that is wanted here.
    pub landlock: bool,
    /// The filter of system calls.
    pub seccomp: bool,
}

impl Confinement {
    /// Of the instance with this launch contract.
    #[must_use]
    pub fn of(spec: &LaunchSpec) -> Self {
        // A link to where another program keeps it up to date.
        let resolver = std::fs::canonicalize("/etc/resolv.conf").ok();
        let folders = [Some(Path::new("/etc/resolv.conf")), resolver.as_deref(), Some(&spec.ca.tls_ca_file)];
        let folder_of = |file: Option<&Path>| Some(file?.parent()?.to_owned());
        let room = spec.status_socket.parent().unwrap_or_else(|| Path::new("/")).to_owned();
        Self { user: spec.user, room, readable: folders.into_iter().filter_map(folder_of).collect() }
    }

    /// Confines the calling thread, and those that it will start, for good.
    ///
    /// # Errors
    /// The kernel refuses the user: then nothing is confined. Parts that the kernel does not offer are returned.
    pub fn enter(&self) -> io::Result<Missing> {
        self.prepare().enter(CapabilitySet::empty())
    }

    /// Does what goes deep, so that a thread that stays need not: its stack would keep the memory.
    pub(crate) fn prepare(&self) -> Sandbox {
        Sandbox { user: self.user, files: self.files().map_err(io::Error::other), calls: system_calls::filter() }
    }

    /// Nothing but these folders and, where the kernel knows how to refuse them, no listeners and no signals to others.
    fn files(&self) -> Result<RulesetCreated, landlock::RulesetError> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(LANDLOCK_ABI))?
            .handle_access(AccessNet::BindTcp)?
            .scope(Scope::from_all(LANDLOCK_ABI))?
            .create()?;
        let readable = self.readable.iter().map(|folder| (folder, AccessFs::ReadFile));
        for (folder, access) in readable.chain([(&self.room, AccessFs::RemoveFile)]) {
            // One that is not there holds nothing that is needed.
            if let Ok(folder) = PathFd::new(folder) {
                rules = rules.add_rule(PathBeneath::new(folder, access))?;
            }
        }
        Ok(rules)
    }
}

/// A prepared sandbox for one thread.
pub(crate) struct Sandbox {
    user: Option<u32>,
    files: io::Result<RulesetCreated>,
    calls: io::Result<Filter>,
}

impl Sandbox {
    /// As [`Confinement::enter`], with some capabilities left.
    pub(crate) fn enter(self, kept: CapabilitySet) -> io::Result<Missing> {
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
            // The change of the user set it to what the machine says.
            hide_memory()?;
        }
        rustix::thread::set_no_new_privs(true)?;
        capabilities::hold(kept)?;
        let restricted = self.files.and_then(|files| files.restrict_self().map_err(io::Error::other));
        let landlock = !restricted.is_ok_and(|status| status.ruleset == RulesetStatus::FullyEnforced);
        Ok(Missing { landlock, seccomp: self.calls.and_then(|calls| calls.install()).is_err() })
    }
}

// Newer kernels can refuse more; that is asked for when it was tried.
const LANDLOCK_ABI: ABI = ABI::V6;
