//! Holds the chart's roles against the table of rights in SECURITY.md, both ways.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{ALL, deploy, documents};

/// One verb of an account on a resource, which may be limited to objects of some names.
type Right = (String, String, Vec<String>);

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];

fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// What the manifests give to service accounts: each right, with the file that gives it.
fn given() -> Vec<(Right, &'static str)> {
    let mut given = Vec::new();
    for path in ALL {
        let documents = documents(path);
        let roles: Vec<_> = documents.iter().filter(|it| it["kind"] == "Role" || it["kind"] == "ClusterRole").collect();
        for binding in documents.iter().filter(|it| it["kind"] == "RoleBinding" || it["kind"] == "ClusterRoleBinding") {
            let wanted = &binding["roleRef"];
            let is_wanted =
                |role: &&&Value| role["kind"] == wanted["kind"] && role["metadata"]["name"] == wanted["name"];
            let role = roles.iter().find(is_wanted).expect("the role of a binding is in the same manifest");
            for account in binding["subjects"].as_array().expect("subjects") {
                assert_eq!(account["kind"], "ServiceAccount", "{path}");
                for rule in role["rules"].as_array().expect("rules") {
                    assert!(rule["nonResourceURLs"].is_null(), "{path}: {rule}");
                    for (resource, verb) in texts(&rule["resources"])
                        .iter()
                        .flat_map(|one| texts(&rule["verbs"]).into_iter().map(move |verb| (one, verb)))
                    {
                        let on = [vec![resource.clone()], texts(&rule["resourceNames"])].concat();
                        let account = account["name"].as_str().expect("a name").to_owned();
                        given.push(((account, verb, on), path));
                    }
                }
            }
        }
    }
    given
}

/// What the table explains.
fn explained() -> BTreeSet<Right> {
    let text = std::fs::read_to_string(deploy("../SECURITY.md")).expect("SECURITY.md");
    let rows = text.lines().skip_while(|line| !line.starts_with("| Account | Verbs | Resource |")).skip(2);
    let mut explained = BTreeSet::new();
    for row in rows.take_while(|line| line.starts_with('|')) {
        let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [account, verbs, resource, purpose, worth] = cells[..] else { panic!("not five cells: {row}") };
        assert!(!purpose.is_empty() && !worth.is_empty(), "not explained: {row}");
        let names = |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        for verb in verbs.split(',').map(str::trim) {
            assert!(VERBS.contains(&verb), "{verb}: {row}");
            explained.insert((names(account).concat(), verb.to_owned(), names(resource)));
        }
    }
    explained
}

#[test]
fn each_right_that_the_chart_gives_is_explained_in_security_md() {
    let (given, explained) = (given(), explained());
    assert!(given.len() > 50, "{} rights", given.len());
    for (right, path) in &given {
        assert!(explained.contains(right), "{path} gives {right:?}, and the table in SECURITY.md says nothing of it");
    }
    let given: BTreeSet<_> = given.into_iter().map(|(right, _)| right).collect();
    let stale: Vec<_> = explained.difference(&given).collect();
    assert!(stale.is_empty(), "in SECURITY.md, and no manifest gives it: {stale:?}");
}

/// The API server's proxy for pods would reach every port of every node through the agents, which have no network of
/// their own. That for Services is limited by the name in its URL to one port of one Service: of the agents, or of the
/// CA.
#[test]
fn the_proxy_is_given_for_one_port_of_two_services_only_and_bound_to_nobody() {
    let mut seen = 0;
    for path in ALL {
        let documents = documents(path);
        for role in documents.iter().filter(|it| it["kind"] == "Role" || it["kind"] == "ClusterRole") {
            for rule in role["rules"].as_array().into_iter().flatten() {
                let resources = texts(&rule["resources"]);
                assert!(!resources.iter().any(|resource| resource.contains('*')), "{path}: {rule}");
                if !resources.iter().any(|resource| resource.ends_with("/proxy")) {
                    continue;
                }
                seen += 1;
                let name = role["metadata"]["name"].as_str().expect("a name");
                let (service, port, verbs): (_, _, &[&str]) = match name {
                    "nebula-kubectl" => ("nebula-cni-agent-api", "api", &["get", "create"]),
                    "nebula-kubectl-revoke" => ("nebula-ca", "https", &["create"]),
                    _ => panic!("{path}: {name} gives a proxy"),
                };
                assert_eq!(
                    (&role["kind"], &resources[..]),
                    (&"Role".into(), &["services/proxy".to_owned()][..]),
                    "{path}"
                );
                assert_eq!(texts(&rule["resourceNames"]), [format!("https:{service}:{port}")], "{path}");
                assert_eq!(texts(&rule["verbs"]), verbs, "{path}");
                let is_meant = |it: &&Value| it["kind"] == "Service" && it["metadata"]["name"] == service;
                let service = documents.iter().find(is_meant).expect("a Service");
                assert_eq!(service["spec"]["ports"][0]["name"], port, "{path}");
                assert_eq!(service["metadata"]["namespace"], role["metadata"]["namespace"], "{path}");
            }
        }
    }
    assert_eq!(seen, 5, "two manifests have both, with agent.api.port and ca.revocation, and one has the first");
    let given = given();
    let proxies: Vec<_> = given.iter().filter(|((_, _, on), _)| on.iter().any(|on| on.ends_with("/proxy"))).collect();
    assert!(proxies.is_empty(), "{proxies:?}");
}
