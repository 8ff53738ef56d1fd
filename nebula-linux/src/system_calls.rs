//! The system calls that an instance may use once it is set up: those that move packets, wait, and talk to the CA
//! service and to clients of the status socket. All others fail with EPERM, in particular any that inspect another
//! process, enter or create namespaces, mount, execute programs, or load code into the kernel.

use std::collections::BTreeMap;
use std::io;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

/// A compiled filter, ready to be installed.
pub(crate) struct Filter([BpfProgram; 2]);

/// Compiles the filter.
///
/// # Errors
/// Returns an error on an unsupported processor architecture.
pub(crate) fn filter() -> io::Result<Filter> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    programs(architecture).map(Filter).map_err(io::Error::other)
}

impl Filter {
    /// Installs the filter for the calling thread and threads that it starts later, in addition to any other filter.
    ///
    /// # Errors
    /// Returns an error if the kernel does not support seccomp filters.
    pub(crate) fn install(&self) -> io::Result<()> {
        self.0.iter().try_for_each(|program| seccompiler::apply_filter(program)).map_err(io::Error::other)
    }
}

/// Builds two programs. Of several filters the kernel applies the strictest result, and of several errors that of the
/// program installed first here: `clone3`, whose flags no filter can inspect, fails with ENOSYS, so that the C library
/// falls back to `clone`.
fn programs(architecture: TargetArch) -> Result<[BpfProgram; 2], seccompiler::BackendError> {
    let filter = |rules, others, listed| -> Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(rules, others, listed, architecture)?.try_into()
    };
    let missing = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    Ok([
        filter(missing, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?,
        filter(allowed()?, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?,
    ])
}

fn allowed() -> Result<BTreeMap<i64, Vec<SeccompRule>>, seccompiler::BackendError> {
    let whole = |at, operator, value| SeccompCondition::new(at, SeccompCmpArgLen::Qword, operator, value);
    let half =
        |at, operator, value: i32| SeccompCondition::new(at, SeccompCmpArgLen::Dword, operator, value as u32 as u64);
    let only = |condition: SeccompCondition| SeccompRule::new(vec![condition]);
    let own = std::process::id().cast_signed();
    let not_executable = || only(half(2, SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64), 0)?);
    let any_of = |at, values: &[i32]| {
        values.iter().map(|value| only(half(at, SeccompCmpOp::Eq, *value)?)).collect::<Result<Vec<_>, _>>()
    };

    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|number| (*number, Vec::new())).collect();
    // Threads, but no processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![only(whole(0, SeccompCmpOp::MaskedEq(thread), thread)?)?]);
    // Memory is never executable.
    rules.insert(libc::SYS_mmap, vec![not_executable()?]);
    rules.insert(libc::SYS_mprotect, vec![not_executable()?]);
    // Signals to this process only; a panic sends one.
    rules.insert(libc::SYS_kill, any_of(0, &[own])?);
    rules.insert(libc::SYS_tgkill, any_of(0, &[own])?);
    rules.insert(libc::SYS_prlimit64, any_of(0, &[0, own])?);
    rules.insert(libc::SYS_prctl, any_of(0, &[libc::PR_SET_NAME, libc::PR_SET_VMA, libc::PR_SET_NO_NEW_PRIVS])?);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    rules.insert(libc::SYS_socket, any_of(0, &families)?);
    // Forbids injecting input into a terminal.
    let harmless = [libc::TIOCSTI, libc::TIOCLINUX].map(|request| half(1, SeccompCmpOp::Ne, request as i32));
    let harmless = harmless.into_iter().collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_ioctl, vec![SeccompRule::new(harmless)?]);
    Ok(rules)
}

const ALLOWED: &[i64] = &[
    // Packets, and I/O on sockets and files.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_socketpair,
    // Files: root certificates of the CA service, the resolver's files, and removal of the status socket on exit.
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_faccessat,
    libc::SYS_readlinkat,
    libc::SYS_unlinkat,
    libc::SYS_fcntl,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_pipe2,
    libc::SYS_umask,
    libc::SYS_getcwd,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_signalfd4,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_futex,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_membarrier,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    // Memory and threads.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_gettid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Identity and resources of the process.
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getcpu,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_capget,
    libc::SYS_capset,
    // The same calls in forms that only the oldest system call table has.
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

#[cfg(test)]
mod tests {
    use nix::errno::Errno;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;

    /// Runs `work` on a separate thread, because the filter cannot be removed.
    fn filtered<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(|| {
            filter().unwrap().install().unwrap();
            work()
        })
        .join()
        .unwrap()
    }

    #[test]
    fn a_filtered_thread_starts_threads_and_speaks_and_looks_at_nobody_else() {
        filtered(|| {
            assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
            std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            assert!(std::fs::read_to_string("/etc/hosts").is_ok());
            assert_eq!(kill(Pid::this(), None), Ok(()));
            assert_eq!(kill(Pid::parent(), None), Err(Errno::EPERM));
            assert_eq!(kill(Pid::from_raw(-1), Signal::SIGCONT), Err(Errno::EPERM));
            assert!(std::process::Command::new("true").status().is_err(), "it runs a program");
            assert_eq!(nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWUSER), Err(Errno::EPERM));
        });
    }
}
