//! A child process that is in its control group from the start. Moving a process into a group of version 2 takes a
//! lock that all processes of the machine share, which costs 10 to 20 ms (`cgroup_threadgroup_rwsem` in Linux). A
//! process that is created in the group is never moved (clone3(2), `CLONE_INTO_CGROUP`).
#![allow(unsafe_code)]

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::ptr;
use std::thread;
use std::time::Duration;

use nix::libc;

/// Something that a child runs.
#[derive(Debug)]
pub(super) struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

/// A child of this process. Whoever drops it leaves it to itself.
#[derive(Debug)]
pub(super) struct Child {
    pid: i32,
    /// It cannot be waited for twice: another process may have its number then.
    ended: Option<ExitStatus>,
}

impl Program {
    /// `arguments` begin with the program's own name.
    ///
    /// # Errors
    /// Returns an error if one of them contains a zero byte.
    pub(super) fn new(path: &Path, arguments: &[&OsStr], environment: &[(&str, &OsStr)]) -> io::Result<Self> {
        let text = |parts: &[&[u8]]| Ok::<_, io::Error>(CString::new(parts.concat())?);
        let arguments = arguments.iter().map(|argument| text(&[argument.as_bytes()])).collect::<Result<_, _>>()?;
        let variable = |(name, value): &(&str, &OsStr)| text(&[name.as_bytes(), b"=", value.as_bytes()]);
        let environment = environment.iter().map(variable).collect::<Result<_, _>>()?;
        Ok(Self { path: text(&[path.as_os_str().as_bytes()])?, arguments, environment })
    }

