//! Bytes that are no program, or a damaged one.
#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]

use std::net::IpAddr;

use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{
    Action, Block, ClusterNetworkPolicy, ClusterPeer, ClusterRule, ClusterTier, Direction, Labels, NamedPort,
    Namespaces, NetworkPolicy, Peer as RulePeer, PodSelector, PortMatch, Profile, Protocol, Rule, Selector,
};
use nebula_cni_policy::program::{Error, Identity, Layout, Peer, Program, Reason, Who};
use proptest::prelude::*;

const HEADER_LEN: usize = 56;
const SECTION_LEN: usize = 12;
const SECTIONS: usize = 14;

/// A program with records in each section but one: with runs, or with dense classes.
fn program(is_dense: bool) -> Vec<u8> {
    let mut cluster = Cluster::new();
    let mut own = None;
    for n in 0..40_u16 {
        let odd = if is_dense { n % 2 } else { n / 20 };
        let labels = Labels::from([("n".into(), n.to_string()), ("odd".into(), odd.to_string())]);
        let port = NamedPort { name: "web".into(), protocol: Protocol::Tcp, port: 8000 + n / 35 };
        let ports = if n < 30 { vec![] } else { vec![port] };
        let identity = cluster.identify(Profile::new("shop", Labels::new(), labels, ports).unwrap()).unwrap();
        own.get_or_insert(identity);
    }
    let odd = PodSelector { pods: Selector::labels([("odd", "1")]), ..PodSelector::namespace("shop") };
    let block = |text: &str| RulePeer::Block(Block { range: text.parse().unwrap(), except: vec![] });
    let named = PortMatch::Name { protocol: None, name: "web".into() };
    let egress = vec![
        Rule {
            peers: vec![RulePeer::Pods(odd.clone()), RulePeer::Groups(["db", "vms"].map(str::to_owned).into())],
            ports: vec![PortMatch::port(Protocol::Tcp, 80)],
        },
        Rule { peers: vec![block("10.0.0.0/8"), block("fd00::/8")], ports: vec![named] },
    ];
    cluster.set_policy(&NetworkPolicy { egress, ..NetworkPolicy::new("shop", "policy") });
    for tier in [ClusterTier::Admin, ClusterTier::Baseline] {
        let peers = vec![ClusterPeer::Pods(odd.clone()), ClusterPeer::Networks(vec!["192.0.2.0/24".parse().unwrap()])];
        let rule = ClusterRule { name: "rule".into(), action: Action::Deny, peers, protocols: vec![] };
        let subject =
            PodSelector { namespaces: Namespaces::Matching(Selector::everything()), pods: Selector::everything() };
        let (name, is_audited) = (format!("{tier:?}"), tier == ClusterTier::Admin);
        let egress = vec![rule];
        let policy = ClusterNetworkPolicy { name, is_audited, tier, priority: 3, subject, ingress: vec![], egress };
        cluster.set_cluster_policy(&policy).unwrap();
    }
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let (addresses, node) = (vec![address("10.0.0.1"), address("fd00::1")], vec![address("10.1.0.1")]);
    cluster.compile(&Subject { identity: own.unwrap(), addresses, node }, Direction::Egress).bytes
}

fn peers() -> Vec<Peer> {
    let addresses = ["10.0.0.1", "10.1.0.1", "192.0.2.7", "fd00::9", "::"].map(|text| Some(text.parse().unwrap()));
    let who = [1, 2, 25, 33, 39, u32::MAX].into_iter().filter_map(Identity::new).map(Who::Pod);
    let who: Vec<_> = who.chain([Who::Outside, Who::Unnumbered]).collect();
    let all =
        addresses.into_iter().chain([None]).flat_map(|address| who.iter().map(move |who| Peer { who: *who, address }));
    all.collect()
}

/// Asks a program everything.
fn ask(bytes: &[u8]) -> Vec<Reason> {
    let Ok(program) = Program::read(bytes) else { return Vec::new() };
    let mut reasons = Vec::new();
    for peer in peers() {
        for (protocol, port) in [(6, 80), (6, 8000), (17, 53), (1, 9), (255, 0)] {
            let verdict = program.judge_carrying(&peer, &["vms", "", "x"], protocol, port);
            for decision in [Some(verdict.enforced), verdict.audited].into_iter().flatten() {
                if let Reason::Rule { policy, rule, .. } = decision.reason {
                    let _ = (program.policy(policy), program.rule(policy, rule));
                }
                assert!(!decision.is_allowed || decision.reason != Reason::Malformed);
                reasons.push(decision.reason);
            }
        }
    }
    let names = program.policies().take(1000).map(|policy| policy.name.len()).sum::<usize>();
    assert!(names <= bytes.len() * 1000);
    reasons
}

