//! `nebula-cni/allow-groups`: peers that are no pods, by the groups of their certificates.

use nebula_cni_policy::model::{Direction, Problem};
use nebula_cni_policy::program::{Peer, Program};
use serde_json::{Value, json};

use crate::town::Town;

fn allowing(groups: &str) -> Value {
    json!({"name": "db", "namespace": "shop", "annotations": {"nebula-cni/allow-groups": groups}})
}

/// Whether the pod `db.shop` may be reached by a machine with these groups at this TCP port.
fn reaches(town: &Town, groups: &[&str], port: u16) -> bool {
    let bytes = town.program("db.shop", Direction::Ingress);
    let program = Program::read(&bytes).unwrap();
    program.judge_carrying(&Peer::outside("10.77.9.9".parse().unwrap()), groups, 6, port).is_allowed()
}

#[test]
fn any_of_the_groups_is_allowed_at_the_ports_of_rules_that_name_peers() {
    let mut town = Town::new();
    let from_web = json!({"from": [{"podSelector": {"matchLabels": {"app": "web"}}}], "ports": [{"port": 5432}]});
    let open = json!({"ports": [{"port": 80}]});
    let spec = json!({"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [from_web, open]});
    assert_eq!(town.policy_with(allowing(" vms, backup,,"), spec), []);
    assert!(reaches(&town, &["vms"], 5432) && reaches(&town, &["x", "backup"], 5432));
    assert!(!reaches(&town, &["vms"], 5433), "another port");
    assert!(!reaches(&town, &["vm", "vms2", "", "BACKUP"], 5432) && !reaches(&town, &[], 5432));
    assert!(reaches(&town, &[], 80), "everyone is allowed there");
    // A pod is a pod, whatever groups it carries, and egress is not concerned.
    let pod = town.pods["db.pay"].identity;
    let bytes = town.program("db.shop", Direction::Ingress);
    assert!(!Program::read(&bytes).unwrap().judge_carrying(&Peer::pod(pod, None), &["vms"], 6, 5432).is_allowed());
}

#[test]
fn a_policy_without_peers_or_in_audit_allows_no_group() {
    let mut town = Town::new();
    let spec = json!({"podSelector": {}, "ingress": []});
    town.policy_with(allowing("vms"), spec.clone());
    assert!(!reaches(&town, &["vms"], 5432));
    let mut audited = allowing("vms");
    audited["annotations"]["nebula-cni/audit"] = "true".into();
    audited["name"] = "audited".into();
    let from_web = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    town.policy_with(audited, from_web);
    assert!(!reaches(&town, &["vms"], 5432));
}

#[test]
fn more_groups_than_the_bound_allow_nobody_and_are_reported() {
    let mut town = Town::new();
    let names: Vec<String> = (0..65).map(|n| format!("g{n}")).collect();
    let spec = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    let problems = town.policy_with(allowing(&names.join(",")), spec.clone());
    assert_eq!(problems, [Problem::Rule { direction: Direction::Ingress, rule: 0 }]);
    assert!(!reaches(&town, &["g0"], 80));
    assert_eq!(town.policy_with(allowing(&names[1..].join(",")), spec), []);
    assert!(reaches(&town, &["g64"], 80) && !reaches(&town, &["g0"], 80));
}

#[test]
fn only_programs_with_groups_are_of_the_later_minor_version() {
    let mut town = Town::new();
    let spec = json!({"podSelector": {}, "ingress": [{"from": [{"podSelector": {}}]}]});
    let minor = |town: &Town| town.program("db.shop", Direction::Ingress)[8];
    town.policy_with(allowing(""), spec.clone());
    assert_eq!(minor(&town), 0);
    town.policy_with(allowing("vms"), spec);
    assert_eq!(minor(&town), 1);
    // A reader that does not know groups refuses; so does this one where the section is missing.
    let mut bytes = town.program("db.shop", Direction::Ingress);
    bytes[12] = 13;
    let program = Program::read(&bytes).unwrap();
    assert!(!program.judge_carrying(&Peer::outside("10.77.9.9".parse().unwrap()), &["vms"], 6, 80).is_allowed());
}
