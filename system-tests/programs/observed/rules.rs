//! Alert rules and dashboards: promtool takes them, every alert fires when it should and not before, and what they name
//! is served.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use super::pages::Pages;
use super::{check_metrics, queries};

const RULES: &str = include_str!("../../../deploy/prometheus-rules.yaml");
const CASES: &str = include_str!("alerts.yaml");
const DASHBOARDS: [(&str, &str); 4] = [
    ("hosts", include_str!("../../../deploy/grafana-dashboard.json")),
    ("cluster", include_str!("../../../deploy/grafana-cluster.json")),
    ("node", include_str!("../../../deploy/grafana-node.json")),
    ("pod", include_str!("../../../deploy/grafana-pod.json")),
];

/// Runs promtool in a folder with these files, and returns what it says if it is not content.
fn promtool(arguments: &[&str], files: &[(&str, &str)]) -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let done = super::promtool().args(arguments).current_dir(folder.path()).output().expect("promtool runs");
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    if done.status.success() { Ok(()) } else { Err(said) }
}

fn rules() -> Value {
    serde_saphyr::from_str(RULES).unwrap()
}

fn alerts(rules: &Value) -> Vec<&Value> {
    let groups = rules["groups"].as_array().unwrap();
    groups.iter().flat_map(|group| group["rules"].as_array().unwrap()).collect()
}

/// Cases would have to repeat every text.
fn without_annotations() -> String {
    let is_annotation = |line: &&str| {
        let line = line.trim_start();
        !["annotations:", "summary:", "description:", "action:"].iter().any(|key| line.starts_with(key))
    };
    RULES.lines().filter(is_annotation).map(|line| format!("{line}\n")).collect()
}

#[test]
fn every_alert_says_what_happened_what_it_means_and_which_command_goes_on() {
    let rules = rules();
    let all = alerts(&rules);
    assert!(all.len() > 20, "{}", all.len());
    for rule in all {
        for key in ["summary", "description", "action"] {
            assert!(rule["annotations"][key].as_str().is_some_and(|text| text.len() > 20), "{}: {key}", rule["alert"]);
        }
        let action = rule["annotations"]["action"].as_str().unwrap();
        let command = action.split('`').nth(1).unwrap_or_default();
        let is_known = ["nebula ctl ", "nebula-cni-agent ", "nebula-ca ", "kubectl "]
            .iter()
            .any(|known| command.starts_with(known));
        assert!(is_known, "{}: {action}", rule["alert"]);
        assert!(["critical", "warning", "info"].contains(&rule["labels"]["severity"].as_str().unwrap()), "{rule}");
    }
}

#[test]
#[ignore = "needs promtool"]
fn every_alert_fires_when_it_should_and_neither_before_nor_for_a_neighbour() {
    promtool(&["check", "rules", "rules.yaml"], &[("rules.yaml", RULES)]).unwrap();
    let files = [("rules.yaml", &*without_annotations()), ("alerts.yaml", CASES)];
    promtool(&["test", "rules", "alerts.yaml"], &files).unwrap();
    // Each alert has a case in which it fires, beside series for which it does not.
    let cases: Value = serde_saphyr::from_str(CASES).unwrap();
    let tested: Vec<&Value> = cases["tests"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|test| test["alert_rule_test"].as_array().unwrap())
        .collect();
    let rules = rules();
    for rule in alerts(&rules) {
        let of_rule = |case: &&&Value| case["alertname"] == rule["alert"];
        let firing =
            tested.iter().filter(of_rule).filter(|case| !case["exp_alerts"].as_array().unwrap().is_empty()).count();
        let quiet = tested.iter().filter(of_rule).count() - firing;
        assert!(firing > 0 && (quiet > 0 || rule["for"].is_null()), "{}: {firing} {quiet}", rule["alert"]);
    }
    // The cases would find a threshold that was changed.
    let wrong = without_annotations().replace("nebula_cni_unprotected_pods > 0", "nebula_cni_unprotected_pods > 5");
    let said =
        promtool(&["test", "rules", "alerts.yaml"], &[("rules.yaml", &wrong), ("alerts.yaml", CASES)]).unwrap_err();
    assert!(said.contains("NebulaPodsUnprotected"), "{said}");
}

