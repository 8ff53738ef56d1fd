//! What code that runs as the instance of one pod can access of another pod's instance and of the node: nothing, under
//! either supervisor. The attacker is this program, started once more: as the user of an instance, and inside the same
//! sandbox.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]
#![allow(clippy::print_stdout, reason = "the attacker reports to the test that started it")]
#![allow(unsafe_code, reason = "the attacker makes system calls that no library offers")]

use crate::service_manager;
use crate::world;

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nebula_cni_contract::launch::LaunchSpec;
use nebula_cni_plugin::supervisor::process::with_arguments;
use nebula_linux::confinement::{self, Confinement, Missing};
use nix::errno::Errno;
use nix::libc::{self, c_long};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use serde_json::json;
use service_manager::{PLACE, Systemd};
use world::capture::Capture;
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, gone_within};

const SOON: Duration = Duration::from_secs(15);

#[test]
#[ignore = "needs root and network namespaces"]
fn code_in_an_instance_gets_nothing_of_another_one_and_of_the_node_with_direct() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    attack_with_each_layer(&mut cluster, &mut node);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

#[test]
#[ignore = "needs root, network namespaces, systemd and D-Bus"]
fn code_in_an_instance_gets_nothing_of_another_one_and_of_the_node_with_systemd() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "systemd".into();
    node.bus = Some(systemd.bus());
    attack_with_each_layer(&mut cluster, &mut node);
    assert_eq!(systemd.units(), "");
}

fn attack_with_each_layer(cluster: &mut Cluster, node: &mut Node) {
    node.add_pods(&mut cluster.world, &["a", "b"]);
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    let [a, b] = ["a", "b"].map(|pod| launch_file(node, pod));
    let user = user_of(&a);
    let shared = |pod: &str, suffix: &str| node.records().join(format!("{pod}-eth0.{suffix}"));
    let room = node.status_socket("b").parent().expect("a folder").to_owned();
    let files =
        [shared("b", "launch"), shared("b", "json"), shared("b", "log"), shared("a", "json"), shared("a", "launch")];
    let files = files.into_iter().chain([room, cluster.ca_file("node.token").into(), "/etc/shadow".into()]);
    let attack = Attack {
        victim: pid_of(&b),
        files: files.collect(),
        socket: node.status_socket("b"),
        netns: node.launch("b").expect("a launch file")["netns"].as_str().expect("a path").into(),
        behind_wall_of: None,
    };
    // Root can access everything, which proves that the attacks work.
    let of_root = attack.run_as(None);
    for expected in ["/proc/PID/mem", "process_vm_readv", "ptrace", "kill", "pidfd_getfd", "/etc/shadow", "/etc/cron.d"]
    {
        assert!(of_root.iter().any(|got| got.starts_with(expected)), "{expected} is not among {of_root:?}");
    }
    assert!(alive(pid_seen_by(node, "b")), "it survived");
    // The user alone is sufficient protection, for kernels that offer nothing else.
    assert_eq!(attack.run_as(Some(user)), Vec::<String>::new(), "as user {user}");
    let behind_wall = Attack { behind_wall_of: Some(a.clone()), ..attack };
    assert_eq!(behind_wall.run_as(None), Vec::<String>::new(), "behind the whole wall");

    for launch in [&a, &b] {
        is_confined(pid_of(launch), user_of(launch));
    }
    assert_ne!(user_of(&a), user_of(&b));
    cluster.world.ping("b", LIGHTHOUSE, SOON);
    node.delete_pods(&cluster.world, &["a", "b"]);
}

