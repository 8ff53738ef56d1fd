//! Broken situations: of each exactly one cause is named, and of the whole one none.

use std::collections::BTreeSet;

use crate::instance_status::{
    Certificate, ClusterTable, DroppedPacket, InstanceState, LostPeer, RefusedCaller, Status, TableState, Trouble,
    Tunnel,
};

use super::*;

const NOW: i64 = 1_800_000_000;

fn workload(namespace: &str, name: &str, node: &str, last: u8) -> Workload {
    Workload {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        is_found: true,
        phase: "Running".to_owned(),
        node: node.to_owned(),
        addresses: vec![[10, 244, 0, last].into()],
        is_ready: true,
        ..Workload::default()
    }
}

fn status(name: &str, last: u8, peer: u8) -> Status {
    Status {
        pod: name.to_owned(),
        port: Some(40_000 + u16::from(last)),
        state: InstanceState::Running,
        overlay: vec![format!("10.244.0.{last}/16")],
        certificate: Some(Certificate {
            name: name.to_owned(),
            not_before: NOW - 3600,
            not_after: NOW + 3600,
            ..Certificate::default()
        }),
        tunnels: vec![Tunnel {
            peer: vec![format!("10.244.0.{peer}")],
            name: "peer".to_owned(),
            endpoint: Some("192.0.2.7:40000".to_owned()),
            ..Tunnel::default()
        }],
        table: Some(ClusterTable { state: TableState::Used, version: Some(7), ..ClusterTable::default() }),
        trouble: Some(Trouble::default()),
        ..Status::default()
    }
}

fn pod_end(node: &str, status: Status, listener: Option<Listener>) -> Option<PodEnd> {
    let policy = PolicySays::Allows { text: "no policy selects it".to_owned(), would_deny: None };
    Some(PodEnd { node: node.to_owned(), tunnel: PodTunnel::Answers(Box::new(status)), policy, listener })
}

/// Everything works: shop/web on node n1 asks Service pay/db at port 80, which is pod pay/db-0 on node n2 at port 5432.
fn whole() -> Facts {
    Facts {
        at: NOW,
        source: workload("shop", "web", "n1", 1),
        target: Target::Service(Service {
            namespace: "pay".to_owned(),
            name: "db".to_owned(),
            addresses: vec![[10, 96, 0, 9].into()],
            has_selector: true,
            ports: vec!["80/tcp".to_owned()],
            target_port: Some(5432),
            ready: 1,
            endpoint: Some(workload("pay", "db-0", "n2", 2)),
            ..Service::default()
        }),
        protocol: 6,
        port: 80,
        source_end: pod_end("n1", status("web", 1, 2), None),
        destination_end: pod_end("n2", status("db", 2, 1), Some(Listener::Reachable)),
        way: Some(Way { table: Some(7), sent_to: InTable::Service, pod: InTable::Enrolled }),
    }
}

fn service(facts: &mut Facts) -> &mut Service {
    let Target::Service(service) = &mut facts.target else { panic!("it is a Service") };
    service
}

fn end(facts: &mut Facts, of: End) -> &mut PodEnd {
    let end = if of == End::Source { &mut facts.source_end } else { &mut facts.destination_end };
    end.as_mut().unwrap()
}

fn status_of(facts: &mut Facts, of: End) -> &mut Status {
    let PodTunnel::Answers(status) = &mut end(facts, of).tunnel else { panic!("it answers") };
    status
}

fn lost(facts: &mut Facts, reason: &str) {
    let status = status_of(facts, End::Source);
    status.tunnels.clear();
    let lost = LostPeer {
        peer: "10.244.0.2".to_owned(),
        cause: "why".to_owned(),
        reason: reason.to_owned(),
        seconds_ago: 9,
        ..LostPeer::default()
    };
    status.trouble.as_mut().unwrap().lost_peers.push(lost);
}

fn dropped(facts: &mut Facts, of: End, local: &str, remote: &str) {
    let direction = if of == End::Source { "outbound" } else { "inbound" };
    let packet = DroppedPacket {
        direction: direction.to_owned(),
        reason: "no_rule".to_owned(),
        protocol: 6,
        local: local.to_owned(),
        remote: remote.to_owned(),
        seconds_ago: 3,
        ..DroppedPacket::default()
    };
    status_of(facts, of).trouble.as_mut().unwrap().dropped.push(packet);
}

/// What breaks, and how.
type Case = (Cause, fn(&mut Facts));

