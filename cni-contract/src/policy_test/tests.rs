use std::net::IpAddr;

use super::*;
use crate::why::{Asked, Kind, Target, Workload};

fn pod(name: &str, namespace: &str) -> End {
    End::Pod { name: name.to_owned(), namespace: namespace.to_owned() }
}

#[test]
fn ends_are_addresses_or_pods_with_a_port_and_a_protocol() {
    let read = |text: &str| Destination::parse(text).map(|to| (to.end, to.protocol, to.port)).unwrap();
    let four = End::Address("10.0.0.1".parse().unwrap());
    let six = End::Address("fd00::1".parse().unwrap());
    assert_eq!(read("10.0.0.1"), (four.clone(), 1, 0));
    assert_eq!(read("10.0.0.1:53/UDP"), (four, 17, 53));
    assert_eq!(read("fd00::1"), (six.clone(), 58, 0));
    assert_eq!(read("[fd00::1]:443"), (six, 6, 443));
    assert_eq!(read("web.shop:80/sctp"), (pod("web", "shop"), 132, 80));
    assert_eq!(read("web.v2.shop"), (pod("web.v2", "shop"), 1, 0));
    assert_eq!(read("shop/web.v2"), (pod("web.v2", "shop"), 1, 0));
    assert_eq!(read("shop/web:53/udp"), (pod("web", "shop"), 17, 53));
    for wrong in [
        "",
        "web",
        "web.shop:0",
        "web.shop:80/quic",
        "web.shop:80:80",
        "../x.shop",
        "web.sh op",
        "web.shop:",
        "a.b/web:80",
        "shop/web/x:80",
        "shop/:80",
    ] {
        assert!(Destination::parse(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn a_question_has_the_ends_of_both_commands() {
    let name = |namespace: &str, name: &str, kind| Asked::Name { namespace: namespace.into(), name: name.into(), kind };
    let asked = question("shop/web", "db.pay:5432").unwrap();
    assert_eq!((&asked.namespace[..], &asked.name[..], asked.source_address()), ("shop", "web", None));
    assert_eq!((asked.target, asked.protocol, asked.port), (name("pay", "db", Some(Kind::Pod)), 6, 5432));
    assert_eq!(question("web.shop", "db.pay.svc:80").unwrap().target, name("pay", "db", Some(Kind::Service)));
    assert_eq!(question("web.shop", "pay/db").unwrap().target, name("pay", "db", None));
    let address: IpAddr = "10.0.0.1".parse().unwrap();
    let asked = question("::ffff:10.0.0.1", "10.0.0.1:53/udp").unwrap();
    assert_eq!((asked.source_address(), asked.target, asked.protocol), (Some(address), Asked::Address(address), 17));
    for (from, to) in
        [("web", "pay/db"), ("shop/web", "db"), ("shop/web:80", "pay/db"), ("", ""), ("svc/pay/db", "a/b")]
    {
        assert!(question(from, to).is_err(), "{from} {to}");
    }
}

fn said(allowed: bool) -> Option<Said> {
    let (reason, text) = ("no-policy".to_owned(), if allowed { "allowed: yes" } else { "denied: no" }.to_owned());
    Some(Said { decision: Explained { allowed, reason, text, ..Explained::default() }, would_deny: None })
}

#[test]
fn a_refusal_of_one_end_counts_and_an_unknown_end_does_not() {
    let address = IpAddr::from([10, 0, 0, 1]);
    let answer = |egress, ingress| Answer {
        version: 1,
        from: address,
        to: address,
        protocol: 6,
        port: 80,
        in_tunnel: true,
        egress,
        ingress,
    };
    let cases = [
        (said(true), said(true), Outcome::Allowed, 0),
        (said(true), said(false), Outcome::Refused, 3),
        (said(false), None, Outcome::Refused, 3),
        (said(true), None, Outcome::Undecided, 4),
        (None, None, Outcome::Undecided, 4),
    ];
    for (egress, ingress, outcome, code) in cases {
        let answer = answer(egress, ingress);
        assert_eq!((answer.outcome(), answer.outcome().code()), (outcome, code), "{answer:?}");
        let text = serde_json::to_string(&answer).unwrap();
        assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer);
        assert!(!serde_json::to_string(&answer.without_sentences()).unwrap().contains("\"text\""));
    }
    let text = answer(said(false), None).text(&pod("web", "shop"), &pod("db", "pay"));
    assert_eq!(
        text,
        "web.shop -> db.pay tcp/80: refused (table version 1)\n  egress of web.shop: denied: no\n  ingress of db.pay: \
         this node has no program of it; ask the agent of its node\n"
    );
}

fn workload(namespace: &str, name: &str, node: &str) -> Workload {
    let (namespace, name, node) = (namespace.to_owned(), name.to_owned(), node.to_owned());
    Workload { namespace, name, node, is_found: true, addresses: vec![[10, 0, 0, 1].into()], ..Workload::default() }
}

fn of_node(node: &str, said: Option<Said>) -> Option<OfNode> {
    Some(OfNode { node: node.to_owned(), version: Some(7), said })
}

fn tested() -> Tested {
    let (source, target) = (workload("shop", "web", "n1"), Target::Pod(workload("pay", "db", "n2")));
    Tested { source, target, protocol: 6, port: 80, in_tunnel: Some(true), ..Tested::default() }
}

#[test]
fn what_two_nodes_say_is_put_together_and_printed_from_the_document() {
    let audited = said(true).map(|said| {
        let would = Explained { text: "denied by rule 0 of pay/p".to_owned(), ..Explained::default() };
        Said { would_deny: Some(would), ..said }
    });
    let mut first = Tested { egress: of_node("n1", said(true)), ..tested() };
    let second = Tested { ingress: of_node("n2", audited), egress: None, ..tested() };
    assert_eq!(first.outcome(), Outcome::Undecided);
    assert!(first.text("shop/web", "pay/db:80").ends_with("  ingress of pay/db: node n2 has not said\n"));
    assert!(first.is_about(&second) && !first.is_about(&Tested { port: 81, ..second.clone() }));
    first.add(second);
    let document = serde_json::to_string(&Document::of(first)).unwrap();
    let Document { tested, outcome } = serde_json::from_str(&document).unwrap();
    assert_eq!(outcome, Outcome::Allowed);
    assert_eq!(
        tested.text("shop/web", "pay/db:80"),
        "shop/web -> pay/db:80: allowed\n  egress of shop/web (node n1, table version 7): allowed: yes\n  ingress of \
         pay/db (node n2, table version 7): allowed: yes\n    audit: would be denied by rule 0 of pay/p\n"
    );
}

#[test]
fn an_end_that_no_policy_selects_refuses_nothing_and_one_that_is_not_known_decides_nothing() {
    let heard = || Tested { egress: of_node("n1", said(true)), ingress: of_node("n2", said(true)), ..tested() };
    assert_eq!(heard().outcome(), Outcome::Allowed);
    let says = |change: &dyn Fn(&mut Tested)| {
        let mut tested = heard();
        change(&mut tested);
        (tested.outcome(), tested.text("a", "b:80"))
    };
    let outside = Target::Address([192, 0, 2, 7].into());
    let on_host = Workload { is_on_host_network: true, ..workload("pay", "agent", "n2") };
    let (allowed, unknown) = (Outcome::Allowed, Outcome::Undecided);
    for (target, outcome, text) in [
        (outside, allowed, "ingress of b:80: allowed: no pod has this address"),
        (Target::Pod(on_host), allowed, "ingress of pay/agent: allowed: it has the network of its node"),
        (Target::Pod(Workload { addresses: Vec::new(), ..workload("pay", "db", "n2") }), unknown, "has no address yet"),
        (Target::Pod(workload("", "10.0.0.9", "")), unknown, "no pod is known by this address"),
        (Target::Service(crate::why::Service::default()), unknown, "the Service has no endpoint"),
        (Target::Nothing { namespace: "pay".into(), name: "x".into() }, unknown, "neither a pod nor a Service"),
        (Target::Hidden, unknown, "ingress of b:80: not shown"),
        (Target::Unknown, unknown, "ingress of b:80: not known"),
    ] {
        let said = says(&|tested| (tested.target, tested.ingress) = (target.clone(), None));
        assert!(said.0 == outcome && said.1.contains(text), "{text}: {said:?}");
    }
    let without = says(&|tested| tested.ingress = of_node("n2", None));
    assert!(without.0 == unknown && without.1.contains("node n2 has no program of it"), "{without:?}");
    let gone = says(&|tested| (tested.source.is_found, tested.egress) = (false, None));
    assert!(gone.0 == unknown && gone.1.contains("egress of shop/web: there is no such pod"), "{gone:?}");
    let clear = says(&|tested| tested.in_tunnel = Some(false));
    assert!(clear.1.contains("is in clear"), "{clear:?}");
    let stranger = says(&|tested| {
        (tested.source, tested.egress) = (Workload { is_found: false, ..workload("", "192.0.2.7", "") }, None)
    });
    assert!(stranger.0 == allowed && stranger.1.contains("egress of 192.0.2.7: allowed: no pod"), "{stranger:?}");
}

#[test]
fn a_destination_that_may_not_be_seen_is_left_out_and_a_name_of_it_says_nothing_at_all() {
    let heard = || Tested { egress: of_node("n1", said(true)), ingress: of_node("n2", said(false)), ..tested() };
    let hidden = |is_by_name, tested: Tested| {
        let mut tested = tested;
        tested.hide(is_by_name, |namespace| namespace == "shop");
        tested
    };
    let by_name = hidden(true, heard());
    let nothing = Target::Nothing { namespace: "pay".into(), name: "x".into() };
    let in_place = Tested { target: nothing, in_tunnel: None, ingress: None, ..heard() };
    assert_eq!(by_name, hidden(true, in_place), "whether there is such a pod is not said");
    assert_eq!(
        (by_name.outcome(), by_name.egress.is_none(), by_name.ingress.is_none()),
        (Outcome::Undecided, true, true)
    );
    let by_address = hidden(false, heard());
    assert!(by_address.egress.is_some() && by_address.ingress.is_none() && by_address.target == Target::Hidden);
    let mut own = heard();
    own.hide(true, |_| true);
    assert_eq!(own, heard());
}
