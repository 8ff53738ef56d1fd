//! A table of small configurations about the forms of YAML: keys that are not text, in every section; keys written
//! twice; numbers and words; tabs, directives, anchors, aliases and merges; deep nesting.

use super::bench::{Bench, Verdict};
use super::documents::DOCUMENTS;

/// Keys in every form, most of them not text.
const KEYS: &[&str] = &[
    "1",
    "0x1",
    "0o1",
    "01",
    "0b1",
    "1_0",
    "1.5",
    "1e3",
    ".5",
    ".inf",
    ".nan",
    "-1",
    "+1",
    "true",
    "True",
    "yes",
    "on",
    "y",
    "null",
    "~",
    "Null",
    "2001-01-01",
    "2001-12-14t21:59:43.10-05:00",
    "!!str 1",
    "!!int \"1\"",
    "\"1\"",
    "'1'",
    "!!binary aGk=",
    "!custom x",
    "[a]",
    "{a: b}",
    "? [a, b]\n  ",
    "\"\"",
    "<<",
    "\"<<\"",
    "=",
    "\"a b\"",
    "a b",
    "12:30",
    "1:2",
    "0o8",
    "09",
    "1__0",
    "!!null \"\"",
    "!!bool yes",
    "!!float 1",
    "!!timestamp 2001-01-01",
    "&k x",
    "&k 1",
    "1e",
    "0x",
    "-",
    "!",
];

/// Mappings, one for each reader of a section or an entry; `@` marks the place of a key.
const PLACES: &[&str] = &[
    "@: x",
    "listen: {port: 1, @: x}",
    "tun:\n  mtu: 1300\n  @: x",
    "pki: {ca: /etc/nebula/ca.crt, cert: /etc/nebula/host.crt, key: /etc/nebula/host.key, @: x}",
    "punchy: {punch: true, @: x}",
    "static_host_map: {\"10.42.0.9\": [\"192.0.2.1:4242\"], @: [\"192.0.2.1:4242\"]}",
    "static_host_map: {@: [\"192.0.2.1:4242\"]}",
    "lighthouse: {am_lighthouse: false, interval: 10, @: x}",
    "lighthouse: {am_lighthouse: true, serve_dns: true, dns: {host: 0.0.0.0, @: x}}",
    "lighthouse: {remote_allow_list: {10.0.0.0/8: true, @: true}}",
    "lighthouse: {remote_allow_list: {@: true}}",
    "lighthouse: {local_allow_list: {interfaces: {@: true}}}",
    "lighthouse: {local_allow_list: {interfaces: {eth: true}, @: true}}",
    "lighthouse: {remote_allow_ranges: {10.42.0.0/24: {10.0.0.0/8: true, @: true}}}",
    "lighthouse: {remote_allow_ranges: {@: {10.0.0.0/8: true}}}",
    "lighthouse: {calculated_remotes: {@: [{mask: 192.168.0.0/16, port: 4242}]}}",
    "lighthouse: {calculated_remotes: {10.42.0.0/16: [{mask: 192.168.0.0/16, port: 4242, @: x}]}}",
    "firewall: {inbound: [{port: any, proto: any, host: any, @: x}]}",
    "firewall: {inbound: [{port: any, proto: any, host: any}], @: x}",
    "firewall: {conntrack: {tcp_timeout: 12m, @: x}}",
    "tun: {routes: [{mtu: 1300, route: 10.42.1.0/24, @: x}]}",
    "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: 10.42.0.9, @: x}]}",
    "tun: {unsafe_routes: [{route: 192.168.1.0/24, via: [{gateway: 10.42.0.9, @: x}]}]}",
    "sshd: {enabled: false, @: x}",
    "stats: {type: none, @: x}",
    "logging: {level: info, @: x}",
    "x-mine: {a: b, @: x}",
];