const CASES: &[Case] = &[
    (Cause::SourceUnknown, |facts| facts.source.is_found = false),
    (Cause::SourceNotRunning, |facts| facts.source.phase = "Pending".to_owned()),
    (Cause::SourceNotRunning, |facts| facts.source.addresses.clear()),
    (Cause::TargetUnknown, |facts| {
        facts.target = Target::Nothing { namespace: "pay".to_owned(), name: "bd".to_owned() };
    }),
    (Cause::TargetNotRunning, |facts| {
        facts.target = Target::Pod(Workload { phase: "Failed".to_owned(), ..workload("pay", "db-0", "n2", 2) });
    }),
    (Cause::NoCommonFamily, |facts| service(facts).addresses = vec!["fd00::9".parse().unwrap()]),
    (Cause::NoCommonFamily, |facts| facts.target = Target::Address("fd00::9".parse().unwrap())),
    (Cause::ExternalName, |facts| service(facts).external_name = Some("db.example.org".to_owned())),
    (Cause::ServiceWithoutPort, |facts| service(facts).target_port = None),
    (Cause::ServiceWithoutSelector, |facts| {
        *service(facts) = Service { ready: 0, has_selector: false, endpoint: None, ..service(facts).clone() };
    }),
    (Cause::NoPodSelected, |facts| *service(facts) = Service { ready: 0, endpoint: None, ..service(facts).clone() }),
    (Cause::NoEndpointReady, |facts| {
        *service(facts) = Service { ready: 0, not_ready: 2, endpoint: None, ..service(facts).clone() };
    }),
    (Cause::TableWithoutDestination, |facts| facts.way.as_mut().unwrap().sent_to = InTable::Unknown),
    (Cause::TableWithoutEndpoint, |facts| facts.way.as_mut().unwrap().sent_to = InTable::NoEndpoint),
    (Cause::TableSaysClear, |facts| facts.way.as_mut().unwrap().sent_to = InTable::Clear),
    (Cause::TableSaysClear, |facts| facts.way.as_mut().unwrap().pod = InTable::Clear),
    (Cause::EgressPolicy, |facts| {
        end(facts, End::Source).policy = PolicySays::Refuses { text: "shop/deny".to_owned() };
    }),
    (Cause::EgressRule, |facts| dropped(facts, End::Source, "10.244.0.1:4000", "10.244.0.2:5432")),
    (Cause::PeerUnknown, |facts| lost(facts, LostPeer::NOBODY_KNOWS)),
    (Cause::CannotSend, |facts| lost(facts, LostPeer::CANNOT_SEND)),
    (Cause::OtherCipher, |facts| lost(facts, LostPeer::OTHER_CIPHER)),
    (Cause::PeerRefused, |facts| lost(facts, LostPeer::REFUSED)),
    (Cause::PeerSilent, |facts| lost(facts, LostPeer::NO_ANSWER)),
    (Cause::PeerSilent, |facts| lost(facts, "a word of another release")),
    (Cause::RefusedByPeer, |facts| {
        lost(facts, LostPeer::NO_ANSWER);
        let caller = RefusedCaller { from: "192.0.2.1:40001".to_owned(), seconds_ago: 9, ..RefusedCaller::default() };
        status_of(facts, End::Destination).trouble.as_mut().unwrap().refused_callers.push(caller);
    }),
    (Cause::IngressPolicy, |facts| {
        end(facts, End::Destination).policy = PolicySays::Refuses { text: "pay/deny".to_owned() };
    }),
    (Cause::IngressRule, |facts| dropped(facts, End::Destination, "10.244.0.2:5432", "10.244.0.1:4000")),
    (Cause::NobodyListens, |facts| end(facts, End::Destination).listener = Some(Listener::Nobody)),
    (Cause::ListensOnLoopback, |facts| end(facts, End::Destination).listener = Some(Listener::LoopbackOnly)),
    (Cause::ListensOnOtherFamily, |facts| end(facts, End::Destination).listener = Some(Listener::OtherFamily)),
];

/// The same for either end.
type CaseOfEnd = (AtEnd, fn(&mut Facts, End));

