//! Proofs confirmed by an API server, for servers that report the node of a token and servers that do not.

use std::{
    fs,
    net::IpAddr,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use nebula_cert::{
    PrivateKey,
    issuance::{Pod, Proof, Reply, Request},
};
use serde_json::{Value, json};

use crate::{
    directory::Reader,
    fake_cluster::{AUDIENCE, FakeCluster, Mood, RELEASES},
    running::{Ca, Service, key, refused, verified},
};

const UID: &str = "b1b1b1b1-0000-4000-8000-000000000001";

/// A CA that trusts one API server.
struct Confirmed {
    cluster: FakeCluster,
    ca: Ca,
}

impl Confirmed {
    fn new(release: &str) -> Self {
        Self::with(release, &json!({}), &json!({}))
    }

    /// Sets up a CA whose policy sections are changed by `kubernetes` and `pods`.
    fn with(release: &str, kubernetes: &Value, pods: &Value) -> Self {
        let cluster = FakeCluster::start(release);
        cluster.add_pod("web-1", UID, |_| {});
        let ca = Ca::init();
        let confirmed = Self { cluster, ca };
        confirmed.set_policy(kubernetes, pods);
        confirmed
    }

    fn set_policy(&self, kubernetes: &Value, pods: &Value) {
        let mut policy = json!({
            "kubernetes": {"node_account": "shop/app", "audience": AUDIENCE, "kubeconfig": self.cluster.kubeconfig()},
            "pods": {"overlay": ["10.42.0.0/16"]},
        });
        for (section, changes) in [("kubernetes", kubernetes), ("pods", pods)] {
            for (name, value) in changes.as_object().unwrap() {
                policy[section][name] = value.clone();
            }
        }
        fs::write(self.ca.file("policy.jsonc"), policy.to_string()).unwrap();
    }

    /// The certificate or refusal that the node agent gets; checks the audit line of a refusal.
    fn ask(&self, service: &Service, pod: Pod) -> Result<String, (u16, String)> {
        let outcome = service.caller.pod(&self.cluster.agent_token(), pod, &key()).map(|reply| reply.certificate);
        if let Err((_, code)) = &outcome {
            let audit = self.ca.text("audit.log");
            let line: Value = serde_json::from_str(audit.lines().last().unwrap()).unwrap();
            assert_eq!((&line["event"], &line["code"]), (&"refused".into(), &code.as_str().into()), "{line}");
        }
        outcome
    }
}

fn web() -> Pod {
    let (namespace, name, uid) = ("shop".into(), "web-1".into(), UID.into());
    Pod { namespace, name, uid, address: "10.244.0.5".parse().unwrap(), other_address: None }
}

fn by_pod(service: &Service, token: &str, address: &str) -> Result<Reply, (u16, String)> {
    let address: IpAddr = address.parse().unwrap();
    let proof = Proof::Pod { token: token.to_owned(), address, other_address: None };
    service.caller.request(&Request { public_key: key().public_pem(), proof })
}

#[test]
fn a_node_gets_certificates_for_its_own_pods_with_what_the_api_server_knows_of_them() {
    for release in RELEASES {
        let groups = json!({"groups": ["ns:{namespace}", "sa:{service_account}", "app:{label:app}", "node:{node}"]});
        let confirmed = Confirmed::with(release, &json!({}), &groups);
        let service = confirmed.ca.serve();
        let reply = service.caller.pod(&confirmed.cluster.agent_token(), web(), &key()).unwrap();
        let certificate = verified(&reply);
        assert_eq!(certificate.name(), "web-1.shop.pod", "{release}");
        assert_eq!(certificate.groups(), ["ns:shop", "sa:app", "app:web", "node:test-node"], "{release}");
    }
}

/// The pause process was killed: the kubelet makes another sandbox with another address, and the API server shows the
/// old address until that one is up.
#[test]
fn a_pod_whose_sandbox_ended_gets_a_certificate_for_the_address_of_the_next_one() {
    for release in RELEASES {
        let confirmed = Confirmed::new(release);
        let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
        let report = |condition: &str, status: &str| {
            cluster.add_pod("web-1", UID, |pod| {
                pod["status"]["podIPs"] = json!([{"ip": "10.244.0.5"}]);
                pod["status"]["conditions"] = json!([
                    {"type": "Ready", "status": "False"}, {"type": condition, "status": status}
                ]);
            });
            let next = Pod { address: "10.244.0.9".parse().unwrap(), ..web() };
            service.caller.pod(&cluster.agent_token(), next, &key()).map_err(|(_, code)| code)
        };
        let code = |outcome: Result<Reply, String>| outcome.map(|_| ()).unwrap_err();
        assert_eq!(code(report("PodReadyToStartContainers", "True")), "address_mismatch", "{release}");
        assert_eq!(code(report("PodReadyToStartContainers", "Unknown")), "address_mismatch", "{release}");
        // Nodes before 1.29 report neither condition by default.
        for condition in ["PodReadyToStartContainers", "PodHasNetwork", "Initialized"] {
            let next = verified(&report(condition, "False").unwrap());
            assert_eq!(next.networks()[0].to_string(), "10.42.0.9/16", "{release}");
        }
        cluster.set_node(&["10.244.7.0/24"]);
        for condition in ["PodReadyToStartContainers", "Initialized"] {
            assert_eq!(code(report(condition, "False")), "outside_node_ranges", "{release}");
        }
    }
}

/// The pod's own word is not the node's: what speaks for itself must be at the address that its node reported.
#[test]
fn a_pod_without_a_sandbox_does_not_speak_for_itself_from_another_address() {
    let policy = json!({"node_account": "nebula-system/agent"});
    let confirmed = Confirmed::with("1.36.2", &policy, &json!({}));
    let service = confirmed.ca.serve();
    confirmed.cluster.change_pod("p2", |pod| {
        pod["status"]["podIPs"] = json!([{"ip": "10.244.0.7"}]);
        pod["status"]["conditions"] = json!([{"type": "PodReadyToStartContainers", "status": "False"}]);
    });
    let token = confirmed.cluster.agent_token();
    let ask = |address: &str| by_pod(&service, &token, address).map(|reply| reply.certificate);
    assert_eq!(ask("10.244.0.8"), refused(403, "address_mismatch"));
    assert!(ask("10.244.0.7").is_ok());
}

#[test]
fn only_agents_of_nodes_read_the_directory_and_a_token_is_reviewed_once_a_minute() {
    for release in RELEASES {
        let confirmed = Confirmed::new(release);
        let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
        let agent = Reader::new(&service.caller, &cluster.agent_token());
        let empty = agent.ask("").unwrap();
        confirmed.ask(&service, web()).unwrap();
        let told = agent.wait(&empty.version);
        let pod = &told.pods[0];
        assert_eq!((pod.uid.as_str(), pod.service_account.as_str(), pod.node.as_str()), (UID, "app", "test-node"));
        // What is known goes on while the API server is away.
        std::thread::sleep(Duration::from_millis(500));
        let asked = cluster.asked();
        cluster.be(Mood::Failing);
        (0..5).for_each(|_| assert_eq!(agent.ask("").unwrap().pods.len(), 1));
        assert_eq!(cluster.asked(), asked, "{release}");
        let read = |token: &str| Reader::new(&service.caller, token).ask("").map(|_| String::new());
        assert_eq!(read("another"), refused(503, "kubernetes_unavailable"), "{release}");
        cluster.be(Mood::Well);
        assert_eq!(read("another"), refused(401, "token_rejected"), "{release}");
        confirmed.set_policy(&json!({"node_account": "nebula-system/agent"}), &json!({}));
        confirmed.ca.output("reload", &[]);
        // The same account under another token is no agent any more.
        cluster.add_token("renewed", &[]);
        assert_eq!(read("renewed"), refused(403, "wrong_account"), "{release}");
    }
}

#[test]
fn each_check_of_the_node_proof_refuses_with_its_own_reason() {
    for release in RELEASES {
        let confirmed = Confirmed::new(release);
        let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
        let ask = |pod| confirmed.ask(&service, pod);
        assert_eq!(ask(Pod { name: "none".into(), ..web() }), refused(403, "pod_not_found"), "{release}");
        assert_eq!(ask(Pod { uid: "u-2".into(), ..web() }), refused(403, "pod_uid_mismatch"), "{release}");
        assert_eq!(ask(Pod { name: "../x".into(), ..web() }), refused(400, "invalid_pod"), "{release}");

        let with = |change: &dyn Fn(&mut Value)| {
            cluster.add_pod("web-1", UID, change);
            confirmed.ask(&service, web())
        };
        assert_eq!(with(&|pod| pod["spec"]["nodeName"] = "other".into()), refused(403, "pod_on_other_node"));
        assert_eq!(with(&|pod| pod["spec"]["nodeName"] = "".into()), refused(403, "pod_not_scheduled"));
        assert_eq!(with(&|pod| pod["status"]["phase"] = "Succeeded".into()), refused(403, "pod_over"));
        assert_eq!(with(&|pod| pod["status"]["phase"] = "Failed".into()), refused(403, "pod_over"));
        assert_eq!(with(&|pod| pod["spec"]["hostNetwork"] = true.into()), refused(403, "host_network"));
        let elsewhere = |pod: &mut Value| {
            pod["status"]["podIPs"] = json!([{"ip": "10.244.0.6"}]);
            pod["status"]["conditions"] = json!([{"type": "PodReadyToStartContainers", "status": "True"}]);
        };
        assert_eq!(with(&elsewhere), refused(403, "address_mismatch"));
        let own = |pod: &mut Value| pod["status"]["podIPs"] = json!([{"ip": "10.244.0.5"}]);
        assert!(with(&own).is_ok());
        let renumbered = |pod: &mut Value| pod["status"]["podIP"] = "10.42.0.5".into();
        assert!(with(&renumbered).is_ok(), "a renumbered pod is known by its overlay address");

        cluster.set_node(&["10.244.9.0/24", "fd00::/64"]);
        assert_eq!(with(&|_| {}), refused(403, "outside_node_ranges"));
        cluster.set_node(&["10.244.0.0/24"]);
        assert!(with(&|_| {}).is_ok());
        cluster.set_node(&["fd00::/64"]);
        assert!(with(&|_| {}).is_ok(), "no range of this family is known");
    }
}

#[test]
fn an_address_that_the_api_server_shows_for_another_pod_or_a_node_is_not_certified() {
    let confirmed = Confirmed::new("1.36.2");
    let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
    cluster.add_pod("dns", "u-9", |pod| {
        pod["spec"]["nodeName"] = "other".into();
        pod["status"] = json!({"phase": "Running", "podIPs": [{"ip": "10.244.0.5"}]});
    });
    let until = |expected: &str| {
        let began = Instant::now();
        loop {
            let code = confirmed.ask(&service, web()).map_or_else(|(_, code)| code, |_| "issued".to_owned());
            if code == expected {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(10), "{code} instead of {expected}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until("address_in_use");
    cluster.set_node(&["10.244.0.4/30"]);
    cluster.delete_pod("dns");
    until("node_address");
    cluster.set_node(&["10.244.0.0/24"]);
    until("issued");
    assert!(confirmed.ca.text("audit.log").contains("shop/dns"));
}

#[test]
fn a_token_of_another_account_audience_or_of_no_pod_vouches_for_nothing() {
    for release in RELEASES {
        let confirmed = Confirmed::new(release);
        let service = confirmed.ca.serve();
        let ask = |token: &str| service.caller.pod(token, web(), &key()).map(|reply| reply.certificate);
        let cluster = &confirmed.cluster;
        assert_eq!(ask(&cluster.token("review: not bound")), refused(403, "token_not_bound"), "{release}");
        assert_eq!(ask(&cluster.token("review: garbage")), refused(401, "token_rejected"), "{release}");
        assert_eq!(ask(""), refused(401, "token_rejected"), "{release}");
        assert_eq!(ask(&"x".repeat(40_000)), refused(401, "token_rejected"), "{release}");
        assert_eq!(
            ask(&confirmed.ca.text("node.token")),
            refused(401, "token_rejected"),
            "the shared secret is none here"
        );
        // The token has expired long ago.
        let agent = cluster.agent_token();
        cluster.review_as(&agent, "review: pod deleted (12 s later)");
        assert_eq!(ask(&agent), refused(401, "service_token_expired"), "{release}");
        drop(service);

        let confirmed = Confirmed::with(release, &json!({"node_account": "nebula-system/agent"}), &json!({}));
        let service = confirmed.ca.serve();
        assert_eq!(confirmed.ask(&service, web()), refused(403, "wrong_account"), "{release}");

        let confirmed = Confirmed::with(release, &json!({"audience": "other"}), &json!({}));
        let service = confirmed.ca.serve();
        let other = confirmed.cluster.token("review: other audience");
        let outcome = service.caller.pod(&other, web(), &key()).map(|reply| reply.certificate);
        assert_eq!(outcome, refused(401, "wrong_audience"), "{release}");
    }
}

#[test]
fn on_old_servers_the_agent_must_still_run_where_it_vouches() {
    let confirmed = Confirmed::new("1.20.2");
    let service = confirmed.ca.serve();
    confirmed.cluster.change_pod("p2", |pod| pod["spec"]["nodeName"] = "elsewhere".into());
    assert_eq!(confirmed.ask(&service, web()), refused(403, "pod_on_other_node"));
    confirmed.cluster.change_pod("p2", |pod| pod["metadata"]["uid"] = "made-anew".into());
    assert_eq!(confirmed.ask(&service, web()), refused(403, "agent_gone"));
    confirmed.cluster.delete_pod("p2");
    assert_eq!(confirmed.ask(&service, web()), refused(403, "agent_gone"));
}

#[test]
fn a_static_pod_is_known_by_the_hash_its_mirror_carries() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    let hash = "d41d8cd98f00b204e9800998ecf8427e";
    let mirror = |owner: &'static str| {
        move |pod: &mut Value| {
            pod["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": hash});
            pod["metadata"]["ownerReferences"] = json!([{"kind": owner, "name": "test-node"}]);
        }
    };
    confirmed.cluster.add_pod("web-1", UID, mirror("ReplicaSet"));
    assert_eq!(confirmed.ask(&service, Pod { uid: hash.into(), ..web() }), refused(403, "pod_uid_mismatch"));
    confirmed.cluster.add_pod("web-1", UID, mirror("Node"));
    assert!(confirmed.ask(&service, Pod { uid: hash.into(), ..web() }).is_ok());
}

#[test]
fn while_the_api_server_confirms_nothing_nothing_is_issued_and_it_may_be_asked_again() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    for mood in [Mood::Failing, Mood::Forbidding, Mood::Garbled, Mood::Endless, Mood::Silent] {
        confirmed.cluster.be(mood);
        assert_eq!(confirmed.ask(&service, web()), refused(503, "kubernetes_unavailable"), "{mood:?}");
        let token = confirmed.cluster.token("review: good");
        let outcome = by_pod(&service, &token, "10.244.0.5").map(|reply| reply.certificate);
        assert_eq!(outcome, refused(503, "kubernetes_unavailable"), "{mood:?}");
    }
    assert!(confirmed.ca.json("certificate list", &[]).as_array().unwrap().is_empty());
    assert!(!confirmed.ca.text("audit.log").contains("secret detail"));
    confirmed.cluster.be(Mood::Well);
    let began = Instant::now();
    while confirmed.ask(&service, web()).is_err() {
        assert!(began.elapsed() < Duration::from_secs(20), "it is well again");
    }
}