    /// Starts it in the root directory with these streams, as a member of `group` if there is one. It runs when this
    /// returns.
    ///
    /// # Errors
    /// Returns the kernel's error, or how the child ended before it ran the program. Linux before 5.7 and some
    /// sandboxes cannot start a process in a group, and Linux 6.18 kills one at once if the group of this process was
    /// killed before (`cgroup.kill`) and the other one was not.
    pub(super) fn start(&self, group: Option<&File>, streams: [BorrowedFd<'_>; 3]) -> io::Result<Child> {
        let pointers = |texts: &[CString]| -> Vec<*const libc::c_char> {
            texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
        };
        // Before the child is made, which must not allocate.
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        let streams = streams.map(|stream| stream.as_raw_fd());
        // The next program does not inherit it.
        let (mut until_then, marker) = io::pipe()?;
        let pid = match group {
            Some(group) => clone_into(group.as_raw_fd()),
            // SAFETY: the child does what is said below, and nothing else.
            None => unsafe { libc::fork() },
        };
        match pid {
            0 => {
                // SAFETY: in a copy of a process that may have had several threads only calls are allowed that are
                // safe in a signal handler (signal-safety(7)): these are. All pointers are to memory that this
                // function has prepared, and lists end with a null pointer.
                unsafe {
                    let mut no_signals: libc::sigset_t = std::mem::zeroed();
                    libc::sigemptyset(&raw mut no_signals);
                    libc::sigprocmask(libc::SIG_SETMASK, &raw const no_signals, ptr::null_mut());
                    // What is ignored stays so in the next program. Rust's runtime ignores SIGPIPE, and a shell's
                    // background jobs ignore SIGINT. The system call, because the C library refuses to change the
                    // signals that it uses itself (32 and 33 in glibc), which a parent may have ignored as well.
                    for signal in 1..=libc::SIGRTMAX() {
                        set_action(signal, libc::SIG_DFL);
                    }
                    let [stdin, stdout, stderr] = streams;
                    let has_streams =
                        libc::dup2(stdin, 0) >= 0 && libc::dup2(stdout, 1) >= 0 && libc::dup2(stderr, 2) >= 0;
                    if has_streams && libc::chdir(c"/".as_ptr()) == 0 {
                        libc::execve(self.path.as_ptr(), arguments.as_ptr(), environment.as_ptr());
                    }
                    libc::_exit(127)
                }
            }
            1.. => {
                drop(marker);
                until_then.read_to_end(&mut Vec::new())?;
                Child { pid, ended: None }.running()
            }
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// rt_sigaction(2) without flags. It fails for SIGKILL and SIGSTOP, whose action never changes.
fn set_action(signal: i32, handler: libc::sighandler_t) {
    // As the kernel has it: the handler, flags, perhaps a restorer, and a mask of 64 signals.
    let action = [handler as u64, 0, 0, 0];
    // SAFETY: the kernel reads 24 or 32 bytes of `action`, and writes nothing.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, action.as_ptr(), ptr::null_mut::<u64>(), size_of::<u64>()) };
}

/// As fork(2), but the child is made in the group with this descriptor.
fn clone_into(group: i32) -> i32 {
    // SAFETY: all fields are numbers, for which zero is a value.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = CLONE_INTO_CGROUP;
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.cgroup = u64::from(group.unsigned_abs());
    // SAFETY: without CLONE_VM the child has a copy of this memory and of this stack, as after fork(2).
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    i32::try_from(pid).unwrap_or(-1)
}

impl Child {
    pub(super) const fn pid(&self) -> i32 {
        self.pid
    }

    /// This child, whose files are closed: by the program that it runs now, or because it ends.
    fn running(mut self) -> io::Result<Self> {
        let command_line = format!("/proc/{}/cmdline", self.pid);
        loop {
            if let Some(status) = self.try_wait()? {
                return Err(io::Error::other(format!("it ended at once: {status}")));
            }
            // The memory of a process that ends goes before its files, and a program has its arguments a moment after
            // its files were closed.
            if fs::read(&command_line).is_ok_and(|line| !line.is_empty()) {
                return Ok(self);
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(super) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.wait_with(libc::WNOHANG)
    }

    /// Ends it and waits for that.
    pub(super) fn kill(&mut self) {
        if self.ended.is_none() {
            // SAFETY: as long as it has not been waited for, nobody else has its number.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
            let _ = self.wait_with(0);
        }
    }

    fn wait_with(&mut self, options: i32) -> io::Result<Option<ExitStatus>> {
        while self.ended.is_none() {
            let mut status = 0;
            // SAFETY: `status` is a number of this function's.
            match unsafe { libc::waitpid(self.pid, &raw mut status, options) } {
                0 => return Ok(None),
                -1 => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                _ => self.ended = Some(ExitStatus::from_raw(status)),
            }
        }
        Ok(self.ended)
    }
}

const LOOK_EVERY: Duration = Duration::from_micros(50);
/// From linux/sched.h; the constant of the crate libc overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    /// It begins when there is a line to read.
    fn shell(script: &str) -> Program {
        let script = format!("read _; {script}");
        let arguments = ["sh", "-c", &script, "name"].map(OsStr::new);
        Program::new(Path::new("/bin/sh"), &arguments, &[("A", OsStr::new("b c"))]).unwrap()
    }

    fn said(program: &Program) -> (String, ExitStatus) {
        let ((mut output, writer), (gate, mut opener)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let null = File::options().write(true).open("/dev/null").unwrap();
        let mut child = program.start(None, [gate.as_fd(), writer.as_fd(), null.as_fd()]).unwrap();
        drop(writer);
        opener.write_all(b"\n").unwrap();
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        let ended = child.wait_with(0).unwrap().unwrap();
        assert_eq!(child.try_wait().unwrap(), Some(ended), "it is known from then on");
        (text, ended)
    }

    #[test]
    fn a_program_has_the_given_arguments_environment_and_streams_and_all_signals() {
        let (text, ended) = said(&shell("echo $0 \"$A\" $(pwd) $HOME; exit 3"));
        assert_eq!((text.as_str(), ended.code()), ("name b c /\n", Some(3)));
        // Nothing sends them here; the second is one that glibc keeps for itself (SIGCANCEL).
        for signal in [libc::SIGUSR2, 32] {
            set_action(signal, libc::SIG_IGN);
        }
        let (text, _) = said(&shell("grep -E '^Sig(Blk|Ign)' /proc/self/status"));
        assert!(text.lines().all(|line| line.ends_with(":\t0000000000000000")), "{text}");
    }

    #[test]
    fn what_cannot_be_run_ends_at_once_and_what_runs_can_be_ended() {
        let nothing = Program::new(Path::new("/nonexistent"), &[OsStr::new("x")], &[]).unwrap();
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let streams = || [null.as_fd(), null.as_fd(), null.as_fd()];
        let error = nothing.start(None, streams()).unwrap_err().to_string();
        assert_eq!(error, "it ended at once: exit status: 127");
        assert!(Program::new(Path::new("/bin/sh"), &[OsStr::from_bytes(b"a\0b")], &[]).is_err());
        let (gate, mut input) = io::pipe().unwrap();
        let start = || shell("cat").start(None, [gate.as_fd(), null.as_fd(), null.as_fd()]).unwrap();
        let (mut one, mut other) = (start(), start());
        assert_eq!(one.try_wait().unwrap(), None);
        other.kill();
        input.write_all(b"x").unwrap();
        drop(input);
        assert!(one.wait_with(0).unwrap().unwrap().success());
    }

    #[test]
    fn a_folder_that_is_no_group_is_refused() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let folder = File::open("/").unwrap();
        let streams = [null.as_fd(), null.as_fd(), null.as_fd()];
        assert!(shell("true").start(Some(&folder), streams).is_err());
    }
}