/// Checks the kernel's status of all threads of a process.
fn is_confined(pid: i32, user: u32) {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a live process").flatten();
    let threads: Vec<String> = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok()).collect();
    assert!(threads.len() > 2, "{threads:?}");
    let ids = [user.to_string().as_str(); 4].join(" ");
    let none = "0000000000000000";
    for thread in threads {
        let field = |name: &str| {
            let line = thread.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).expect("a field");
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(
            (field("Uid"), field("Gid"), field("Groups")),
            (ids.clone(), ids.clone(), String::new()),
            "{thread}"
        );
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(set), none, "{thread}");
        }
        assert_eq!((field("NoNewPrivs"), field("Seccomp")), ("1".to_owned(), "2".to_owned()), "{thread}");
    }
    // The files in /proc of a non-dumpable process belong to root.
    assert_eq!(fs::metadata(format!("/proc/{pid}/status")).expect("a live process").uid(), 0);
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).expect("a live process");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).expect("the limit");
    assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"]);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn an_instance_that_crashes_leaves_no_core_file() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    // As some runtimes set it.
    setrlimit(Resource::RLIMIT_CORE, libc::RLIM_INFINITY, libc::RLIM_INFINITY).expect("root may");
    node.add_pods(&mut cluster.world, &["web"]);
    let launch = launch_file(&node, "web");
    let room = node.status_socket("web").parent().expect("a folder").to_owned();
    for signal in [Signal::SIGSEGV, Signal::SIGABRT] {
        let pid = pid_of(&launch);
        // Rust's SIGSEGV handler first restores the default action and expects the fault to recur, so it is sent again.
        let until = Instant::now() + SOON;
        while alive(pid.unsigned_abs().into()) && Instant::now() < until {
            let _ = kill(Pid::from_raw(pid), signal);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(gone_within(pid.unsigned_abs().into(), SOON));
        let cores = [Path::new("/"), &room].into_iter().flat_map(|folder| fs::read_dir(folder).expect("a folder"));
        let cores = cores.flatten().map(|entry| entry.path());
        let cores: Vec<PathBuf> = cores
            .filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"core")))
            .filter(|path| fs::metadata(path).is_ok_and(|core| core.is_file()))
            .collect();
        cores.iter().for_each(|core| drop(fs::remove_file(core)));
        assert_eq!(cores, Vec::<PathBuf>::new(), "{signal}");
        node.chain(&cluster.world, "check", "web");
        let plugin = world::cluster::binary("nebula-cni-plugin").display().to_string();
        let reconcile = [plugin.as_str(), "reconcile", &node.dir.join("state").display().to_string()];
        assert!(cluster.world.exec("n1", &reconcile).status.success());
        cluster.world.ping("web", LIGHTHOUSE, SOON);
    }
    node.chain_ok(&cluster.world, "del", "web");
}

#[test]
#[ignore = "needs root, network namespaces and a memory controller"]
fn an_instance_that_needs_too_much_memory_is_ended_and_the_pod_closed_until_it_is_started_again() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web"]);
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    let pid = pid_of(&launch_file(&node, "web"));
    let group = memory_group(pid);
    assert_eq!(read_number(&group.limit), 32 << 20);
    // Takes away the unused part, so that fewer packets are needed. cgroup v1 refuses to go below the usage.
    let smaller = (1..64_u64).rev().map(|half_mib| half_mib << 19);
    let _ = smaller.take_while(|limit| fs::write(&group.limit, limit.to_string()).is_ok()).last();
    let capture = Capture::start(&cluster.world.namespace_of("n1"));
    let until = Instant::now() + SOON;
    while alive(pid.unsigned_abs().into()) {
        assert!(Instant::now() < until, "{} of {}", read_number(&group.usage), read_number(&group.limit));
        scan(&cluster.world.namespace_of("web"));
    }
    scan(&cluster.world.namespace_of("web"));
    assert_eq!(capture.overlay_packets(), 0, "packets for the overlay left in clear");
    // CHECK reports why, and causes a restart.
    let check = node.chain(&cluster.world, "check", "web");
    let said = String::from_utf8_lossy(&check.stdout).into_owned();
    assert!(!check.status.success() && said.contains("needed more memory"), "{said}");
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    assert_eq!(read_number(&memory_group(pid_of(&launch_file(&node, "web"))).limit), 32 << 20);
    node.chain_ok(&cluster.world, "check", "web");
    node.chain_ok(&cluster.world, "del", "web");
    assert!(!group.limit.exists(), "its group is gone");
}