#[test]
fn a_pod_speaks_for_itself_once_its_node_has_reported_its_address() {
    for release in RELEASES {
        let confirmed = Confirmed::with(release, &json!({"node_account": "nebula-system/agent"}), &json!({}));
        let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
        let token = cluster.agent_token();
        let ask = |address: &str| by_pod(&service, &token, address).map(|reply| reply.certificate);
        assert_eq!(ask("10.244.0.7"), refused(503, "address_unknown"), "{release}");
        cluster.change_pod("p2", |pod| pod["status"]["podIPs"] = json!([{"ip": "10.244.0.7"}]));
        assert_eq!(ask("10.244.0.8"), refused(403, "address_mismatch"), "another pod's address");
        let reply = by_pod(&service, &token, "10.244.0.7").unwrap();
        assert_eq!(verified(&reply).name(), "p2.shop.pod", "{release}");

        cluster.change_pod("p2", |pod| pod["spec"]["serviceAccountName"] = "other".into());
        assert_eq!(ask("10.244.0.7"), refused(403, "service_account_mismatch"), "{release}");
        cluster.change_pod("p2", |pod| pod["metadata"]["uid"] = "made-anew".into());
        assert_eq!(ask("10.244.0.7"), refused(403, "pod_uid_mismatch"), "{release}");
        cluster.delete_pod("p2");
        assert_eq!(ask("10.244.0.7"), refused(403, "pod_not_found"), "{release}");
        let unbound = cluster.token("review: not bound");
        let outcome = by_pod(&service, &unbound, "10.244.0.7").map(|reply| reply.certificate);
        assert_eq!(outcome, refused(403, "token_not_bound"), "{release}");
        // A pod's token is not accepted as that of the node agent.
        let outcome = service.caller.pod(&token, web(), &key()).map(|reply| reply.certificate);
        assert_eq!(outcome, refused(403, "wrong_account"), "{release}");
    }
}

