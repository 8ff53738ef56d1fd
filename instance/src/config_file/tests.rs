//! What a configuration means, and what refuses to start, in the cases that differ between YAML readers.

use std::net::IpAddr;
use std::time::Duration;

use nebula_cert::{Certificate, Curve, PrivateKey, SigningKey, Template, Version};
use nebula_core::config::{Cipher, RecvErrorPolicy};
use nebula_core::firewall::{Cidr, PortRange, Protocol};
use proptest::prelude::*;

use super::*;

fn tree(text: &str) -> Value {
    parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn settings(text: &str) -> Settings {
    Settings::read_without_pki(&tree(text)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refusal(text: &str) -> String {
    Settings::read_without_pki(&tree(text)).map(|_| ()).unwrap_err().to_string()
}

fn scalar(text: &str) -> Value {
    tree(&format!("key: {text}")).at("key").cloned().unwrap_or(Value::Null)
}

#[test]
fn scalars_have_the_types_go_yaml_gives_them() {
    for (text, expected) in [
        ("yes", Value::String("yes".into())),
        ("on", Value::String("on".into())),
        ("true", Value::Bool(true)),
        ("0755", Value::Int(0o755)),
        ("0o755", Value::Int(0o755)),
        ("0x1F", Value::Int(31)),
        ("1_000", Value::Int(1000)),
        ("-5", Value::Int(-5)),
        ("18446744073709551615", Value::Uint(u64::MAX)),
        ("1e3", Value::Float(1000.0)),
        ("443.0", Value::Float(443.0)),
        (".inf", Value::Float(f64::INFINITY)),
        ("'1e3'", Value::String("1e3".into())),
        ("10.42.0.1", Value::String("10.42.0.1".into())),
        ("2001-01-01", Value::String("2001-01-01".into())),
        ("~", Value::Null),
        ("${FOO}", Value::String("${FOO}".into())),
    ] {
        assert_eq!(scalar(text), expected, "{text}");
    }
}

#[test]
fn integers_are_decimal_text_after_yaml() {
    for (text, expected) in [
        ("4242", Some(4242)),
        ("'4242'", Some(4242)),
        ("0x1F", Some(31)),
        ("1e3", Some(1000)),
        ("443.0", Some(443)),
        ("1_000", Some(1000)),
        ("1e6", None),
        ("'1e3'", None),
        ("'0x10'", None),
        ("'1_000'", None),
        ("true", None),
        ("[1]", None),
    ] {
        assert_eq!(scalar(text).int(), expected, "{text}");
    }
}

#[test]
fn booleans_accept_words_and_digits() {
    for (text, expected) in [
        ("yes", Some(true)),
        ("Y", Some(true)),
        ("1", Some(true)),
        ("'FALSE'", Some(false)),
        ("off", None),
        ("2", None),
    ] {
        assert_eq!(scalar(text).boolean(), expected, "{text}");
    }
}

#[test]
fn durations_need_a_unit() {
    for (text, expected) in [
        ("10s", Some(10_000)),
        ("1h30m", Some(5_400_000)),
        ("1.5s", Some(1500)),
        (".5s", Some(500)),
        ("250ms", Some(250)),
        ("0", Some(0)),
        ("60", None),
        ("1d", None),
        ("s", None),
        ("1.2.3s", None),
        ("99999999999h", None),
    ] {
        let read = scalar(text).duration().map(|d| d.magnitude.as_millis());
        assert_eq!(read, expected, "{text}");
    }
    assert!(scalar("-5s").duration().unwrap().negative);
}

#[test]
fn mapping_keys_of_any_scalar_type_are_their_text() {
    let map = tree("static_host_map: {1: x, true: y, 0x10: z}");
    assert_eq!(map.at("static_host_map.1"), Some(&Value::String("x".into())));
    assert_eq!(map.at("static_host_map.true"), Some(&Value::String("y".into())));
    assert_eq!(map.at("static_host_map.16"), Some(&Value::String("z".into())));
}

#[test]
fn merge_keys_and_anchors_work() {
    let map = tree("base: &b {a: 1, b: 2}\nkey:\n  <<: *b\n  b: 3");
    assert_eq!(map.at("key.a"), Some(&Value::Int(1)));
    assert_eq!(map.at("key.b"), Some(&Value::Int(3)));
}

#[test]
fn only_a_mapping_is_a_configuration() {
    assert!(parse("[1, 2]").unwrap_err().to_string().contains("cannot unmarshal !!seq"));
    assert!(parse("a: 1\na: 2").is_err());
    assert!(parse("a: [1").is_err());
    for empty in ["", "# only a comment\n", "---\n"] {
        assert_eq!(parse(empty).unwrap(), Value::empty());
    }
    assert_eq!(parse("{\"a\": 1}").unwrap().at("a"), Some(&Value::Int(1)));
}

#[test]
fn of_several_documents_the_first_counts() {
    assert_eq!(parse("a: 1\n---\na: 2\n").unwrap().at("a"), Some(&Value::Int(1)));
}

#[test]
fn hostile_text_is_refused_in_bounded_time() {
    assert!(parse(&"[".repeat(100_000)).is_err());
    assert!(parse(&format!("a: {}1{}", "[".repeat(1000), "]".repeat(1000))).is_err());
    assert!(parse(&"x".repeat(MAX_TEXT + 1)).is_err());
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let previous = format!("*a{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("a{level}: &a{level} [{previous}]\n"));
    }
    assert!(parse(&bomb).is_err());
}

#[test]
fn defaults_are_those_of_the_code_of_go_nebula() {
    let settings = settings("{}");
    assert_eq!(settings.cipher, Cipher::Aes256Gcm);
    assert_eq!((settings.listen.host.as_str(), settings.listen.port), ("0.0.0.0", 0));
    assert_eq!((settings.tun.mtu, settings.tun.tx_queue, settings.tun.device.as_str()), (1300, 500, ""));
    assert_eq!((settings.handshakes.try_interval, settings.handshakes.retries), (Duration::from_millis(100), 10));
    assert_eq!(settings.lighthouse_interval, Some(Duration::from_secs(10)));
    assert_eq!(settings.firewall.tcp_timeout, Duration::from_secs(720));
    assert_eq!(settings.static_hosts.cadence, Duration::from_secs(30));
    assert_eq!(settings.static_hosts.lookup_timeout, Duration::from_millis(250));
    assert!(settings.disconnect_invalid && !settings.punchy.punch && settings.firewall.inbound.is_empty());
    assert_eq!(settings.routines, 1);
}

#[test]
fn every_setting_is_read() {
    let settings = settings(
        "static_host_map: {'10.42.0.1': ['203.0.113.7:4242', 'lh.example.com:4243'], fd77::1: '[2001:db8::1]:1'}
static_map: {cadence: 1m, network: ip, lookup_timeout: 1s}
cipher: chachapoly
lighthouse: {hosts: ['10.42.0.1'], interval: 0, advertise_addrs: ['192.0.2.9:0']}
listen: {host: '[::]', port: '4242', read_buffer: 1000, write_buffer: 0, send_recv_error: private,
  accept_recv_error: false, udp_offloads: no, batch: 128}
routines: 2
punchy: {punch: y, respond: true, delay: 2s, respond_delay: 3s}
tun: {disabled: true, dev: neb1, mtu: 1400, tx_queue: 100, drop_local_broadcast: true, drop_multicast: true,
  use_offloads: false}
handshakes: {try_interval: 50ms, retries: 20}
timers: {connection_alive_interval: 3, pending_deletion_interval: 4}
preferred_ranges: ['172.16.0.0/24', nonsense]
firewall: {default_local_cidr_any: true, conntrack: {tcp_timeout: 1m, udp_timeout: 2m, default_timeout: 3m}}
pki: ~
logging: {level: WARNING, format: json, disable_timestamp: true}",
    );
    let lighthouse: IpAddr = "10.42.0.1".parse().unwrap();
    assert_eq!(
        settings.static_hosts.entries[&lighthouse],
        vec![
            HostTarget::Address("203.0.113.7:4242".parse().unwrap()),
            HostTarget::Name { host: "lh.example.com".into(), port: 4243 }
        ]
    );
    assert_eq!(settings.static_hosts.entries.len(), 2);
    assert_eq!(settings.static_hosts.family, NameFamily::Both);
    assert_eq!(settings.cipher, Cipher::ChaCha20Poly1305);
    assert_eq!((settings.lighthouses, settings.lighthouse_interval), (vec![lighthouse], None));
    assert_eq!(settings.advertise, vec![HostTarget::Address("192.0.2.9:0".parse().unwrap())]);
    assert_eq!(
        settings.listen,
        Listen {
            host: "::".into(),
            port: 4242,
            read_buffer: Some(1000),
            write_buffer: Some(0),
            so_mark: 0,
            offloads: false,
            send_recv_error: RecvErrorPolicy::Private,
            accept_recv_error: RecvErrorPolicy::Never,
        }
    );
    assert_eq!(settings.routines, 2);
    assert!(settings.punchy.punch && settings.punchy.respond);
    assert_eq!(
        (settings.punchy.delay, settings.punchy.respond_delay),
        (Duration::from_secs(2), Duration::from_secs(3))
    );
    assert_eq!(
        settings.tun,
        TunSettings {
            disabled: true,
            device: "neb1".into(),
            mtu: 1400,
            tx_queue: 100,
            offloads: false,
            drop_local_broadcast: true,
            drop_multicast: true,
            routes: Routes::default(),
            follow_system_routes: false,
            system_routes_buffer: 0,
        }
    );
    assert_eq!((settings.handshakes.try_interval, settings.handshakes.retries), (Duration::from_millis(50), 20));
    assert_eq!(settings.timers.pending_deletion_interval, Duration::from_secs(4));
    assert_eq!(settings.preferred_ranges.len(), 1);
    assert!(settings.firewall.default_local_cidr_any);
    assert_eq!(settings.firewall.default_timeout, Duration::from_secs(180));
    assert_eq!(settings.logging, Logging { level: LogLevel::Warn, format: LogFormat::Json, disable_timestamp: true });
    assert!(settings.remarks.iter().any(|w| w.text.contains("nonsense")), "{:?}", settings.remarks);
}

#[test]
fn the_same_configuration_as_json_means_the_same() {
    let json = serde_json::json!({"listen": {"port": 4242}, "tun": {"mtu": "1400"}, "punchy": true});
    let from_json = Settings::read_without_pki(&Value::from(&json)).unwrap();
    let from_yaml = settings("listen: {port: 4242}\ntun: {mtu: '1400'}\npunchy: true");
    assert_eq!(format!("{from_json:?}"), format!("{from_yaml:?}"));
    assert!(from_json.punchy.punch);
    assert_eq!(from_json.tun.mtu, 1400);
}

#[test]
fn keys_without_effect_and_unknown_keys_are_named() {
    let warnings = settings(
        "relay: {am_relay: true, use_relays: true}
tun: {unsafe_routes: [{route: 192.168.0.0/16, via: 10.42.0.1}], routes: , mtu: 1300, use_system_route_table: true}
lighthouse: {serve_dns: true}
sshd: {enabled: true}
listen: {prot: 4242}
nonsense: {deeper: 1}",
    )
    .remarks
    .iter()
    .map(|remark| format!("{remark}\n"))
    .collect::<String>();
    for expected in [
        "DNS server refusing to run because this host is not a lighthouse",
        "sshd.enabled is not supported",
        "unknown key listen.prot",
        "unknown key nonsense",
    ] {
        assert!(warnings.contains(expected), "{expected} not in\n{warnings}");
    }
    for silent in ["relay", "tun."] {
        assert!(!warnings.contains(silent), "{silent} in\n{warnings}");
    }
}

#[test]
fn relays_are_read_and_an_entry_that_is_no_address_is_skipped() {
    let settings = settings("relay: {relays: [10.42.0.9, nonsense, '::ffff:10.42.0.8'], use_relays: n}");
    let expected: [IpAddr; 2] = ["10.42.0.9", "10.42.0.8"].map(|text| text.parse().unwrap());
    assert_eq!(settings.relay.relays, expected);
    assert!(!settings.relay.use_relays && !settings.relay.am_relay);
    assert!(settings.remarks.iter().any(|warning| warning.text.contains("nonsense")), "{:?}", settings.remarks);
}

#[test]
fn a_relay_is_told_that_its_own_relays_are_not_used() {
    let settings = settings("relay: {am_relay: true, relays: [10.42.0.9]}");
    assert!(settings.relay.am_relay && settings.relay.use_relays);
    assert!(settings.remarks.iter().any(|warning| warning.text.contains("am_relay is true")), "{:?}", settings.remarks);
}

#[test]
fn when_tunnels_are_dropped_and_moved_can_be_set() {
    let defaults = settings("tunnels: {inactivity_timeout: 5m}").timers;
    assert_eq!(defaults, nebula_core::config::Timers::default(), "inactive tunnels stay unless drop_inactive is set");
    let timers = settings(
        "tunnels: {drop_inactive: true, inactivity_timeout: 5m}
counters: {try_promote: 7, requery_every_packets: 0}
timers: {requery_wait_duration: 3s}",
    )
    .timers;
    assert_eq!(timers.inactivity_timeout, Some(Duration::from_secs(300)));
    assert_eq!((timers.try_promote.map(u64::from), timers.requery_every), (Some(7), None));
    assert_eq!(timers.requery_wait, Duration::from_secs(3));
    let timers = settings("tunnels: {drop_inactive: true}").timers;
    assert_eq!(timers.inactivity_timeout, Some(Duration::from_secs(600)));
}

#[test]
fn allow_lists_are_read_with_yes_and_no_but_no_other_booleans() {
    let settings = settings(
        "lighthouse: {remote_allow_list: {0.0.0.0/0: false, 10.0.0.0/8: yes, 10.1.0.0/16: n},
          remote_allow_ranges: {10.42.0.0/16: {192.168.0.0/16: true}},
          local_allow_list: {interfaces: {tun.*: false, 'docker.*': no}, '10.0.0.0/8': true}}",
    );
    let list = |rules: &[(&str, bool)]| {
        let rules = rules.iter().map(|(prefix, allowed)| (prefix.parse().unwrap(), *allowed));
        nebula_core::config::AllowList::new(rules).unwrap()
    };
    let everybody = list(&[("0.0.0.0/0", false), ("10.0.0.0/8", true), ("10.1.0.0/16", false)]);
    let range = ("10.42.0.0/16".parse().unwrap(), list(&[("192.168.0.0/16", true)]));
    assert_eq!(settings.remote_allow, nebula_core::config::RemoteAllowList::new(everybody, [range]));
    assert_eq!(settings.local_allow.addresses, list(&[("10.0.0.0/8", true)]));
    let interfaces = &settings.local_allow.interfaces;
    assert_eq!(["tun0", "docker0", "eth0"].map(|name| interfaces.allows(name)), [false, false, true]);
    assert_eq!(settings.remarks.iter().filter(|r| r.text.contains("allow")).count(), 0);
}

#[test]
fn calculated_remotes_are_read_by_range_with_ports_as_numbers_or_text() {
    let settings = settings(
        "lighthouse: {calculated_remotes: {10.42.0.0/16: [{mask: 192.168.1.9/16, port: 4242}, {mask: 172.16.0.0/12, port: '1'}],
          'fd00::/64': [{mask: '2001:db8::/64', port: 65535}], 10.43.0.0/16: []}}
punchy: {target_all_remotes: true}",
    );
    let guess = |mask: &str, port| nebula_core::config::Calculation { mask: mask.parse().unwrap(), port };
    let expected = nebula_core::config::CalculatedRemotes::new([
        ("10.42.0.0/16".parse().unwrap(), vec![guess("192.168.1.9/16", 4242), guess("172.16.0.0/12", 1)]),
        ("fd00::/64".parse().unwrap(), vec![guess("2001:db8::/64", 65535)]),
        ("10.43.0.0/16".parse().unwrap(), Vec::new()),
    ]);
    assert_eq!(settings.calculated_remotes, expected.unwrap());
    assert!(settings.punchy.target_all_remotes);
    assert_eq!(settings.remarks.iter().filter(|r| r.text.contains("remotes")).count(), 0);
}

