//! Documents of this release and of others, and how people see them.

use std::path::Path;

use super::*;
use crate::recorded::hold;

#[test]
fn the_documents_of_each_release_are_read_and_keep_their_keys() {
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
    let version = env!("CARGO_PKG_VERSION");
    hold::<NodeStatus>(&documents, version, "agent-status.json").unwrap();
    hold::<PodStates>(&documents, version, "agent-pods.json").unwrap();
    hold::<FlowLine>(&documents, version, "agent-flow.json").unwrap();
    hold::<Findings>(&documents, version, "agent-doctor.json").unwrap();
    hold::<WhyFacts>(&documents, version, "agent-why.json").unwrap();
    hold::<PolicyTested>(&documents, version, "agent-policy-test.json").unwrap();
    hold::<PolicySeen>(&documents, version, "agent-policy-seen.json").unwrap();
    hold::<Refused>(&documents, version, "agent-refused.json").unwrap();
}

#[test]
fn what_a_later_release_adds_is_skipped_and_what_an_earlier_one_lacks_is_empty() {
    let text =
        r#"{"node":"n1","later":[1],"parts":[{"name":"chain","ok":true,"colour":"red"}],"upgrade":{"stage":"x"}}"#;
    let status: NodeStatus = serde_json::from_str(text).unwrap();
    assert_eq!((status.node.as_str(), status.parts[0].ok, status.upgrade.stage.as_str()), ("n1", true, "x"));
    assert_eq!((status.pods, status.first_to_expire), (PodCounts::default(), None));
    let line: FlowLine = serde_json::from_str(r#"{"weather":"fine"}"#).unwrap();
    assert_eq!(line, FlowLine::default());
}

#[test]
fn every_text_and_key_of_a_document_is_changed() {
    let status = serde_json::json!({"state": "running", "counters": {"a\u{1b}": 1}, "tunnels": [{"name": "b\u{1b}"}]});
    let pod = PodState { pod: "shop/\u{1b}web".to_owned(), status, ..PodState::default() };
    let shown = change_texts(&pod, &mut |text| text.replace('\u{1b}', "ESC")).unwrap();
    let text = serde_json::to_string(&shown).unwrap();
    assert!(!text.contains("\\u001b") && text.matches("ESC").count() == 3, "{text}");
}

#[test]
fn a_permission_that_is_lacking_is_named_with_the_command_that_gives_it() {
    let lacking = |namespace: Option<&str>, verb: &str| Lacking {
        user: "system:serviceaccount:shop:nebula-viewer".to_owned(),
        verb: verb.to_owned(),
        resource: "flows".to_owned(),
        namespace: namespace.map(str::to_owned),
    };
    let of_shop = lacking(Some("shop"), "get");
    assert_eq!(
        of_shop.to_string(),
        "system:serviceaccount:shop:nebula-viewer may not get flows.nebula-cni in namespace shop"
    );
    assert_eq!(
        of_shop.remedy().unwrap(),
        "kubectl create rolebinding -n shop nebula-viewer --clusterrole=nebula-viewer --serviceaccount=shop:nebula-viewer"
    );
    let of_all = lacking(None, "update").remedy().unwrap();
    assert!(of_all.contains("clusterrolebinding") && of_all.contains("--clusterrole=nebula-operator"), "{of_all}");
    let person = Lacking { user: "jane".to_owned(), ..lacking(None, "get") };
    assert_eq!(person.remedy(), None);
}

#[test]
fn pods_of_several_nodes_have_a_column_for_them() {
    let running = serde_json::json!({"state": "running", "certificate": {"not_after": 7300}, "last_error": "late"});
    let pods = [
        PodState { node: Some("node-1".into()), pod: "shop/web".into(), status: running, ..PodState::default() },
        PodState {
            node: Some("n2".into()),
            pod: "shop/db-0".into(),
            problem: Some("was started before".into()),
            is_unprotected: true,
            ..PodState::default()
        },
    ];
    let text = PodState::table(&pods, 0);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "NODE    POD        STATE        CERTIFICATE  TUNNELS  OVERLAY");
    assert_eq!(lines[1].trim_end(), "node-1  shop/web   running      for 2 h            0");
    assert_eq!(lines[2].trim(), "-> late");
    assert_eq!(lines[3], "n2      shop/db-0  UNPROTECTED  was started before");
    assert!(pods[0].is_well() && !pods[1].is_well());
}
