//! Network policies in a real two-node cluster: a truth table of three namespaces, three pods, three ports and all
//! protocols. Each flow is really opened, from each pod to each other and to itself, by IPv4, IPv6 and Service; in
//! clear from and to pods without a certificate.

mod cluster_policies;
mod faults;
mod full_nodes;
mod grid;
mod network_policies;
mod new_pods;
mod probes;
mod required;
mod why;

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::grid::{Flow, Grid, Pod, Way};
use self::probes::Protocol;
use super::capture::town::{Town, list};

const SOON: Duration = Duration::from_secs(30);
/// A change of policies takes effect on all nodes; a round of flows takes about a second.
const IN_EFFECT: Duration = Duration::from_secs(15);

/// Policies, and the flows that they allow between different pods. They select enrolled pods only, since they are not
/// enforced for others.
struct Case {
    name: &'static str,
    policies: Vec<Value>,
    allows: Box<dyn Fn(&Flow) -> bool>,
}

impl Case {
    fn new(
        name: &'static str,
        policies: impl IntoIterator<Item = Value>,
        allows: impl Fn(&Flow) -> bool + 'static,
    ) -> Self {
        let numbered = policies.into_iter().enumerate().map(|(number, mut policy)| {
            policy["metadata"]["name"] = json!(format!("policy-{number}"));
            policy
        });
        Self { name, policies: numbered.collect(), allows: Box::new(allows) }
    }
}

/// `KUBE_CASE` is part of the names of the cases or groups of cases to try.
#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn each_statement_about_policies_holds_for_every_flow_between_pods_of_two_nodes() {
    let (town, grid) = site();
    let first = Pod { namespace: 'x', name: 'a' };
    let ranges = network_policies::ranges(grid.address(first, Way::V4), grid.address(first, Way::V6));
    let groups = [
        ("selection", network_policies::selection()),
        ("directions", network_policies::directions()),
        ("peers", network_policies::peers()),
        ("ports", network_policies::ports()),
        ("ranges", ranges),
        ("order of cluster policies", cluster_policies::order()),
        ("ends of cluster policies", cluster_policies::ends()),
        ("protocols of cluster policies", cluster_policies::protocols()),
    ];
    let wanted = std::env::var("KUBE_CASE").unwrap_or_default();
    let (mut tried, mut longest) = (0, Duration::ZERO);
    for (group, cases) in groups {
        for case in cases.into_iter().filter(|case| case.name.contains(&wanted) || group.contains(&wanted)) {
            let file = format!("case-{tried}.json");
            town.nodes.apply(&file, &list(&case.policies));
            let took = settle(&town, &grid, case.name, IN_EFFECT, &case.allows);
            let path = town.nodes.folder.path().join(&file).display().to_string();
            town.nodes.kubectl(&["delete", "-f", &path, "--wait=false"]);
            settle(&town, &grid, "without policies again", IN_EFFECT, &|_| true);
            println!("{group}: {}: in effect after {:.1} s", case.name, took.as_secs_f64());
            longest = longest.max(took);
            tried += 1;
        }
    }
    println!("{tried} cases, the slowest in effect after {:.1} s\n{}", longest.as_secs_f64(), town.costs());
    assert!(tried > 0, "no case is called {wanted}");
}

/// Two nodes with everything that the chart makes and the grid, in which everybody reaches everybody.
fn site() -> (Town, Grid) {
    let town = Town::bare();
    town.install();
    town.nodes.apply("definition.json", &definition().to_string());
    let grid = Grid::build(&town);
    let took = settle(&town, &grid, "without policies", Duration::from_secs(90), &|_| true);
    println!("everybody reaches everybody after {:.1} s", took.as_secs_f64());
    (town, grid)
}

/// Tries all flows until each is answered if it is allowed, and only then, twice in a row. Returns when the first of
/// these rounds began.
fn settle(town: &Town, grid: &Grid, what: &str, within: Duration, allows: &dyn Fn(&Flow) -> bool) -> Duration {
    let start = Instant::now();
    let mut held = None;
    loop {
        let began = start.elapsed();
        let opened = grid.opened();
        let wrong: Vec<String> = opened
            .iter()
            .filter(|((flow, _), opened)| **opened != is_to_pass(flow, allows))
            .map(|((flow, way), opened)| format!("{flow:?} {way:?} is {}", if *opened { "opened" } else { "refused" }))
            .collect();
        match (wrong.as_slice(), held) {
            ([], Some(first)) => return first,
            ([], None) => held = Some(began),
            (wrong, _) => {
                held = None;
                assert!(
                    began < within,
                    "{what}: {} of {} flows, such as {:#?}\n{}",
                    wrong.len(),
                    opened.len(),
                    &wrong[..wrong.len().min(12)],
                    town.details()
                );
            }
        }
    }
}

fn is_to_pass(flow: &Flow, allows: &dyn Fn(&Flow) -> bool) -> bool {
    let is_not_ours = flow.from.is_outside() && flow.to.is_outside();
    // `capture.accept` lets pods without a certificate in by ports.
    let is_accepted = flow.protocol != Protocol::Icmp || !flow.from.is_outside();
    // A pod always reaches itself.
    flow.from == flow.to || is_not_ours || is_accepted && allows(flow)
}

/// The definition that a user installs, without its schema.
pub(super) fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "clusternetworkpolicies.policy.networking.k8s.io",
                     "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
        "spec": {
            "group": "policy.networking.k8s.io", "scope": "Cluster",
            "names": {"kind": "ClusterNetworkPolicy", "plural": "clusternetworkpolicies",
                      "singular": "clusternetworkpolicy", "listKind": "ClusterNetworkPolicyList",
                      "shortNames": ["cnp"]},
            "versions": [{
                "name": "v1alpha2", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
            }],
        },
    })
}
