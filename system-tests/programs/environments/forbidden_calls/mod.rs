//! The programs under filters of system calls, as container runtimes and service managers install them: each kind of
//! call in turn is answered as if the kernel did not have it (ENOSYS) or as if it were forbidden (EPERM).

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]
#![allow(unsafe_code, reason = "a filter is installed between fork and exec")]

mod ca;
mod node_agent;
mod plugin;

use crate::loopback;
use crate::world::cluster::binary;

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use loopback::{Network, free_tcp_port, free_udp_port, ours};
use nebula_cni_contract::netlink::nftables::{self, Family};
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

/// A system call, whatever its arguments or with these (number and value of each).
type Call = (libc::c_long, &'static [(u8, i32)]);

/// Kinds of calls, and the word by which an error names them.
const KINDS: &[(&str, &[Call])] = &[
    ("io_uring_setup", &[(libc::SYS_io_uring_setup, &[])]),
    ("userfaultfd", &[(libc::SYS_userfaultfd, &[])]),
    ("membarrier", &[(libc::SYS_membarrier, &[])]),
    ("sched_setaffinity", &[(libc::SYS_sched_setaffinity, &[]), (libc::SYS_sched_getaffinity, &[])]),
    ("setpriority", &[(libc::SYS_setpriority, &[]), (libc::SYS_getpriority, &[])]),
    ("prctl", &[(libc::SYS_prctl, &[])]),
    ("landlock", &[(libc::SYS_landlock_create_ruleset, &[]), (libc::SYS_landlock_restrict_self, &[])]),
    ("memfd_create", &[(libc::SYS_memfd_create, &[])]),
    ("timerfd", &[(libc::SYS_timerfd_create, &[]), (libc::SYS_timerfd_settime, &[])]),
    ("inotify", &[(libc::SYS_inotify_init1, &[]), (libc::SYS_inotify_add_watch, &[])]),
    ("recvmmsg", &[(libc::SYS_recvmmsg, &[])]),
    ("sendmmsg", &[(libc::SYS_sendmmsg, &[])]),
    ("UDP_SEGMENT", &[(libc::SYS_getsockopt, &[(1, libc::SOL_UDP)]), (libc::SYS_setsockopt, &[(1, libc::SOL_UDP)])]),
    (
        "SO_SNDBUF",
        &[
            (libc::SYS_setsockopt, &[(1, libc::SOL_SOCKET), (2, libc::SO_RCVBUFFORCE)]),
            (libc::SYS_setsockopt, &[(1, libc::SOL_SOCKET), (2, libc::SO_SNDBUFFORCE)]),
            (libc::SYS_setsockopt, &[(1, libc::SOL_SOCKET), (2, libc::SO_RCVBUF)]),
            (libc::SYS_setsockopt, &[(1, libc::SOL_SOCKET), (2, libc::SO_SNDBUF)]),
        ],
    ),
    ("capget", &[(libc::SYS_capset, &[]), (libc::SYS_capget, &[])]),
    ("setrlimit", &[(libc::SYS_setrlimit, &[]), (libc::SYS_prlimit64, &[])]),
    ("statx", &[(libc::SYS_statx, &[])]),
    ("clone3", &[(libc::SYS_clone3, &[])]),
    ("madvise", &[(libc::SYS_madvise, &[])]),
    ("getrandom", &[(libc::SYS_getrandom, &[])]),
    ("eventfd", &[(libc::SYS_eventfd2, &[])]),
    ("ppoll", &[(libc::SYS_ppoll, &[])]),
    ("netlink", &[(libc::SYS_socket, &[(0, libc::AF_NETLINK)])]),
    ("AF_UNIX", &[(libc::SYS_socket, &[(0, libc::AF_UNIX)])]),
    ("AF_INET6", &[(libc::SYS_socket, &[(0, libc::AF_INET6)])]),
    ("ioctl", &[(libc::SYS_ioctl, &[])]),
];

/// A filter that answers these calls with an error, and lets all others pass.
fn filter(calls: &[Call], errno: i32) -> BpfProgram {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for (number, arguments) in calls {
        let of_call = rules.entry(*number).or_default();
        let is = |(at, value): &(u8, i32)| {
            SeccompCondition::new(*at, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *value as u64).unwrap()
        };
        if !arguments.is_empty() {
            of_call.push(SeccompRule::new(arguments.iter().map(is).collect()).unwrap());
        }
    }
    let architecture = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    let error = SeccompAction::Errno(errno.cast_unsigned());
    SeccompFilter::new(rules, SeccompAction::Allow, error, architecture).unwrap().try_into().unwrap()
}

/// Starts the program under a filter.
fn spawn(command: &mut Command, program: BpfProgram) -> Child {
    // SAFETY: two system calls and no memory from the heap.
    unsafe {
        command.pre_exec(move || seccompiler::apply_filter(&program).map_err(|_| nix::errno::Errno::EINVAL.into()))
    };
    command.spawn().unwrap()
}

/// Each kind of calls with each answer, and the word by which an error names it.
fn rounds() -> impl Iterator<Item = (&'static str, i32, BpfProgram)> {
    KINDS.iter().flat_map(|(word, calls)| [libc::ENOSYS, libc::EPERM].map(|errno| (*word, errno, filter(calls, errno))))
}

fn heading(word: &str, errno: i32) -> String {
    format!("== {word} answered with {:?}: ", nix::errno::Errno::from_raw(errno))
}

/// What a text says that is never the cause.
fn misleads(said: &str) -> Option<&'static str> {
    ["panicked", "removed by somebody else", "this is a bug"].into_iter().find(|text| said.contains(text))
}

