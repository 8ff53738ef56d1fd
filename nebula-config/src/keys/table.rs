//! Every key: what it accepts, its default, and when a change takes effect.

use Effect::{Console, Ignored, OnReload, OnStart};
use Kind::{Address, Boolean, Choice, Cidrs, Duration, Entries, Map, Number, Pem, Text, Texts};

/// A key of the configuration.
#[derive(Debug)]
pub(super) struct Key {
    /// Dotted path.
    pub(super) path: &'static str,
    pub(super) kind: Kind,
    /// As the reference shows it. A test makes that; in programs the relocations of these texts would be a page of
    /// private memory for each pod.
    #[cfg(test)]
    pub(super) default: &'static str,
    pub(super) effect: Effect,
    #[cfg(test)]
    pub(super) about: &'static str,
}

/// What a key accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Boolean,
    Number(i64, i64),
    /// With a unit.
    Duration,
    Text,
    /// One of these words, in any case where Go accepts any case.
    Choice(&'static [&'static str]),
    /// Path of a file, or PEM text.
    Pem,
    /// `host:port`.
    Address,
    Texts,
    Cidrs,
    /// A list of maps with these fields.
    Entries(&'static [&'static str]),
    /// A map whose keys the user chooses.
    Map,
}

/// When a change takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    OnReload,
    OnStart,
    /// Read by Go, but what it tunes does not exist here, or not on Linux; the text says why.
    Ignored(&'static str),
    /// On reload, in builds with the SSH console; in others, only the switch is reported.
    Console,
}

#[cfg_attr(not(test), expect(unused_variables, reason = "the reference and the schema are made by a test"))]
const fn key(path: &'static str, kind: Kind, default: &'static str, effect: Effect, about: &'static str) -> Key {
    Key {
        path,
        kind,
        #[cfg(test)]
        default,
        effect,
        #[cfg(test)]
        about,
    }
}

const U32: i64 = u32::MAX as i64;
const I32: i64 = i32::MAX as i64;
const LEVELS: Kind = Choice(&["trace", "debug", "info", "warn", "warning", "error", "fatal", "panic"]);
const RECV_ERROR: Kind = Choice(&["always", "never", "private", "true", "false"]);
const ACTION: Kind = Choice(&["drop", "reject"]);
const RULE: Kind =
    Entries(&["port", "code", "proto", "host", "group", "groups", "cidr", "local_cidr", "ca_name", "ca_sha"]);
const NO_CHANNEL: Effect = Ignored("nothing is queued there here");
const OTHER_SYSTEM: Effect = Ignored("not on Linux");
/// A branch of Go Nebula has it, and no release.
const MULTIPORT: Effect =
    Ignored("in no release of Go; each tunnel has one UDP port here, and a peer's offer of more is skipped");
const INFO_API: Effect = Ignored("in no release of Go; daemon.whois_socket answers this question here");