#[test]
fn a_mistake_in_calculated_remotes_refuses_to_start_in_the_words_of_go() {
    for (ranges, expected) in [
        ("1", "config `lighthouse.calculated_remotes` has invalid type: int"),
        ("{x: []}", "config `lighthouse.calculated_remotes` has invalid CIDR: x"),
        (
            "{10.0.0.0/8: {}}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': \
             calculated_remotes entry has invalid type: map[string]interface {}",
        ),
        (
            "{10.0.0.0/8: [1]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid type: int",
        ),
        (
            "{10.0.0.0/8: [{port: 1}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: missing mask",
        ),
        (
            "{10.0.0.0/8: [{mask: 1, port: 1}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid mask (type int): 1",
        ),
        (
            "{10.0.0.0/8: [{mask: 10.0.0.1, port: 1}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid mask: 10.0.0.1",
        ),
        (
            "{10.0.0.0/8: [{mask: '::/0', port: 1}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid mask: ::/0 for cidr: 10.0.0.0/8",
        ),
        (
            "{10.0.0.0/8: [{mask: 10.0.0.0/8}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: missing port",
        ),
        (
            "{10.0.0.0/8: [{mask: 10.0.0.0/8, port: x}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid port: x",
        ),
        (
            "{10.0.0.0/8: [{mask: 10.0.0.0/8, port: 1.5}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid port (type float64): 1.5",
        ),
        (
            "{10.0.0.0/8: [{mask: 10.0.0.0/8, port: 65536}]}",
            "config 'lighthouse.calculated_remotes.10.0.0.0/8': calculated_remotes entry: invalid port: 65536",
        ),
    ] {
        let tree = parse(&format!("lighthouse: {{calculated_remotes: {ranges}}}")).unwrap();
        let refused = Settings::read_without_pki(&tree).unwrap_err().refused.remove(0);
        assert!(refused.cause.starts_with(expected), "{ranges}: {}", refused.cause);
    }
}

