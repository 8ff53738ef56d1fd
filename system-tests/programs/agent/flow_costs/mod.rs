//! What it costs the agent to keep and export the flow records of a full node: CPU time and memory at 1,000 new flows a
//! second beside the same agent without records, and the time of questions about an hour of them.
//!
//! `FLOW_ROUNDS` (1) rounds measure each way of keeping records for `FLOW_COST_SECONDS` (20); the questions are about
//! `FLOW_HOUR_SECONDS` (60; an hour has 3600) of flows. Bars are asserted with programs of a release build, and may be
//! exceeded `COST_SLACK` (2) times by what is a time.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod told;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::told::{FLOWS, Node};
use crate::loopback::free_tcp_port;
use crate::world::chaos::number;
use crate::world::cluster::binary;
use crate::world::cost::{cpu_ticks, is_release, memory_kib, quantile, slack};

/// Of one core, in percent: asking and writing, and with one export.
const KEPT: f64 = 5.0;
const EXPORTED: f64 = 8.0;
const MEMORY_KIB: f64 = 8.0 * 1024.0;
const QUESTION: Duration = Duration::from_secs(1);
/// After the first turn of all instances.
const SETTLED: Duration = Duration::from_secs(12);
const SOON: Duration = Duration::from_secs(30);

/// One way of keeping records.
struct Way {
    title: &'static str,
    flows: Value,
    cpu: Vec<f64>,
    memory: Vec<f64>,
}

