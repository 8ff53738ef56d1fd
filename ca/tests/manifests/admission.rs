//! What the chart's ValidatingAdmissionPolicies let an agent's token change: their expressions are evaluated against
//! requests as the API server makes them. Another implementation of CEL than the API server's does that (`cel`); its
//! types are not checked here.

use cel::{Context, Program, Value as CelValue, to_value};
use serde_json::{Value, json};

use super::{EVERY_OPTION, NEBULA, documents, object};

/// A policy of the chart, as an API server applies it.
struct Policy(Value);

impl Policy {
    fn of(resource: &str) -> Self {
        let name = format!("nebula-cni-agent-{resource}");
        let policy = object(EVERY_OPTION, "ValidatingAdmissionPolicy", &name).expect("a policy");
        let binding = object(EVERY_OPTION, "ValidatingAdmissionPolicyBinding", &name).expect("a binding");
        assert_eq!(binding["spec"], json!({"policyName": name, "validationActions": ["Deny"]}), "for every object");
        let spec = policy["spec"].clone();
        assert_eq!(spec["failurePolicy"], "Fail");
        assert_eq!(spec["matchConstraints"]["resourceRules"][0]["resources"], json!([resource]));
        Self(spec)
    }

    /// The message of the first validation that refuses a request.
    fn refusal(&self, request: &Request) -> Option<String> {
        let mut context = Context::default();
        let mut set = |name: &str, value: &Value| context.add_variable_from_value(name, to_value(value).expect("JSON"));
        set("object", &request.object);
        set("oldObject", &request.old);
        set("request", &json!({"userInfo": request.user}));
        let is_true = |context: &Context<'_, '_>, expression: &Value| {
            let text = expression.as_str().expect("an expression");
            let program = Program::compile(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            program.execute(context)
        };
        let list = |key: &str| self.0[key].as_array().expect("a list").clone();
        let conditions = list("matchConditions");
        if conditions.iter().any(|condition| is_true(&context, &condition["expression"]) == Ok(CelValue::Bool(false))) {
            return None;
        }
        let mut variables = std::collections::HashMap::new();
        for variable in list("variables") {
            let value = is_true(&context, &variable["expression"]).expect("a value");
            variables.insert(variable["name"].as_str().expect("a name").to_owned(), value);
            context.add_variable_from_value("variables", variables.clone());
        }
        list("validations").iter().find_map(|validation| {
            assert_eq!(validation["reason"], "Forbidden", "the agent expects this status");
            let is_valid = is_true(&context, &validation["expression"]).expect("a verdict") == CelValue::Bool(true);
            (!is_valid).then(|| validation["message"].as_str().expect("a message").to_owned())
        })
    }
}

/// An update of an object, as its policy sees it.
#[derive(Clone)]
struct Request {
    user: Value,
    old: Value,
    object: Value,
}

impl Request {
    /// By the agent of node `n1`.
    fn new(old: Value, change: impl FnOnce(&mut Value)) -> Self {
        let mut object = old.clone();
        change(&mut object);
        // What the server itself does to an update.
        object["metadata"]["managedFields"] = json!([{"manager": "nebula-cni-agent", "operation": "Update"}]);
        object["metadata"]["generation"] = json!(2);
        let user = json!({"username": "system:serviceaccount:other:nebula-cni-agent",
            "extra": {"authentication.kubernetes.io/node-name": ["n1"],
                "authentication.kubernetes.io/pod-name": ["nebula-cni-agent-x"]}});
        Self { user, old, object }
    }
}

fn pod(node: &str) -> Value {
    json!({"metadata": {"name": "web", "namespace": "shop", "uid": "u", "resourceVersion": "7", "generation": 1,
            "labels": {"app": "web"}, "annotations": {"team": "a"}, "finalizers": ["x/y"]},
        "spec": {"nodeName": node, "serviceAccountName": "default",
            "containers": [{"name": "web", "image": "web:1", "env": [{"name": "A", "value": "b"}]}]},
        "status": {"podIP": "10.8.0.7"}})
}

fn node(name: &str, taints: Value) -> Value {
    json!({"metadata": {"name": name, "labels": {"zone": "a"}, "annotations": {"flannel/backend": "{}"}},
        "spec": {"podCIDR": "10.8.1.0/24", "podCIDRs": ["10.8.1.0/24"], "taints": taints}})
}

fn taint(effect: &str) -> Value {
    json!({"key": "nebula-cni/agent-not-ready", "effect": effect})
}

fn other() -> Value {
    json!({"key": "dedicated", "value": "db", "effect": "NoExecute"})
}

#[test]
fn an_agent_sets_and_removes_one_label_of_pods_of_its_own_node_and_nothing_else() {
    let policy = Policy::of("pods");
    let verdict = |old: Value, change: &dyn Fn(&mut Value)| policy.refusal(&Request::new(old, change));
    const LABEL: &str = "nebula-cni/unprotected";
    let set = |pod: &mut Value| pod["metadata"]["labels"][LABEL] = json!("true");
    let mut labelled = pod("n1");
    set(&mut labelled);
    let mut bare = pod("n1");
    bare["metadata"].as_object_mut().expect("a map").remove("labels");
    assert_eq!(verdict(pod("n1"), &set), None);
    assert_eq!(verdict(bare.clone(), &set), None, "it had no label at all");
    let remove = |pod: &mut Value| drop(pod["metadata"]["labels"].as_object_mut().expect("a map").remove(LABEL));
    assert_eq!(verdict(labelled, &remove), None);
    assert_eq!(verdict(pod("n1"), &|_| ()), None, "an update that changes nothing");

    let own = "an agent changes pods of its own node only";
    assert_eq!(verdict(pod("n2"), &set).as_deref(), Some(own));
    let mut unbound = pod("n1");
    unbound["spec"].as_object_mut().expect("a map").remove("nodeName");
    assert_eq!(verdict(unbound, &set).as_deref(), Some(own));
    for (at, value) in [
        ("/spec/containers/0/image", json!("evil:1")),
        ("/spec/containers/0/env/0/value", json!("c")),
        ("/spec/activeDeadlineSeconds", json!(1)),
        ("/spec/tolerations", json!([{"operator": "Exists"}])),
        ("/metadata/annotations/team", json!("b")),
        ("/metadata/annotations/new", json!("b")),
        ("/metadata/annotations", Value::Null),
        ("/metadata/finalizers", json!([])),
        ("/metadata/ownerReferences", json!([{"kind": "Node", "name": "n1"}])),
        ("/metadata/labels/app", json!("db")),
        ("/metadata/labels/other", json!("true")),
        ("/metadata/labels", Value::Null),
        ("/metadata/labels/nebula-cni~1unprotected", json!("false")),
    ] {
        assert!(verdict(pod("n1"), &|pod| put(pod, at, &value)).is_some(), "{at} = {value} is let through");
    }
}

/// Sets what a JSON pointer names; `null` removes it.
fn put(object: &mut Value, at: &str, value: &Value) {
    let (parent, key) = at.rsplit_once('/').expect("a pointer");
    let parent = object.pointer_mut(parent).and_then(Value::as_object_mut).expect("a map");
    let key = key.replace("~1", "/");
    match value {
        Value::Null => drop(parent.remove(&key)),
        value => drop(parent.insert(key, value.clone())),
    }
}

#[test]
fn an_agent_changes_one_taint_and_takes_it_from_its_own_node_only() {
    let policy = Policy::of("nodes");
    let verdict = |name: &str, before: Value, after: Value| {
        policy.refusal(&Request::new(node(name, before), |node| node["spec"]["taints"] = after))
    };
    let (ours, other) = (taint("NoSchedule"), other());
    assert_eq!(verdict("n1", json!([ours, other]), json!([other])), None);
    assert_eq!(verdict("n2", json!([other]), json!([other, ours])), None, "the agent of n2 is gone");
    let bare = |name| {
        let mut node = node(name, Value::Null);
        node["spec"].as_object_mut().expect("a map").remove("taints");
        node
    };
    let add = |node: &mut Value| node["spec"]["taints"] = json!([ours]);
    assert_eq!(policy.refusal(&Request::new(bare("n2"), add)), None);
    let remove = |node: &mut Value| drop(node["spec"].as_object_mut().expect("a map").remove("taints"));
    assert_eq!(policy.refusal(&Request::new(node("n1", json!([ours])), remove)), None);

    let own = "an agent takes nebula-cni/agent-not-ready from its own node only";
    assert_eq!(policy.refusal(&Request::new(node("n2", json!([ours])), remove)).as_deref(), Some(own));
    assert_eq!(verdict("n2", json!([ours, other]), json!([other])).as_deref(), Some(own));
    for (before, after) in [
        (json!([other]), json!([])),
        (json!([other]), json!([{"key": "dedicated", "value": "db", "effect": "NoSchedule"}])),
        (json!([]), json!([other])),
        (json!([ours]), json!([{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}])),
        // It would end what runs there.
        (json!([]), json!([taint("NoExecute")])),
    ] {
        assert!(verdict("n1", before.clone(), after.clone()).is_some(), "{before} -> {after} is let through");
    }
    for (at, value) in [
        ("/metadata/annotations/flannel~1backend", json!("{\"PublicIP\": \"203.0.113.66\"}")),
        ("/metadata/labels/zone", json!("b")),
        ("/metadata/labels/new", json!("b")),
        ("/metadata/finalizers", json!(["x/y"])),
        ("/spec/unschedulable", json!(true)),
        ("/spec/podCIDR", json!("10.9.0.0/16")),
        ("/spec/providerID", json!("x")),
    ] {
        let request = Request::new(node("n1", json!([])), |node| put(node, at, &value));
        assert!(policy.refusal(&request).is_some(), "{at} = {value} is let through");
    }
}

#[test]
fn an_agent_renews_its_own_lease_and_leads_for_itself() {
    let policy = Policy::of("leases");
    let verdict = |name: &str, holder: &str| {
        let lease = json!({"metadata": {"name": name, "namespace": "other"}, "spec": {"holderIdentity": holder}});
        let mut request = Request::new(lease, |_| ());
        request.old = Value::Null;
        policy.refusal(&request).is_none()
    };
    assert!(verdict("nebula-cni-agent-node-n1", "n1"));
    assert!(verdict("nebula-cni-agent-leader", "n1"));
    assert!(!verdict("nebula-cni-agent-node-n2", "n2"));
    assert!(!verdict("nebula-cni-agent-node-n2", "n1"));
    assert!(!verdict("nebula-cni-agent-node-n1", "n2"));
    assert!(!verdict("nebula-cni-agent-leader", "n2"));
    assert!(!verdict("other", "n1"));
}

#[test]
fn others_are_not_held_and_where_tokens_name_no_node_the_rest_holds() {
    let policy = Policy::of("pods");
    let image = |pod: &mut Value| pod["spec"]["containers"][0]["image"] = json!("web:2");
    let label = |pod: &mut Value| pod["metadata"]["labels"]["nebula-cni/unprotected"] = json!("true");
    for user in ["system:serviceaccount:other:nebula-ca", "system:serviceaccount:shop:nebula-cni-agent", "root"] {
        let mut request = Request::new(pod("n2"), image);
        request.user["username"] = json!(user);
        assert_eq!(policy.refusal(&request), None, "{user}");
    }
    for extra in [Value::Null, json!({"authentication.kubernetes.io/pod-name": ["x"]})] {
        let without = |change: &dyn Fn(&mut Value)| {
            let mut request = Request::new(pod("n2"), change);
            put(&mut request.user, "/extra", &extra);
            policy.refusal(&request)
        };
        assert_eq!(without(&label), None);
        assert!(without(&image).is_some());
    }
}

#[test]
fn no_policy_is_made_where_agents_have_no_such_rights() {
    assert!(documents(NEBULA).iter().all(|document| document["kind"] != "ValidatingAdmissionPolicy"));
}