#[test]
fn the_cap_of_new_handshakes_can_be_set_and_lifted() {
    let cap = |text: &str| settings(text).handshakes.max_new_per_second.map(u32::from);
    assert_eq!(cap("{}"), Some(4000));
    assert_eq!(cap("handshakes: {max_new_per_second: 10}"), Some(10));
    assert_eq!(cap("handshakes: {max_new_per_second: 0}"), None);
    assert_eq!(cap("handshakes: {max_new_per_second: -1}"), Some(4000), "with a warning");
}

#[test]
fn a_mistake_in_an_allow_list_refuses_to_start_in_the_words_of_go() {
    for (lists, expected) in [
        ("remote_allow_list: 1", "config `lighthouse.remote_allow_list` has invalid type: int"),
        (
            "remote_allow_list: {10.0.0.0/8: 'true'}",
            "config `lighthouse.remote_allow_list` has invalid value (type string): true",
        ),
        ("remote_allow_list: {10.0.0.0/8: 1}", "config `lighthouse.remote_allow_list` has invalid value (type int): 1"),
        ("remote_allow_list: {x: true}", "config `lighthouse.remote_allow_list` has invalid CIDR: x."),
        (
            "local_allow_list: {10.0.0.0/8: true, 10.1.0.0/16: false}",
            "config `lighthouse.local_allow_list` contains both true and false rules, but no default set for 0.0.0.0/0",
        ),
        (
            "remote_allow_ranges: {10.0.0.0/8: {'::1/128': y, '::2/128': n}}",
            "config `lighthouse.remote_allow_ranges.10.0.0.0/8` contains both true and false rules, \
             but no default set for ::/0",
        ),
        ("remote_allow_ranges: {x: {}}", "config `lighthouse.remote_allow_ranges` has invalid CIDR: x."),
        (
            "local_allow_list: {interfaces: x}",
            "config `lighthouse.local_allow_list.interfaces` is invalid (type string)",
        ),
        (
            "local_allow_list: {interfaces: {a: true, b: false}}",
            "config `lighthouse.local_allow_list.interfaces` values must all be the same true/false value",
        ),
        (
            "local_allow_list: {interfaces: {'[': true}}",
            "config `lighthouse.local_allow_list.interfaces` has invalid key: [:",
        ),
    ] {
        let text = refusal(&format!("lighthouse: {{{lists}}}"));
        assert!(text.contains(expected), "{lists}: {text}");
    }
}