/// An agent whose node is a folder with the records of pods, and what stands for their instances.
struct Bench {
    folder: tempfile::TempDir,
    node: Arc<Node>,
    port: u16,
    agent: Option<Child>,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir_all(folder.path().join("var/lib")).expect("a folder");
        let node = Node::start(&folder.path().join("run/nebula-cni/pods"));
        Self { folder, node, port: free_tcp_port(), agent: None }
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("agent.json")
    }

    /// Starts an agent that keeps records like this, and has none yet.
    fn start(&mut self, flows: &Value) -> u64 {
        let _ = fs::remove_dir_all(self.folder.path().join("var/lib/nebula-cni"));
        let config = json!({"ca": {"url": "https://127.0.0.1:1"}, "hostRoot": self.folder.path(),
            "listen": format!("127.0.0.1:{}", self.port), "flows": flows});
        fs::write(self.config(), config.to_string()).expect("agent.json");
        let (config, nowhere) = (self.config(), self.folder.path().join("none"));
        let agent = Command::new(binary("nebula-cni-agent"))
            .arg("run")
            .arg("--config")
            .arg(config)
            .args(
                ["--token-file", "--trust-file", "--programs"]
                    .iter()
                    .flat_map(|flag| [flag.as_ref(), nowhere.as_os_str()]),
            )
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the agent starts");
        let pid = agent.id().into();
        self.agent = Some(agent);
        self.until("its metrics", |bench| bench.metric("nebula_cni_looks_total").is_some());
        pid
    }

    fn stop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }

    /// A number of the agent's page of metrics: the sum of what begins like this.
    fn metric(&self, name: &str) -> Option<u64> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "GET /metrics HTTP/1.0\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let values = text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' '));
        values.map(|(_, value)| value.parse::<u64>().ok()).sum::<Option<u64>>().filter(|_| text.contains(name))
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        self.within(SOON, what, is_so);
    }

    fn within(&self, time: Duration, what: &str, is_so: impl Fn(&Self) -> bool) {
        let until = Instant::now() + time;
        while !is_so(self) {
            assert!(Instant::now() < until, "not in time: {what}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Measures one way of keeping records.
    fn measure(&mut self, way: &mut Way, time: Duration) {
        self.node.begin();
        let agent = self.start(&way.flows);
        thread::sleep(SETTLED);
        let written = || self.metric("nebula_cni_flow_records_written_total ").unwrap_or(0);
        let exported = || self.metric("nebula_cni_flow_export_records_total{").unwrap_or(0);
        let (before, began, counts) = (cpu_ticks(&[agent]), Instant::now(), [written(), exported()]);
        thread::sleep(time);
        let (spent, seconds) = (cpu_ticks(&[agent]) - before, began.elapsed().as_secs_f64());
        let expected = FLOWS as f64 * 2.0 * seconds;
        let is_kept = way.flows["keep"] != false;
        let counts = [written() - counts[0], exported() - counts[1]];
        let wanted = [is_kept, is_kept && !way.flows["export"].is_null()];
        for ((what, count), is_wanted) in ["written", "exported"].into_iter().zip(counts).zip(wanted) {
            let is_right = if is_wanted { (0.5..2.0).contains(&(count as f64 / expected)) } else { count == 0 };
            assert!(is_right, "{}: {count} changes {what}, of {expected}", way.title);
        }
        // What a busy machine delayed comes later, and with it its cost.
        let share = if is_kept { counts[0] as f64 / expected } else { 1.0 };
        way.cpu.push(spent as f64 / seconds / share);
        way.memory.push(memory_kib(agent, "Private_"));
        self.stop();
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.stop();
    }
}

#[test]
#[ignore = "needs a release build; prints figures"]
fn an_agent_keeps_and_exports_a_thousand_flows_a_second_at_little_cost() {
    let mut bench = Bench::new();
    let endpoint = format!("http://127.0.0.1:{}", collector());
    let kept = |export: Value| if export.is_null() { json!({}) } else { json!({ "export": export }) };
    let way = |title, flows| Way { title, flows, cpu: Vec::new(), memory: Vec::new() };
    let mut ways = [
        way("nothing is kept", json!({"keep": false})),
        way("kept", kept(Value::Null)),
        way("kept and sent to a collector", kept(json!({"otlp": {"endpoint": endpoint}}))),
        way("kept and written to a file", kept(json!({"file": {"path": "/var/lib/flows.jsonl"}}))),
    ];
    let time = Duration::from_secs(number("FLOW_COST_SECONDS", 20));
    for _ in 0..number("FLOW_ROUNDS", 1) {
        for way in &mut ways {
            bench.measure(way, time);
        }
    }
    let [cpu, memory] = [|way: &Way| quantile(&way.cpu, 0.5), |way: &Way| quantile(&way.memory, 0.5)];
    println!(
        "\n| the agent at {FLOWS} new flows a second of {} pods | CPU, % of a core | more | private memory, KiB | more |",
        told::PODS
    );
    println!("| --- | ---: | ---: | ---: | ---: |");
    for way in &ways {
        let more = (cpu(way) - cpu(&ways[0]), memory(way) - memory(&ways[0]));
        println!("| {} | {:.1} | {:.1} | {:.0} | {:.0} |", way.title, cpu(way), more.0, memory(way), more.1);
    }
    for way in &ways {
        println!("- {}: {:.1?} %, {:.0?} KiB", way.title, way.cpu, way.memory);
    }
    println!("load average {}", fs::read_to_string("/proc/loadavg").expect("/proc").trim());
    if is_release() {
        for way in &ways[1..] {
            let bar = if way.flows["export"].is_null() { KEPT } else { EXPORTED };
            assert!(cpu(way) - cpu(&ways[0]) <= bar * slack(), "{}", way.title);
            assert!(memory(way) - memory(&ways[0]) <= MEMORY_KIB, "{}", way.title);
        }
    }
}

#[test]
#[ignore = "needs a release build; prints figures"]
fn questions_about_an_hour_of_a_thousand_flows_a_second_are_answered_in_time() {
    let mut bench = Bench::new();
    let seconds = number("FLOW_HOUR_SECONDS", 60);
    let flows = seconds * FLOWS;
    bench.node.end(seconds);
    let began = Instant::now();
    bench.start(&json!({"maxMiB": 1024}));
    let patience = Duration::from_secs(60 + seconds);
    bench.within(patience, "all are written", |bench| {
        bench.metric("nebula_cni_flow_records_written_total ") >= Some(flows)
    });
    println!("{flows} flows were written in {:.0?}, a quarter of a core at most", began.elapsed());
    // Until what was written is in the file.
    thread::sleep(Duration::from_secs(5));
    bench.stop();
    let quarter = format!("{}s", began.elapsed().as_secs() + seconds / 4);
    let questions: [(&str, &[&str], bool); 9] = [
        ("all", &[], true),
        ("a quarter of the time", &["--since", &quarter], true),
        ("one pod", &["--pod", "ns-3/pod-3"], true),
        ("one namespace", &["-n", "ns-3"], true),
        ("one peer", &["--peer", "peer-7.pay.pod"], true),
        ("one port", &["--port", "5432"], true),
        ("a peer that is not there", &["--peer", "10.9.9.9"], false),
        ("a port that is not there", &["--port", "1"], false),
        ("refused ones", &["--verdict", "refused"], false),
    ];
    let config = bench.config().display().to_string();
    println!(
        "\n| a question about {flows} records, at most 1,000 in the answer | records | ms |\n| --- | ---: | ---: |"
    );
    let mut late = Vec::new();
    for (what, conditions, has_some) in questions {
        let mut times = Vec::new();
        let mut count = 0;
        for _ in 0..3 {
            let began = Instant::now();
            let said = Command::new(binary("nebula-cni-agent"))
                .args(["flows", "--json", "--config", &config])
                .args(conditions)
                .output()
                .expect("it runs");
            times.push(began.elapsed().as_secs_f64() * 1000.0);
            assert!(said.status.success(), "{what}: {}", String::from_utf8_lossy(&said.stderr));
            count = said.stdout.iter().filter(|byte| **byte == b'\n').count();
        }
        assert_eq!(count > 0, has_some, "{what}: {count} records");
        println!("| {what} | {count} | {:.0} |", quantile(&times, 0.5));
        if quantile(&times, 0.5) > QUESTION.as_secs_f64() * 1000.0 * slack() {
            late.push(what);
        }
    }
    let bytes = fs::metadata(bench.folder.path().join("var/lib/nebula-cni/flows/flows.db")).expect("the store").len();
    println!("\n{} MiB, load average {}", bytes >> 20, fs::read_to_string("/proc/loadavg").expect("/proc").trim());
    assert!(!is_release() || late.is_empty(), "{late:?}");
}

/// Takes whatever it is sent, as a collector does. Returns its port.
fn collector() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || take_all(stream));
        }
    });
    port
}

fn take_all(stream: TcpStream) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let head = head.to_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.and_then(|length| length.parse().ok()).expect("a length")];
        let answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n";
        if stream.read_exact(&mut body).and_then(|()| stream.get_mut().write_all(answer)).is_err() {
            return;
        }
    }
}
