//! Answers of the running node, in the words and the JSON of Go Nebula's console.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Component, Path, PathBuf};

use nebula_cert::go_json;
use nebula_config::{LogFormat, LogLevel, log};
use nebula_core::lighthouse::KnownEndpoints;
use nebula_core::{Node, PendingStatus, RelayState, RelayStatus, TunnelStatus};
use serde_json::{Map, Value, json};

use super::commands::{Form, Question};
use crate::Daemon;

/// One line of text that explains why a command has no other answer.
#[derive(Debug, PartialEq, Eq)]
struct Refusal(String);

fn refuse(text: impl Into<String>) -> Refusal {
    Refusal(text.into())
}

/// The answer, including its last newline.
pub(super) fn answer(daemon: &dyn Daemon, sandbox: &Path, question: Question) -> String {
    match asked(daemon, sandbox, question) {
        Ok(text) => text,
        Err(Refusal(text)) => line(&text),
    }
}

fn asked(daemon: &dyn Daemon, sandbox: &Path, question: Question) -> Result<String, Refusal> {
    match question {
        Question::Hostmap { form, by_index } => Ok(hosts(&hostmap(daemon, by_index), form)),
        Question::PendingHostmap { form } => Ok(hosts(&pending(daemon), form)),
        Question::LighthouseMap { form } => Ok(lighthouse_map(daemon, form)),
        Question::Tunnel { peer, form } => {
            let (typed, peer) = peer_of(peer, "addr")?;
            let rows = rows(daemon, move |tunnel| tunnel.primary && tunnel.peer.contains(&peer));
            let row = rows.first().ok_or_else(|| no_tunnel(&typed, "addr"))?;
            Ok(document(&row.to_json(), form))
        }
        Question::Relays { form } => Ok(document(&relays(daemon), form)),
        Question::Certificate { peer, form, pem } => certificate(daemon, peer, form, pem),
        Question::Device { form } => Ok(device(daemon, form)),
        Question::Version => Ok(line(env!("CARGO_PKG_VERSION"))),
        Question::LogLevel(level) => log_level(daemon, level),
        Question::LogFormat(format) => log_format(format),
        Question::Query { peer } => {
            let (_, peer) = peer_of(peer, "address")?;
            daemon.handle().inquire(peer);
            let sources = daemon.handle().with_node(move |node, _| node.sources(peer)).unwrap_or_default();
            let known = if sources.is_empty() { Value::Null } else { cache(&sources) };
            Ok(line(&go_json(&known, None)))
        }
        Question::Create { peer, endpoint } => create(daemon, peer, endpoint),
        Question::Close { peer, quietly } => {
            let (typed, peer) = peer_of(peer, "address")?;
            if daemon.close(peer, quietly) { Ok(line("Closed")) } else { Err(no_tunnel(&typed, "address")) }
        }
        Question::ChangeRemote { peer, endpoint } => change_remote(daemon, peer, endpoint),
        Question::Profile { file } => profile(sandbox, file),
        Question::StopProfile => Ok(line("If a CPU profile was running it is now stopped")),
        Question::ProfileFraction => Err(refuse(NO_PROFILE)),
    }
}

fn line(text: &str) -> String {
    format!("{text}\n")
}

fn document(value: &Value, form: Form) -> String {
    line(&go_json(value, (form == Form::Indented).then_some(INDENT)))
}

/// Parses an overlay address; returns it with the text as it was typed. `what` is the word that Go's message uses for
/// it.
fn peer_of(typed: Option<String>, what: &str) -> Result<(String, IpAddr), Refusal> {
    let typed = typed.ok_or_else(|| refuse("No vpn address was provided"))?;
    let parsed = typed.parse::<IpAddr>();
    let peer = parsed.map_err(|_| refuse(format!("The provided vpn {what} could not be parsed: {typed}")))?;
    Ok((typed, peer))
}

fn endpoint_of(typed: &str) -> Result<SocketAddr, Refusal> {
    typed.parse().map_err(|_| refuse("Address could not be parsed"))
}

fn no_tunnel(typed: &str, what: &str) -> Refusal {
    refuse(format!("Could not find tunnel for vpn {what}: {typed}"))
}