#[test]
fn mistakes_that_stop_the_start_say_where_they_are() {
    for (text, expected) in [
        ("cipher: des", "unknown cipher"),
        ("lighthouse: {am_lighthouse: true}", "no port number is set"),
        ("lighthouse: {hosts: [10.42.0.1]}", "lighthouse 10.42.0.1 does not have a static_host_map entry"),
        ("lighthouse: {hosts: [x]}", "entry 1"),
        ("static_host_map: {x: 'a:1'}", "static_host_map entry x"),
        ("static_host_map: {10.42.0.1: 203.0.113.7}", "missing port"),
        ("static_host_map: {10.42.0.1: '::1:4242'}", "brackets"),
        ("static_map: {cadence: 10}", "static_map.cadence"),
        ("static_map: {cadence: 0s}\nstatic_host_map: {10.42.0.1: 'h:4242'}", "static_map.cadence"),
        ("static_map: {network: ip5}", "static_map.network"),
        ("listen: {port: 70000}", "listen.port"),
        ("handshakes: {try_interval: 0s}", "handshakes.try_interval"),
        ("firewall: {conntrack: {tcp_timeout: 0s}}", "tcp_timeout must be above zero"),
        ("firewall: {conntrack: {udp_timeout: -1s}}", "udp_timeout must be above zero"),
        ("logging: {level: loud}", "not a valid logging level"),
        ("pki: {ca: x}", "pki cannot be set here"),
    ] {
        let error = refusal(text);
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn what_go_accepts_without_effect_is_accepted_with_a_remark() {
    for (text, expected) in [
        ("static_host_map: {10.42.0.1: 'h:70000'}", "static_host_map entry 10.42.0.1: h:70000 has no valid UDP port"),
        ("static_map: {cadence: 0s}", "static_map.cadence must be a duration above zero"),
        ("firewall: {inbound: [{port: 1, proto: tcp, ca_sha: abc}]}", "ca_sha is not a fingerprint"),
        ("static_host_map: [10.42.0.1]", "static_host_map is a list, not a map"),
    ] {
        let settings = settings(text);
        let found = settings.remarks.iter().any(|remark| remark.text.contains(expected));
        assert!(found, "{text}: {:?}", settings.remarks);
        assert!(settings.firewall.inbound.is_empty(), "a rule of an impossible CA must match nobody");
    }
}

#[test]
fn firewall_rules_are_refused_in_the_words_of_go() {
    for (rule, expected) in [
        ("{port: any, proto: icmpv6, host: any}", "proto was not understood; `icmpv6`"),
        ("{port: any, host: any}", "proto was not understood; ``"),
        ("{proto: tcp, host: any}", "port was not a number; ``"),
        ("{port: 70000, proto: tcp, host: any}", "port out of range [0,65535]; `70000`"),
        ("{port: 90-80, proto: tcp, host: any}", "`start port was lower than end port`"),
        ("{port: 1-, proto: tcp, host: any}", "port appears to be a range but could not be parsed; `1-`"),
        ("{port: 1, code: 1, proto: tcp, host: any}", "only one of port or code should be provided"),
        ("{port: 1, proto: tcp}", "at least one of host, group, cidr, local_cidr, ca_name, or ca_sha must be provided"),
        ("{port: 1, proto: tcp, group: [a, b]}", "group should contain a single value"),
        (
            "{port: 1, proto: tcp, group: a, groups: [b]}",
            "only one of group or groups should be defined, both provided",
        ),
        ("{port: 1, proto: tcp, cidr: 10.0.0.1}", "cidr did not parse;"),
        ("{port: 1, proto: tcp, local_cidr: x}", "local_cidr did not parse;"),
        ("just text", "could not parse rule"),
    ] {
        let ok = "{port: any, proto: any, host: any}";
        let error = refusal(&format!("firewall: {{inbound: [{ok}, {rule}]}}"));
        let expected = format!("firewall.inbound rule #1; {expected}");
        assert!(error.contains(&expected), "{rule}: {error}\nexpected {expected}");
    }
    assert!(
        refusal("firewall: {outbound: {}}").contains("firewall.outbound failed to parse, should be an array of rules")
    );
}

#[test]
fn firewall_rules_of_every_form_are_read() {
    let policy = settings(
        "firewall:
  outbound: [{port: any, proto: any, host: any}]
  inbound:
    - {port: 443, proto: tcp, groups: [web, 7]}
    - {port: 100-200, proto: udp, group: dns, cidr: 10.0.0.0/8, local_cidr: any}
    - {port: 0-5, proto: any, host: a.b}
    - {port: fragment, proto: any, cidr: any}
    - {port: any, proto: icmp, groups: any}
    - {code: 8, proto: tcp, ca_name: prod, ca_sha: '0101010101010101010101010101010101010101010101010101010101010101'}
    - {port: 0, proto: tcp, group: [one]}",
    )
    .firewall;
    let [first, second, third, fourth, fifth, sixth, seventh] = policy.inbound.as_slice() else { panic!() };
    assert_eq!((first.protocol, first.port), (Protocol::Tcp, PortRange::Range(443, 443)));
    assert_eq!(first.groups, ["web", "7"]);
    assert_eq!((second.protocol, second.port), (Protocol::Udp, PortRange::Range(100, 200)));
    assert_eq!(second.cidr, Some(Cidr::Prefix("10.0.0.0/8".parse().unwrap())));
    assert_eq!(second.local_cidr, Some(Cidr::Any));
    assert_eq!((third.port, third.host.as_deref()), (PortRange::Any, Some("a.b")));
    assert_eq!((fourth.port, fourth.cidr), (PortRange::Fragment, Some(Cidr::Any)));
    assert_eq!((fifth.protocol, fifth.groups.as_slice()), (Protocol::Icmp, ["any".to_owned()].as_slice()));
    assert_eq!(sixth.port, PortRange::Range(8, 8));
    assert_eq!((sixth.ca_name.as_deref(), sixth.ca_sha.map(|sha| sha.0)), (Some("prod"), Some([1; 32])));
    assert_eq!((seventh.port, seventh.groups.as_slice()), (PortRange::Any, ["one".to_owned()].as_slice()));
    assert_eq!(policy.outbound, [nebula_core::firewall::Rule::any()]);
}

#[test]
fn names_are_looked_up_into_the_places_they_stand_in() {
    let hosts = settings("static_host_map: {10.42.0.1: ['a:1', '192.0.2.1:2', 'b:3']}").static_hosts;
    assert_eq!(hosts.names(), ["a", "b"]);
    let answers = [("a".to_owned(), vec!["192.0.2.8".parse().unwrap(), "2001:db8::8".parse().unwrap()])].into();
    let peer: IpAddr = "10.42.0.1".parse().unwrap();
    let texts: Vec<_> = hosts.endpoints(&answers)[&peer].iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["192.0.2.8:1", "[2001:db8::8]:1", "192.0.2.1:2"]);
}

#[test]
fn files_of_a_directory_merge_in_order_of_their_paths() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    write("10.yml", "relay: {am_relay: true}\nlist: [old]\ntun: {mtu: 1, dev: a}\ncipher: aes");
    write("99.yaml", "list: [new]\ntun: {mtu: 2}");
    write("sub/50.yml", "tun: {mtu: 3}\nrelay: {am_relay: false}\ncipher: ''");
    write("ignored.txt", "tun: {mtu: 9}");
    let (tree, warnings) = load(folder.path()).unwrap();
    assert_eq!(tree.at("tun.mtu"), Some(&Value::Int(3)));
    assert_eq!(tree.at("tun.dev"), Some(&Value::String("a".into())));
    assert_eq!(tree.at("list"), Some(&Value::List(vec![Value::String("new".into()), Value::String("old".into())])));
    // A later zero value does not win; that is Go's rule, and it is said.
    assert_eq!(tree.at("relay.am_relay"), Some(&Value::Bool(true)));
    assert_eq!(tree.at("cipher"), Some(&Value::String("aes".into())));
    assert_eq!(warnings.len(), 2, "{warnings:?}");

    write("zz.yml", "list: {a: 1}");
    assert!(load(folder.path()).unwrap_err().to_string().contains("list"));
}