#[test]
#[ignore = "needs root, network namespaces, systemd and D-Bus"]
fn a_unit_has_the_limit_that_is_configured() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "systemd".into();
    node.bus = Some(systemd.bus());
    for (limit, expected) in [(json!(24), "25165824"), (json!(0), "infinity")] {
        node.conf["plugins"][1]["memoryLimitMiB"] = limit;
        node.add_pods(&mut cluster.world, &["web"]);
        let units = systemd.units();
        let unit = units.split(' ').next().expect("a unit");
        assert_eq!(systemd.show(unit, "MemoryMax"), expected);
        assert_eq!(
            (systemd.show(unit, "OOMPolicy"), systemd.show(unit, "Restart")),
            ("stop".into(), "on-failure".into())
        );
        node.chain_ok(&cluster.world, "del", "web");
        world::run("ip", &["netns", "del", &cluster.world.namespace_of("web")]);
    }
}

/// Files of the memory control group of a process.
struct MemoryGroup {
    limit: PathBuf,
    usage: PathBuf,
}

fn memory_group(pid: i32) -> MemoryGroup {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("a live process");
    let below = |controllers: &str| groups.lines().find_map(|line| line.split_once(controllers)?.1.strip_prefix('/'));
    let at = |root: &str, group: &str, limit: &str, usage: &str| {
        let folder = Path::new(root).join(group);
        MemoryGroup { limit: folder.join(limit), usage: folder.join(usage) }
    };
    let group = match (below(":memory:"), below("0::")) {
        (Some(group), _) => at("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes"),
        (None, group) => at("/sys/fs/cgroup", group.expect("a group"), "memory.max", "memory.current"),
    };
    assert!(group.limit.to_string_lossy().contains("nebula-cni"), "{}", group.limit.display());
    group
}

fn read_number(file: &Path) -> u64 {
    fs::read_to_string(file).expect("a file of the group").trim().parse().expect("a number")
}

/// Sends a packet to each of many unused overlay addresses.
fn scan(namespace: &str) {
    let namespace = namespace.to_owned();
    let scan = std::thread::spawn(move || {
        world::enter(&namespace);
        let socket = std::net::UdpSocket::bind("0.0.0.0:0").expect("a socket");
        for n in 0..10_000_u32 {
            let [_, _, high, low] = n.to_be_bytes();
            // Without a device there is no route.
            let _ = socket.send_to(b"x", (std::net::Ipv4Addr::new(10, 42, 100 + high % 100, low), 9));
        }
    });
    scan.join().expect("the scan ends");
}

/// The parameters passed to the attacker.
#[derive(Serialize, Deserialize)]
struct Attack {
    victim: i32,
    files: Vec<PathBuf>,
    socket: PathBuf,
    netns: PathBuf,
    /// The launch file of the instance whose sandbox the attacker enters by itself.
    behind_wall_of: Option<PathBuf>,
}