const OF_AN_END: &[CaseOfEnd] = &[
    (AtEnd::TunnelMissing, |facts, of| end(facts, of).tunnel = PodTunnel::Missing),
    (AtEnd::InstanceSilent, |facts, of| end(facts, of).tunnel = PodTunnel::Silent { problem: "refused".to_owned() }),
    (AtEnd::InitOverdue, |facts, of| {
        let status = status_of(facts, of);
        (status.state, status.certificate, status.init_overdue) = (InstanceState::Waiting, None, true);
    }),
    (AtEnd::CertificateDenied, |facts, of| {
        let status = status_of(facts, of);
        (status.state, status.certificate, status.denied) = (InstanceState::Waiting, None, true);
    }),
    (AtEnd::CaNotReached, |facts, of| {
        let status = status_of(facts, of);
        (status.state, status.certificate) = (InstanceState::Waiting, None);
    }),
    (AtEnd::CertificateNotYetValid, |facts, of| {
        status_of(facts, of).certificate.as_mut().unwrap().not_before = NOW + 60;
    }),
    (AtEnd::CertificateExpired, |facts, of| {
        let status = status_of(facts, of);
        status.state = InstanceState::Closed;
        status.certificate.as_mut().unwrap().not_after = NOW;
    }),
    (AtEnd::Closed, |facts, of| {
        let status = status_of(facts, of);
        (status.state, status.closed) = (InstanceState::Closed, Some("its key is gone".to_owned()));
    }),
    (AtEnd::TableMissing, |facts, of| {
        status_of(facts, of).table = Some(ClusterTable { state: TableState::Missing, ..ClusterTable::default() });
    }),
    (AtEnd::PoliciesMissing, |facts, of| {
        status_of(facts, of).table.as_mut().unwrap().closed = Some("no program yet".to_owned());
    }),
];

/// Every cause, with the facts in which it is the only one.
fn situations() -> Vec<(Cause, Facts)> {
    let of = |change: &dyn Fn(&mut Facts)| {
        let mut facts = whole();
        change(&mut facts);
        facts
    };
    let mut all: Vec<_> = CASES.iter().map(|(cause, change)| (*cause, of(change))).collect();
    for end in [End::Source, End::Destination] {
        all.extend(
            OF_AN_END.iter().map(|(at, change)| (Cause::At(end, *at), of(&|facts: &mut Facts| change(facts, end)))),
        );
    }
    all
}

#[test]
fn of_each_situation_its_cause_is_named_and_no_other() {
    let all = situations();
    assert!(all.len() >= 40, "{}", all.len());
    let mut words = BTreeSet::new();
    for (cause, facts) in &all {
        let report = Report::of(facts);
        assert_eq!(report.cause, Some(*cause), "{}", report.text());
        let (last, before) = report.steps.split_last().unwrap();
        assert_eq!((last.link, last.standing), (cause.link(), Standing::Broken));
        assert!(before.iter().all(|step| step.standing == Standing::Fine), "{cause:?}: {}", report.text());
        let text = report.text();
        assert!(text.contains(&cause.word()) && text.contains(cause.remedy()), "{text}");
        words.insert(cause.word());
    }
    assert_eq!(words.len(), 46, "each cause has a word of its own, and a situation: {words:?}");
}

#[test]
fn where_all_is_well_nothing_is_named() {
    let changes: &[fn(&mut Facts)] = &[
        |_| {},
        |facts| facts.target = Target::Pod(workload("pay", "db-0", "n2", 2)),
        // A relay; a sample of another flow, an old one, and a call of long ago.
        |facts| status_of(facts, End::Source).tunnels[0].endpoint = None,
        |facts| dropped(facts, End::Source, "10.244.0.1:4000", "10.244.0.2:81"),
        |facts| dropped(facts, End::Destination, "10.244.0.2:5432", "10.244.0.3:4000"),
        |facts| {
            dropped(facts, End::Source, "10.244.0.1:4000", "10.244.0.2:5432");
            status_of(facts, End::Source).trouble.as_mut().unwrap().dropped[0].seconds_ago = 3600;
        },
        |facts| {
            let tunnels = status_of(facts, End::Source).tunnels.clone();
            lost(facts, LostPeer::NO_ANSWER);
            status_of(facts, End::Source).tunnels = tunnels;
        },
        // In clear: neither is enrolled.
        |facts| {
            (end(facts, End::Source).tunnel, end(facts, End::Destination).tunnel) =
                (PodTunnel::NotMeant, PodTunnel::NotMeant);
            facts.way = Some(Way { table: Some(7), sent_to: InTable::Clear, pod: InTable::Clear });
        },
    ];
    for change in changes {
        let mut facts = whole();
        change(&mut facts);
        let report = Report::of(&facts);
        assert!(report.cause.is_none() && report.is_whole(), "{}", report.text());
        assert_eq!(report.steps.len(), Link::ALL.len());
    }
}

