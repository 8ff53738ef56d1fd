//! How fast TCP is on a way from a client to a server, by iperf3, and what that costs.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::World;
use super::cost::{cpu_ticks, quantile};

/// One way from a client to a server.
pub struct Way {
    pub title: &'static str,
    client: &'static str,
    /// ADDRESS:PORT of an iperf3 server.
    target: String,
    /// Whose processor time it takes.
    pub processes: Vec<u64>,
    pub gbps: Vec<f64>,
    /// Seconds of those processes for each GB.
    pub cpu: Vec<f64>,
    /// Seconds of the whole machine for each GB, but for what runs at a low priority.
    pub machine: Vec<f64>,
}

impl Way {
    pub fn new(title: &'static str, client: &'static str, target: String, processes: &[u64]) -> Self {
        let (gbps, cpu, machine) = Default::default();
        Self { title, client, target, processes: processes.to_vec(), gbps, cpu, machine }
    }

    /// The median, in Gbit/s.
    pub fn speed(&self) -> f64 {
        quantile(&self.gbps, 0.5)
    }

    /// Sends for some seconds and notes the result.
    pub fn measure(&mut self, world: &World, seconds: u64) {
        let (address, port) = self.target.split_once(':').expect("an address and a port");
        let seconds = seconds.to_string();
        let until = Instant::now() + SOON;
        let (ended, spent, machine) = loop {
            let before = (cpu_ticks(&self.processes), machine_ticks());
            let command = ["timeout", "60", "iperf3", "--json", "-c", address, "-p", port, "-t", &seconds];
            let said = world.exec(self.client, &command).stdout;
            let (spent, machine) = (cpu_ticks(&self.processes) - before.0, machine_ticks() - before.1);
            let said: Value = serde_json::from_slice(&said).unwrap_or_default();
            // The first attempt may come before the tunnel, and the server takes one client at a time.
            if said["error"].is_null() && said["end"]["sum_received"]["bytes"].as_u64() > Some(0) {
                break (said["end"]["sum_received"].clone(), spent, machine);
            }
            assert!(Instant::now() < until, "{}: {said}\n{}", self.title, world.all_logs());
            std::thread::sleep(Duration::from_millis(300));
        };
        let number = |key: &str| ended[key].as_f64().expect("a number");
        let gigabytes = number("bytes") / 1e9;
        self.gbps.push(number("bits_per_second") / 1e9);
        self.cpu.push(spent as f64 / 100.0 / gigabytes);
        self.machine.push(machine as f64 / 100.0 / gigabytes);
    }
}

/// Ticks that all processors worked, but for what runs at a low priority.
fn machine_ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").expect("/proc");
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq
    [0, 2, 5, 6].iter().filter_map(|column| ticks.get(*column)).sum()
}

const SOON: Duration = Duration::from_secs(10);