impl Attack {
    /// Runs the attacker as this user without capabilities, or else as root; returns what it could access.
    fn run_as(&self, user: Option<u32>) -> Vec<String> {
        let this = std::env::current_exe().expect("this program");
        let mut command = match user {
            None => Command::new(&this),
            Some(user) => {
                // In a place where everybody may execute it.
                let copy = std::env::temp_dir().join(format!("attacker-{}", std::process::id()));
                fs::copy(&this, &copy).expect("a copy of this program");
                let mut command = Command::new("setpriv");
                command.args(["--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]);
                command.arg(format!("--reuid={user}")).arg(format!("--regid={user}")).arg(copy);
                command
            }
        };
        let (_, here) = module_path!().split_once("::").expect("a module of this program");
        command.args(["--ignored", "--exact", &format!("{here}::attacker"), "--nocapture"]);
        let command = command.env(ATTACK, json!(self).to_string()).current_dir("/");
        let output = command.output().expect("the attacker runs");
        let _ = fs::remove_file(std::env::temp_dir().join(format!("attacker-{}", std::process::id())));
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(said.contains("attacked\n"), "{said}{}", String::from_utf8_lossy(&output.stderr));
        said.lines().filter_map(|line| Some(line.split_once("got: ")?.1.to_owned())).collect()
    }

    fn run(&self) {
        let got = |what: &str| println!("got: {what}");
        let victim = c_long::from(self.victim);
        let memory = format!("/proc/{victim}/mem");
        if let Ok(maps) = fs::read_to_string(format!("/proc/{victim}/maps")) {
            got("/proc/PID/maps");
            let start = maps.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok());
            let read = File::open(&memory).and_then(|file| file.read_at(&mut [0; 64], start.unwrap_or(0)));
            read.into_iter().for_each(|_| got("/proc/PID/mem"));
        } else if File::open(&memory).is_ok() {
            got("/proc/PID/mem");
        }
        for name in ["environ", "fd", "auxv", "stack", "root", "cwd"] {
            let path = PathBuf::from(format!("/proc/{victim}/{name}"));
            let opened = if path.is_dir() { fs::read_dir(&path).is_ok() } else { fs::read(&path).is_ok() };
            opened.then(|| got(&format!("/proc/PID/{name}")));
        }
        let mut bytes = [0_u8; 8];
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 8 };
        let remote = libc::iovec { iov_base: 0x1000 as *mut libc::c_void, iov_len: 8 };
        for (name, number) in
            [("process_vm_readv", libc::SYS_process_vm_readv), ("process_vm_writev", libc::SYS_process_vm_writev)]
        {
            let pointers = [&raw const local, &raw const remote].map(|pointer| pointer as c_long);
            // EFAULT: only a permitted caller learns that nothing is mapped at that address.
            let result = call(number, [victim, pointers[0], 1, pointers[1], 1, 0]);
            (result.is_ok() || result == Err(Errno::EFAULT)).then(|| got(name));
        }
        if call(libc::SYS_ptrace, [libc::PTRACE_SEIZE.into(), victim, 0, 0, 0, 0]).is_ok() {
            got("ptrace");
            let _ = call(libc::SYS_ptrace, [libc::PTRACE_INTERRUPT.into(), victim, 0, 0, 0, 0]);
            let _ = nix::sys::wait::waitpid(Pid::from_raw(self.victim), Some(nix::sys::wait::WaitPidFlag::__WALL));
            let _ = call(libc::SYS_ptrace, [libc::PTRACE_DETACH.into(), victim, 0, 0, 0, 0]);
        }
        if let Ok(process) = call(libc::SYS_pidfd_open, [victim, 0, 0, 0, 0, 0]) {
            let found = (0..64).any(|fd| call(libc::SYS_pidfd_getfd, [process, fd, 0, 0, 0, 0]).is_ok());
            found.then(|| got("pidfd_getfd"));
            call(libc::SYS_pidfd_send_signal, [process, 0, 0, 0, 0, 0])
                .into_iter()
                .for_each(|_| got("pidfd_send_signal"));
            // MADV_COLD, which has no visible effect.
            let advised = call(libc::SYS_process_madvise, [process, pointers_to(&remote), 1, 20, 0, 0]);
            (advised.is_ok() || advised == Err(Errno::ENOMEM)).then(|| got("process_madvise"));
        }
        call(libc::SYS_kill, [victim, 0, 0, 0, 0, 0]).into_iter().for_each(|_| got("kill"));
        call(libc::SYS_prlimit64, [victim, 7, 0, 0, 0, 0]).into_iter().for_each(|_| got("prlimit64"));
        let own = c_long::from(std::process::id().cast_signed());
        call(libc::SYS_kcmp, [own, victim, 1, 0, 0, 0]).into_iter().for_each(|_| got("kcmp"));
        for path in &self.files {
            let readable = if path.is_dir() { fs::read_dir(path).is_ok() } else { File::open(path).is_ok() };
            readable.then(|| got(&path.display().to_string()));
        }
        let mut said = Vec::new();
        let status = UnixStream::connect(&self.socket).and_then(|stream| stream.take(9).read_to_end(&mut said));
        status.into_iter().for_each(|_| got("the status socket"));
        for folder in ["/etc/cron.d", "/etc", "/", "/root"] {
            let path = Path::new(folder).join(format!("nebula-attack-{own}"));
            if OpenOptions::new().write(true).create_new(true).open(&path).is_ok() {
                got(folder);
                let _ = fs::remove_file(path);
            }
        }
        if self.behind_wall_of.is_some() {
            self.try_calls();
        }
        println!("attacked");
    }

