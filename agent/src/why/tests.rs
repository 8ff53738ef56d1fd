//! Tests: what is asked, what the API server says, and what this node adds.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_contract::why::{
    Asked, Cause, End, Facts, InTable, Kind, PodTunnel, Question, Report, Target, Workload,
};
use serde_json::{Value, json};

use super::ends::Here;
use super::objects::{described, workload};
use crate::host_root::HostRoot;
use crate::pod_status;
use crate::table::endpoints::Slice;

#[test]
fn ends_are_read_as_people_write_them() {
    let name = |namespace: &str, name: &str, kind| Asked::Name { namespace: namespace.into(), name: name.into(), kind };
    let address = |text: &str| Asked::Address(text.parse().unwrap());
    for (text, target, protocol, port) in [
        ("pay/db:5432", name("pay", "db", None), 6, 5432),
        ("pay/db", name("pay", "db", None), 1, 0),
        ("pay/db:53/udp", name("pay", "db", None), 17, 53),
        ("pay/db:9/SCTP", name("pay", "db", None), 132, 9),
        ("pod/pay/db-0:80", name("pay", "db-0", Some(Kind::Pod)), 6, 80),
        ("svc/pay/db:80", name("pay", "db", Some(Kind::Service)), 6, 80),
        ("pod/db:80", name("pod", "db", None), 6, 80),
        ("db.pay.svc:80", name("pay", "db", Some(Kind::Service)), 6, 80),
        ("db.pay.svc.cluster.local:53/udp", name("pay", "db", Some(Kind::Service)), 17, 53),
        ("10.96.0.10:53/udp", address("10.96.0.10"), 17, 53),
        ("10.96.0.10", address("10.96.0.10"), 1, 0),
        ("[fd00::7]:443", address("fd00::7"), 6, 443),
        ("fd00::7", address("fd00::7"), 58, 0),
        ("[::ffff:10.0.0.7]:80", address("10.0.0.7"), 6, 80),
    ] {
        let question = Question::parse("shop/web", text).unwrap();
        assert_eq!((&question.namespace[..], &question.name[..]), ("shop", "web"));
        assert_eq!((question.target, question.protocol, question.port), (target, protocol, port), "{text}");
    }
    for wrong in [
        "",
        "db",
        "pay/",
        "/db",
        "pay/db:",
        "pay/db:0",
        "pay/db:65536",
        "pay/db:80/quic",
        "Pay/db",
        "a.b/db",
        "pay/db/x:1",
        "db.svc:80",
        "../x/y",
        "pay/db?x=1",
    ] {
        assert!(Question::parse("shop/web", wrong).is_err(), "{wrong}");
        assert!(Question::parse(wrong, "pay/db").is_err() || wrong == "pay/db/x:1", "{wrong}");
    }
}

fn question(port: u16, protocol: u8) -> Question {
    let target = Asked::Name { namespace: "pay".into(), name: "db".into(), kind: None };
    Question { namespace: "shop".into(), name: "web".into(), target, protocol, port }
}

fn pod(namespace: &str, name: &str, node: &str, addresses: &[&str]) -> Workload {
    let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let pod: core::Pod = serde_json::from_value(json!({
        "metadata": {"namespace": namespace, "name": name}, "spec": {"nodeName": node, "containers": []},
        "status": {"phase": "Running", "podIP": addresses[0], "podIPs": ips,
                   "conditions": [{"type": "Ready", "status": "True"}]},
    }))
    .unwrap();
    workload(&pod)
}