/// Two keys that are one, or look like one.
const PAIRS: &[(&str, &str)] = &[
    ("1", "0x1"),
    ("1", "\"1\""),
    ("a", "\"a\""),
    ("'a'", "\"a\""),
    ("a", "!!str a"),
    ("1", "1.0"),
    ("1", "01"),
    ("true", "True"),
    ("~", "null"),
    ("null", "\"null\""),
    ("~", "~"),
    ("", "~"),
    ("a", "A"),
    ("[a]", "[a]"),
    ("[a]", "[b]"),
    ("{a: b}", "{c: d}"),
    ("[a]", "{a: b}"),
    ("<<", "<<"),
    ("&a k", "k"),
    ("\"\\x61\"", "a"),
    ("1.5", "1.50"),
    ("0x1", "0X1"),
    ("1_0", "10"),
    (".nan", ".nan"),
    ("2001-01-01", "2001-01-01"),
    ("2001-01-01", "\"2001-01-01\""),
];

/// Scalars in every form.
const VALUES: &[&str] = &[
    "1",
    "0x10",
    "0o17",
    "017",
    "08",
    "0b11",
    "1_000",
    "_1",
    "1_",
    "+1",
    "-0",
    "1.0",
    "1.",
    ".5",
    "1e3",
    "1E3",
    "1e+3",
    ".inf",
    "-.INF",
    ".NaN",
    "0x",
    "0x1G",
    "1:30",
    "2001-01-01",
    "true",
    "True",
    "TRUE",
    "tRUE",
    "yes",
    "Yes",
    "on",
    "off",
    "n",
    "y",
    "null",
    "Null",
    "NULL",
    "~",
    "",
    "\"1\"",
    "'1'",
    "!!str 1",
    "!!int \"7\"",
    "99999999999",
    "18446744073709551616",
    "9223372036854775808",
    "-9223372036854775809",
    "0x7fffffffffffffff",
    "0xffffffffffffffff",
    "1e400",
    "0.1e1",
    "0o",
    "0b",
    "0b2",
    "0O17",
    "0X10",
    "0B1",
    "1 000",
    "1,000",
    "=",
    "<<",
    "-",
    "- 1",
    "1#",
    "1 #x",
    "\"\\x31\"",
    "|\n  1",
    ">-\n  1",
];

/// Keys of which a value decides whether the configuration is refused, or panics.
const READERS: &[&str] = &[
    "listen:\n  port",
    "punchy:\n  punch",
    "firewall:\n  inbound_action",
    "cipher",
    "handshakes:\n  try_interval",
    "logging:\n  level",
    "stats:\n  type",
];

/// Levels of nesting, below and above our limit.
const DEPTHS: &[usize] = &[10, 64, 100, 200, 300, 1000, 9999];

const CREDENTIALS: &str = "pki: {ca: /etc/nebula/ca.crt, cert: /etc/nebula/host.crt, key: /etc/nebula/host.key}\n";

/// The table, each text once.
fn table() -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for (place, key) in PLACES.iter().flat_map(|place| KEYS.iter().map(move |key| (place, key))) {
        found.push(place.replace('@', key));
    }
    for (one, other) in PAIRS {
        found.push(format!("{one}: x\n{other}: y"));
        found.push(format!("tun:\n  {one}: 1\n  {other}: 2"));
        found.push(format!("x-mine: {{{one}: x, {other}: y}}"));
        found.push(format!("lighthouse: {{remote_allow_list: {{{one}: true, {other}: true}}}}"));
        found.push(format!("firewall: {{inbound: [{{port: any, proto: any, host: any, {one}: x, {other}: y}}]}}"));
    }
    for (reader, value) in READERS.iter().flat_map(|reader| VALUES.iter().map(move |value| (reader, value))) {
        found.push(format!("{reader}: {value}"));
    }
    found.extend(DOCUMENTS.iter().map(|text| (*text).to_owned()));
    for depth in DEPTHS.iter().copied() {
        found.push(format!("a: {}{}", "[".repeat(depth), "]".repeat(depth)));
        found.push(format!("a: {}{}", "{a: ".repeat(depth), "}".repeat(depth)));
        // A line is as long as its depth.
        let depth = depth.min(1000);
        found.push((0..depth).map(|level| format!("{}a:\n", " ".repeat(level))).collect());
        found.push(format!("a:\n{}1", "- ".repeat(depth)));
    }
    for length in [1000, 1100] {
        let key = "x".repeat(length);
        found.extend([
            format!("{key}: 1"),
            format!("\"{key}\": 1"),
            format!("? {key}\n: 1"),
            format!("a: {{{key}: 1}}"),
        ]);
    }
    for generations in [3, 5, 7] {
        let more = |level: usize| format!("a{level}: &a{level} [{}]\n", vec![format!("*a{}", level - 1); 9].join(","));
        let lists: String = (1..generations).map(more).collect();
        found.push(format!("a0: &a0 [x,x,x,x,x,x,x,x,x]\n{lists}"));
    }
    let mut found: Vec<String> = found.into_iter().map(with_credentials).collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// The text with good credentials, where it does not prevent that it is what it is about.