#[test]
fn nothing_to_read_is_one_error_whatever_the_cause() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("missing.yml")] {
        let error = load(&path).unwrap_err().to_string();
        assert_eq!(error, format!("no config files found at {}", path.display()));
    }
    let any_name = folder.path().join("conf.txt");
    std::fs::write(&any_name, "tun: {mtu: 7}").unwrap();
    assert_eq!(load(&any_name).unwrap().0.at("tun.mtu"), Some(&Value::Int(7)));
}

const NOW: i64 = 1_800_000_000;

struct Network {
    ca: Certificate,
    ca_key: SigningKey,
}

impl Network {
    fn new(not_after: i64) -> Self {
        let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = template("ca", NOW - 1000, not_after, ca_key.public_key(), &[]).self_sign(&ca_key).unwrap();
        Self { ca, ca_key }
    }

    /// PEM of certificate and key.
    fn host(&self, not_after: i64) -> (String, String) {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let host = template("host", NOW - 900, not_after, key.public_key(), &["10.42.0.7/16"]);
        (host.sign(&self.ca, &self.ca_key).unwrap().to_pem(), key.to_pem().to_string())
    }
}

fn template(name: &str, not_before: i64, not_after: i64, public_key: Vec<u8>, networks: &[&str]) -> Template {
    Template {
        version: Version::V2,
        curve: Curve::Curve25519,
        name: name.to_owned(),
        networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
        unsafe_networks: Vec::new(),
        groups: Vec::new(),
        not_before,
        not_after,
        public_key,
    }
}