#[test]
fn a_service_is_described_by_its_endpoints() {
    let service = |spec: Value| -> core::Service {
        serde_json::from_value(json!({"metadata": {"namespace": "pay", "name": "db"}, "spec": spec})).unwrap()
    };
    let slice = |family: &str, endpoints: Value| -> Vec<Slice> {
        let slice: EndpointSlice = serde_json::from_value(json!({
            "metadata": {"namespace": "pay", "name": "db-1", "labels": {"kubernetes.io/service-name": "db"}},
            "addressType": family, "ports": [{"name": "sql", "port": 5432}], "endpoints": endpoints}))
        .unwrap();
        Slice::of_slice(&slice)
    };
    let usual =
        service(json!({"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd96::9"], "selector": {"app": "db"},
        "ports": [{"name": "sql", "port": 80, "targetPort": "sql"}, {"name": "dns", "port": 53, "protocol": "UDP"}]}));
    let source = pod("shop", "web", "n1", &["10.244.0.1"]);
    let two = slice(
        "IPv4",
        json!([{"addresses": ["10.244.0.8"], "conditions": {"ready": false}}, {"addresses": ["10.244.0.2"]}]),
    );
    let (found, endpoint) = described(&usual, &two, &question(80, 6), &source);
    assert_eq!((found.target_port, found.ready, found.not_ready), (Some(5432), 1, 1));
    assert_eq!((endpoint, found.ports), (Some([10, 244, 0, 2].into()), vec!["80/tcp".to_owned(), "53/udp".to_owned()]));
    assert_eq!((found.addresses.len(), found.has_selector, found.external_name), (2, true, None));
    // Another protocol, another port, a message without a port.
    assert_eq!(described(&usual, &two, &question(80, 17), &source).0.target_port, None);
    assert_eq!(described(&usual, &two, &question(81, 6), &source).0.target_port, None);
    assert_eq!(described(&usual, &two, &question(0, 1), &source).0.target_port, Some(5432));
    // Endpoints of a family that the source does not have are ready, and none for it.
    let other = slice("IPv6", json!([{"addresses": ["fd00::2"]}]));
    let (found, endpoint) = described(&usual, &other, &question(80, 6), &source);
    assert_eq!((found.ready, endpoint), (1, None));
    let outside = service(json!({"type": "ExternalName", "externalName": "db.example.org"}));
    let (found, endpoint) = described(&outside, &[], &question(80, 6), &source);
    assert_eq!((found.external_name.as_deref(), found.addresses.len(), endpoint), (Some("db.example.org"), 0, None));
    let headless = service(json!({"clusterIP": "None", "selector": {}}));
    let (found, _) = described(&headless, &[], &question(80, 6), &source);
    assert_eq!((found.addresses.len(), found.has_selector, found.ready), (0, false, 0));
}

/// A node whose state directory has an attachment of each of these pods; their instances say what is given, or nothing.
fn node(folder: &Path, pods: &[(&Workload, Option<Value>)]) -> HostRoot {
    for (pod, status) in pods {
        let network = folder.join("run/nebula-cni/pods");
        fs::create_dir_all(&network).unwrap();
        let socket = network.join(format!("{}.status", pod.name));
        let record = json!({
            "version": 1, "state": "running", "network": "pods", "container_id": pod.name, "ifname": "eth0",
            "device": "nebula0", "netns": "/run/netns/none", "netns_id": [4, 9], "pod_address": pod.addresses[0],
            "pod": {"namespace": pod.namespace, "name": pod.name, "uid": "u"}, "supervisor": "direct",
            "instance": "/opt/x", "process": null, "status_socket": format!("/run/nebula-cni/pods/{}.status", pod.name)});
        fs::write(network.join(format!("{}-eth0.json", pod.name)), record.to_string()).unwrap();
        if let Some(status) = status {
            let listener = UnixListener::bind(&socket).unwrap();
            let text = status.to_string();
            thread::spawn(move || {
                while let Ok((mut stream, _)) = listener.accept() {
                    let _ = std::io::Write::write_all(&mut stream, text.as_bytes());
                }
            });
        }
    }
    HostRoot::new(Some(folder.to_owned()))
}

fn table(folder: &Path, enrolled: &[&Workload], clear: &[&Workload]) {
    let mut builder = Builder::new();
    for (n, pod) in enrolled.iter().enumerate() {
        builder.pod(pod.addresses[0], n as u64 + 1);
    }
    for pod in clear {
        builder.clear(pod.addresses[0]);
    }
    fs::create_dir_all(folder.join("run/nebula-cni/cluster")).unwrap();
    fs::write(folder.join("run/nebula-cni/cluster/table"), builder.finish(7)).unwrap();
}

fn asked(folder: &Path, host: &HostRoot, node: &str, facts: &Facts) -> Facts {
    let state = Path::new("/run/nebula-cni");
    assert!(folder.join("run/nebula-cni").is_dir());
    let mut facts = facts.clone();
    let (records, _) = pod_status::records(host, state).unwrap();
    Here { host, node, records: &records }.add_to(&mut facts);
    facts
}