pub(super) const KEYS: &[Key] = &[
    key("pki.ca", Pem, "required", OnReload, "CA certificates that are trusted: path of a file, or PEM text"),
    key(
        "pki.cert",
        Pem,
        "required",
        OnReload,
        "this host's certificate, of one version or both: path of a file, or PEM text",
    ),
    key("pki.key", Pem, "required", OnReload, "this host's private key: path of a file, or PEM text"),
    key("pki.blocklist", Texts, "[]", OnReload, "fingerprints of certificates that are refused"),
    key(
        "pki.enrolment",
        Text,
        "none",
        OnStart,
        "file that `nebula up` or nebula-enrol wrote beside the certificate: it is renewed there, and what the CA announces is followed; then ca, cert and key need not be given",
    ),
    key(
        "pki.disconnect_invalid",
        Boolean,
        "true",
        OnReload,
        "close tunnels to peers whose certificate is no longer valid",
    ),
    key(
        "pki.initiating_version",
        Number(0, U32),
        "1 if there is such a certificate, else 2",
        OnReload,
        "certificate version to start handshakes with: 1 or 2",
    ),
    key(
        "pki.post_quantum",
        Choice(&["prefer", "require", "off"]),
        "prefer",
        OnReload,
        "agree on keys by ML-KEM-768, too, with peers that offer it (not in Go): prefer, require (refuse other peers), off",
    ),
    key("cipher", Choice(&["aes", "chachapoly"]), "aes", OnStart, "cipher of tunnels, the same in the whole network"),
    key("static_host_map", Map, "{}", OnReload, "underlay endpoints by overlay address: one `host:port`, or a list"),
    key("static_map.cadence", Duration, "30s", OnReload, "time between two look-ups of names in static_host_map"),
    key("static_map.network", Choice(&["ip4", "ip6", "ip"]), "ip4", OnReload, "addresses of such names that are used"),
    key("static_map.lookup_timeout", Duration, "250ms", OnReload, "longest time a look-up may take"),
    key(
        "lighthouse.am_lighthouse",
        Boolean,
        "false",
        OnStart,
        "this host tells others where their peers are; needs listen.port",
    ),
    key("lighthouse.hosts", Texts, "[]", OnReload, "overlay addresses of the lighthouses"),
    key("lighthouse.interval", Number(0, U32), "10", OnReload, "seconds between two reports of own endpoints; 0 never"),
    key(
        "lighthouse.advertise_addrs",
        Texts,
        "[]",
        OnReload,
        "further endpoints to report, `host:port`; port 0 is the real one",
    ),
    key("lighthouse.serve_dns", Boolean, "false", OnReload, "answer DNS queries for the names of peers"),
    key("lighthouse.dns.host", Text, "all addresses", OnReload, "address of the DNS server"),
    key(
        "lighthouse.dns.port",
        Number(0, 65535),
        "53",
        OnReload,
        "port of the DNS server; TCP, too, which is not in Go",
    ),
    key(
        "lighthouse.dns.domain",
        Text,
        "none",
        OnReload,
        "domain below which the DNS server answers, too (not in Go): NAME.DOMAIN, and GROUP.groups.DOMAIN for the hosts of a group",
    ),
    key(
        "lighthouse.remote_allow_list",
        Map,
        "everything",
        OnReload,
        "underlay networks where peers may be: prefix to true or false; loopback and link-local endpoints that lighthouses and hosts name are believed only where a prefix inside 127.0.0.0/8, 169.254.0.0/16, ::1/128 or fe80::/10 allows them, and loopback also from a lighthouse that is itself reached by a loopback address",
    ),
    key(
        "lighthouse.remote_allow_ranges",
        Map,
        "none",
        OnReload,
        "as remote_allow_list, by overlay network of the peer",
    ),
    key(
        "lighthouse.local_allow_list",
        Map,
        "everything",
        OnReload,
        "own addresses that may be reported: prefix to true or false, and `interfaces`: pattern to true or false",
    ),
    key(
        "lighthouse.calculated_remotes",
        Map,
        "none",
        OnReload,
        "endpoints to guess, by overlay network: a list of `mask` and `port`",
    ),
    key("listen.host", Text, "0.0.0.0", OnStart, "underlay address or name to listen on; `::` is both families"),
    key("listen.port", Number(0, 65535), "0", OnStart, "UDP port; 0 any"),
    key(
        "listen.batch",
        Number(1, 65535),
        "64",
        Ignored("batches have the size of what the kernel has ready"),
        "datagrams per system call",
    ),
    key(
        "listen.read_buffer",
        Number(0, I32),
        "8388608",
        OnReload,
        "receive buffer of the socket in bytes; 0 leaves the system's",
    ),
    key(
        "listen.write_buffer",
        Number(0, I32),
        "8388608",
        OnReload,
        "send buffer of the socket in bytes; 0 leaves the system's",
    ),
    key("listen.so_mark", Number(0, U32), "0", OnReload, "mark of the underlay sockets, for policy routing"),
    key("listen.send_recv_error", RECV_ERROR, "always", OnReload, "whom to tell that a tunnel is unknown here"),
    key("listen.accept_recv_error", RECV_ERROR, "always", OnReload, "whom to believe that a tunnel is unknown there"),
    key("listen.udp_offloads", Boolean, "true", OnStart, "UDP segmentation and coalescing by the kernel"),
    key("listen.rebind_on_network_change", Boolean, "true", OTHER_SYSTEM, "macOS only"),
    key("listen.windows_bypass_wdf", Boolean, "true", OTHER_SYSTEM, "Windows only"),
    key("listen.routines", Number(1, 256), "1", OnStart, "deprecated name of routines"),
    key("routines", Number(1, 256), "1", OnStart, "pairs of tun queue and UDP socket, each with two threads"),
    key("punchy", Boolean, "false", OnReload, "short form of punchy.punch"),
    key("punchy.punch", Boolean, "false", OnReload, "keep NAT mappings open with small datagrams"),
    key("punchy.respond", Boolean, "false", OnReload, "answer a punch request also with a handshake towards the peer"),
    key("punchy.delay", Duration, "1s", OnReload, "wait before answering a punch request"),
    key("punchy.respond_delay", Duration, "5s", OnReload, "wait before that handshake"),
    key("punchy.target_all_remotes", Boolean, "false", OnReload, "punch towards every known endpoint of a peer"),
    key("punch_back", Boolean, "false", OnReload, "deprecated name of punchy.respond"),
    key("relay.am_relay", Boolean, "false", OnReload, "carry packets between other hosts"),
    key("relay.use_relays", Boolean, "true", OnReload, "reach peers through relays where nothing else works"),
    key("relay.relays", Texts, "[]", OnReload, "overlay addresses of hosts through which this one can be reached"),
    key(
        "relay.groups",
        Texts,
        "[]",
        OnReload,
        "a lighthouse offers hosts with one of these groups as relays, and another host chooses two of those it is offered (not in Go)",
    ),
    key("tun.disabled", Boolean, "false", OnStart, "no device; no privilege is needed then"),
    key("tun.dev", Text, "the kernel's choice", OnStart, "name of the device, at most 15 bytes"),
    key("tun.mtu", Number(68, 65_535), "1300", OnReload, "largest packet of the overlay"),
    key(
        "tun.path_mtu_discovery",
        Boolean,
        "true",
        OnReload,
        "find out how large a packet the path to each peer carries",
    ),
    key(
        "tun.max_mtu",
        Number(0, 65_535),
        "0",
        Ignored(
            "in no release of Go; set tun.mtu to the largest packet, tun.path_mtu_discovery finds what each path carries",
        ),
        "largest packet of a path that carries more than tun.mtu",
    ),
    key("tun.multiport.tx_enabled", Boolean, "false", MULTIPORT, "send from several UDP ports"),
    key("tun.multiport.rx_enabled", Boolean, "false", MULTIPORT, "accept packets from several UDP ports of a peer"),
    key("tun.multiport.tx_ports", Number(1, 65_535), "100", MULTIPORT, "how many ports"),
    key(
        "tun.multiport.tx_handshake",
        Boolean,
        "false",
        MULTIPORT,
        "handshakes from other ports when there is no answer",
    ),
    key("tun.multiport.tx_handshake_delay", Number(0, 1000), "2", MULTIPORT, "attempts before that"),
    key("tun.tx_queue", Number(0, U32), "500", OnStart, "transmit queue of the device, in packets"),
    key("tun.drop_local_broadcast", Boolean, "false", OnStart, "drop packets to the broadcast address of the overlay"),
    key("tun.drop_multicast", Boolean, "false", OnStart, "drop multicast packets"),
    key("tun.routes", Entries(&["mtu", "route"]), "[]", OnReload, "parts of the overlay with an MTU of their own"),
    key(
        "tun.unsafe_routes",
        Entries(&["route", "via", "mtu", "metric", "install", "inside"]),
        "[]",
        OnReload,
        "networks behind other hosts, and by which hosts: `via` is an address, or a list of maps: gateway, weight, priority \
         (not in Go, which ignores it). `inside: true` is for a part of the overlay itself, whose hosts have no Nebula (not in \
         Go, which refuses it)",
    ),
    key(
        "tun.use_system_route_table",
        Boolean,
        "false",
        OnStart,
        "follow routes that others put into the kernel with a gateway in the overlay",
    ),
    key(
        "tun.use_system_route_table_buffer_size",
        Number(0, I32),
        "0",
        OnStart,
        "buffer for news of them in bytes; 0 leaves the system's",
    ),
    key("tun.use_offloads", Boolean, "true", OnStart, "segmentation and checksum offloads of the device"),
    key("tun.routines", Number(1, 256), "1", OnStart, "deprecated name of routines"),
    key("tun.pin_threads", Boolean, "true", Ignored("threads are left to the scheduler"), "bind threads to processors"),
    key(
        "tun.pin_threads_key",
        Choice(&["pid", "port"]),
        "none",
        Ignored("threads are left to the scheduler"),
        "what chooses the processor",
    ),
    key(
        "tun.cpu_affinity",
        Texts,
        "none",
        OnStart,
        "processors, by number, of the threads of each routine; a shorter list is repeated, and one with a processor that is not there or not allowed is left alone with a warning",
    ),
    key("tun.network_category", Text, "private", OTHER_SYSTEM, "Windows only"),
    key("tun.windows_bypass_wdf", Boolean, "true", OTHER_SYSTEM, "Windows only"),
    key("firewall.inbound", RULE, "[]: nothing passes", OnReload, "rules for packets from peers"),
    key("firewall.outbound", RULE, "[]: nothing passes", OnReload, "rules for packets to peers"),
    key("firewall.inbound_action", ACTION, "drop", OnReload, "what happens to packets from peers that no rule allows"),
    key("firewall.outbound_action", ACTION, "drop", OnReload, "what happens to packets to peers that no rule allows"),
    key(
        "firewall.default_local_cidr_any",
        Boolean,
        "false",
        OnReload,
        "rules without local_cidr also cover unsafe networks of this host",
    ),
    key("firewall.conntrack.tcp_timeout", Duration, "12m", OnReload, "idle time after which a TCP flow is forgotten"),
    key("firewall.conntrack.udp_timeout", Duration, "3m", OnReload, "idle time after which a UDP flow is forgotten"),
    key(
        "firewall.conntrack.default_timeout",
        Duration,
        "10m",
        OnReload,
        "idle time after which any other flow is forgotten",
    ),
    key(
        "firewall.conntrack.routine_cache_timeout",
        Duration,
        "0s",
        Ignored("flows that a thread remembers follow every change at once"),
        "life of a thread's own cache of flows",
    ),
    key(
        "firewall.conntrack.max_connections",
        Number(0, I32),
        "100000",
        Ignored("Go never applied it either; the limit is firewall.conntrack.max_flows"),
        "flows remembered at most",
    ),
    key(
        "firewall.conntrack.max_flows",
        Number(0, 1 << 24),
        "262144, of a pod 32768",
        OnReload,
        "flows remembered at most, about 110 bytes each (not in Go)",
    ),
    key("handshakes.try_interval", Duration, "100ms", OnStart, "time between two attempts, growing with each"),
    key("handshakes.retries", Number(1, 1000), "10", OnStart, "attempts before a handshake is given up"),
    key(
        "handshakes.max_new_per_second",
        Number(0, U32),
        "4000",
        OnStart,
        "new handshakes of others answered per second; 0 no limit (not in Go)",
    ),
    key(
        "handshakes.max_pending",
        Number(1, 1 << 20),
        "4096, of a pod 512",
        OnStart,
        "own handshakes under way at a time, up to 10 kB each; for more, those that found no endpoint give way (not in Go)",
    ),
    key(
        "handshakes.max_waiting_bytes",
        Number(1, 1 << 30),
        "8388608, of a pod 2097152",
        OnStart,
        "bytes of packets that wait for a handshake, over all peers (not in Go)",
    ),
    key("handshakes.trigger_buffer", Number(0, U32), "64", NO_CHANNEL, "length of a queue"),
    key("handshakes.query_buffer", Number(0, U32), "64", NO_CHANNEL, "length of a queue"),
    key(
        "flows.records",
        Boolean,
        "true",
        OnReload,
        "keep records of flows in memory, for `nebula ctl flows` (not in Go)",
    ),
    key(
        "flows.ring",
        Number(16, 65_536),
        "192",
        OnReload,
        "number of these records, about 256 bytes each; a record costs 150 bytes more for each flow that goes on (not in Go)",
    ),
    key("tunnels.keep", Texts, "[]", OnReload, "overlay addresses of peers, at most 64, whose tunnels are kept"),
    key("tunnels.keep_groups", Texts, "[]", OnReload, "groups: tunnels to hosts with one of them are kept once made"),
    key(
        "tunnels.measure_paths",
        Boolean,
        "true",
        OnReload,
        "measure the paths to a peer that has several, and use the best",
    ),
    key(
        "tunnels.clear_on_wake",
        Boolean,
        "true",
        Ignored(
            "in no release of Go; after a sleep all tunnels are tested at once here, and those without an answer are made again",
        ),
        "close all tunnels after a sleep",
    ),
    key(
        "tunnels.wake_clear_threshold",
        Duration,
        "30s",
        Ignored("in no release of Go; see tunnels.clear_on_wake"),
        "shortest sleep after which they are closed",
    ),
    key("tunnels.drop_inactive", Boolean, "false", OnReload, "close tunnels without traffic"),
    key("tunnels.inactivity_timeout", Duration, "10m", OnReload, "how long they may be without traffic"),
    key("timers.connection_alive_interval", Number(1, 86_400), "5", OnStart, "seconds between two checks of a tunnel"),
    key(
        "timers.pending_deletion_interval",
        Number(1, 86_400),
        "10",
        OnStart,
        "seconds a peer has to answer before its tunnel is closed",
    ),
    key(
        "timers.requery_wait_duration",
        Duration,
        "1m",
        OnReload,
        "shortest time between two questions to lighthouses about a connected peer",
    ),
    key(
        "counters.try_promote",
        Number(0, U32),
        "1000",
        OnReload,
        "packets between two attempts to move to a preferred endpoint",
    ),
    key(
        "counters.requery_every_packets",
        Number(0, U32),
        "5000",
        OnReload,
        "packets between two questions to lighthouses",
    ),
    key("preferred_ranges", Cidrs, "[]", OnReload, "underlay networks that are preferred over others"),
    key("sshd.enabled", Boolean, "false", Console, "debug console by SSH"),
    key("sshd.listen", Address, "none", Console, "its address; not port 22"),
    key("sshd.host_key", Pem, "none", Console, "its key"),
    key("sshd.authorized_users", Entries(&["user", "keys"]), "[]", Console, "who may log in"),
    key("sshd.trusted_cas", Texts, "[]", Console, "CAs whose SSH certificates may log in"),
    key(
        "sshd.sandbox_dir",
        Text,
        "nebula-debug in the folder for temporary files",
        Console,
        "folder for files that commands name; empty: any",
    ),
    key("info_api.enabled", Boolean, "false", INFO_API, "identities of overlay addresses for local programs, by HTTP"),
    key("info_api.listen", Text, "none", INFO_API, "its unix socket, as a unix:// URL"),
    key("info_api.socket_mode", Text, "0600", INFO_API, "mode of the socket"),
    key("stats.type", Choice(&["graphite", "prometheus", "none", ""]), "none", OnReload, "how metrics leave"),
    key("stats.interval", Duration, "required with a type", OnReload, "time between two sendings"),
    key("stats.prefix", Text, "nebula", OnReload, "prefix of names in Graphite"),
    key("stats.protocol", Choice(&["tcp", "tcp4", "tcp6"]), "tcp", OnReload, "protocol of Graphite"),
    key("stats.host", Address, "required for graphite", OnReload, "address of Graphite"),
    key("stats.listen", Address, "required for prometheus", OnReload, "address that serves metrics to Prometheus"),
    key("stats.path", Text, "required for prometheus", OnReload, "path of the metrics"),
    key("stats.namespace", Text, "none", OnReload, "first part of names in Prometheus"),
    key("stats.subsystem", Text, "none", OnReload, "second part of names in Prometheus"),
    key(
        "stats.max_peers",
        Number(0, 65535),
        "256",
        OnReload,
        "peers with metrics of their own in Prometheus, the first by address; 0 none (not in Go)",
    ),
    key(
        "stats.message_metrics",
        Boolean,
        "false",
        Ignored("all counters are always there"),
        "counters by kind of message",
    ),
    key(
        "stats.lighthouse_metrics",
        Boolean,
        "false",
        Ignored("all counters are always there"),
        "counters by kind of lighthouse message",
    ),
    key(
        "daemon.control_socket",
        Text,
        "/run/nebula/DEVICE.sock",
        OnStart,
        "unix socket for `nebula ctl` (not in Go): a path, or false; without a device its name is that of the certificate; \
         the usual one is left out silently where its folder cannot be made",
    ),
    key(
        "daemon.whois_socket",
        Text,
        "none",
        OnStart,
        "unix socket where other programs can look up the identity of an overlay address, and nothing else (not in Go): an absolute path",
    ),
    key(
        "daemon.whois_group",
        Text,
        "everybody",
        OnStart,
        "who may use that socket (not in Go): a group in /etc/group, or its number",
    ),
    key(
        "daemon.raise_priority",
        Boolean,
        "true",
        OnStart,
        "threads that carry packets run at niceness -20 while there are few or super-packets and they keep up (not in Go); without CAP_SYS_NICE, or started with a niceness, nothing changes",
    ),
    key(
        "daemon.user",
        Text,
        "none",
        OnStart,
        "whom nebula becomes once device, routes and sockets are there (not in Go): a name in /etc/passwd, or UID:GID; it keeps CAP_NET_ADMIN, CAP_NET_BIND_SERVICE and with daemon.raise_priority CAP_SYS_NICE; for a reload this user must be able to read configuration, certificates and key",
    ),
    key(
        "daemon.watch_files",
        Duration,
        "0s",
        OnReload,
        "time between two looks at the files of configuration and credentials (not in Go): a change is obeyed as SIGHUP; 0 never looks",
    ),
    key(
        "resolver.domain",
        Text,
        "none",
        OnReload,
        "domain of overlay names that this host resolves by asking the lighthouses (not in Go); their lighthouse.dns.domain",
    ),
    key(
        "resolver.listen",
        Text,
        "own overlay address, port 53",
        OnReload,
        "`address:port` where the resolver answers (not in Go)",
    ),
    key(
        "resolver.servers",
        Texts,
        "the lighthouses, port 53",
        OnReload,
        "DNS servers that the resolver asks (not in Go)",
    ),
    key(
        "resolver.register",
        Boolean,
        "true",
        OnReload,
        "tell systemd-resolved, or else openresolv, of the resolver, for this domain only (not in Go)",
    ),
    key("logging.level", LEVELS, "info", OnReload, "least important lines that are printed"),
    key("logging.format", Choice(&["text", "json"]), "text", OnReload, "form of the lines"),
    key("logging.disable_timestamp", Boolean, "false", OnReload, "leave the time out"),
    key("logging.timestamp_format", Text, "none", Ignored("Go ignores it since 1.11 too"), "form of the time"),
];
