//! Metrics in Prometheus' text format, over HTTP.

use std::fmt::Write as _;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::listener::{Place, Places, Source};
use nebula_config::names;
use nebula_core::{GatewayStatus, TunnelStatus};
use nebula_linux::clock::unix_now;

use super::{HALF_OPEN, Metrics, REPAIRS, Reading, TUNNELS, help};
use crate::listener::http::{self, Answer, Received, Request};
use crate::listener::until_stopped::{self, Running, Stopped};

/// Serves metrics until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    _running: Running,
}

/// The common prefix of all names.
#[derive(Debug)]
pub(super) struct Names {
    prefix: String,
}

impl Names {
    pub(super) fn new(namespace: &str, subsystem: &str) -> Self {
        let parts = [namespace, subsystem].into_iter().filter(|part| !part.is_empty());
        Self { prefix: parts.map(|part| format!("{}_", clean(part))).collect() }
    }
}

impl Server {
    /// `listen` is `host:port`; without a host it means every address.
    pub(super) fn start(
        listen: &str,
        path: String,
        names: Names,
        metrics: Arc<Metrics>,
        max_peers: usize,
    ) -> io::Result<Self> {
        let listener = names::bind(listen)
            .map_err(|error| io::Error::new(error.kind(), format!("stats.listen {listen}: {error}")))?;
        let address = listener.local_addr()?;
        // A client that leaves before it is accepted must not block the thread, which then could not be stopped.
        listener.set_nonblocking(true)?;
        let page = Page { path, text: Box::new(move || text(&metrics.read(unix_now(), max_peers), &names)) };
        let running = until_stopped::spawn("stats", move |stopped| serve(&listener, &stopped, &Arc::new(page)))?;
        tracing::info!(addr = %address, "Starting prometheus stats listener");
        Ok(Self { _running: running })
    }
}

/// What is served, and under which path.
struct Page {
    path: String,
    text: Box<dyn Fn() -> String + Send + Sync>,
}

/// Answers each client on a thread of its own.
fn serve(listener: &TcpListener, stopped: &Stopped, page: &Arc<Page>) {
    let places = Places::new(MAX_CLIENTS);
    while stopped.wait_for(listener) {
        let Ok((stream, peer)) = listener.accept() else { continue };
        let Ok(local) = stream.local_addr() else { continue };
        let stream = Arc::new(stream);
        let served = Arc::clone(&stream);
        let end = move || drop(stream.shutdown(Shutdown::Both));
        let Some(place) = places.admit(Source::of_tcp(local, peer), end) else { continue };
        let page = Arc::clone(page);
        let body = move || {
            // A client that went away is not an error of the node.
            let _ = answer(&served, &place, &page.path, &page.text);
        };
        // Without a thread this client gets no answer, but others may.
        let _ = std::thread::Builder::new().name("stats".to_owned()).stack_size(STACK_BYTES).spawn(body);
    }
}

fn answer(stream: &TcpStream, place: &Place, path: &str, text: impl FnOnce() -> String) -> io::Result<()> {
    // The stream was accepted from a non-blocking listener.
    stream.set_nonblocking(false)?;
    let received = http::read_request(stream, READ_TIMEOUT, MAX_HEAD_BYTES)?;
    place.has_asked();
    let (status, body, has_body) = match received {
        Received::Complete(Request { method, path: asked, .. }) => match (method.as_str(), asked == path) {
            ("GET" | "HEAD", true) => ("200 OK", text(), method == "GET"),
            ("GET" | "HEAD", false) => ("404 Not Found", "404 page not found\n".to_owned(), method == "GET"),
            _ => ("405 Method Not Allowed", String::new(), false),
        },
        Received::Malformed => ("400 Bad Request", String::new(), false),
        Received::Incomplete(_) | Received::Silence => return Ok(()),
    };
    let answer = Answer { status, content_type: CONTENT_TYPE, body: &body, has_body };
    http::write_answer(stream, WRITE_TIMEOUT, &answer)
}

const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// `READ_TIMEOUT` is for a request's whole head, `WRITE_TIMEOUT` for the whole answer.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Beyond this limit, clients of the source that has the most are disconnected.
const MAX_CLIENTS: usize = 8;
// This is address space; only the part that is used costs memory.
const STACK_BYTES: usize = 512 << 10;
const MAX_HEAD_BYTES: usize = 8192;

