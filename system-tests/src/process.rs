//! Processes: their output by lines, their CPU time, and the end of all of them.

use std::fs;
use std::io::{self, BufRead, BufReader, PipeReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

use crate::schedule::lock;

/// Gets each line that a process prints, without its end.
pub(crate) type Lines = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// How a process ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    pub(crate) is_ok: bool,
    /// Its own and that of its children that it waited for.
    pub(crate) cpu: Duration,
}

/// The processes that run, each the head of a group of its own.
#[derive(Default)]
pub(crate) struct Processes {
    running: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    groups: Vec<Pid>,
    is_over: bool,
}

impl Processes {
    /// Runs a command until it ends, without input.
    pub(crate) fn run(&self, mut command: Command, lines: &Lines) -> io::Result<Ended> {
        let (reader, writer) = io::pipe()?;
        command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
        let mut child = self.start(&mut command)?;
        // It holds the pipe open for writing.
        drop(command);
        let (end, ended) = mpsc::channel();
        let to = Arc::clone(lines);
        thread::spawn(move || {
            read_lines(reader, &*to);
            let _ = end.send(());
        });
        let cpu = self.wait(&mut child);
        let status = child.wait()?;
        // A daemon that the command started may hold the pipe for ever.
        if ended.recv_timeout(OUTPUT_AFTER_THE_END).is_err() {
            lines(b"(something that this started goes on, and its output is not waited for)");
        }
        Ok(Ended { is_ok: status.success(), cpu: cpu? })
    }

    /// Sends a signal to all, and lets no more start.
    pub(crate) fn end(&self, signal: Signal) {
        let mut running = lock(&self.running);
        running.is_over = true;
        for group in &running.groups {
            let _ = killpg(*group, signal);
        }
    }

    pub(crate) fn are_over(&self) -> bool {
        lock(&self.running).is_over
    }

    fn start(&self, command: &mut Command) -> io::Result<Child> {
        let mut running = lock(&self.running);
        if running.is_over {
            return Err(io::Error::other("interrupted"));
        }
        let child = command.spawn()?;
        running.groups.push(pid(&child));
        Ok(child)
    }

    /// Waits for the end of a process, and returns its CPU time. Its number stays taken: `Child::wait` frees it.
    fn wait(&self, child: &mut Child) -> io::Result<Duration> {
        let pid = pid(child);
        while let Err(error) = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
        let cpu = fs::read_to_string(format!("/proc/{pid}/stat")).map(|stat| cpu_time(&stat));
        lock(&self.running).groups.retain(|group| *group != pid);
        cpu
    }
}

/// CPU time of this process's children that ended.
pub(crate) fn children_cpu() -> Duration {
    fs::read_to_string("/proc/self/stat").map_or(Duration::ZERO, |stat| ticks(&stat, CHILDREN))
}

fn cpu_time(stat: &str) -> Duration {
    ticks(stat, OWN_AND_CHILDREN)
}

/// The sum of fields of `/proc/PID/stat`, numbered from the one behind the name, which may hold anything.
fn ticks(stat: &str, fields: std::ops::Range<usize>) -> Duration {
    let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
    let ticks = behind.split_whitespace().skip(fields.start).take(fields.len());
    Duration::from_millis(ticks.filter_map(|word| word.parse::<u64>().ok()).sum::<u64>() * MILLISECONDS_OF_A_TICK)
}

fn read_lines(reader: PipeReader, to: &(dyn Fn(&[u8]) + Send + Sync)) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
        to(line.strip_suffix(b"\n").unwrap_or(&line));
        line.clear();
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id().cast_signed())
}

const OWN_AND_CHILDREN: std::ops::Range<usize> = 11..15;
const CHILDREN: std::ops::Range<usize> = 13..15;
// USER_HZ is 100 on every architecture that runs these tests.
const MILLISECONDS_OF_A_TICK: u64 = 10;
// What a process wrote is in the pipe when it ends.
const OUTPUT_AFTER_THE_END: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    fn collected() -> (Lines, Arc<Mutex<Vec<String>>>) {
        let log = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&log);
        (Arc::new(move |line: &[u8]| lock(&to).push(String::from_utf8_lossy(line).into_owned())), log)
    }

    #[test]
    fn every_line_of_both_streams_arrives_also_the_last_without_an_end() {
        let (lines, log) = collected();
        let ended = Processes::default().run(shell("echo out; echo error >&2; printf 'last'; exit 3"), &lines).unwrap();
        assert!(!ended.is_ok);
        assert_eq!(*lock(&log), ["out", "error", "last"]);
    }

    #[test]
    fn cpu_time_is_that_of_the_process_and_its_children_and_sleep_costs_none() {
        let (lines, _) = collected();
        let processes = Processes::default();
        let busy = "i=0; while [ $i -lt 600000 ]; do i=$((i+1)); done";
        let own = processes.run(shell(busy), &lines).unwrap().cpu;
        let of_a_child = processes.run(shell(&format!("sh -c '{busy}'; true")), &lines).unwrap().cpu;
        let idle = processes.run(shell("sleep 0.5"), &lines).unwrap().cpu;
        assert!(own >= Duration::from_millis(50) && of_a_child >= Duration::from_millis(50), "{own:?} {of_a_child:?}");
        assert!(idle < Duration::from_millis(50), "{idle:?}");
    }

    #[test]
    fn the_end_reaches_children_of_children_and_nothing_starts_after_it() {
        let (lines, log) = collected();
        let processes = Arc::new(Processes::default());
        let begun = Instant::now();
        let running = {
            let (processes, lines) = (Arc::clone(&processes), Arc::clone(&lines));
            thread::spawn(move || processes.run(shell("sh -c 'echo $$; sleep 60'; echo more"), &lines).unwrap())
        };
        while lock(&log).is_empty() {
            thread::sleep(Duration::from_millis(10));
        }
        processes.end(Signal::SIGTERM);
        assert!(!running.join().unwrap().is_ok);
        assert!(begun.elapsed() < Duration::from_secs(30));
        let inner = lock(&log)[0].clone();
        // A first process that waits for nobody leaves it as a zombie.
        let is_gone = || fs::read_to_string(format!("/proc/{inner}/stat")).map_or(true, |stat| stat.contains(") Z "));
        assert!(
            (0..500).any(|_| is_gone() || {
                thread::sleep(Duration::from_millis(10));
                false
            }),
            "the inner shell goes on"
        );
        assert_eq!(processes.run(shell("true"), &lines).unwrap_err().to_string(), "interrupted");
    }

    #[test]
    fn a_daemon_that_holds_the_output_is_not_waited_for() {
        let (lines, log) = collected();
        let begun = Instant::now();
        let ended = Processes::default().run(shell("setsid sleep 20 & echo started"), &lines).unwrap();
        assert!(ended.is_ok && begun.elapsed() < Duration::from_secs(15));
        assert_eq!(lock(&log).len(), 2, "{log:?}");
    }
}