fn with_pki(ca: &str, certificate: &str, key: &str, more: &str) -> Result<Settings, Refusals> {
    let inline = |text: &str| serde_json::Value::from(text).to_string();
    let text = format!("pki: {{ca: {}, cert: {}, key: {}{more}}}", inline(ca), inline(certificate), inline(key));
    Settings::read(&tree(&text), NOW)
}

#[test]
fn credentials_are_read_inline_and_from_files() {
    let network = Network::new(NOW + 1000);
    let (certificate, key) = network.host(NOW + 500);
    let inline = with_pki(&network.ca.to_pem(), &certificate, &key, "").unwrap();
    assert_eq!(inline.pki.unwrap().identity.primary().name(), "host");

    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (ca, cert, key_file) =
        (file("ca.crt", &network.ca.to_pem()), file("host.crt", &certificate), file("host.key", &key));
    assert!(with_pki(&ca, &cert, &key_file, "").unwrap().remarks.iter().all(|w| !w.text.contains("pki")));
}

#[test]
fn wrong_credentials_are_refused_with_the_cause() {
    let network = Network::new(NOW + 1000);
    let ca = network.ca.to_pem();
    let (certificate, key) = network.host(NOW + 500);
    let (_, other_key) = network.host(NOW + 500);
    let (old_certificate, old_key) = network.host(NOW - 1);
    let old_ca = Network::new(NOW - 1).ca.to_pem();
    for (ca, certificate, key, more, expected) in [
        (ca.as_str(), certificate.as_str(), "", "", "no pki.key path or PEM data provided"),
        (&ca, "", &key, "", "no pki.cert path or PEM data provided"),
        ("", &certificate, &key, "", "no pki.ca path or PEM data provided"),
        (&ca, &certificate, "/nonexistent/k", "", "unable to read pki.key file /nonexistent/k: open /nonexistent/k"),
        (&ca, &certificate, "pkcs11:x", "", "pkcs11"),
        (&ca, &certificate, &other_key, "", "private key is not a pair with public key in nebula cert"),
        (&ca, &old_certificate, &old_key, "", "nebula certificate for this host is expired"),
        (&old_ca, &certificate, &key, "", "no valid CA certificates present"),
        (&certificate, &certificate, &key, "", "certificate is not a CA"),
        (&ca, &ca, &key, "", "no networks encoded in certificate"),
        (&ca, &certificate, &key, ", initiating_version: 1", "can not use pki.initiating_version 1 without a v1"),
        (&ca, &certificate, &key, ", initiating_version: 3", "unknown pki.initiating_version: 3"),
    ] {
        let error = with_pki(ca, certificate, key, more).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\nexpected {expected}");
        assert!(!error.contains("PRIVATE KEY-----"), "{error}");
    }
}