/// Starts the daemon under a filter, in the network namespace of the calling thread.
fn start(config: &Path, log: &Path, program: BpfProgram) -> Child {
    spawn(logged(&ours(), log).arg("-config").arg(config), program)
}

/// Ends a program. Returns its exit code; `None` if a signal had to end it.
fn end(child: &mut Child) -> Option<i32> {
    let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
    let until = Instant::now() + Duration::from_secs(5);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > until {
            let _ = child.kill();
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait().unwrap().code()
}

/// Waits until this is so, and no longer than the program runs.
fn comes_true(child: &mut Child, mut is_so: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + Duration::from_secs(15);
    while !is_so() {
        if child.try_wait().unwrap().is_some() || Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// Starts a program without IPv6 in its kernel. Returns whether it opens these ports in IPv4, and its exit code at
/// the end.
fn serves_without_v6(command: &mut Command, ports: &[u16]) -> (bool, Option<i32>) {
    let v6: Call = (libc::SYS_socket, &[(0, libc::AF_INET6)]);
    let mut child = spawn(command, filter(&[v6], libc::EAFNOSUPPORT));
    let is_open = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_ok();
    let opens = comes_true(&mut child, || ports.iter().all(is_open));
    (opens, end(&mut child))
}

/// A command that writes into this log.
fn logged(program: &Path, log: &Path) -> Command {
    let output = std::fs::File::create(log).unwrap();
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
    command
}

/// What is wrong with how the daemon took it.
fn complaint(child: &mut Child, log: &Path, word: &str) -> Option<String> {
    let said = || std::fs::read_to_string(log).unwrap();
    let is_active = |text: &str| text.contains("Nebula interface is active");
    comes_true(child, || is_active(&said()));
    let names_it = |text: &str| {
        let errors = text.lines().filter(|line| line.contains("level=ERROR") || line.contains("level=WARN"));
        errors.into_iter().any(|line| line.to_lowercase().contains(&word.to_lowercase()))
    };
    let mut works = false;
    if child.try_wait().unwrap().is_none() {
        let ping = ["ping", "-c", "1", "-W", "1", "10.42.0.1"];
        works =
            (0..4).any(|_| Command::new(ping[0]).args(&ping[1..]).stdout(Stdio::null()).status().unwrap().success());
        if end(child).is_none() {
            return Some(format!("it does not end\n{}", said()));
        }
    }
    let said = said();
    match misleads(&said) {
        Some(text) => Some(format!("it says {text:?}\n{said}")),
        None if !works && !names_it(&said) => Some(format!("it does not work, and does not say why\n{said}")),
        None => None,
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn without_one_kind_of_system_call_the_daemon_works_or_names_what_it_needs() {
    let network = Network::new();
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let port = free_udp_port();
    let rules =
        "firewall: {outbound: [{port: any, proto: any, host: any}], inbound: [{port: any, proto: any, host: any}]}";
    let lighthouse = format!("listen: {{host: 127.0.0.1, port: {port}}}\nlighthouse: {{am_lighthouse: true}}\n{rules}");
    let _peer = network.start(&ours(), "peer", &["10.42.0.1/16"], &lighthouse);
    let settings = format!(
        "tun: {{dev: nebfilter}}\nlisten: {{host: '::', port: 0}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\n\
         lighthouse: {{hosts: [10.42.0.1]}}\ndaemon: {{control_socket: false, user: '65534:65534'}}\n{rules}"
    );
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    let log = config.with_extension("log");
    let mut complaints = Vec::new();
    for (word, errno, program) in rounds() {
        let mut child = start(&config, &log, program);
        let found = complaint(&mut child, &log, word);
        complaints.extend(found.map(|found| heading(word, errno) + &found));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn without_ipv6_in_the_kernel_whatever_listens_everywhere_listens_on_ipv4() {
    let network = Network::new();
    let (metrics, dns, port) = (free_tcp_port(), free_tcp_port(), free_udp_port());
    let settings = format!(
        "tun: {{disabled: true}}\nlisten: {{host: '::', port: {port}}}\nstats: {{type: prometheus, listen: '[::]:{metrics}', path: /m, \
         interval: 10s}}\nlighthouse: {{am_lighthouse: true, serve_dns: true, dns: {{host: '::', port: {dns}}}}}\n\
         daemon: {{control_socket: false}}"
    );
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    let log = config.with_extension("log");
    let served = serves_without_v6(logged(&ours(), &log).arg("-config").arg(&config), &[metrics, dns]);
    let said = std::fs::read_to_string(&log).unwrap();
    assert_eq!(served, (true, Some(0)), "{said}");
    assert!(said.contains("addr=0.0.0.0:"), "{said}");
}

#[test]
#[ignore = "needs a build of the proxy"]
fn without_ipv6_in_the_kernel_the_proxy_listens_on_ipv4() {
    let network = Network::new();
    let (socks, forward, port) = (free_tcp_port(), free_tcp_port(), free_udp_port());
    let settings = format!("tun: {{disabled: true}}\nlisten: {{host: '::', port: {port}}}");
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    let log = config.with_extension("log");
    let mut command = logged(&binary("nebula-proxy"), &log);
    command.arg("-config").arg(&config).args(["-socks", &format!("[::]:{socks}")]);
    command.args(["-forward", &format!("[::]:{forward}=10.42.0.1:22")]);
    let users = config.with_extension("users");
    std::fs::write(&users, "one:secret-of-one\n").unwrap();
    std::fs::set_permissions(&users, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    command.arg("-credentials").arg(&users);
    let served = serves_without_v6(&mut command, &[socks, forward]);
    let said = std::fs::read_to_string(&log).unwrap();
    assert_eq!(served, (true, Some(0)), "{said}");
    assert!(said.contains("udpAddr=0.0.0.0:"), "{said}");
}

/// Runs `work` on a thread for which these calls fail.
fn without<T: Send>(calls: &[Call], errno: i32, work: impl FnOnce() -> T + Send) -> T {
    let program = filter(calls, errno);
    std::thread::scope(|scope| {
        let filtered = scope.spawn(|| {
            seccompiler::apply_filter(&program).unwrap();
            work()
        });
        filtered.join().unwrap()
    })
}

#[test]
fn where_the_kernel_has_no_netfilter_there_is_no_table_to_remove() {
    let netfilter: Call = (libc::SYS_socket, &[(0, libc::AF_NETLINK), (2, libc::NETLINK_NETFILTER)]);
    for errno in [libc::EPROTONOSUPPORT, libc::EAFNOSUPPORT] {
        let removed = without(&[netfilter], errno, || nftables::remove(Family::Link, "nebula-cni-capture"));
        assert!(removed.is_ok(), "{removed:?}");
    }
    let forbidden = without(&[netfilter], libc::EACCES, || nftables::remove(Family::Link, "nebula-cni-capture"));
    assert_eq!(forbidden.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied, "there may be one");
}