#[test]
#[ignore = "needs promtool, and a build of all programs"]
fn rules_and_dashboards_name_what_real_programs_serve() {
    let served = Pages::read();
    let mut pages = queries::Pages::default();
    for (program, page) in [("nebula", &served.daemon), ("nebula-ca", &served.ca), ("nebula-cni-agent", &served.agent)]
    {
        pages.add(page);
        let said = check_metrics(page).err().unwrap_or_default();
        // Names of Go Nebula are as they are.
        let ours: Vec<_> = said.lines().filter(|line| !is_of_go(line)).collect();
        assert!(ours.is_empty(), "{program}: {ours:#?}");
    }
    let mut all = queries::of_rules(&rules());
    for (name, text) in DASHBOARDS {
        let queries = queries::of_dashboard(&serde_json::from_str(text).unwrap());
        assert!(queries.len() > 5, "{name}");
        all.extend(queries);
    }
    // As rules, which promtool parses; variables of Grafana are within strings.
    let records: String = all
        .iter()
        .enumerate()
        .map(|(at, query)| format!("  - record: r{at}\n    expr: {}\n", serde_json::to_string(&query.text).unwrap()))
        .collect();
    promtool(&["check", "rules", "rules.yaml"], &[("rules.yaml", &format!("groups:\n- name: a\n  rules:\n{records}"))])
        .unwrap();
    // Series of pods need a runtime with pods, and those of some metrics an event: the agent's own test
    // `rules_and_dashboards_name_metrics_labels_and_values_that_agents_show` has them all.
    let is_known = |name: &str| pages.names().any(|known| known == name);
    let may_be_empty = |name: &str| is_known(name) && (name.starts_with("nebula_cni_") || AFTER_EVENTS.contains(&name));
    let is_absent = |name: &str| ABSENT.contains(&name);
    let mut wrong = Vec::new();
    for query in &all {
        wrong.extend(
            pages
                .wrong(query, may_be_empty)
                .into_iter()
                .filter(|wrong| !ABSENT.iter().any(|name| wrong.contains(name))),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let named: BTreeSet<String> =
        all.iter().flat_map(|query| queries::used(&query.text).0).map(|used| used.metric).collect();
    assert!(named.len() > 60 && named.iter().filter(|name| is_absent(name)).count() == ABSENT.len(), "{named:?}");
    // A name or a label that nobody serves is found.
    for query in [
        "nebula_cni_flow_byte_total",
        "nebula_cni_flow_bytes_total{source=\"shop\"}",
        "sum by (node) (nebula_cni_flow_pairs)",
    ] {
        assert_eq!(pages.problems(query, may_be_empty).len(), 1, "{query}");
    }
}

/// Those of hosts and the CA that have series after traffic and after a request; tests of these programs have their
/// labels.
const AFTER_EVENTS: [&str; 2] = ["nebula_peer_path_mtu_bytes", "nebula_ca_decisions_total"];
/// Metrics of the cluster table, which an agent serves once it has written one.
const ABSENT: [&str; 1] = ["nebula_cni_table_input_ok"];

fn is_of_go(line: &str) -> bool {
    const FAMILIES: [&str; 11] = [
        "nebula_certificate_",
        "nebula_firewall_",
        "nebula_handshake",
        "nebula_hostinfo_",
        "nebula_hostmap_",
        "nebula_info",
        "nebula_lighthouse_",
        "nebula_messages_",
        "nebula_network_packets_",
        "nebula_routines",
        "nebula_udp_",
    ];
    FAMILIES.iter().any(|family| line.starts_with(family))
}
