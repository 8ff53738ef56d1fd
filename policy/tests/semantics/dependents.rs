//! Which programs a change concerns.

use std::collections::BTreeSet;

use nebula_cni_policy::compile::PolicyKey;
use nebula_cni_policy::model::{Direction, NamedPort, Protocol};
use nebula_cni_policy::program::Identity;
use serde_json::json;

use crate::town::Town;

fn key(name: &str) -> PolicyKey {
    PolicyKey::NetworkPolicy { namespace: "shop".into(), name: name.into() }
}

/// A town in which `web.shop` allows ingress from pods with label `app: db`, and egress to all pods, and the others of
/// `shop` allow ingress from all pods.
fn town() -> (Town, Identity) {
    let mut town = Town::new();
    let from = json!([{"podSelector": {"matchLabels": {"app": "db"}}, "namespaceSelector": {}}]);
    let web = json!({"matchLabels": {"app": "web"}});
    town.policy(
        json!({"podSelector": web, "ingress": [{"from": from}], "egress": [{"to": [{"namespaceSelector": {}}]}]}),
    );
    let all =
        json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"from": [{"namespaceSelector": {}}]}]});
    town.policy_with(json!({"name": "all", "namespace": "shop"}), all);
    let identity = town.pods["web.shop"].identity;
    (town, identity)
}

#[test]
fn a_policy_concerns_the_programs_of_its_pods() {
    let (mut town, web) = town();
    let both = BTreeSet::from([(web, Direction::Ingress), (web, Direction::Egress)]);
    assert_eq!(town.cluster.programs_of_policy(&key("policy")), both);
    let _ = town.cluster.take_changed();
    town.cluster.remove_policy(&key("policy"));
    assert_eq!(town.cluster.take_changed(), both);
    assert_eq!(town.cluster.programs_of_policy(&key("policy")), BTreeSet::new());
}

#[test]
fn a_policy_that_is_said_again_changes_nothing() {
    let (mut town, _) = town();
    let _ = town.cluster.take_changed();
    let all =
        || json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"from": [{"namespaceSelector": {}}]}]});
    town.policy_with(json!({"name": "all", "namespace": "shop"}), all());
    assert_eq!(town.cluster.take_changed(), BTreeSet::new());
    let audited = json!({"name": "all", "namespace": "shop", "annotations": {"nebula-cni/audit": "true"}});
    town.policy_with(audited, all());
    assert_eq!(town.cluster.take_changed().len(), 1);
}

#[test]
fn a_new_identity_changes_the_programs_that_mention_it_only() {
    let (mut town, web) = town();
    let _ = town.cluster.take_changed();
    let identity = town.add("new", "pay", &[("app", "other")], &[("team", "b")], vec![]);
    assert_eq!(town.cluster.take_changed(), BTreeSet::new(), "rules for all pods do not mention it");
    assert_eq!(town.cluster.programs_of_identity(identity), BTreeSet::new());
    town.check(&["new.pay -> db.shop TCP/1", "web.shop -> new.pay TCP/1"], &["new.pay -> web.shop TCP/1"]);
    let identity = town.add("new", "pay", &[("app", "db"), ("more", "x")], &[("team", "b")], vec![]);
    assert_eq!(town.cluster.take_changed(), BTreeSet::from([(web, Direction::Ingress)]));
    assert_eq!(town.cluster.programs_of_identity(identity), BTreeSet::from([(web, Direction::Ingress)]));
}

#[test]
fn a_named_port_changes_the_programs_that_name_it() {
    let (mut town, web) = town();
    let egress = json!([{"to": [{"namespaceSelector": {"matchLabels": {"team": "b"}}}], "ports": [{"port": "admin"}]}]);
    let web_only = json!({"matchLabels": {"app": "web"}});
    town.policy(json!({"podSelector": web_only, "policyTypes": ["Egress"], "egress": egress}));
    // Its set of pods does not change by what follows.
    let everybody = json!([{"ports": [{"port": "admin"}]}]);
    town.policy_with(
        json!({"name": "all", "namespace": "shop"}),
        json!({"podSelector": web_only, "policyTypes": ["Egress"], "egress": everybody}),
    );
    let _ = town.cluster.take_changed();
    let port = |name: &str| vec![NamedPort { name: name.into(), protocol: Protocol::Tcp, port: 7000 }];
    town.add("new", "else", &[], &[("team", "c")], port("other"));
    assert_eq!(town.cluster.take_changed(), BTreeSet::new());
    town.add("new", "else", &[], &[("team", "c")], port("admin"));
    assert_eq!(town.cluster.take_changed(), BTreeSet::from([(web, Direction::Egress)]));
    town.check(&["web.shop -> new.else TCP/7000"], &["web.shop -> new.else TCP/7001"]);
}

#[test]
fn a_number_that_is_used_again_has_nothing_of_its_old_pod() {
    let (mut town, web) = town();
    let old = town.add("old", "pay", &[("app", "db"), ("more", "x")], &[("team", "b")], vec![]);
    town.check(&["old.pay -> web.shop TCP/1"], &[]);
    town.cluster.unwatch(old);
    town.cluster.release(old);
    let epoch = town.cluster.advance();
    town.cluster.recycle(epoch);
    let _ = town.cluster.take_changed();
    let new = town.add("new", "pay", &[("app", "other")], &[("team", "b")], vec![]);
    assert_eq!(new, old);
    assert_eq!(town.cluster.take_changed(), BTreeSet::from([(web, Direction::Ingress)]));
    town.check(&[], &["new.pay -> web.shop TCP/1"]);
}

#[test]
fn pods_without_programs_have_no_changes() {
    let (mut town, web) = town();
    town.cluster.unwatch(web);
    assert_eq!(town.cluster.programs_of_policy(&key("policy")), BTreeSet::new());
    let _ = town.cluster.take_changed();
    town.cluster.remove_policy(&key("policy"));
    assert_eq!(town.cluster.take_changed(), BTreeSet::new());
}
