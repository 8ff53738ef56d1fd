//! Lighthouses of a StatefulSet: what they get, where they are announced, and who is refused.

use std::{
    fs,
    num::NonZeroU16,
    thread,
    time::{Duration, Instant},
};

use nebula_cert::issuance::{Proof, Reply, Request, Trust};
use serde_json::{Value, json};

use crate::{
    fake_cluster::{AUDIENCE, FakeCluster, Mood, RELEASES},
    running::{Ca, Caller, Service, key, refused, verified},
};

/// A CA that enrols pods of the account `shop/app` as lighthouses.
fn ca(cluster: &FakeCluster) -> Ca {
    let ca = Ca::init();
    fs::write(ca.file("policy.jsonc"), policy(cluster).to_string()).unwrap();
    ca
}

pub(crate) fn policy(cluster: &FakeCluster) -> Value {
    json!({
        "kubernetes": {"node_account": "shop/agent", "audience": AUDIENCE, "kubeconfig": cluster.kubeconfig()},
        "lighthouses": {"account": "shop/app", "network": "10.42.255.0/24"},
        "pods": {"overlay": ["10.42.0.0/16"], "reserved": ["10.42.255.0/24"]},
        "hosts": {"lighthouses": {"10.42.0.1": ["outside.example:4242"]}},
    })
}

/// Adds a pod of the StatefulSet `lh`, in the network of a node, and its token.
pub(crate) fn add(cluster: &FakeCluster, name: &str, uid: &str, node: &str) {
    cluster.add_pod(name, uid, |pod| {
        let set = name.rsplit_once('-').unwrap().0;
        pod["spec"]["hostNetwork"] = true.into();
        pod["status"]["hostIP"] = node.into();
        pod["status"]["podIPs"] = json!([{"ip": node}]);
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set, "controller": true}]);
    });
    cluster.add_token(uid, &[("pod-name", name), ("pod-uid", uid)]);
}

/// The token of a pod is its UID here.
pub(crate) fn enrol(caller: &Caller, token: &str, port: Option<u16>) -> Result<Reply, (u16, String)> {
    let proof = Proof::Lighthouse { token: token.to_owned(), port: port.and_then(NonZeroU16::new) };
    caller.request(&Request { public_key: key().public_pem(), proof })
}

fn code(service: &Service, token: &str) -> Result<String, (u16, String)> {
    enrol(&service.caller, token, None).map(|reply| reply.certificate)
}

pub(crate) fn announced(caller: &Caller) -> Value {
    let trust: Value = serde_json::from_str(&caller.get("/v1/trust", "").2).unwrap();
    trust["lighthouses"].clone()
}

#[test]
fn a_lighthouse_has_name_and_address_by_its_ordinal_and_is_announced_at_its_node() {
    for release in RELEASES {
        let cluster = FakeCluster::start(release);
        add(&cluster, "lh-1", "l-1", "192.0.2.7");
        let service = ca(&cluster).serve();
        let reply = enrol(&service.caller, "l-1", None).unwrap();
        let certificate = verified(&reply);
        assert_eq!((certificate.name(), certificate.groups()), ("lighthouse-1", &["lighthouse".to_owned()][..]));
        assert_eq!(certificate.networks()[0].to_string(), "10.42.255.2/16", "{release}");
        let expected = json!({"10.42.0.1": ["outside.example:4242"], "10.42.255.2": ["192.0.2.7:4242"]});
        assert_eq!(announced(&service.caller), expected, "{release}");
        assert_eq!(serde_json::to_value(reply.lighthouses).unwrap(), expected, "{release}");
        // The same key gets the same certificate.
        let holder = key();
        let ask = || {
            let proof = Proof::Lighthouse { token: "l-1".into(), port: None };
            service.caller.request(&Request { public_key: holder.public_pem(), proof }).unwrap().certificate
        };
        assert_eq!(ask(), ask(), "{release}");
    }
}

#[test]
fn a_lighthouse_that_moves_is_known_elsewhere_within_a_second_and_what_it_was_is_blocked() {
    let cluster = FakeCluster::start(RELEASES[0]);
    add(&cluster, "lh-0", "l-1", "192.0.2.7");
    let service = ca(&cluster).serve();
    let before = verified(&enrol(&service.caller, "l-1", None).unwrap());
    let (_, tag, _) = service.caller.get("/v1/trust", "");
    let follower = {
        let (caller, tag) = (service.caller.clone(), tag.clone());
        thread::spawn(move || (caller.get("/v1/trust?wait=30", &tag), Instant::now()))
    };
    thread::sleep(Duration::from_millis(300));
    // The API server has the pod that replaces it, on another node.
    add(&cluster, "lh-0", "l-2", "192.0.2.8");
    let moved = Instant::now();
    let after = verified(&enrol(&service.caller, "l-2", Some(4343)).unwrap());
    let ((status, _, body), heard) = follower.join().unwrap();
    let trust: Trust = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(trust.lighthouses[&before.networks()[0].addr()], ["192.0.2.8:4343"]);
    assert!(heard - moved < Duration::from_secs(1), "{:?}", heard - moved);
    assert_eq!(after.networks(), before.networks());
    assert_eq!(trust.blocklist, [before.fingerprint().to_string()]);
    assert_eq!(code(&service, "l-1"), refused(403, "pod_uid_mismatch"), "the one before comes back from the dead");
    assert_eq!(announced(&service.caller)["10.42.255.1"], json!(["192.0.2.8:4343"]));
}