fn with_credentials(text: String) -> String {
    match text.as_str() {
        own if own.starts_with("pki:") => format!("{own}\n"),
        own if own.starts_with(['%', '-', '.', ' ', '\u{feff}']) => format!("{own}\n{CREDENTIALS}"),
        own => format!("{CREDENTIALS}{own}\n"),
    }
}

/// Go refuses them, and YAML 1.2 does not: `deviation-yaml-newer` in docs/migration.md.
const NEWER: &[&str] = &[
    "x: &\u{e9} 1\ny: *\u{e9}",
    "x: &a.b 1\ny: *a.b",
    "%YAML 1.2\n---\na: 1",
    "%YAML 1.3\n---\na: 1",
    "%FOO bar\n---\na: 1",
    "...\na: 1",
    "a:\n  -\t1",
    "a:\n  - \t1",
    "a:\n  -\tb: 1",
    "a:\n  - \tb: 1",
    "a: |\n  \tx",
    "a: >\n \tx\n",
    "? \ta\n: 1",
    "?\ta\n:\t1",
    "a:\n  b: 1\n\t\n  c: 2",
    "a: 1\n\t# c\nb: 2",
    "a: 1\n\t",
    "\t",
    "\t\n",
    "a: \"\\e\\a\\0\\_\\N\\L\\P\\ \\/\"",
    "a: x\u{2028}y",
    "a: [: 1]",
    "a: {: 1}",
    ": 1",
];

/// Go accepts them: `deviation-yaml-stricter` in docs/migration.md.
const STRICTER: &[&str] = &["x: &a k\n*a: 1", "a: 1\n%YAML 1.1\n---\nb: 1", "a: 1\n... x", "a: 1\n\u{feff}b: 2"];

/// The other part of `deviation-yaml-stricter`.
const TOO_DEEP: &str = "recursion limit exceeded";

#[test]
fn every_deliberate_difference_is_a_document_of_the_table() {
    let missing: Vec<_> = NEWER.iter().chain(STRICTER).filter(|text| !DOCUMENTS.contains(text)).collect();
    assert_eq!(missing, [] as [&&str; 0]);
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn go_and_ours_end_alike_on_99_of_100_forms_of_yaml() {
    let texts: Vec<_> = table().into_iter().map(|text| (text.clone(), text)).collect();
    let listed: Vec<String> = NEWER.iter().chain(STRICTER).map(|text| with_credentials((*text).to_owned())).collect();
    let (mut alike, mut panics, mut deliberate, mut failures) = (0, 0, 0, Vec::new());
    for (text, verdict) in Bench::judge_all(&texts) {
        match verdict {
            Verdict::Agreed => alike += 1,
            Verdict::GoPanics => panics += 1,
            Verdict::Differs(said) if said.contains(TOO_DEEP) || listed.iter().any(|listed| listed == text) => {
                deliberate += 1;
            }
            Verdict::Differs(said) => failures.push(format!("{text:?}: {said}")),
        }
    }
    let tried = texts.len();
    let figure = format!("{alike} of {tried} end alike, {deliberate} deliberately not, Go panics on {panics}");
    let counted = tried - deliberate - panics;
    assert!(tried >= 1000 && deliberate * 100 <= tried * 3, "{figure}");
    assert!(alike * 100 >= counted * 99, "{figure}; {} differ:\n{}", failures.len(), failures.join("\n"));
    eprintln!("{figure}; of others differ:\n{}", failures.join("\n"));
}