#[test]
fn a_certificate_is_renewed_with_its_key_while_the_pod_is_there() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    let first = key();
    let reply = service.caller.pod(&confirmed.cluster.agent_token(), web(), &first).unwrap();
    let present = verified(&reply);
    let renew = |holder: &PrivateKey, next: &PrivateKey| {
        let (renewal_key, public) = (reply.renewal_key.clone().unwrap(), next.public_pem());
        let proof = Proof::of_certificate(&present, holder, &renewal_key, Some(&public), nebula_ca::now()).unwrap();
        service.caller.request(&Request { public_key: public, proof })
    };
    let code = |outcome: Result<Reply, (u16, String)>| outcome.map(|reply| reply.certificate);
    let next = verified(&renew(&first, &key()).unwrap());
    assert_eq!((next.name(), next.networks()), (present.name(), present.networks()));
    assert_ne!(next.public_key(), present.public_key());
    assert_eq!(code(renew(&key(), &key())), refused(401, "not_the_holder"));
    confirmed.cluster.change_pod("web-1", |pod| pod["status"]["phase"] = "Failed".into());
    assert_eq!(code(renew(&first, &key())), refused(403, "pod_over"));
    confirmed.cluster.delete_pod("web-1");
    assert_eq!(code(renew(&first, &key())), refused(403, "pod_gone"));
}

