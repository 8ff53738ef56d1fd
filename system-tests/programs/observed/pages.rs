//! Pages of metrics of programs that run: a daemon with a peer, the CA, and an agent with one instance.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord, FlowRecords};
use serde_json::json;

use crate::loopback::{Network, built, free_tcp_port, free_udp_port, ours};

/// Pages by program.
pub(super) struct Pages {
    pub(super) daemon: String,
    pub(super) ca: String,
    pub(super) agent: String,
}

impl Pages {
    pub(super) fn read() -> Self {
        Self { daemon: daemon(), ca: ca(), agent: agent() }
    }
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn daemon() -> String {
    let [port, peer_port] = [free_tcp_port(), free_udp_port()];
    let network = Network::new();
    let gateways = "tun: {disabled: true, unsafe_routes: [{route: 192.168.7.0/24, via: [{gateway: 10.42.0.8}, {gateway: 10.42.0.9}]}]}";
    let stats = format!(
        "stats: {{type: prometheus, listen: '127.0.0.1:{port}', path: /metrics, namespace: nebula, interval: 1s, \
         message_metrics: true, lighthouse_metrics: true}}"
    );
    let more = format!(
        "{gateways}\nlisten: {{host: 127.0.0.1}}\n{stats}\n\
         static_host_map: {{10.42.0.8: ['127.0.0.1:{peer_port}']}}\nlighthouse: {{hosts: [10.42.0.8]}}"
    );
    let _peer = network.start(
        &ours(),
        "peer",
        &["10.42.0.8/16"],
        &format!("listen: {{host: 127.0.0.1, port: {peer_port}}}\nlighthouse: {{am_lighthouse: true}}"),
    );
    let _daemon = network.start(&ours(), "host", &["10.42.0.7/16"], &more);
    page(port, "nebula_peer_direct{")
}

fn ca() -> String {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("ca").display().to_string();
    let init = ["init", "--dir", &dir, "--tls-name", "localhost", "--overlay", "10.42.0.0/16"];
    let made = Command::new(built("nebula-ca")).args(init).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let [port, status] = [free_tcp_port(), free_tcp_port()];
    let [listen, status_listen] = [port, status].map(|port| format!("127.0.0.1:{port}"));
    let _ca = run("nebula-ca", &["serve", "--dir", &dir, "--listen", &listen, "--status-listen", &status_listen]);
    page(status, "nebula_ca_ready 1")
}

/// An agent whose node is a folder, with the record of one pod and what stands for its instance. Its export fails.
fn agent() -> String {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("run/nebula-cni/pods");
    fs::create_dir_all(&state).unwrap();
    fs::create_dir_all(folder.path().join("var/lib")).unwrap();
    let socket = state.join("web.sock");
    let _instance = std::thread::spawn({
        let listener = UnixListener::bind(&socket).unwrap();
        move || listener.incoming().flatten().for_each(answer)
    });
    let record = json!({"version": 1, "state": "running", "status_socket": "/run/nebula-cni/pods/web.sock", "process": null,
        "network": "pods", "container_id": "web", "ifname": "eth0", "device": "nebula0", "netns": "/run/netns/x",
        "netns_id": [4, 9], "pod_address": "10.244.1.7", "pod": {"namespace": "shop", "name": "web-0", "uid": "web"}});
    fs::write(state.join("web-eth0.json"), record.to_string()).unwrap();
    let port = free_tcp_port();
    let export = json!({"file": {"path": "/var/lib/flows.jsonl"},
        "otlp": {"endpoint": format!("http://127.0.0.1:{}", free_tcp_port())}});
    let config = json!({"ca": {"url": "https://127.0.0.1:1"}, "hostRoot": folder.path(), "listen": format!("127.0.0.1:{port}"),
        "flows": {"export": export}});
    let path = folder.path().join("agent.json");
    fs::write(&path, config.to_string()).unwrap();
    let nowhere = folder.path().join("none").display().to_string();
    let config = path.display().to_string();
    let arguments =
        ["run", "--config", &config, "--token-file", &nowhere, "--trust-file", &nowhere, "--programs", &nowhere];
    let _agent = run("nebula-cni-agent", &arguments);
    let text = page(port, "nebula_cni_flow_export_records_total{target=\"file\"} 2\n");
    read_back(&folder.path().join("var/lib/flows.jsonl"));
    text
}

/// What the instance of a pod says: two flows, of which one was refused.
fn answer(mut stream: std::os::unix::net::UnixStream) {
    let mut head = [0; 4096];
    let length = stream.read(&mut head).unwrap_or(0);
    let text = String::from_utf8_lossy(&head[..length]).into_owned();
    let after = text.split_once("after=").and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
    let end = |name: &str| FlowEnd { name: Some(name.to_owned()), ..FlowEnd::default() };
    let record = |number, verdict: &str, direction: &str| FlowRecord {
        number,
        id: number,
        event: "created".to_owned(),
        verdict: verdict.to_owned(),
        direction: direction.to_owned(),
        protocol: 6,
        source: end("scan-1"),
        destination: end("db-0.pay.pod"),
        forward: Amount { packets: 3, bytes: 300 },
        ..FlowRecord::default()
    };
    let records = vec![record(1, "allowed", "outbound"), record(2, "refused", "inbound")];
    let records = records.into_iter().filter(|record| record.number > after.unwrap_or(0)).collect();
    let said = FlowRecords { records, next: 2, is_on: true, ..FlowRecords::default() };
    let _ = write!(stream, "HTTP/1.1 200 OK\r\n\r\n{}", serde_json::to_string(&said).unwrap());
}

fn read_back(path: &Path) {
    let text = fs::read_to_string(path).unwrap();
    let records: Vec<FlowRecord> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let ends: Vec<_> =
        records.iter().map(|record| (record.source.pod.as_deref(), record.destination.pod.as_deref())).collect();
    assert_eq!(ends, [(Some("shop/web-0"), None), (None, Some("shop/web-0"))]);
}

fn run(program: &str, arguments: &[&str]) -> Running {
    let mut command = Command::new(built(program));
    Running(command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
}

/// The page once there is something on it.
fn page(port: u16, expected: &str) -> String {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let text = get(port).unwrap_or_default();
        if let Some((_, body)) = text.split_once("\r\n\r\n").filter(|(_, body)| body.contains(expected)) {
            return body.to_owned();
        }
        assert!(Instant::now() < until, "no {expected} at {port}: {text}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn get(port: u16) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}
