//! `nebula-cni-instance` with a fault that it shows only where it takes over from another instance: a new release that
//! passes the tests of a node and fails in its pods.
//!
//! The fault is the end of its own file, behind `fault=`: `mute FD` (it sends no datagrams, but by sendmsg(2) on
//! descriptors up to this one, as which it has the channel to the other instance), `kill NUMBER` (that system call ends
//! the process), `die SECONDS`, `stop SECONDS` (it hangs), or `leak MIB` (that much more memory in each second).

#![allow(clippy::disallowed_methods, clippy::expect_used, clippy::print_stderr, reason = "a program of tests")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use nebula_instance::pod::tunnel;
use nebula_linux::{memory, notify};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

fn main() -> ExitCode {
    memory::share_one_heap();
    nebula_core::io::register_barriers();
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str| {
        let at = arguments.iter().position(|word| word.trim_start_matches('-') == flag)?;
        arguments.get(at + 1).cloned()
    };
    // Also the version, for which the agent asks.
    let Some(launch) = value("launch").map(PathBuf::from) else { return ExitCode::SUCCESS };
    let predecessor = value("take-over").and_then(|pid| pid.parse().ok());
    if predecessor.is_some() {
        break_as_told();
    }
    match tunnel::serve(&launch, predecessor) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            notify::start_error(&error.to_start_error());
            eprintln!("faulty instance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn break_as_told() {
    let mut own = File::open("/proc/self/exe").expect("its own file");
    let mut end = Vec::new();
    own.seek(SeekFrom::End(-64)).and_then(|_| own.read_to_end(&mut end)).expect("the end of its file");
    let end = String::from_utf8_lossy(&end);
    let Some((kind, number)) = end.rsplit_once("fault=").and_then(|(_, fault)| fault.trim().split_once(' ')) else {
        return;
    };
    let number: u64 = number.parse().expect("a number");
    match kind {
        "mute" => {
            let only = |condition: Result<_, _>| {
                vec![SeccompRule::new(vec![condition.expect("a condition")]).expect("a rule")]
            };
            let beyond = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Gt, number);
            // A stream has no address there.
            let has_address = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0);
            let calls = [
                (libc::SYS_sendmmsg, Vec::new()),
                (libc::SYS_sendmsg, only(beyond)),
                (libc::SYS_sendto, only(has_address)),
            ];
            filter(calls.into(), SeccompAction::Errno(libc::EPERM.cast_unsigned()));
        }
        "kill" => {
            let call = i64::try_from(number).expect("a system call");
            filter([(call, Vec::new())].into(), SeccompAction::KillProcess);
        }
        "leak" => drop(thread::spawn(move || leak(number))),
        "die" => later(number, Signal::SIGKILL),
        "stop" => later(number, Signal::SIGSTOP),
        kind => panic!("no fault is called {kind}"),
    }
}

fn filter(calls: BTreeMap<i64, Vec<SeccompRule>>, action: SeccompAction) {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).expect("a known processor");
    let filter = SeccompFilter::new(calls, SeccompAction::Allow, action, architecture).expect("a filter");
    let program: BpfProgram = filter.try_into().expect("a filter");
    seccompiler::apply_filter(&program).expect("the kernel has filters");
}

fn later(seconds: u64, signal: Signal) {
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(seconds));
        kill(Pid::this(), signal)
    });
}

fn leak(mib: u64) {
    let mut kept = Vec::new();
    loop {
        thread::sleep(Duration::from_millis(100));
        kept.push(vec![1_u8; usize::try_from(mib).unwrap_or(1) * 100 * 1024]);
    }
}