#[test]
fn a_deleted_pod_that_nobody_released_is_blocked() {
    let confirmed = Confirmed::new("1.36.2");
    confirmed.cluster.add_pod("web-2", "u-2", |_| {});
    let service = confirmed.ca.serve();
    confirmed.ask(&service, web()).unwrap();
    let two = Pod { name: "web-2".into(), uid: "u-2".into(), address: "10.244.0.6".parse().unwrap(), ..web() };
    confirmed.ask(&service, two).unwrap();
    let (_, tag, _) = service.caller.get("/v1/trust", "");
    service.stop();
    confirmed.cluster.delete_pod("web-1");
    // The service checks right after its start, then every half minute.
    let service = confirmed.ca.serve();
    let (status, _, body) = service.caller.get("/v1/trust?wait=20", &tag);
    let trust: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, trust["blocklist"].as_array().unwrap().len()), (200, 1));
    let audit = confirmed.ca.text("audit.log");
    let line = audit.lines().find(|line| line.contains("pod_deleted")).unwrap();
    assert!(line.contains("pod shop/web-1"), "{line}");
}

#[test]
fn a_node_gives_back_its_own_pods_and_gone_ones_but_not_those_of_others() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    confirmed.ask(&service, web()).unwrap();
    let proof = || Proof::Node { token: confirmed.cluster.agent_token(), pod: web() };
    confirmed.cluster.change_pod("web-1", |pod| pod["spec"]["nodeName"] = "other".into());
    assert_eq!(service.caller.release(proof()), Err((403, "pod_on_other_node".to_owned())));
    confirmed.cluster.delete_pod("web-1");
    assert_eq!(service.caller.release(proof()).unwrap().len(), 1);
    assert_eq!(service.caller.release(proof()).unwrap().len(), 0, "given back twice is given back");
}

