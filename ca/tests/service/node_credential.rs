//! Pods that start while their node's agent is away, by the credential that the agent obtained before.

use std::fs;

use nebula_cert::issuance::{Pod, Proof};
use serde_json::json;

use crate::{
    directory::Reader,
    fake_cluster::{AUDIENCE, FakeCluster, RELEASES},
    running::{Ca, key, refused, verified},
};

/// Of the node in the recorded review of the agent's token.
const NODE_UID: &str = "61ff46fd-f6f7-4f51-b6b1-5dd107e3549e";

fn ca(cluster: &FakeCluster, account: &str) -> Ca {
    let ca = Ca::init();
    set_account(&ca, cluster, account);
    ca
}

fn set_account(ca: &Ca, cluster: &FakeCluster, account: &str) {
    let policy = json!({
        "kubernetes": {"node_account": account, "audience": AUDIENCE, "kubeconfig": cluster.kubeconfig()},
        "pods": {"overlay": ["10.42.0.0/16"], "namespaces": ["shop"]},
    });
    fs::write(ca.file("policy.jsonc"), policy.to_string()).unwrap();
}

fn web() -> Pod {
    let (namespace, name, uid) = ("shop".into(), "web-1".into(), "u-1".into());
    Pod { namespace, name, uid, address: "10.244.0.5".parse().unwrap(), other_address: None }
}

#[test]
fn pods_start_by_the_credential_of_their_node_when_the_agent_and_its_token_are_gone() {
    for release in RELEASES {
        let cluster = FakeCluster::start(release);
        cluster.make_node(NODE_UID);
        cluster.add_pod("web-1", "u-1", |_| {});
        let ca = ca(&cluster, "shop/app");
        let service = ca.serve();
        let token = cluster.agent_token();
        let made = service.caller.node_credential(&token).unwrap();
        assert_eq!(made.node, "test-node", "{release}");
        cluster.revoke_token(&token);
        cluster.delete_pod("p2");
        let ask = |token: &str, pod| service.caller.pod(token, pod, &key()).map(|reply| reply.certificate);
        // The recorded one says itself when it ended.
        assert_eq!(ask(&token, web()), refused(401, "service_token_expired"), "{release}");
        let certificate = verified(&service.caller.pod(&made.credential, web(), &key()).unwrap());
        assert_eq!(certificate.name(), "web-1.shop.pod", "{release}");
        // Services of one CA share the key: the next one understands it.
        drop(service);
        let service = ca.serve();
        assert!(service.caller.pod(&made.credential, web(), &key()).is_ok(), "{release}");
        let audit = ca.text("audit.log");
        assert!(audit.contains(r#""proof":"node credential""#) && audit.contains(r#""node test-node""#), "{audit}");
        assert!(!audit.contains(&made.credential));
    }
}

#[test]
fn a_node_credential_passes_the_checks_of_the_agents_token_and_ends_with_its_node() {
    let cluster = FakeCluster::start("1.36.2");
    cluster.make_node(NODE_UID);
    cluster.add_pod("web-1", "u-1", |_| {});
    cluster.add_pod("far", "u-2", |pod| pod["spec"]["nodeName"] = "other".into());
    let ca = ca(&cluster, "shop/app");
    let service = ca.serve();
    let made = service.caller.node_credential(&cluster.agent_token()).unwrap().credential;
    let ask = |token: &str, pod| service.caller.pod(token, pod, &key()).map(|reply| reply.certificate);
    let far = Pod { name: "far".into(), uid: "u-2".into(), ..web() };
    assert_eq!(ask(&made, far), refused(403, "pod_on_other_node"));
    assert_eq!(ask(&made, Pod { uid: "u-9".into(), ..web() }), refused(403, "pod_uid_mismatch"));
    assert_eq!(ask(&made, Pod { namespace: "pay".into(), ..web() }), refused(403, "pod_not_found"));
    cluster.add_pod("web-1", "u-1", |pod| {
        pod["status"]["podIPs"] = json!([{"ip": "10.244.0.6"}]);
        pod["status"]["conditions"] = json!([{"type": "PodReadyToStartContainers", "status": "True"}]);
    });
    assert_eq!(ask(&made, web()), refused(403, "address_mismatch"));
    cluster.add_pod("web-1", "u-1", |_| {});

    // It is good for certificates of pods only, so a stolen one is not prolonged.
    let again = |token: &str| service.caller.node_credential(token).map(|made| made.credential);
    assert_eq!(again(&made), refused(401, "token_rejected"));
    assert_eq!(Reader::new(&service.caller, &made).ask("").map(|_| ()), Err((401, "token_rejected".to_owned())));
    let release = service.caller.release(Proof::Node { token: made.clone(), pod: web() });
    assert_eq!(release, Err((401, "token_rejected".to_owned())));
    let changed = format!("{}A{}", &made[..40], &made[41..]);
    assert_eq!(ask(&changed, web()), refused(401, "node_credential_rejected"));

    assert!(ask(&made, web()).is_ok());
    cluster.delete_node();
    assert_eq!(ask(&made, web()), refused(403, "node_gone"));
    assert_eq!(again(&cluster.agent_token()), refused(403, "node_gone"));
    cluster.make_node("n-2");
    assert_eq!(ask(&made, web()), refused(403, "node_gone"), "made anew");
    assert_eq!(again(&cluster.agent_token()), refused(403, "node_gone"), "the token is of the node before");
    cluster.make_node(NODE_UID);
    assert!(ask(&made, web()).is_ok());

    set_account(&ca, &cluster, "nebula-system/agent");
    ca.output("reload", &[]);
    assert_eq!(ask(&made, web()), refused(403, "wrong_account"));
    assert_eq!(again(&cluster.agent_token()), refused(403, "wrong_account"));
}

#[test]
fn without_an_api_server_there_are_no_node_credentials() {
    let ca = Ca::init();
    let service = ca.serve();
    let made = service.caller.node_credential(ca.text("node.token").trim()).map(|made| made.credential);
    assert_eq!(made, refused(403, "node_credentials_disabled"));
}
