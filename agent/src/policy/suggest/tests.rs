use nebula_cni_contract::seen::{Flow, Peer, StableLabels};
use nebula_cni_policy::suggest::Suggestion;
use serde_json::{Value, json};

use super::cluster::encoded;
use super::*;
use crate::table::member::incarnation;

fn api_pod(namespace: &str, name: &str, labels: &Value, address: &str) -> cluster::ApiPod {
    let metadata = json!({"namespace": namespace, "name": name, "uid": format!("uid-{name}"), "labels": labels});
    serde_json::from_value(json!({"metadata": metadata, "status": {"podIPs": [{"ip": address}]}})).unwrap()
}

fn flow(direction: &str, peer: &str, incarnation: u64, port: u16) -> SeenFlow {
    let (direction, peer) = (direction.to_owned(), peer.parse().unwrap());
    SeenFlow { direction, peer, incarnation, protocol: 6, port, flows: 2, last: u64::from(port) }
}

fn labels(all: &[(&str, &str)]) -> StableLabels {
    all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn pod(name: &str) -> Pod {
    Pod { namespace: "shop".into(), name: name.into(), uid: String::new() }
}

fn said(pods: Vec<Asked>) -> Said {
    Said { namespace: "shop".to_owned(), pods }
}

#[test]
fn flows_of_equal_pods_are_added_and_an_address_that_another_pod_has_by_now_is_nobody() {
    let to_db = || flow("egress", "10.0.0.3", incarnation("uid-db"), 5432);
    let gone = flow("ingress", "10.0.0.3", incarnation("uid-before"), 80);
    let said = said(vec![
        (pod("web-1"), Ok((vec![to_db(), gone, flow("ingress", "192.0.2.1", 0, 80)], 1))),
        (pod("web-2"), Ok((vec![to_db()], 2))),
        (pod("web-2"), Err(io::Error::other("no"))),
        (pod("ended"), Ok((vec![to_db()], 0))),
    ]);
    assert!(said.has_flows());
    let mut cluster = Cluster::of(&said, 1000);
    let add = |cluster: &mut Cluster, pod| cluster.add(pod, "shop").unwrap();
    for (name, hash) in [("web-1", "1"), ("web-2", "2")] {
        let labels = json!({"app": "web", "pod-template-hash": hash});
        add(&mut cluster, api_pod("shop", name, &labels, "10.0.0.1"));
    }
    // Of the same name, in another namespace.
    add(&mut cluster, api_pod("quiet", "web-1", &json!({"app": "other"}), "10.0.0.5"));
    add(&mut cluster, api_pod("pay", "db", &json!({"app": "db"}), "10.0.0.3"));
    add(&mut cluster, api_pod("quiet", "unknown", &json!({}), "10.0.0.4"));
    let seen = cluster.seen(said, None, 1000);
    let web = labels(&[("app", "web")]);
    let found = |is_egress, peer, port, flows| Flow {
        labels: web.clone(),
        is_egress,
        peer,
        protocol: 6,
        port,
        flows,
        last: u64::from(port),
    };
    let db = Peer::Pod { namespace: "pay".to_owned(), labels: labels(&[("app", "db")]) };
    let expected = [
        found(false, Peer::Address("192.0.2.1".parse().unwrap()), 80, 2),
        found(false, Peer::Gone("10.0.0.3".parse().unwrap()), 80, 2),
        found(true, db, 5432, 4),
    ];
    assert_eq!(seen.flows, expected);
    assert_eq!((seen.lost, seen.pods), (3, 4));
    assert_eq!(seen.silent, ["shop/web-2: no", "shop/ended: the API server has no such pod"]);
    assert_eq!(seen.known.keys().collect::<Vec<_>>(), ["pay", "shop"]);

    let document = Suggestion::of(&seen, 0).document(&seen).to_string();
    let mut both = Seen::read(&document, "a.json", "shop").unwrap();
    assert_eq!(both, seen);
    both.add(seen);
    let text = Suggestion::of(&both, 0).text(&both);
    assert!(text.contains("# 8 flow(s)"), "{text}");
}

#[test]
fn labels_and_flows_for_which_there_is_no_room_are_not_kept() {
    let kinds: Vec<SeenFlow> = (1..=100).map(|port| flow("ingress", "192.0.2.1", 0, port)).collect();
    let asked = || said(vec![(pod("web"), Ok((kinds.clone(), 0)))]);
    let long = json!({"app": "x".repeat(600)});
    let mut cluster = Cluster::of(&asked(), 1000);
    cluster.add(api_pod("shop", "web", &long, "10.0.0.1"), "shop").unwrap();
    cluster.add(api_pod("shop", "web-2", &long, "10.0.0.2"), "shop").unwrap();
    let other = api_pod("pay", "db", &long, "10.0.0.3");
    assert!(matches!(cluster.add(other, "shop"), Err(SuggestError::TooMany)), "those of both together");
    let seen = cluster.seen(asked(), None, 5000);
    assert_eq!(seen.flows.len() + 94, kinds.len());
    assert_eq!(seen.silent, ["94 kind(s) of flows of this node, for which an answer has no room"]);
}

#[test]
fn without_a_flow_nobody_needs_to_be_named() {
    let said = said(vec![(pod("web"), Ok((Vec::new(), 3))), (pod("old"), Err(io::Error::other("no")))]);
    assert!(!said.has_flows());
    let expected = Seen {
        namespace: "shop".to_owned(),
        pods: 2,
        lost: 3,
        silent: vec!["shop/old: no".to_owned()],
        ..Seen::default()
    };
    assert_eq!(said.without_names(), expected);
}

#[test]
fn times_have_a_unit() {
    let read = |text| seconds(text).ok();
    assert_eq!(["90s", "30m", "24h", "7d"].map(read), [Some(90), Some(1800), Some(86_400), Some(604_800)]);
    assert_eq!(["", "h", "24", "-1h", "1y", "99999999999999999999d", "1é"].map(read), [None; 7]);
}

#[tokio::test]
async fn pods_are_listed_and_the_dns_is_known_by_its_service() {
    let server = crate::cluster::fake_api_server::FakeApiServer::default();
    let client = server.clone().start().await;
    let own = json!({"metadata": {"namespace": "shop", "name": "web", "uid": "u", "labels": {"app": "web"}},
        "spec": {"containers": []}, "status": {"podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]}});
    server.put("/api/v1/namespaces/shop/pods/web", own);
    let node = json!({"metadata": {"namespace": "shop", "name": "node", "uid": "n"},
        "spec": {"containers": [], "hostNetwork": true}, "status": {"podIPs": [{"ip": "192.0.2.1"}]}});
    server.put("/api/v1/namespaces/shop/pods/node", node);
    let both = ["10.0.0.1", "fd00::1"].map(|peer| flow("egress", peer, incarnation("u"), 80));
    let on_node = flow("egress", "192.0.2.1", incarnation("n"), 80);
    let said = said(vec![(pod("web"), Ok((both.into_iter().chain([on_node]).collect(), 0)))]);
    let cluster = Cluster::list(&client, &said, 1000).await.unwrap();
    assert_eq!((cluster.own.len(), cluster.own["web"].is_some(), cluster.holders.len()), (1, true, 2));
    let service = json!({"metadata": {"namespace": "kube-system", "name": "kube-dns"},
        "spec": {"selector": {"k8s-app": "kube-dns"}, "clusterIP": "10.96.0.10"}});
    server.put("/api/v1/namespaces/kube-system/services/kube-dns", service);
    let dns = pods_of_service(&client, "kube-system/kube-dns").await.unwrap();
    let labels = labels(&[("k8s-app", "kube-dns")]);
    assert_eq!(dns, Some(Peer::Pod { namespace: "kube-system".to_owned(), labels }));
    assert_eq!(pods_of_service(&client, "kube-system/other").await.unwrap(), None);
    assert_eq!(encoded("a+b/c=é"), "a%2Bb%2Fc%3D%C3%A9");
}