#[test]
fn of_pods_that_are_deleted_a_node_gives_back_those_that_the_ledger_has_for_it() {
    let confirmed = Confirmed::with(RELEASES[0], &json!({}), &json!({"overlay": ["10.42.0.0/30"], "address": "pool"}));
    let (cluster, service) = (&confirmed.cluster, confirmed.ca.serve());
    cluster.add_token("other agent", &[("node-name", "other")]);
    confirmed.ask(&service, web()).unwrap();
    let blocked = || service.caller.get("/v1/trust", "").2;
    let release = |token: &str, pod: Pod| service.caller.release(Proof::Node { token: token.to_owned(), pod });
    let own = cluster.agent_token();
    for change in [true, false] {
        // The API server shows another pod of that name, or none.
        if change {
            cluster.add_pod("web-1", "u-9", |_| {})
        } else {
            cluster.delete_pod("web-1")
        }
        assert_eq!(release("other agent", web()), Err((403, "pod_on_other_node".to_owned())));
        assert!(
            !blocked()
                .contains(&confirmed.ca.json("certificate list", &[])[0]["fingerprint"].as_str().unwrap().to_owned())
        );
    }
    assert_eq!(release("other agent", Pod { uid: "u-5".into(), ..web() }).unwrap(), [""; 0], "there is nothing");
    let released = release(&own, web()).unwrap();
    assert_eq!(released.len(), 1);
    assert!(blocked().contains(&released[0]));
    assert_eq!(release(&own, web()).unwrap(), [""; 0], "given back twice is given back");
    // The pool has two addresses: the one that is free at once, and the other after its cool-down.
    cluster.add_pod("web-2", "u-2", |_| {});
    assert!(confirmed.ask(&service, web_2()).is_ok());
}