#[test]
fn each_node_adds_what_it_knows_of_its_own_pods() {
    let folder = tempfile::tempdir().unwrap();
    let (web, db) = (pod("shop", "web", "n1", &["10.244.0.1"]), pod("pay", "db", "n2", &["10.244.0.2"]));
    let running = json!({"state": "running", "overlay": ["10.244.0.1/16"], "certificate": {"not_after": 2_000_000_000_i64},
        "tunnels": [{"peer": ["10.244.0.2"], "name": "db.pay.pod", "endpoint": "192.0.2.2:4242"}]});
    let host = node(folder.path(), &[(&web, Some(running)), (&db, None)]);
    table(folder.path(), &[&web, &db], &[]);
    let facts = Facts {
        at: 1_800_000_000,
        source: web.clone(),
        target: Target::Pod(db.clone()),
        protocol: 6,
        port: 80,
        ..Facts::default()
    };
    let seen = asked(folder.path(), &host, "n1", &facts);
    let way = seen.way.as_ref().unwrap();
    assert_eq!((way.table, way.sent_to, way.pod), (Some(7), InTable::Enrolled, InTable::Enrolled));
    assert!(matches!(&seen.source_end.as_ref().unwrap().tunnel, PodTunnel::Answers(_)), "{seen:?}");
    // Both happen to be here, so the other end is known, too: nobody is behind its socket.
    assert!(matches!(&seen.destination_end.as_ref().unwrap().tunnel, PodTunnel::Silent { .. }), "{seen:?}");
    let cause = Report::of(&seen).cause;
    assert_eq!(cause, Some(Cause::At(End::Destination, nebula_cni_contract::why::AtEnd::InstanceSilent)));
    // Pods of other nodes are somebody else's.
    let (elsewhere, missing) = (pod("shop", "far", "n3", &["10.244.0.3"]), pod("pay", "new", "n1", &["10.244.0.4"]));
    let far = asked(folder.path(), &host, "n1", &Facts { source: elsewhere, ..facts.clone() });
    assert!(far.source_end.is_none() && far.way.is_none());
    // A pod of this node without an attachment: the table says whether it is to have one.
    for (enrolled, clear, expected) in [
        (vec![&missing], vec![], PodTunnel::Missing),
        (vec![], vec![&missing], PodTunnel::NotMeant),
        (vec![], vec![], PodTunnel::Unknown),
    ] {
        table(folder.path(), &enrolled, &clear);
        let seen = asked(folder.path(), &host, "n1", &Facts { source: missing.clone(), ..facts.clone() });
        assert_eq!(seen.source_end.unwrap().tunnel, expected);
    }
    // Without an API server: both pods are here, or the other one is an address that the table has.
    table(folder.path(), &[&web, &db], &[]);
    let (records, _) = pod_status::records(&host, Path::new("/run/nebula-cni")).unwrap();
    let here = Here { host: &host, node: "n1", records: &records };
    let known = |target: &str| here.resolve(&Question::parse("shop/web", target).unwrap());
    assert!(known("service/pay/db:80").is_none() && known("pay/nobody:80").is_none());
    assert!(here.resolve(&Question::parse("shop/far", "pay/db:80").unwrap()).is_none());
    for (target, expected) in [("pay/db:80", "pay/db"), ("10.244.0.2:80", "pay/db"), ("10.244.0.2", "pay/db")] {
        let (source, Target::Pod(found)) = known(target).unwrap() else { panic!("{target}") };
        assert_eq!((source.full_name(), found.full_name()), ("shop/web".to_owned(), expected.to_owned()));
    }
    let (source, target) = known("10.244.0.9:80").unwrap();
    assert_eq!(target, Target::Address([10, 244, 0, 9].into()));
    let elsewhere = Workload { addresses: vec![[10, 244, 0, 9].into()], ..Workload::default() };
    table(folder.path(), &[&web, &elsewhere], &[]);
    let seen = asked(folder.path(), &host, "n1", &Facts { source, target, ..facts.clone() });
    assert_eq!((seen.destination().unwrap().full_name(), seen.destination_end), ("10.244.0.9".to_owned(), None));
    fs::write(folder.path().join("run/nebula-cni/cluster/table"), "damaged").unwrap();
    let seen = asked(folder.path(), &host, "n1", &facts);
    assert_eq!(seen.way.unwrap().table, None);
}