#[test]
fn an_unrelated_ca_is_a_warning_and_a_blocklist_may_be_one_scalar() {
    let network = Network::new(NOW + 1000);
    let (certificate, key) = network.host(NOW + 500);
    let unrelated = with_pki(&Network::new(NOW + 1000).ca.to_pem(), &certificate, &key, "").unwrap();
    assert!(unrelated.remarks.iter().any(|w| w.text.contains("not valid under pki.ca")), "{:?}", unrelated.remarks);

    let blocked = Certificate::from_pem(certificate.as_bytes()).unwrap();
    let more = format!(", blocklist: {}", blocked.fingerprint());
    let settings = with_pki(&network.ca.to_pem(), &certificate, &key, &more).unwrap();
    assert!(settings.pki.unwrap().trust.verify(blocked, NOW).is_err());
}

#[test]
fn a_printed_tree_reads_back_as_itself() {
    let text =
        "a: {b: [1, {c: 'x: y', d: [[2], []]}, 'yes'], e: {}}\nf: \"line\\nbreak\"\ng: ~\nh: '0755'\n'10.0.0.1': -1.5";
    let tree = tree(text);
    assert_eq!(parse(&tree.to_yaml()).unwrap(), tree, "{}", tree.to_yaml());
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
        if let Ok(tree) = parse(&text) {
            let _ = Settings::read_without_pki(&tree);
        }
    }

    #[test]
    fn any_yaml_shaped_text_is_read_or_refused(
        lines in prop::collection::vec("( ){0,4}(- )?(listen|tun|firewall|inbound|port|'1'|&a|\\*a|<<|\\{|\\[)(: ?(1-|0x1|any|~|\\*a|&a x|\\[|-5s|1e999|))?", 0..12)
    ) {
        if let Ok(tree) = parse(&lines.join("\n")) {
            let _ = Settings::read_without_pki(&tree);
            prop_assert!(parse(&tree.to_yaml()).is_ok());
        }
    }
}

