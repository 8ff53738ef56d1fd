//! What a configuration means, and what prevents the start, in the cases in which YAML readers differ.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::config::{Cipher, Handshakes, RecvErrorPolicy};
use nebula_core::firewall::{Cidr, PortRange, Protocol};

use super::*;

mod credentials;
mod values;

fn tree(text: &str) -> Value {
    parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn settings(text: &str) -> Settings {
    Settings::read_without_pki(&tree(text)).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refusal(text: &str) -> String {
    Settings::read_without_pki(&tree(text)).map(|_| ()).unwrap_err().to_string()
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
            discovers_path_mtu: true,
            tx_queue: 100,
            offloads: false,
            drop_local_broadcast: true,
            drop_multicast: true,
            routes: Routes::default(),
            follow_system_routes: false,
            system_routes_buffer: 0,
            processors: Vec::new(),
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
        if cfg!(feature = "ssh") { "sshd.listen must be provided" } else { "sshd.enabled is not supported" },
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
        ("pki: {ca: x, post_quantum: require}", "pki cannot be set here"),
        ("pki: {post_quantum: requir}", "prefer, require or off"),
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
    // By Go's rule a zero value in a later file does not win; there is a remark about it.
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
fn the_tunnel_of_a_pod_holds_less_than_a_host_unless_it_is_told_otherwise() {
    let limits = |settings: Settings| {
        let Handshakes { max_pending, max_waiting_bytes, .. } = settings.handshakes;
        (max_pending, max_waiting_bytes, settings.firewall.max_flows)
    };
    let both = |text: &str| {
        let of_pod = Settings::read_for_pod(&tree(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
        [limits(settings(text)), limits(of_pod)]
    };
    assert_eq!(both("{}"), [(4096, 8 << 20, 1 << 18), (512, 2 << 20, 1 << 15)]);
    let said = "handshakes: {max_pending: 7, max_waiting_bytes: 70000}\nfirewall: {conntrack: {max_flows: 9}}";
    assert_eq!(both(said), [(7, 70_000, 9); 2]);
    assert_eq!(both("handshakes: {max_pending: 0}")[0], (4096, 8 << 20, 1 << 18), "with a warning");
}

#[test]
fn hosts_and_pods_examine_and_measure_their_paths_unless_they_are_told_otherwise() {
    let both = |text: &str| {
        let of_pod = Settings::read_for_pod(&tree(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
        [settings(text), of_pod].map(|settings| (settings.tun.path_mtu(), settings.measures_paths))
    };
    assert_eq!(both("{}"), [(Some(1300), true); 2]);
    assert_eq!(both("{tun: {path_mtu_discovery: false}, tunnels: {measure_paths: false}}"), [(None, false); 2]);
    assert_eq!(both("tun: {mtu: 8900}"), [(Some(8900), true); 2]);
}

#[test]
fn hosts_and_pods_record_flows_unless_they_are_told_otherwise() {
    let both = |text: &str| {
        let of_pod = Settings::read_for_pod(&tree(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
        [settings(text), of_pod].map(|settings| settings.flow_records)
    };
    assert_eq!(both("{}"), [192; 2]);
    assert_eq!(both("flows: {ring: 1000}"), [1000; 2]);
    assert_eq!(both("flows: {records: false, ring: 1000}"), [0; 2]);
    for wrong in ["15", "65537", "-1", "many"] {
        assert_eq!(both(&format!("flows: {{ring: {wrong}}}")), [192; 2], "{wrong}: with a warning");
    }
}

#[test]
fn the_tunnel_of_a_pod_has_no_console_and_says_so() {
    let text = "sshd: {enabled: true, listen: 127.0.0.1:2222, host_key: 7}";
    let of_pod = Settings::read_for_pod(&tree(text)).unwrap();
    let remarks: Vec<String> = of_pod.remarks.iter().map(ToString::to_string).collect();
    assert!(remarks.iter().any(|remark| remark.contains("in a pod, whose instance has no SSH console")), "{remarks:?}");
}

#[test]
fn the_number_of_flows_can_be_limited() {
    let flows = |text: &str| settings(text).firewall.max_flows;
    let default = flows("{}");
    assert_eq!(flows("firewall: {conntrack: {max_flows: 100000}}"), 100_000);
    assert_eq!(flows("firewall: {conntrack: {max_flows: 0}}"), default);
    assert_eq!(flows("firewall: {conntrack: {max_flows: -1}}"), default);
    // Files written for Go have this key, and Go has no limit.
    assert_eq!(flows("firewall: {conntrack: {max_connections: 1000}}"), default);
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