#[test]
fn the_trust_is_written_into_the_config_map_and_put_right_again() {
    let cluster = FakeCluster::start(RELEASES[0]);
    let (ca, map) = (Ca::init(), json!({"trust_config_map": "shop/nebula-trust"}));
    let confirmed = Confirmed { cluster, ca };
    confirmed.set_policy(&map, &json!({}));
    confirmed.cluster.be(Mood::Forbidding);
    let service = confirmed.ca.serve_with_options(&["--tls-name", "nebula-ca.shop.svc"]);
    let names = confirmed.ca.json("tls show", &[])["names"].to_string();
    assert!(names.contains("nebula-ca.shop.svc"), "{names}");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(confirmed.cluster.config_map(), None);
    confirmed.cluster.be(Mood::Well);
    let expected = json!({"tls.crt": confirmed.ca.text("tls.crt"), "ca.crt": confirmed.ca.text("ca.crt")});
    confirmed.ca.output("reload", &[]);
    assert_eq!(confirmed.cluster.config_map(), Some(expected.clone()));
    // Somebody edits it, and adds a key of their own.
    confirmed.cluster.set_config_map(&json!({"tls.crt": "x", "ca.crt": confirmed.ca.text("ca.crt"), "note": "mine"}));
    confirmed.ca.output("tls add-name", &["ca.example"]);
    let found = confirmed.cluster.config_map().unwrap();
    assert_eq!((&found["tls.crt"], &found["note"]), (&confirmed.ca.text("tls.crt").into(), &"mine".into()));
    assert_ne!(found["tls.crt"], expected["tls.crt"]);
    let log = service.stop();
    assert!(log.contains("the verbs get, patch and create"), "{log}");
    assert!(!found.to_string().contains("PRIVATE KEY"));
}

/// Sets up web-1, running on node `other` at 10.244.0.5, and web-2 on our node, which has reported no address yet.
fn beside_a_pod_of_another_node(release: &str) -> (Confirmed, Service, String) {
    let confirmed = Confirmed::new(release);
    confirmed.cluster.add_pod("web-2", "u-2", |_| {});
    let service = confirmed.ca.serve();
    // The certificate was issued through our agent; the ledger does not care which node's agent it was.
    let victim = verified(&service.caller.pod(&confirmed.cluster.agent_token(), web(), &key()).unwrap());
    confirmed.cluster.add_pod("web-1", UID, |pod| {
        pod["spec"]["nodeName"] = "other".into();
        pod["status"]["podIPs"] = json!([{"ip": "10.244.0.5"}]);
    });
    (confirmed, service, victim.fingerprint().to_string())
}

fn web_2() -> Pod {
    Pod { name: "web-2".into(), uid: "u-2".into(), ..web() }
}

#[test]
fn an_agent_that_names_its_own_pod_and_the_uid_of_another_one_gives_nothing_back() {
    for release in RELEASES {
        let (confirmed, service, victim) = beside_a_pod_of_another_node(release);
        let token = || confirmed.cluster.agent_token();
        for pod in [Pod { uid: UID.into(), ..web_2() }, Pod { name: "none".into(), ..web() }] {
            for proof in [
                Proof::Node { token: token(), pod: pod.clone() },
                Proof::Provisional { token: token(), pod: pod.clone() },
            ] {
                assert_eq!(service.caller.release(proof), Err((409, "pod_uid_conflict".to_owned())), "{release}");
            }
        }
        assert!(!service.caller.get("/v1/trust", "").2.contains(&victim), "{release}");
    }
}

#[test]
fn an_address_not_yet_reported_is_not_taken_from_a_live_pod_of_another_node() {
    for release in RELEASES {
        let (confirmed, service, victim) = beside_a_pod_of_another_node(release);
        assert_eq!(confirmed.ask(&service, web_2()), refused(409, "address_conflict"), "{release}");
        assert!(!service.caller.get("/v1/trust", "").2.contains(&victim), "{release}");
        // Also while the other node has not reported its pod's address.
        confirmed.cluster.add_pod("web-1", UID, |pod| pod["spec"]["nodeName"] = "other".into());
        assert_eq!(confirmed.ask(&service, web_2()), refused(409, "address_conflict"), "{release}");
        // While the API server fails, nobody can tell.
        confirmed.cluster.be(Mood::Failing);
        assert_eq!(confirmed.ask(&service, web_2()), refused(503, "kubernetes_unavailable"), "{release}");
    }
}