/// Go Nebula's metrics are all gauges, as Go exports them; ours that only grow are counters.
fn text(reading: &Reading, names: &Names) -> String {
    let prefix = &names.prefix;
    let mut out = String::new();
    let mut typed = String::new();
    let mut gauge = |name: &str, label: &str, value: f64| {
        let name = clean(name);
        if typed != name {
            head(&mut out, prefix, &name, "gauge");
        }
        let _ = writeln!(out, "{prefix}{name}{label} {value}");
        typed = name;
    };
    let version = env!("CARGO_PKG_VERSION");
    gauge("info", &format!("{{boringcrypto=\"false\",goversion=\"\",version=\"{version}\"}}"), 1.0);
    for metric in &reading.metrics {
        gauge(&metric.name, "", metric.value);
    }
    let summary = &reading.handshakes;
    for (kind, value) in [
        ("count", summary.completed as f64),
        ("max", summary.max()),
        ("mean", summary.mean()),
        ("min", summary.min()),
        ("perc75", summary.percentile(0.75)),
        ("perc95", summary.percentile(0.95)),
        ("perc99", summary.percentile(0.99)),
        ("perc999", summary.percentile(0.999)),
        ("stddev", summary.variance().sqrt()),
        ("sum", summary.sum()),
        ("variance", summary.variance()),
    ] {
        gauge("handshakes", &format!("{{type=\"{kind}\"}}"), value);
    }
    for (name, value) in &reading.own {
        head(&mut out, prefix, &format!("{name}_total"), "counter");
        let _ = writeln!(out, "{prefix}{name}_total {value}");
    }
    head(&mut out, prefix, HALF_OPEN, "gauge");
    let _ = writeln!(out, "{prefix}{HALF_OPEN} {}", reading.half_open);
    head(&mut out, prefix, TUNNELS, "gauge");
    for (post_quantum, count) in &reading.tunnels {
        let _ = writeln!(out, "{prefix}{TUNNELS}{{post_quantum=\"{post_quantum}\"}} {count}");
    }
    head(&mut out, prefix, "dropped_packets_total", "counter");
    for (direction, reason, value) in &reading.dropped {
        let _ = writeln!(out, "{prefix}dropped_packets_total{{direction=\"{direction}\",reason=\"{reason}\"}} {value}");
    }
    head(&mut out, prefix, &format!("{REPAIRS}_total"), "counter");
    for (what, value) in &reading.repairs {
        let _ = writeln!(out, "{prefix}{REPAIRS}_total{{what=\"{what}\"}} {value}");
    }
    of_peers(&mut out, prefix, reading);
    of_gateways(&mut out, prefix, reading);
    out
}

/// Hosts without subnet routes do not report these.
fn of_gateways(out: &mut String, prefix: &str, reading: &Reading) {
    if reading.gateways.is_empty() {
        return;
    }
    type Value = fn(&GatewayStatus) -> u64;
    let metrics: [(&str, Value); 3] = [
        ("gateway_up", |status| u64::from(status.state.takes_flows())),
        ("gateway_state_seconds", |status| status.lasts.map_or(0, |lasts| lasts.as_secs())),
        ("gateway_weight", |status| status.gateway.weight.get().into()),
    ];
    for (name, value) in metrics {
        head(out, prefix, name, "gauge");
        for status in &reading.gateways {
            let (address, priority) = (status.gateway.address, status.gateway.priority);
            let network = status.network.trunc();
            let labels = format!("network=\"{network}\",gateway=\"{address}\",priority=\"{priority}\"");
            let _ = writeln!(out, "{prefix}{name}{{{labels}}} {}", value(status));
        }
    }
    head(out, prefix, "moved_flows", "gauge");
    let _ = writeln!(out, "{prefix}moved_flows {}", reading.moved_flows);
}

fn of_peers(out: &mut String, prefix: &str, reading: &Reading) {
    type Value = fn(&TunnelStatus) -> u64;
    let metrics: [(&str, &str, Value); 5] = [
        ("peer_bytes_sent_total", "counter", |tunnel| tunnel.bytes_sent),
        ("peer_bytes_received_total", "counter", |tunnel| tunnel.bytes_received),
        ("peer_messages_sent_total", "counter", |tunnel| tunnel.message_counter.saturating_sub(1)),
        ("peer_messages_received_total", "counter", |tunnel| tunnel.received_counter),
        ("peer_direct", "gauge", |tunnel| u64::from(tunnel.endpoint.is_some())),
    ];
    for (name, kind, value) in metrics {
        head(out, prefix, name, kind);
        for tunnel in &reading.peers {
            let _ = writeln!(out, "{prefix}{name}{} {}", of(tunnel), value(tunnel));
        }
    }
    head(out, prefix, "peer_path_mtu_bytes", "gauge");
    for (tunnel, mtu) in reading.peers.iter().filter_map(|tunnel| Some((tunnel, tunnel.path_mtu?))) {
        let _ = writeln!(out, "{prefix}peer_path_mtu_bytes{} {mtu}", of(tunnel));
    }
    head(out, prefix, "peers_not_listed", "gauge");
    let _ = writeln!(out, "{prefix}peers_not_listed {}", reading.more_peers);
}

