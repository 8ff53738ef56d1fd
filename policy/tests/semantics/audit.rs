//! Policies for audit: what is enforced is the verdict without them, and what they report is the verdict with all.

use nebula_cni_policy::program::{Reason, Tier, Verdict};
use serde_json::{Value, json};

use crate::town::Town;

fn audited(name: &str) -> Value {
    json!({"name": name, "namespace": "shop", "annotations": {"nebula-cni/audit": "true"}})
}

fn enforced(name: &str) -> Value {
    json!({"name": name, "namespace": "shop", "annotations": {"nebula-cni/audit": "false"}})
}

/// Whether the flow passes, and whether it would.
fn told(verdict: Verdict) -> (bool, Option<bool>) {
    (verdict.is_allowed(), verdict.audited.map(|audited| audited.is_allowed))
}

#[test]
fn without_audited_policies_nothing_is_audited() {
    let mut town = Town::new();
    town.policy_with(enforced("a"), json!({"podSelector": {}}));
    town.policy_with(audited("other"), json!({"podSelector": {"matchLabels": {"app": "db"}}}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/1")), (false, None));
    assert_eq!(town.judge("web.shop <- db.pay TCP/1").would_deny(), None);
}

#[test]
fn an_audited_policy_that_alone_isolates_a_pod_refuses_nothing() {
    let mut town = Town::new();
    town.policy_with(audited("a"), json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/80")), (true, Some(true)));
    let verdict = town.judge("web.shop <- db.pay TCP/81");
    assert_eq!(told(verdict), (true, Some(false)));
    assert_eq!(verdict.would_deny().unwrap().reason, Reason::Isolated { policy: 0 });
    assert_eq!(town.judge("web.shop -> db.pay TCP/81").audited, None, "the other direction has none");
}

#[test]
fn an_audited_policy_beside_enforced_ones_neither_allows_nor_denies() {
    let mut town = Town::new();
    town.policy_with(enforced("a"), json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}));
    town.policy_with(audited("b"), json!({"podSelector": {}, "ingress": [{"ports": [{"port": 81}]}]}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/80")), (true, Some(true)));
    let verdict = town.judge("web.shop <- db.pay TCP/81");
    assert_eq!(told(verdict), (false, Some(true)), "its rule allows nothing yet");
    assert!(verdict.would_allow().is_some() && verdict.would_deny().is_none());
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/82")), (false, Some(false)));
    assert_eq!(town.judge("web.shop <- db.pay TCP/82").would_deny(), None, "it is denied already");
}

#[test]
fn an_audited_policy_does_not_end_the_baseline_of_its_pods() {
    let mut town = Town::new();
    let deny = json!([{"action": "Deny", "from": [{"namespaces": {}}]}]);
    town.cluster_policy(json!({"tier": "Baseline", "priority": 0, "subject": {"namespaces": {}}, "ingress": deny}));
    town.policy_with(audited("a"), json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/80")), (false, Some(true)));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/81")), (false, Some(false)));
}

#[test]
fn an_audited_denial_of_admin_lets_later_rules_decide() {
    let mut town = Town::new();
    let rule = |action: &str| json!([{"action": action, "from": [{"namespaces": {}}]}]);
    let spec = |priority, rules| json!({"tier": "Admin", "priority": priority, "subject": {"namespaces": {}}, "ingress": rules});
    town.cluster_policy_with(audited("first"), spec(0, rule("Deny")));
    town.policy_with(enforced("a"), json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}]}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/80")), (true, Some(false)));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/81")), (false, Some(false)));
    town.cluster_policy_with(json!({"name": "second"}), spec(1, rule("Accept")));
    let verdict = town.judge("web.shop <- db.pay TCP/81");
    assert_eq!(told(verdict), (true, Some(false)));
    assert_eq!(verdict.enforced.reason, Reason::Rule { tier: Tier::Admin, policy: 1, rule: 0 });
    assert_eq!(verdict.would_deny().unwrap().reason, Reason::Rule { tier: Tier::Admin, policy: 0, rule: 0 });
}

#[test]
fn an_audited_pass_can_be_why_an_enforced_policy_would_deny() {
    let mut town = Town::new();
    let rule = |action: &str| json!([{"action": action, "from": [{"namespaces": {}}]}]);
    let spec = |priority, rules| json!({"tier": "Admin", "priority": priority, "subject": {"namespaces": {}}, "ingress": rules});
    town.cluster_policy_with(audited("pass"), spec(0, rule("Pass")));
    town.cluster_policy_with(json!({"name": "accept"}), spec(1, rule("Accept")));
    town.policy_with(enforced("a"), json!({"podSelector": {}}));
    let verdict = town.judge("web.shop <- db.pay TCP/80");
    assert_eq!(told(verdict), (true, Some(false)));
    assert_eq!(verdict.would_deny().unwrap().reason, Reason::Isolated { policy: 2 });
}

#[test]
fn an_audited_accept_opens_nothing() {
    let mut town = Town::new();
    let accept = json!([{"action": "Accept", "from": [{"namespaces": {}}]}]);
    town.cluster_policy_with(
        audited("a"),
        json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}, "ingress": accept}),
    );
    town.policy_with(enforced("a"), json!({"podSelector": {}}));
    assert_eq!(told(town.judge("web.shop <- db.pay TCP/80")), (false, Some(true)));
}

#[test]
fn an_audited_baseline_and_egress_are_audited_as_well() {
    let mut town = Town::new();
    let deny = json!([{"action": "Deny", "to": [{"networks": ["0.0.0.0/0"]}]}]);
    town.cluster_policy_with(
        audited("a"),
        json!({"tier": "Baseline", "priority": 0, "subject": {"namespaces": {}}, "egress": deny}),
    );
    assert_eq!(told(town.judge("web.shop -> 192.0.2.1 TCP/80")), (true, Some(false)));
    assert_eq!(told(town.judge("web.shop -> 2001:db8::1 TCP/80")), (true, Some(true)));
    town.policy_with(enforced("a"), json!({"podSelector": {}, "egress": [{}]}));
    assert_eq!(
        told(town.judge("web.shop -> 192.0.2.1 TCP/80")),
        (true, Some(true)),
        "the baseline is not for this pod"
    );
}