#[test]
fn a_pod_that_is_gone_over_or_moved_makes_room_and_is_blocked_at_once() {
    type Change = fn(&FakeCluster);
    let cases: [(&str, Change); 6] = [
        ("deleted", |cluster| cluster.delete_pod("web-1")),
        ("made anew", |cluster| cluster.add_pod("web-1", "u-9", |_| {})),
        ("over", |cluster| cluster.change_pod("web-1", |pod| pod["status"]["phase"] = "Succeeded".into())),
        ("moved", |cluster| {
            cluster.change_pod("web-1", |pod| pod["status"]["podIPs"] = json!([{"ip": "10.244.0.9"}]));
        }),
        ("of our node, without an address", |cluster| cluster.add_pod("web-1", UID, |_| {})),
        ("of our node, ending", |cluster| {
            cluster.change_pod("web-1", |pod| {
                pod["spec"]["nodeName"] = "test-node".into();
                pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            });
        }),
    ];
    for (case, change) in cases {
        let (confirmed, service, victim) = beside_a_pod_of_another_node(RELEASES[0]);
        change(&confirmed.cluster);
        assert!(confirmed.ask(&service, web_2()).is_ok(), "{case}");
        assert!(service.caller.get("/v1/trust", "").2.contains(&victim), "{case}: not in the trust at once");
        let audit = confirmed.ca.text("audit.log");
        assert!(audit.lines().any(|line| line.contains("address_reused") && line.contains(&victim)), "{case}: {audit}");
    }
}

#[test]
fn whoever_fails_too_often_costs_the_api_server_little() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    for number in 0..25 {
        by_pod(&service, &format!("junk-{number}"), "10.244.0.5").unwrap_err();
    }
    confirmed.cluster.be(Mood::Silent);
    let before = confirmed.cluster.asked();
    let askers: Vec<_> = (0..12)
        .map(|number| {
            let caller = service.caller.clone();
            std::thread::spawn(move || {
                let proof = Proof::Pod {
                    token: format!("more junk {number}"),
                    address: "10.244.0.5".parse().unwrap(),
                    other_address: None,
                };
                caller.request(&Request { public_key: key().public_pem(), proof }).unwrap_err().1
            })
        })
        .collect();
    let codes: Vec<String> = askers.into_iter().map(|asker| asker.join().unwrap()).collect();
    assert_eq!(codes.iter().filter(|code| *code == "too_many_failures").count(), 10, "{codes:?}");
    assert_eq!(confirmed.cluster.asked() - before, 2);
    confirmed.cluster.be(Mood::Well);
    assert!(confirmed.ask(&service, web()).is_ok(), "a good proof from there is still heard");
}