/// What stands above the values of a metric.
fn head(out: &mut String, prefix: &str, name: &str, kind: &str) {
    let _ = writeln!(out, "# HELP {prefix}{name} {}\n# TYPE {prefix}{name} {kind}", help::of(name));
}

/// The labels of a peer.
fn of(tunnel: &TunnelStatus) -> String {
    let address = tunnel.peer.first().map(ToString::to_string).unwrap_or_default();
    format!("{{address=\"{address}\",peer=\"{}\"}}", escaped(&tunnel.name))
}

/// Escapes the characters that a label must not contain.
pub(crate) fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Replaces the characters that Go's exporter replaces in a name.
fn clean(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == ':' { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::metrics::{Kind, Metric, Repairs, Summary};

    fn exchange(request: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let served = listener.accept().unwrap().0;
        let place = Places::new(1).admit(Source::User(0), || ()).unwrap();
        answer(&served, &place, "/metrics", || "a 1\n".to_owned()).unwrap();
        drop(served);
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn one_path_answers_and_others_do_not() {
        let found = exchange("GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(found.starts_with("HTTP/1.1 200 OK\r\n") && found.ends_with("\r\n\r\na 1\n"), "{found}");
        assert!(exchange("GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(exchange("POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert!(exchange("HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
    }

    #[test]
    fn a_request_that_does_not_end_gets_no_answer() {
        assert_eq!(exchange("GET /metrics HTTP/1.1\r\n"), "");
        assert!(exchange("\u{1}\u{2} what\r\n\r\n").starts_with("HTTP/1.1 400 "));
    }

    fn server(text: impl Fn() -> String + Send + Sync + 'static) -> (std::net::SocketAddr, Running) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let page = Arc::new(Page { path: "/metrics".to_owned(), text: Box::new(text) });
        (address, until_stopped::spawn("test", move |stopped| serve(&listener, &stopped, &page)).unwrap())
    }

    fn get(address: std::net::SocketAddr) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        let _ = client.read_to_string(&mut text);
        text
    }

    #[test]
    fn a_crowd_of_silent_clients_gives_way_to_one_that_asks() {
        let (address, _running) = server(|| "a 1\n".to_owned());
        for _ in 0..20 {
            // One that must give way at once may see that as an error.
            let _silent: Vec<_> = (0..MAX_CLIENTS * 2).filter_map(|_| TcpStream::connect(address).ok()).collect();
            // The disconnected clients' threads need a moment to end.
            let served = (0..50).any(|_| {
                std::thread::sleep(Duration::from_millis(1));
                get(address).ends_with("a 1\n")
            });
            assert!(served);
        }
    }

    #[test]
    fn clients_that_read_nothing_do_not_keep_the_others_from_the_page() {
        let (address, _running) = server(|| "x".repeat(8 << 20));
        let silent: Vec<_> = (1..MAX_CLIENTS).map(|_| TcpStream::connect(address).unwrap()).collect();
        for mut client in &silent {
            client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        }
        assert_eq!(get(address).len() >> 20, 8);
    }

    #[test]
    fn names_begin_with_namespace_and_subsystem_and_dots_are_underscores() {
        let repairs = Repairs::default();
        repairs.count("mtu");
        let metrics = vec![Metric { name: "hostmap.main.hosts".to_owned(), value: 2.0, kind: Kind::Gauge }];
        let reading = Reading {
            metrics,
            handshakes: Summary::default(),
            own: vec![("packets_in", 7)],
            half_open: 4,
            tunnels: [(true, 3), (false, 1)],
            dropped: vec![("in", "no_rule", 3)],
            repairs: repairs.read(),
            peers: Vec::new(),
            more_peers: 0,
            gateways: Vec::new(),
            moved_flows: 0,
        };
        let text = text(&reading, &Names::new("n", "s"));
        for line in [
            "# TYPE n_s_hostmap_main_hosts gauge",
            "n_s_hostmap_main_hosts 2",
            "# TYPE n_s_handshakes gauge",
            "n_s_handshakes{type=\"perc999\"} 0",
            "# HELP n_s_packets_in_total Overlay packets delivered to the device, before they are joined.",
            "# TYPE n_s_packets_in_total counter",
            "n_s_packets_in_total 7",
            "# TYPE n_s_half_open_handshakes gauge",
            "n_s_half_open_handshakes 4",
            "n_s_tunnels{post_quantum=\"true\"} 3",
            "n_s_tunnels{post_quantum=\"false\"} 1",
            "n_s_dropped_packets_total{direction=\"in\",reason=\"no_rule\"} 3",
            "n_s_link_repairs_total{what=\"mtu\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} not in\n{text}");
        }
        let mut types: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE ")).collect();
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count, "one type line for each name\n{text}");
    }
}