#[test]
fn refused_packets_are_answered_if_configured_and_nonsense_means_drop() {
    use nebula_core::firewall::Action;
    let actions = |text: &str| {
        let settings = settings(text);
        (
            settings.firewall.inbound_action,
            settings.firewall.outbound_action,
            settings.remarks.iter().map(|r| r.text.clone()).collect::<Vec<_>>().join("\n"),
        )
    };
    let (inbound, outbound, warnings) = actions("firewall: {inbound_action: reject, outbound_action: drop}");
    assert_eq!((inbound, outbound), (Action::Reject, Action::Drop));
    assert!(!warnings.contains("action"), "{warnings}");
    let (_, outbound, warnings) = actions("firewall: {outbound_action: shout}");
    assert_eq!(outbound, Action::Drop);
    assert!(warnings.contains("invalid firewall.outbound_action: shout, defaulting to drop"), "{warnings}");
}

#[test]
fn the_number_of_flows_can_be_limited() {
    let flows = |text: &str| settings(text).firewall.max_flows;
    let default = flows("{}");
    assert_eq!(flows("firewall: {conntrack: {max_connections: 100000}}"), 100_000);
    assert_eq!(flows("firewall: {conntrack: {max_connections: 0}}"), default);
    assert_eq!(flows("firewall: {conntrack: {max_connections: -1}}"), default);
}

#[test]
fn the_device_is_large_enough_for_every_route() {
    let tun = |text: &str| settings(&format!("tun: {text}")).tun;
    assert_eq!(tun("{mtu: 1300}").device_mtu(), 1300);
    let routes = "[{route: 10.42.1.0/24, mtu: 8000}, {route: 10.42.2.0/24, mtu: 600}]";
    assert_eq!(tun(&format!("{{mtu: 1300, routes: {routes}}}")).device_mtu(), 8000);
    let routes = "[{route: 192.168.0.0/16, via: 10.42.0.1, mtu: 2000}]";
    assert_eq!(tun(&format!("{{mtu: 1300, unsafe_routes: {routes}}}")).device_mtu(), 2000);
}