/// One tunnel, or one that is still being set up.
#[derive(Clone)]
struct Row {
    addresses: Vec<IpAddr>,
    local_index: u32,
    remote_index: u32,
    endpoints: Vec<SocketAddr>,
    certificate: Value,
    message_counter: u64,
    endpoint: Option<SocketAddr>,
    relays: Vec<IpAddr>,
    passed_on: Vec<IpAddr>,
}

impl Row {
    fn to_json(&self) -> Value {
        json!({
            "vpnAddrs": texts(&self.addresses),
            "localIndex": self.local_index,
            "remoteIndex": self.remote_index,
            "remoteAddrs": texts(&self.endpoints),
            "cert": self.certificate,
            "messageCounter": self.message_counter,
            "currentRemote": self.endpoint.map(|endpoint| endpoint.to_string()).unwrap_or_default(),
            "currentRelaysToMe": texts(&self.relays),
            "currentRelaysThroughMe": texts(&self.passed_on),
        })
    }
}

fn texts<T: ToString>(items: &[T]) -> Value {
    items.iter().map(ToString::to_string).collect()
}

fn bracketed<T: ToString>(items: &[T]) -> String {
    format!("[{}]", items.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
}

fn hosts(rows: &[Row], form: Form) -> String {
    match form {
        Form::Text => {
            let row = |row: &Row| format!("{}: {}\n", bracketed(&row.addresses), bracketed(&row.endpoints));
            rows.iter().map(row).collect()
        }
        _ => document(&rows.iter().map(Row::to_json).collect(), form),
    }
}

/// The primary tunnels, once for each address of the peer; with `by_index`, every tunnel once.
fn hostmap(daemon: &dyn Daemon, by_index: bool) -> Vec<Row> {
    let tunnels = rows(daemon, move |tunnel| by_index || tunnel.primary);
    let times = |row: &Row| if by_index { 1 } else { row.addresses.len() };
    tunnels
        .into_iter()
        .flat_map(|row| {
            let times = times(&row);
            std::iter::repeat_n(row, times)
        })
        .collect()
}

/// Rows of the `wanted` tunnels, by address.
fn rows(daemon: &dyn Daemon, wanted: impl Fn(&TunnelStatus) -> bool + Send + 'static) -> Vec<Row> {
    let survey = move |node: &mut Node, _| {
        let relays = node.relays();
        let wanted = node.tunnels().into_iter().filter(|tunnel| wanted(tunnel)).take(MAX_ROWS);
        let row = |tunnel: TunnelStatus| {
            let endpoints = tunnel.peer.first().map(|peer| node.whereabouts(*peer).endpoints).unwrap_or_default();
            row(tunnel, endpoints, &relays)
        };
        wanted.map(row).collect::<Vec<_>>()
    };
    let mut rows = daemon.handle().with_node(survey).unwrap_or_default();
    for (row, index) in &mut rows {
        if let Some(certificate) = daemon.handle().certificate(*index) {
            row.certificate = certificate.to_json();
        }
    }
    rows.into_iter().map(|(row, _)| row).collect()
}

fn row(tunnel: TunnelStatus, endpoints: Vec<SocketAddr>, relays: &[RelayStatus]) -> (Row, nebula_core::LocalIndex) {
    let to_it = |relay: &&RelayStatus| {
        !relay.forwarding && relay.state == RelayState::Established && tunnel.peer.contains(&relay.far)
    };
    let by_it = |relay: &&RelayStatus| tunnel.peer.contains(&relay.neighbour);
    let (index, relayed) = (tunnel.local_index, relays.iter().filter(to_it).map(|relay| relay.neighbour).collect());
    let row = Row {
        local_index: index.0,
        remote_index: tunnel.remote_index.0,
        endpoints,
        certificate: Value::Null,
        message_counter: tunnel.message_counter,
        endpoint: tunnel.endpoint,
        relays: relayed,
        passed_on: relays.iter().filter(by_it).map(|relay| relay.far).collect(),
        addresses: tunnel.peer,
    };
    (row, index)
}

fn pending(daemon: &dyn Daemon) -> Vec<Row> {
    let row = |PendingStatus { peer, local_index, endpoints }| Row {
        addresses: vec![peer],
        local_index: local_index.0,
        remote_index: 0,
        endpoints,
        certificate: Value::Null,
        message_counter: 0,
        endpoint: None,
        relays: Vec::new(),
        passed_on: Vec::new(),
    };
    let survey = |node: &mut Node, _| node.pending_handshakes();
    daemon.handle().with_node(survey).unwrap_or_default().into_iter().map(row).collect()
}

fn lighthouse_map(daemon: &dyn Daemon, form: Form) -> String {
    let survey = |node: &mut Node, _| {
        let peers = node.known_peers(MAX_ROWS);
        peers.into_iter().map(|peer| (peer.to_string(), node.sources(peer))).collect::<Vec<_>>()
    };
    let mut known = daemon.handle().with_node(survey).unwrap_or_default();
    known.sort_by(|(one, _), (other, _)| one.cmp(other));
    let known = known.into_iter().map(|(peer, sources)| (peer, cache(&sources)));
    match form {
        Form::Text => known.map(|(peer, sources)| format!("{peer}: {}\n", go_json(&sources, None))).collect(),
        _ => document(&known.map(|(peer, sources)| json!({"vpnAddr": peer, "addrs": sources})).collect(), form),
    }
}

/// The endpoints by their source, sorted by its text.
fn cache(sources: &BTreeMap<IpAddr, KnownEndpoints>) -> Value {
    let mut by_owner: Vec<_> = sources.iter().map(|(owner, source)| (owner.to_string(), source)).collect();
    by_owner.sort_by(|(one, _), (other, _)| one.cmp(other));
    let entry = |(owner, source): (String, &KnownEndpoints)| {
        let mut fields = Map::new();
        for (name, endpoints) in [("learned", &source.learnt), ("reported", &source.reported)] {
            if !endpoints.is_empty() {
                fields.insert(name.to_owned(), texts(endpoints));
            }
        }
        fields.insert("relay".to_owned(), texts(&source.relays));
        (owner, Value::Object(fields))
    };
    Value::Object(by_owner.into_iter().map(entry).collect())
}

/// As in Go, every hop is listed with all hops of its neighbour, and those that it does not mean carry an error.
fn relays(daemon: &dyn Daemon) -> Value {
    let relays = daemon.handle().with_node(|node, _| node.relays()).unwrap_or_default();
    let relays = &relays[..relays.len().min(MAX_ROWS)];
    let through = |far: IpAddr| {
        let to_it = relays.iter().filter(|it| !it.forwarding && it.state == RelayState::Established && it.far == far);
        let neighbours: Vec<_> = to_it.map(|relay| relay.neighbour).collect();
        if neighbours.is_empty() { Value::Null } else { texts(&neighbours) }
    };
    let hop = |relay: &RelayStatus, meant: &RelayStatus| {
        json!({
            "Error": (relay.local_index != meant.local_index).then(|| json!({})),
            "Type": if relay.forwarding { "forwarding" } else { "terminal" },
            "State": match relay.state {
                RelayState::Requested => "requested",
                RelayState::Established => "established",
                RelayState::Waiting => "unknown",
            },
            "PeerAddr": relay.far.to_string(),
            "LocalIndex": relay.local_index.0,
            "RemoteIndex": relay.remote_index.map_or(0, |index| index.0),
            "RelayedThrough": through(relay.far),
        })
    };
    let of_neighbour = |meant: &RelayStatus| {
        let hops = relays.iter().filter(|relay| relay.neighbour == meant.neighbour).take(MAX_HOPS);
        let hops: Value = hops.map(|relay| hop(relay, meant)).collect();
        json!({"NebulaAddr": meant.neighbour.to_string(), "RelayForAddrs": hops})
    };
    let all: Vec<_> = relays.iter().take(MAX_HOPS).map(of_neighbour).collect();
    json!({"Relays": if all.is_empty() { Value::Null } else { all.into() }})
}

fn certificate(daemon: &dyn Daemon, peer: Option<String>, form: Form, pem: bool) -> Result<String, Refusal> {
    let shown = match peer {
        Some(typed) => {
            let (typed, peer) = peer_of(Some(typed), "addr")?;
            let tunnels = daemon.handle().tunnels();
            let tunnel = tunnels.iter().find(|tunnel| tunnel.primary && tunnel.peer.contains(&peer));
            let certificate = tunnel.and_then(|tunnel| daemon.handle().certificate(tunnel.local_index));
            let certificate = certificate.ok_or_else(|| no_tunnel(&typed, "addr"))?;
            (certificate.to_json(), certificate.to_pem())
        }
        None => {
            let certificate = daemon.certificate().ok_or_else(|| refuse("this node has no certificate"))?;
            (certificate.to_json(), certificate.to_pem())
        }
    };
    let (json, text) = shown;
    Ok(match form {
        Form::Indented => go_json(&json, Some(INDENT)),
        Form::Json => go_json(&json, None),
        Form::Text if pem => text,
        Form::Text => line(&go_json(&json, Some("\t"))),
    })
}

fn device(daemon: &dyn Daemon, form: Form) -> String {
    let (name, networks) = (daemon.device(), daemon.networks());
    match form {
        Form::Text => format!("name={name} cidr={}\n", bracketed(&networks)),
        _ => document(&json!({"name": name, "cidr": texts(&networks)}), form),
    }
}

fn log_level(daemon: &dyn Daemon, typed: Option<String>) -> Result<String, Refusal> {
    let level = typed.map(|typed| {
        let unknown =
            || refuse(format!("Unknown log level [{typed}]. Possible log levels: trace, debug, info, warn, error"));
        LogLevel::parse(&typed).ok_or_else(unknown)
    });
    daemon.set_log_level(level.transpose()?).map_err(refuse)?;
    Ok(line(&format!("Log level is: {}", log::level().name())))
}

fn log_format(typed: Option<String>) -> Result<String, Refusal> {
    match typed.map(|typed| typed.to_lowercase()).as_deref() {
        None => {}
        Some("text") => log::set_format(LogFormat::Text),
        Some("json") => log::set_format(LogFormat::Json),
        Some(other) => return Err(refuse(format!("unknown log format {other}; there are text and json"))),
    }
    let format = match log::format() {
        LogFormat::Text => "text",
        LogFormat::Json => "json",
    };
    Ok(line(&format!("Log format is: {format}")))
}

fn create(daemon: &dyn Daemon, peer: Option<String>, endpoint: Option<String>) -> Result<String, Refusal> {
    let (_, peer) = peer_of(peer, "address")?;
    if daemon.handle().tunnels().iter().any(|tunnel| tunnel.peer.contains(&peer)) {
        return Err(refuse("Tunnel already exists"));
    }
    if daemon.handle().handshaking().contains(&peer) {
        return Err(refuse("Tunnel already handshaking"));
    }
    match endpoint.as_deref().map(endpoint_of).transpose()? {
        None => daemon.handle().connect(peer),
        Some(endpoint) => {
            let _ = daemon.handle().with_node(move |node, now| node.connect_at(now, peer, endpoint));
        }
    }
    Ok(line("Created"))
}

fn change_remote(daemon: &dyn Daemon, peer: Option<String>, endpoint: Option<String>) -> Result<String, Refusal> {
    // A missing argument is reported before an invalid one.
    let peer = Some(peer.ok_or_else(|| refuse("No vpn address was provided"))?);
    let endpoint = endpoint.ok_or_else(|| refuse("No address was provided"))?;
    let endpoint = endpoint_of(&endpoint)?;
    let (typed, peer) = peer_of(peer, "address")?;
    if !daemon.handle().tunnels().iter().any(|tunnel| tunnel.peer.contains(&peer)) {
        return Err(no_tunnel(&typed, "address"));
    }
    match daemon.handle().with_node(move |node, now| node.redirect(now, peer, endpoint)) {
        Some(true) => Ok(line("Changed")),
        _ => Err(refuse("lighthouse.remote_allow_list does not allow this peer to be there")),
    }
}

/// There are no profiles; but a file outside the sandbox is refused with Go's reason.
fn profile(sandbox: &Path, file: Option<String>) -> Result<String, Refusal> {
    let file = file.ok_or_else(|| refuse("No path to write profile provided"))?;
    inside(sandbox, &file)?;
    Err(refuse(NO_PROFILE))
}

/// Checks that `file` is below the directory `sandbox`, by the names alone; an empty sandbox allows every file.
fn inside(sandbox: &Path, file: &str) -> Result<(), Refusal> {
    if sandbox.as_os_str().is_empty() {
        return Ok(());
    }
    let (folder, target) = (cleaned(sandbox), cleaned(&sandbox.join(file)));
    let named = if Path::new(file).is_absolute() { Path::new(file) } else { &target };
    let (path, sandbox) = (named.display(), sandbox.display());
    if target == folder {
        return Err(refuse(format!("path \"{path}\" resolves to the sandbox directory itself \"{sandbox}\"")));
    }
    if !target.starts_with(&folder) {
        return Err(refuse(format!("path \"{path}\" is outside the sandbox directory \"{sandbox}\"")));
    }
    Ok(())
}

/// Resolves `.` and `..` by the names alone.
fn cleaned(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    clean
}

const INDENT: &str = "    ";
const NO_PROFILE: &str = "This program has no profiles: it has no Go runtime; perf can profile its process";
// Keeps an answer within a few MiB.
const MAX_ROWS: usize = 10_000;
// The number of listed hops is quadratic.
const MAX_HOPS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_stay_inside_the_sandbox() {
        let sandbox = Path::new("/tmp/nebula-debug");
        for good in ["a", "./a", "b/../a", "/tmp/nebula-debug/a", "/tmp/x/../nebula-debug/a"] {
            assert_eq!(inside(sandbox, good), Ok(()), "{good}");
        }
        for (bad, reason) in [
            ("/etc/passwd", "path \"/etc/passwd\" is outside the sandbox directory \"/tmp/nebula-debug\""),
            ("../a", "path \"/tmp/a\" is outside"),
            ("/tmp/nebula-debugger", "is outside"),
            (".", "resolves to the sandbox directory itself"),
        ] {
            let refusal = inside(sandbox, bad).unwrap_err();
            assert!(refusal.0.contains(reason), "{refusal:?}");
        }
        assert_eq!(inside(Path::new(""), "/etc/passwd"), Ok(()));
    }

    #[test]
    fn sources_are_written_as_go_writes_its_cache() {
        let source = |learnt: &[&str], reported: &[&str], relays: &[&str]| KnownEndpoints {
            learnt: learnt.iter().map(|text| text.parse().unwrap()).collect(),
            reported: reported.iter().map(|text| text.parse().unwrap()).collect(),
            relays: relays.iter().map(|text| text.parse().unwrap()).collect(),
        };
        let sources = BTreeMap::from([
            ("10.0.0.9".parse().unwrap(), source(&["192.0.2.1:1"], &[], &[])),
            ("10.0.0.10".parse().unwrap(), source(&[], &["[2001:db8::1]:2", "192.0.2.1:1"], &["10.0.0.3"])),
        ]);
        assert_eq!(
            go_json(&cache(&sources), None),
            "{\"10.0.0.10\":{\"reported\":[\"[2001:db8::1]:2\",\"192.0.2.1:1\"],\"relay\":[\"10.0.0.3\"]},\
             \"10.0.0.9\":{\"learned\":[\"192.0.2.1:1\"],\"relay\":[]}}"
        );
    }

    #[test]
    fn addresses_are_missed_and_refused_in_gos_words() {
        assert_eq!(line(&peer_of(None, "addr").unwrap_err().0), "No vpn address was provided\n");
        let refusal = peer_of(Some("web-1".to_owned()), "address").unwrap_err();
        assert_eq!(line(&refusal.0), "The provided vpn address could not be parsed: web-1\n");
        assert_eq!(line(&endpoint_of("192.0.2.1").unwrap_err().0), "Address could not be parsed\n");
        assert_eq!(line(&no_tunnel("10.0.0.1", "addr").0), "Could not find tunnel for vpn addr: 10.0.0.1\n");
    }
}