#[test]
fn a_program_is_whole() {
    for is_dense in [false, true] {
        let bytes = program(is_dense);
        let reasons = ask(&bytes);
        assert!(!reasons.is_empty() && !reasons.contains(&Reason::Malformed), "{reasons:?}");
        let sections = bytes[HEADER_LEN..].chunks(SECTION_LEN).take(SECTIONS);
        let counts: Vec<_> = sections.map(|entry| u32::from_le_bytes(entry[4..8].try_into().unwrap())).collect();
        let (runs, dense) = if is_dense { (0, 1) } else { (1, 0) };
        assert_eq!([counts[3].min(1), counts[4].min(1)], [runs, dense], "{counts:?}");
        assert!(counts.iter().filter(|count| **count == 0).count() == 1, "{counts:?}");
    }
}

#[test]
fn what_is_no_program_is_refused_with_a_reason() {
    let bytes = program(false);
    let damaged = |at: usize, value: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        Layout::read(&bytes).map(|_| ())
    };
    let found = bytes.len() - 1;
    let expected = bytes.len() as u32;
    assert_eq!(Layout::read(&[]).map(|_| ()), Err(Error::NotAProgram));
    assert_eq!(Layout::read(&bytes[..found]).map(|_| ()), Err(Error::Truncated { expected, found }));
    assert_eq!(damaged(0, b"x"), Err(Error::NotAProgram));
    assert_eq!(damaged(10, &[2, 0]), Err(Error::OtherFormat { found: 2 }));
    assert_eq!(damaged(8, &[9]), Ok(()), "a later minor version is read");
    assert_eq!(damaged(12, &[12]), Err(Error::Header));
    assert_eq!(damaged(12, &[13]), Ok(()), "groups may be missing");
    assert_eq!(damaged(20, &[2]), Err(Error::Header));
    assert_eq!(damaged(28, &[4]), Err(Error::Header), "rows of tier Admin end after those of NetworkPolicies");
    assert_eq!(damaged(32, &[200]), Err(Error::Header));
    for section in 0..SECTIONS {
        let entry = HEADER_LEN + section * SECTION_LEN;
        for (at, value) in [(entry, u32::MAX), (entry + 4, u32::MAX), (entry + 8, 0)] {
            assert_eq!(damaged(at, &value.to_le_bytes()), Err(Error::Section(section)));
        }
    }
    let rows = 9000_u32;
    let mut many = bytes.clone();
    many[HEADER_LEN + 4..HEADER_LEN + 8].copy_from_slice(&rows.to_le_bytes());
    let len = bytes.len() as u32 + rows * 16;
    many[16..20].copy_from_slice(&len.to_le_bytes());
    many.resize(len as usize, 0);
    assert_eq!(Layout::read(&many).map(|_| ()), Err(Error::Section(0)));
}

/// Offset of a section's records.
fn section(bytes: &[u8], place: usize) -> usize {
    let entry = HEADER_LEN + place * SECTION_LEN;
    u32::from_le_bytes(bytes[entry..entry + 4].try_into().unwrap()) as usize
}

/// Offset of a class with named ports.
fn named_class(bytes: &[u8]) -> usize {
    let classes = section(bytes, 2)..section(bytes, 3);
    classes.step_by(12).find(|at| bytes[at + 8] > 0).expect("a class with named ports")
}

#[test]
fn a_record_that_leads_outside_denies() {
    // Masks of classes, of ports, of addresses of both families and of the header; the list of named ports of a class;
    // the action of a row; the class of an identity. Every flow of some peer meets each.
    let bytes = program(false);
    let places = [
        (36, 4),
        (40, 4),
        (section(&bytes, 2), 4),
        (section(&bytes, 6) + 4, 4),
        (section(&bytes, 7) + 4, 4),
        (section(&bytes, 8) + 16, 4),
        (named_class(&bytes) + 4, 4),
        (section(&bytes, 0) + 6, 1),
        (section(&bytes, 3) + 4, 4),
    ];
    for (at, len) in places {
        let mut bytes = bytes.clone();
        bytes[at..at + len].fill(0xfe);
        assert!(ask(&bytes).contains(&Reason::Malformed), "{at}");
    }
    assert!(Program::read(&bytes).unwrap().judge(&Peer { who: Who::Outside, address: None }, 6, 80).audited.is_some());
    let short = &bytes[..bytes.len() / 2];
    let layout = Layout::read(&bytes).unwrap();
    let peer = Peer::outside("192.0.2.7".parse().unwrap());
    assert_eq!(
        layout.program(short).judge(&peer, 6, 80).enforced.reason,
        Reason::Malformed,
        "other bytes than those read"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_programs_are_survived(
        is_dense in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        keep in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut bytes = program(is_dense);
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if cuts {
            bytes.truncate(keep.index(bytes.len()));
        }
        ask(&bytes);
    }

    #[test]
    fn damaged_numbers_are_survived(
        is_dense in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![0, 1, 2, 63, 64, 65, 255, 0x7fff_ffff, 0xffff_fffe, u32::MAX])), 1..6),
    ) {
        let mut bytes = program(is_dense);
        for (at, value) in damage {
            let at = 8 + at.index(bytes.len() - 12);
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
        }
        ask(&bytes);
    }
}
