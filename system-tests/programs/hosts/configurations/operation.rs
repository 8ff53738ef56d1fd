//! `logging`, `stats`, `sshd`, and unknown keys.

use super::bench::{Case, deviates, good, refused, remarked};

/// What our remark names: without the console, the switch that enables it.
const fn sshd(named: &'static str) -> &'static str {
    if cfg!(feature = "ssh") { named } else { "sshd.enabled is not supported" }
}

pub(super) const CASES: &[Case] = &[
    deviates(
        "a timer of zero",
        "timers: {connection_alive_interval: 0}",
        "deviation-timers",
        (2, 0),
        "timers.connection_alive_interval",
    ),
    good("logging", "logging: {level: info, format: text, disable_timestamp: true}"),
    good("logging in capitals", "logging: {level: WARN, format: JSON}"),
    good("level fatal", "logging: {level: fatal}"),
    refused("level empty", "logging: {level: ''}", "not a valid logging level"),
    refused("format empty", "logging: {format: ''}", "unknown log format"),
    good("timestamp_format", "logging: {timestamp_format: '2006-01-02T15:04:05Z07:00'}"),
    refused("level unknown", "logging: {level: loud}", "loud"),
    refused("level as a number", "logging: {level: 5}", "5"),
    refused("format unknown", "logging: {format: xml}", "xml"),
    refused("level as a list", "logging: {level: [info]}", "[info]"),
    refused("format as a list", "logging: {format: [json]}", "[json]"),
    remarked("disable_timestamp as a word", "logging: {disable_timestamp: perhaps}", "logging.disable_timestamp"),
    good("stats none", "stats: {type: none}"),
    good("stats empty", "stats: {type: ''}"),
    good("stats without type", "stats: {interval: 10s}"),
    good(
        "prometheus",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, path: /metrics, namespace: n, subsystem: s, \
         interval: 10s, message_metrics: true, lighthouse_metrics: true}",
    ),
    remarked(
        "metrics of more peers than there are ports",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, path: /metrics, interval: 10s, max_peers: 65536}",
        "stats.max_peers",
    ),
    good("graphite", "stats: {type: graphite, prefix: nebula, protocol: tcp, host: 127.0.0.1:19999, interval: 10s}"),
    refused("stats type unknown", "stats: {type: statsd, interval: 10s}", "stats.type was not understood: statsd"),
    refused(
        "stats type in capitals",
        "stats: {type: PROMETHEUS, interval: 10s}",
        "stats.type was not understood: PROMETHEUS",
    ),
    refused(
        "graphite by UDP",
        "stats: {type: graphite, protocol: udp, host: 127.0.0.1:19999, interval: 10s}",
        "unknown network udp",
    ),
    remarked(
        "prometheus on no address",
        "stats: {type: prometheus, interval: 10s, listen: nonsense, path: /m}",
        "stats.listen",
    ),
    refused(
        "stats without interval",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, path: /metrics}",
        "stats.interval",
    ),
    refused(
        "stats interval without unit",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, path: /metrics, interval: 10}",
        "stats.interval",
    ),
    refused(
        "stats interval zero",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, path: /metrics, interval: 0s}",
        "stats.interval",
    ),
    refused("prometheus without listen", "stats: {type: prometheus, path: /metrics, interval: 10s}", "stats.listen"),
    refused(
        "prometheus without path",
        "stats: {type: prometheus, listen: 127.0.0.1:18080, interval: 10s}",
        "stats.path",
    ),
    refused("graphite without host", "stats: {type: graphite, interval: 10s}", "stats.host"),
    refused(
        "graphite with a bad protocol",
        "stats: {type: graphite, protocol: carrier, host: 127.0.0.1:19999, interval: 10s}",
        "carrier",
    ),
    refused(
        "graphite with a host without port",
        "stats: {type: graphite, host: 127.0.0.1, interval: 10s}",
        "127.0.0.1",
    ),
    remarked("stats as a scalar", "stats: prometheus", "stats"),
    remarked(
        "sshd",
        "sshd: {enabled: true, listen: 127.0.0.1:2222, host_key: /none, authorized_users: []}",
        sshd("sshd.host_key"),
    ),
    good("sshd off", "sshd: {enabled: false, listen: 127.0.0.1:2222}"),
    remarked("sshd on port 22", "sshd: {enabled: true, listen: 127.0.0.1:22}", sshd("sshd.listen can not use port 22")),
    remarked("sshd without listen", "sshd: {enabled: true}", sshd("sshd.listen must be provided")),
    remarked(
        "sshd listen without port",
        "sshd: {enabled: true, listen: 127.0.0.1}",
        sshd("invalid sshd.listen address"),
    ),
    remarked("sshd without host_key", "sshd: {enabled: true, listen: ':2222'}", sshd("sshd.host_key must be provided")),
    remarked(
        "sshd with a host_key of Nebula",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/host.key}",
        sshd("error while adding sshd.host_key"),
    ),
    remarked(
        "sshd with a host_key that is a certificate",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/host.crt}",
        sshd("error while adding sshd.host_key"),
    ),
    remarked(
        "sshd users as a text",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/ssh.key, authorized_users: me}",
        sshd("sshd.authorized_users is no list"),
    ),
    remarked(
        "sshd user without a name",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/ssh.key, authorized_users: [{keys: []}]}",
        sshd("missing the user field"),
    ),
    remarked(
        "sshd user without keys",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/ssh.key, authorized_users: [{user: me}]}",
        sshd("missing the keys field"),
    ),
    remarked(
        "sshd user with a bad key",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/ssh.key, authorized_users: [{user: me, keys: [ssh-ed25519]}]}",
        sshd("Failed to authorize key"),
    ),
    remarked(
        "sshd with a bad ca",
        "sshd: {enabled: true, listen: ':2222', host_key: $DIR/ssh.key, trusted_cas: [nonsense]}",
        sshd("SSH CA had an error"),
    ),
    remarked("sshd.enabled as a word", "sshd: {enabled: maybe}", "sshd.enabled"),
    remarked("unknown section", "nonsense: {a: 1}", "nonsense"),
    remarked("section misspelt", "firewal: {inbound: []}", "firewall"),
    remarked("key misspelt", "lighthouse: {am_lighthous: false}", "lighthouse.am_lighthouse"),
    remarked("key in capitals", "Listen: {port: 4242}", "listen"),
    remarked("key under another section", "tun: {am_relay: true}", "relay.am_relay"),
    remarked("key at the wrong level", "am_lighthouse: true", "lighthouse.am_lighthouse"),
    remarked("x509, the old name of pki", "x509: {ca: x}", "pki"),
    remarked("key with a dot", "listen.port: 4242", "listen"),
    deviates(
        "try_interval zero",
        "handshakes: {try_interval: 0s}",
        "deviation-try-interval",
        (2, 1),
        "handshakes.try_interval",
    ),
    deviates(
        "trigger_buffer negative",
        "handshakes: {trigger_buffer: -1}",
        "deviation-buffers",
        (2, 0),
        "handshakes.trigger_buffer",
    ),
];
