//! `policy.required` and `policy.condition` in a real two-node cluster, by the chart and Helm. Nothing limits the
//! tokens of agents before Kubernetes 1.30, so the chart is given `agent.acceptUnrestrictedToken`.

use std::time::Duration;

use serde_json::{Value, json};

use super::super::capture::town::Town;
use super::super::helm::Helm;
use super::definition;

/// A policy's condition is written within two minutes, by one agent for all.
const WRITTEN_WITHIN: Duration = Duration::from_secs(150);
/// The node's condition settles for 15 seconds; pods are looked at every 30.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);

fn values(policy: &Value) -> Value {
    json!({
        "enrol": {"namespaces": ["shop"]},
        "network": {"overlay": ["10.244.0.0/16", "fd00:10:244::/48"], "reserved": ["10.244.254.0/24"]},
        "lighthouse": {"network": "10.244.255.0/24"},
        "capture": {"enabled": true},
        "policy": policy,
        "agent": {"unprotected": "attach", "acceptUnrestrictedToken": true},
        "uninstall": {"kubectlImage": "localhost/kubectl:1", "pauseImage": "localhost/pause:1"},
    })
}

fn condition(town: &Town, kind: &str, name: &str, of_type: &str) -> Value {
    let object = town.object(kind, "default", name);
    let all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    all.into_iter().find(|condition| condition["type"] == of_type).unwrap_or_default()
}

fn of_policy(town: &Town, name: &str, status: &str) -> Value {
    let mut last = Value::Null;
    let took = town.nodes.until(&format!("condition {status} of {name}"), WRITTEN_WITHIN, || {
        last = condition(town, "clusternetworkpolicies", name, "nebula-cni/Enforced");
        last["status"] == status
    });
    println!("{name}: {} after {:.0} s: {}", status, took.as_secs_f64(), last["message"]);
    last
}

fn of_nodes(town: &Town, status: &str, message: &str) {
    for node in ["test-node", "node2"] {
        let took = town.nodes.until(&format!("condition {status} of {node}"), SETTLED_WITHIN, || {
            let found = condition(town, "node", node, "NebulaPoliciesEnforced");
            found["status"] == status && found["message"].as_str().is_some_and(|text| text.contains(message))
        });
        println!("{node}: {status} after {:.0} s", took.as_secs_f64());
    }
}

fn cluster_policy(name: &str, peer: &Value) -> Value {
    json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy", "metadata": {"name": name},
        "spec": {"tier": "Admin", "priority": 7, "subject": {"namespaces": {}},
            "egress": [{"name": "out", "action": "Accept", "to": [peer]}]}})
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build, Helm's packages and a build of Kubernetes"]
fn pods_from_before_are_captured_again_when_a_policy_selects_them_and_conditions_say_what_is_not_enforced() {
    let town = Town::bare();
    let nodes = &town.nodes;
    let helm = Helm::new(nodes);
    helm.install(&values(&json!({"enabled": false})), &town);
    for (name, node) in [("server", "test-node"), ("client", "node2")] {
        nodes.pod("shop", name, node);
        nodes.wait_for_pod("shop", name);
    }
    let address = town.pod_address("shop", "server").to_string();
    let reaches = || nodes.ping("shop", "client", &address);
    nodes.until("the pods reach each other", Duration::from_secs(60), reaches);

    nodes.apply("definition.json", &definition().to_string());
    let required = json!({"enabled": true, "required": true, "condition": true});
    helm.succeeds("upgrade", helm.start_with("upgrade", &values(&required)));
    of_nodes(&town, "True", "");
    assert!(reaches(), "no policy selects it yet\n{}", town.details());

    let isolated = json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": "closed"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    nodes.apply("isolated.json", &isolated.to_string());
    let took = nodes.until("a pod from before is isolated", SETTLED_WITHIN, || !reaches());
    println!("isolated in place after {:.0} s", took.as_secs_f64());
    let events = nodes.kubectl(&["get", "events", "-n", "shop", "-o", "jsonpath={.items[*].reason}"]);
    assert!(events.contains("NebulaPolicyNotEnforced"), "{events}\n{}", nodes.state());
    assert_eq!(nodes.status("shop", "server")["containerStatuses"][0]["restartCount"], 0);
    // Not for lack of a tunnel: the same pod answers as soon as a policy lets it.
    nodes.kubectl(&["delete", "networkpolicy", "-n", "shop", "closed"]);
    nodes.until("it is open again", Duration::from_secs(60), reaches);
    of_nodes(&town, "True", "");

    let fine = json!({"namespaces": {}});
    nodes.apply("fine.json", &cluster_policy("fine", &fine).to_string());
    of_policy(&town, "fine", "True");
    nodes.apply("domains.json", &cluster_policy("domains", &json!({"domainNames": ["example.org"]})).to_string());
    let said = of_policy(&town, "domains", "False");
    assert!(said["message"].as_str().is_some_and(|text| text.contains("domain")), "{said}");
    of_nodes(&town, "False", "domains");
    // The next version of it has its own condition.
    nodes.apply("domains.json", &cluster_policy("domains", &fine).to_string());
    assert_eq!(of_policy(&town, "domains", "True")["observedGeneration"], 2);
    of_nodes(&town, "True", "");
}