    /// Calls that an unprivileged user may make, but an instance may not.
    fn try_calls(&self) {
        let got = |what: &str| println!("got: {what}");
        let refused = |number, arguments| call(number, arguments) == Err(Errno::EPERM);
        for (name, number) in [
            ("ptrace", libc::SYS_ptrace),
            ("process_vm_readv", libc::SYS_process_vm_readv),
            ("pidfd_open", libc::SYS_pidfd_open),
            ("pidfd_getfd", libc::SYS_pidfd_getfd),
            ("kcmp", libc::SYS_kcmp),
            ("mount", libc::SYS_mount),
            ("unshare", libc::SYS_unshare),
            ("setns", libc::SYS_setns),
            ("bpf", libc::SYS_bpf),
            ("userfaultfd", libc::SYS_userfaultfd),
            ("keyctl", libc::SYS_keyctl),
            ("add_key", libc::SYS_add_key),
            ("io_uring_setup", libc::SYS_io_uring_setup),
            ("perf_event_open", libc::SYS_perf_event_open),
            ("memfd_create", libc::SYS_memfd_create),
            ("execve", libc::SYS_execve),
            ("execveat", libc::SYS_execveat),
            ("fork", libc::SYS_fork),
            ("setuid", libc::SYS_setuid),
            ("chmod", libc::SYS_chmod),
            ("symlinkat", libc::SYS_symlinkat),
            ("renameat", libc::SYS_renameat),
        ] {
            (!refused(number, [0; 6])).then(|| got(name));
        }
        let executable = c_long::from(libc::PROT_READ | libc::PROT_EXEC);
        let private = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        (!refused(libc::SYS_mmap, [0, 4096, executable, private, -1, 0])).then(|| got("executable memory"));
        (!refused(libc::SYS_socket, [libc::AF_PACKET.into(), libc::SOCK_RAW.into(), 0, 0, 0, 0]))
            .then(|| got("AF_PACKET"));
        // Landlock, on a kernel that supports it: files that everybody else may read and write.
        for path in ["/etc/passwd", "/usr/bin", "/proc/1/cmdline", "/proc/self/mem"] {
            let inside = path == "/etc/passwd";
            let opened = File::open(path).is_ok_and(|mut file| file.read(&mut [0; 1]).is_ok());
            (opened && !inside).then(|| got(path));
        }
        let path = format!("/tmp/nebula-attack-{}", std::process::id());
        OpenOptions::new().write(true).create_new(true).open(path).into_iter().for_each(|_| got("/tmp"));
        std::net::TcpListener::bind("127.0.0.1:0").into_iter().for_each(|_| got("a TCP listener"));
        let _ = &self.netns;
    }
}

/// The attacker's side of [`Attack::run_as`]; does nothing without its environment variable.
#[test]
#[ignore = "is started by the tests of this file"]
fn attacker() {
    let Ok(attack) = std::env::var(ATTACK) else { return };
    let attack: Attack = serde_json::from_str(&attack).expect("an attack");
    if let Some(launch) = &attack.behind_wall_of {
        let spec: LaunchSpec = nebula_instance::pod::launch_file::read(launch).expect("a launch file");
        confinement::hide_memory().expect("the kernel can");
        assert_eq!(Confinement::of(&spec).enter().expect("a wall"), Missing::default());
    }
    attack.run();
}

fn pointers_to(vector: &libc::iovec) -> c_long {
    std::ptr::from_ref(vector) as c_long
}

fn call(number: c_long, arguments: [c_long; 6]) -> Result<c_long, Errno> {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: pointers among the arguments point to live values, or are null.
    Errno::result(unsafe { libc::syscall(number, a, b, c, d, e, f) })
}

fn launch_file(node: &Node, pod: &str) -> PathBuf {
    node.records().join(format!("{pod}-eth0.launch"))
}

/// User of the instance with this launch file; 0 if it has none.
fn user_of(launch: &Path) -> u32 {
    let spec: serde_json::Value = serde_json::from_slice(&fs::read(launch).expect("a launch file")).expect("JSON");
    spec["user"].as_u64().map_or(0, |user| u32::try_from(user).expect("a user"))
}

/// The process id in the machine's pid namespace, even if systemd has another one.
fn pid_of(launch: &Path) -> i32 {
    let until = Instant::now() + SOON;
    loop {
        if let [instance] = with_arguments("--launch", launch)[..] {
            return instance.pid;
        }
        assert!(Instant::now() < until, "no instance of {}", launch.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn pid_seen_by(node: &Node, pod: &str) -> u64 {
    pid_of(&launch_file(node, pod)).unsigned_abs().into()
}

const ATTACK: &str = "NEBULA_ATTACK";
