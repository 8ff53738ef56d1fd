//! Which keys exist, and what is said about those that are unknown or have no effect here.

use super::Value;
use super::section::Section;

/// Remarks on every key that is not read.
pub(super) fn check(section: &Section<'_>, tree: &Value) {
    for (path, state) in KEYS {
        let Some(value) = section.get(path) else { continue };
        match state {
            Read | Tuning => {}
            NoEffectIfSet if value.is_zero() || value.boolean() == Some(false) => {}
            NoEffectIfSet => section.warn(format!("{path} is not supported and has no effect in this version")),
        }
    }
    report_unknown(section, tree, String::new());
}

fn report_unknown(section: &Section<'_>, value: &Value, prefix: String) {
    let Value::Map(map) = value else { return };
    for (key, value) in map {
        let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
        let exact = KEYS.iter().any(|(known, _)| *known == path);
        let has_children =
            KEYS.iter().any(|(known, _)| known.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.')));
        if has_children && matches!(value, Value::Map(_)) {
            report_unknown(section, value, path);
        } else if !(exact || has_children && *value == Value::Null) {
            section.warn(format!("unknown key {path} is ignored"));
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Has its effect.
    Read,
    /// Tunes something that is sized differently here; harmless to ignore.
    Tuning,
    /// Ignored, and said so unless it is off or empty.
    NoEffectIfSet,
}

use State::{NoEffectIfSet, Read, Tuning};

const KEYS: &[(&str, State)] = &[
    ("pki.ca", Read),
    ("pki.cert", Read),
    ("pki.key", Read),
    ("pki.blocklist", Read),
    ("pki.disconnect_invalid", Read),
    ("pki.initiating_version", Read),
    ("cipher", Read),
    ("static_host_map", Read),
    ("static_map.cadence", Read),
    ("static_map.network", Read),
    ("static_map.lookup_timeout", Read),
    ("lighthouse.am_lighthouse", Read),
    ("lighthouse.hosts", Read),
    ("lighthouse.interval", Read),
    ("lighthouse.advertise_addrs", Read),
    ("lighthouse.serve_dns", NoEffectIfSet),
    ("lighthouse.dns.host", Tuning),
    ("lighthouse.dns.port", Tuning),
    ("lighthouse.remote_allow_list", Read),
    ("lighthouse.remote_allow_ranges", Read),
    ("lighthouse.local_allow_list", Read),
    ("lighthouse.calculated_remotes", Read),
    ("listen.host", Read),
    ("listen.port", Read),
    ("listen.batch", Tuning),
    ("listen.read_buffer", Read),
    ("listen.write_buffer", Read),
    ("listen.so_mark", NoEffectIfSet),
    ("listen.send_recv_error", Read),
    ("listen.accept_recv_error", Read),
    ("listen.udp_offloads", Read),
    ("listen.rebind_on_network_change", Tuning),
    ("listen.windows_bypass_wdf", Tuning),
    ("listen.routines", Read),
    ("routines", Read),
    ("punchy", Read),
    ("punchy.punch", Read),
    ("punchy.respond", Read),
    ("punchy.delay", Read),
    ("punchy.respond_delay", Read),
    ("punchy.target_all_remotes", Read),
    ("punch_back", Read),
    ("relay.am_relay", Read),
    ("relay.use_relays", Read),
    ("relay.relays", Read),
    ("tun.disabled", Read),
    ("tun.dev", Read),
    ("tun.mtu", Read),
    ("tun.tx_queue", Read),
    ("tun.drop_local_broadcast", Read),
    ("tun.drop_multicast", Read),
    ("tun.routes", Read),
    ("tun.unsafe_routes", Read),
    ("tun.use_system_route_table", Read),
    ("tun.use_system_route_table_buffer_size", Read),
    ("tun.use_offloads", Read),
    ("tun.routines", Read),
    ("tun.pin_threads", Tuning),
    ("tun.pin_threads_key", Tuning),
    ("tun.cpu_affinity", NoEffectIfSet),
    ("tun.network_category", Tuning),
    ("tun.windows_bypass_wdf", Tuning),
    ("firewall.inbound", Read),
    ("firewall.outbound", Read),
    ("firewall.inbound_action", Read),
    ("firewall.outbound_action", Read),
    ("firewall.default_local_cidr_any", Read),
    ("firewall.conntrack.tcp_timeout", Read),
    ("firewall.conntrack.udp_timeout", Read),
    ("firewall.conntrack.default_timeout", Read),
    ("firewall.conntrack.routine_cache_timeout", Tuning),
    ("firewall.conntrack.max_connections", Read),
    ("handshakes.try_interval", Read),
    ("handshakes.retries", Read),
    ("handshakes.max_new_per_second", Read),
    ("handshakes.trigger_buffer", Tuning),
    ("handshakes.query_buffer", Tuning),
    ("tunnels.drop_inactive", Read),
    ("tunnels.inactivity_timeout", Read),
    ("timers.connection_alive_interval", Read),
    ("timers.pending_deletion_interval", Read),
    ("timers.requery_wait_duration", Read),
    ("counters.try_promote", Read),
    ("counters.requery_every_packets", Read),
    ("preferred_ranges", Read),
    ("sshd.enabled", NoEffectIfSet),
    ("sshd.listen", Tuning),
    ("sshd.host_key", Tuning),
    ("sshd.authorized_users", Tuning),
    ("sshd.trusted_cas", Tuning),
    ("sshd.sandbox_dir", Tuning),
    ("stats.type", Read),
    ("stats.interval", Tuning),
    ("stats.prefix", Tuning),
    ("stats.protocol", Tuning),
    ("stats.host", Tuning),
    ("stats.listen", Tuning),
    ("stats.path", Tuning),
    ("stats.namespace", Tuning),
    ("stats.subsystem", Tuning),
    ("stats.message_metrics", Tuning),
    ("stats.lighthouse_metrics", Tuning),
    ("logging.level", Read),
    ("logging.format", Read),
    ("logging.disable_timestamp", Read),
    ("logging.timestamp_format", Tuning),
];