#[test]
fn twelve_connections_of_bogus_proofs_do_not_lock_out_the_node_behind_whose_address_they_are() {
    let confirmed = Confirmed::new("1.36.2");
    let service = confirmed.ca.serve();
    let uid = |number: u16| format!("b1b1b1b1-0000-4000-8000-{number:012}");
    for number in 0..44 {
        confirmed.cluster.add_pod(&format!("db-{number}"), &uid(number), |_| {});
    }
    confirmed.cluster.be(Mood::Slow);
    let (stop, refused) = (AtomicBool::new(false), AtomicUsize::new(0));
    let waits = std::thread::scope(|scope| {
        for attacker in 0..12 {
            let (caller, stop, refused) = (service.caller.clone(), &stop, &refused);
            scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let (token, address) = (format!("bogus {attacker} {number}"), "10.244.0.5".parse().unwrap());
                    let proof = Proof::Pod { token, address, other_address: None };
                    let answer = caller.request(&Request { public_key: key().public_pem(), proof });
                    if answer.is_err_and(|(_, code)| code == "too_many_failures") {
                        refused.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        while refused.load(Ordering::Relaxed) < 24 {
            assert!(Instant::now() < deadline, "the failures are not limited");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The agent's proof is not known yet: the first request waits for its turn, the others do not wait.
        let waits: Vec<_> = (0..44)
            .map(|number| {
                let pod = Pod { name: format!("db-{number}"), uid: uid(number), ..web() };
                let pod = Pod { address: [10, 244, 1, u8::try_from(number + 1).unwrap()].into(), ..pod };
                let start = Instant::now();
                let outcome = service.caller.pod(&confirmed.cluster.agent_token(), pod, &key());
                (outcome.map(|_| ()).map_err(|(_, code)| code), start.elapsed())
            })
            .collect();
        stop.store(true, Ordering::Relaxed);
        waits
    });
    let log = service.stop();
    let failures: Vec<&str> = log.lines().filter(|line| line.contains("ERROR")).collect();
    let served = waits.iter().filter(|(outcome, _)| outcome.is_ok()).count();
    let longest = waits.iter().map(|(_, wait)| *wait).max().unwrap();
    println!("{served} of 44 served, the longest wait {longest:?}, {refused:?} of the others refused");
    assert_eq!(served, 44, "{waits:?} {failures:?}");
    assert!(longest < Duration::from_secs(10), "{longest:?}");
}

#[test]
fn credentials_that_cannot_be_read_are_named_at_start() {
    let confirmed = Confirmed::with("1.36.2", &json!({"kubeconfig": "/nonexistent/kubeconfig"}), &json!({}));
    let error = confirmed.ca.failure("serve", &["--listen", "127.0.0.1:0"]);
    assert!(error.contains("/nonexistent/kubeconfig"), "{error}");
}

#[test]
fn a_provisional_certificate_is_off_by_default_and_little_and_no_proof_for_another_one() {
    let confirmed = Confirmed::with(RELEASES[0], &json!({}), &json!({}));
    let service = confirmed.ca.serve();
    // Here the agent vouches for its own pod, so one token serves as both its proof and the pod's own.
    let token = confirmed.cluster.agent_token();
    let uid = confirmed.cluster.recorded("get pod as node")["response"]["metadata"]["uid"].as_str().unwrap().to_owned();
    let p2 = || Pod { name: "p2".into(), uid: uid.clone(), address: "10.244.0.7".parse().unwrap(), ..web() };
    let ask = |key: &PrivateKey, pod: Pod| {
        let proof = Proof::Provisional { token: token.clone(), pod };
        service.caller.request(&Request { public_key: key.public_pem(), proof })
    };
    let code = |outcome: Result<Reply, _>| outcome.map(|reply| reply.certificate);
    assert_eq!(code(ask(&key(), p2())), refused(403, "provisional_disabled"));

    let rules = json!([{"unsafe_networks": ["192.168.7.0/24"], "groups": ["gateway"]}]);
    confirmed.set_policy(&json!({}), &json!({"provisional": {}, "address": "pool", "rules": rules}));
    confirmed.ca.output("reload", &[]);
    let holder = key();
    let reply = ask(&holder, p2()).unwrap();
    let provisional = verified(&reply);
    assert_eq!((provisional.name(), provisional.groups()), ("p2.shop.pod", &["provisional".to_owned()][..]));
    assert!(provisional.unsafe_networks().is_empty());
    assert!((500..=600).contains(&(provisional.not_after() - nebula_ca::now())));
    // The checks are those of the node proof.
    assert_eq!(code(ask(&key(), Pod { uid: "u-2".into(), ..p2() })), refused(403, "pod_uid_mismatch"));

    let (public_key, renewal_key) = (key().public_pem(), reply.renewal_key.unwrap());
    let now = nebula_ca::now();
    let proof = Proof::of_certificate(&provisional, &holder, &renewal_key, Some(&public_key), now).unwrap();
    let renewed = service.caller.request(&Request { public_key, proof });
    assert_eq!(code(renewed), refused(403, "provisional_certificate"));

    // The pod's own token gets the full certificate, at the same address.
    confirmed.cluster.change_pod("p2", |pod| pod["status"]["podIPs"] = json!([{"ip": "10.244.0.7"}]));
    let own = verified(&by_pod(&service, &token, "10.244.0.7").unwrap());
    assert_eq!((own.name(), own.networks()), (provisional.name(), provisional.networks()));
    assert_eq!(own.groups(), ["ns:shop", "gateway"]);
    let proof = Proof::of_certificate(&provisional, &holder, &renewal_key, None, nebula_ca::now()).unwrap();
    assert_eq!(service.caller.release(proof).unwrap(), [provisional.fingerprint().to_string()]);
}