#[test]
fn a_renewal_by_certificate_reads_pod_and_node_again() {
    let cluster = FakeCluster::start(RELEASES[0]);
    add(&cluster, "lh-0", "l-1", "192.0.2.7");
    let service = ca(&cluster).serve();
    let holder = key();
    let proof = Proof::Lighthouse { token: "l-1".into(), port: NonZeroU16::new(4343) };
    let reply = service.caller.request(&Request { public_key: holder.public_pem(), proof }).unwrap();
    let present = verified(&reply);
    let renew = || {
        let public_key = key().public_pem();
        let renewal_key = reply.renewal_key.clone().unwrap();
        let proof =
            Proof::of_certificate(&present, &holder, &renewal_key, Some(&public_key), nebula_ca::now()).unwrap();
        service.caller.request(&Request { public_key, proof }).map(|reply| reply.certificate)
    };
    // The node got another address.
    cluster.change_pod("lh-0", |pod| pod["status"]["podIPs"] = json!([{"ip": "192.0.2.9"}]));
    cluster.change_pod("lh-0", |pod| pod["status"]["hostIP"] = "192.0.2.9".into());
    assert!(renew().is_ok());
    assert_eq!(announced(&service.caller)["10.42.255.1"], json!(["192.0.2.9:4343"]));
    cluster.change_pod("lh-0", |pod| pod["spec"]["hostNetwork"] = false.into());
    assert_eq!(renew(), refused(403, "not_host_network"));
    cluster.delete_pod("lh-0");
    assert_eq!(renew(), refused(403, "pod_not_found"));
    assert_eq!(announced(&service.caller)["10.42.255.1"], json!(["192.0.2.9:4343"]), "not at once: it may come back");
}

#[test]
fn who_is_no_lighthouse_is_refused_and_announced_nowhere() {
    let cluster = FakeCluster::start(RELEASES[0]);
    let ca = ca(&cluster);
    let service = ca.serve();
    let with = |change: &dyn Fn(&mut Value)| {
        add(&cluster, "lh-0", "l-1", "192.0.2.7");
        cluster.change_pod("lh-0", change);
        code(&service, "l-1")
    };
    assert_eq!(with(&|pod| pod["spec"]["hostNetwork"] = false.into()), refused(403, "not_host_network"));
    assert_eq!(with(&|pod| pod["metadata"]["ownerReferences"] = json!([])), refused(403, "not_in_stateful_set"));
    let kind = |pod: &mut Value| pod["metadata"]["ownerReferences"][0]["kind"] = "ReplicaSet".into();
    assert_eq!(with(&kind), refused(403, "not_in_stateful_set"));
    assert_eq!(with(&|pod| pod["status"]["phase"] = "Failed".into()), refused(403, "pod_over"));
    assert_eq!(with(&|pod| pod["metadata"]["uid"] = "l-9".into()), refused(403, "pod_uid_mismatch"));
    let account = |pod: &mut Value| pod["spec"]["serviceAccountName"] = "other".into();
    assert_eq!(with(&account), refused(403, "service_account_mismatch"));
    let silent = |pod: &mut Value| pod["status"] = json!({"phase": "Pending"});
    assert_eq!(with(&silent), refused(503, "address_unknown"));
    let own = |pod: &mut Value| pod["status"] = json!({"hostIP": "127.0.0.1", "podIPs": [{"ip": "0.0.0.0"}]});
    assert_eq!(with(&own), refused(503, "address_unknown"), "nobody reaches it there");
    add(&cluster, "lh-40", "l-40", "192.0.2.7");
    assert_eq!(code(&service, "l-40"), refused(403, "no_lighthouse_address"));
    assert_eq!(code(&service, &cluster.token("review: not bound")), refused(403, "token_not_bound"));
    assert_eq!(code(&service, "guessed"), refused(401, "token_rejected"));
    cluster.be(Mood::Failing);
    assert_eq!(code(&service, "l-1"), refused(503, "kubernetes_unavailable"));
    cluster.be(Mood::Well);
    assert_eq!(announced(&service.caller), json!({"10.42.0.1": ["outside.example:4242"]}));

    // Another StatefulSet of the same account has the same ordinals.
    add(&cluster, "lh-0", "l-1", "192.0.2.7");
    code(&service, "l-1").unwrap();
    add(&cluster, "evil-0", "e-1", "192.0.2.66");
    assert_eq!(code(&service, "e-1"), refused(409, "address_conflict"));
    assert_eq!(announced(&service.caller)["10.42.255.1"], json!(["192.0.2.7:4242"]));

    let mut other = policy(&cluster);
    other["lighthouses"]["account"] = "shop/lighthouse".into();
    fs::write(ca.file("policy.jsonc"), other.to_string()).unwrap();
    ca.output("reload", &[]);
    assert_eq!(code(&service, "l-1"), refused(403, "wrong_account"));
    other.as_object_mut().unwrap().remove("lighthouses");
    fs::write(ca.file("policy.jsonc"), other.to_string()).unwrap();
    ca.output("reload", &[]);
    assert_eq!(code(&service, "l-1"), refused(403, "lighthouses_disabled"));
    assert_eq!(announced(&service.caller), json!({"10.42.0.1": ["outside.example:4242"]}));
}