#[test]
fn what_a_node_does_not_know_is_said_and_added_by_the_other_one() {
    let (mut here, mut there) = (whole(), whole());
    here.destination_end = None;
    (there.source_end, there.way) = (None, None);
    end(&mut there, End::Destination).listener = Some(Listener::Nobody);
    let report = Report::of(&here);
    assert!(report.cause.is_none() && !report.is_whole(), "{}", report.text());
    assert!(report.text().contains("?   destination's tunnel  node n2 was not asked\n"), "{}", report.text());
    assert!(here.is_about(&there));
    let (mut one, mut other) = (here.clone(), there.clone());
    one.add(there);
    other.add(here);
    assert_eq!(one, other);
    assert_eq!(Report::of(&one).cause, Some(Cause::NobodyListens));
    assert!(!one.is_about(&Facts { port: 81, ..other }));
}

/// docs/why.md shows it.
#[test]
fn the_page_shows_what_is_printed() {
    let mut facts = Facts { destination_end: None, ..whole() };
    let text = "egress denied: shop/default-deny isolates the pod, and no NetworkPolicy allows the flow".to_owned();
    end(&mut facts, End::Source).policy = PolicySays::Refuses { text };
    let printed: String =
        Report::of(&facts).text().lines().map(|line| format!("    {line}").trim_end().to_owned() + "\n").collect();
    assert!(include_str!("../../../docs/why.md").contains(&printed), "{printed}");
}

#[test]
fn documents_are_read_back_and_words_stay_as_they_are() {
    for (cause, facts) in situations() {
        let text = serde_json::to_string(&facts).unwrap();
        assert_eq!(serde_json::from_str::<Facts>(&text).unwrap(), facts);
        let report = Report::of(&facts);
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
        assert!(text.contains(&format!("\"word\":\"{}\"", cause.word())), "{text}");
    }
    // What a later release adds, and what it leaves out.
    let facts = serde_json::from_str::<Facts>(r#"{"port": 80, "weather": "fine"}"#).unwrap();
    assert_eq!(facts, Facts { port: 80, ..Facts::default() });
    let words = [Cause::At(End::Destination, AtEnd::CaNotReached), Cause::NobodyListens].map(Cause::word);
    assert_eq!(words, ["destination-ca-not-reached", "nobody-listens"]);
}

#[test]
fn of_a_namespace_that_is_not_to_be_seen_nothing_is_left_and_the_own_end_stays() {
    let text = |facts: &Facts| serde_json::to_string(facts).unwrap() + &Report::of(facts).text();
    for is_by_name in [true, false] {
        let mut facts = whole();
        facts.hide(is_by_name, |namespace| namespace == "shop");
        let text = text(&facts);
        for secret in ["db-0", "pay", "n2"] {
            assert!(
                !text.contains(&format!("\"{secret}")) && !text.contains(&format!(" {secret}")),
                "{secret}: {text}"
            );
        }
        assert!(facts.source_end.is_some() && facts.destination_end.is_none(), "{text}");
        let report = Report::of(&facts);
        assert!(report.cause.is_none() && !report.is_whole(), "{text}");
        let known = report.steps.iter().filter(|step| step.standing == Standing::Fine).map(|step| step.link);
        let of_packet = if is_by_name { &[][..] } else { &[Link::Table, Link::Egress] };
        assert_eq!(known.collect::<Vec<_>>(), [&[Link::Source, Link::SourceTunnel], of_packet].concat());
        let mut same = whole();
        same.hide(is_by_name, |_| true);
        assert_eq!(same, whole());
        // An endpoint elsewhere, in a Service of one's own.
        let mut facts = whole();
        service(&mut facts).namespace = "shop".to_owned();
        facts.hide(is_by_name, |namespace| namespace == "shop");
        assert_eq!((&facts.target, &facts.destination_end), (&Target::Hidden, &None));
    }
    // What is refused by the own end is said, if a packet would meet it.
    for (is_by_name, cause) in [(true, None), (false, Some(Cause::EgressPolicy))] {
        let mut facts = whole();
        end(&mut facts, End::Source).policy = PolicySays::Refuses { text: "shop/default-deny".to_owned() };
        facts.hide(is_by_name, |namespace| namespace == "shop");
        assert_eq!(Report::of(&facts).cause, cause);
    }
}
