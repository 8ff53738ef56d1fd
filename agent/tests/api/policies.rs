//! What an agent says for `policy test` and `policy suggest`, to somebody who may see one namespace.

use nebula_cni_contract::agent_api::{AUDIENCE, PolicySeen, PolicyTested, Refused};
use nebula_cni_contract::policy_test::Outcome;
use nebula_cni_contract::seen::Peer;
use nebula_cni_contract::why::Target;
use serde_json::json;

use super::fake_reviews::FakeReviews;
use super::site::{Site, pod, to};
use super::{OPERATOR, VIEWER, ask};

const WEB: &str = "10.244.0.7";
const DB: &str = "10.244.1.7";
const CACHE: &str = "10.244.1.8";

fn lacking(body: &str) -> (String, Option<String>) {
    let lacking = serde_json::from_str::<Refused>(body).unwrap().lacking.unwrap();
    (lacking.resource, lacking.namespace)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_says_what_its_programs_do_and_who_may_see_the_destination_only_learns_of_it() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    for (namespace, name, node, address) in
        [("shop", "web", "n1", WEB), ("pay", "db", "n2", DB), ("shop", "cache", "n2", CACHE)]
    {
        reviews.pod(namespace, pod(namespace, name, node, address, &json!({})));
    }
    site.know(&[("shop", WEB), ("pay", DB), ("shop", CACHE)], &[WEB]);
    reviews.allow(VIEWER, "get", "pods", "shop");
    let token = reviews.token(VIEWER, AUDIENCE);
    let test = async |token: &str, from: &str, to: &str| {
        ask(site.address, "GET", &format!("/v1/policy/test?from={from}&to={to}"), Some(token)).await
    };
    let read = |body: &str| serde_json::from_str::<PolicyTested>(body).unwrap();

    let (status, body) = test(&token, "shop/web", "shop/cache:80").await;
    let known = read(&body);
    let egress = known.tested.egress.clone().unwrap();
    assert_eq!((status, egress.node.as_str(), egress.version), (200, "n1", Some(3)), "{body}");
    assert!(egress.said.unwrap().decision.text.starts_with("allowed: "), "{body}");
    assert_eq!((known.tested.in_tunnel, known.tested.ingress.clone()), (Some(true), None));
    assert_eq!(known.tested.target.destination().unwrap().node, "n2", "so that one knows whom to ask");
    assert_eq!((known.tested.outcome(), known.lacking), (Outcome::Undecided, None));

    let (status, body) = test(&token, "web.shop", "db.pay:80").await;
    let hidden = read(&body);
    assert_eq!((status, &hidden.tested.target, hidden.tested.egress), (200, &Target::Hidden, None), "{body}");
    assert_eq!(hidden.lacking.unwrap().namespace.as_deref(), Some("pay"));
    let (_, same) = test(&token, "web.shop", "nothing.pay:80").await;
    assert_eq!(body, same, "whether there is such a pod is not said");
    let (_, body) = test(&token, "shop/web", &format!("{DB}:80")).await;
    let hidden = read(&body);
    assert!(
        hidden.tested.target == Target::Hidden && hidden.tested.egress.is_some(),
        "what a packet meets here: {body}"
    );
    assert!(!body.contains("pay/") && !body.contains("n2"), "{body}");

    let (status, body) = test(&token, "pay/db", "shop/web:80").await;
    assert_eq!((status, lacking(&body)), (403, ("pods".to_owned(), Some("pay".to_owned()))));
    let (status, body) = test(&token, WEB, "shop/cache:80").await;
    assert_eq!((status, lacking(&body)), (403, ("pods".to_owned(), None)), "an address may be anybody's");
    for (from, to) in [("web", "shop/cache"), ("shop/web", "cache"), ("shop/web", "shop/cache:0"), ("", "")] {
        let (status, body) = test(&token, from, to).await;
        assert!(status == 400 && body.contains("is no end of a flow"), "{from} {to}: {body}");
    }

    reviews.allow(OPERATOR, "get", "pods", "*");
    let token = reviews.token(OPERATOR, AUDIENCE);
    let (_, body) = test(&token, WEB, "pay/db:80").await;
    let known = read(&body).tested;
    assert_eq!(
        (known.source.full_name(), known.target.destination().unwrap().full_name()),
        ("shop/web".into(), "pay/db".into())
    );
    assert!(known.egress.is_some() && known.ingress.is_none(), "{body}");
    // The other node's own end.
    site.know(&[("shop", WEB), ("pay", DB), ("pay", CACHE)], &[DB]);
    let (_, body) = test(&token, CACHE, &format!("{DB}:80")).await;
    let refused = read(&body).tested;
    assert_eq!(refused.outcome(), Outcome::Refused, "{body}");
    assert_eq!(refused.ingress.unwrap().said.unwrap().decision.policy.as_deref(), Some("pay/from-shop"));
    let (_, body) = test(&token, "192.0.2.7", "192.0.2.8:80").await;
    let outside = read(&body).tested;
    assert_eq!(
        (outside.outcome(), outside.in_tunnel),
        (Outcome::Allowed, Some(false)),
        "no policy selects them: {body}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_viewer_of_a_namespace_learns_no_labels_of_others() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    for (namespace, name, address) in [("shop", "web", WEB), ("pay", "db", DB), ("shop", "cache", CACHE)] {
        let labels = json!({"app": format!("app-of-{namespace}"), "name": name});
        reviews.pod(namespace, pod(namespace, name, "n1", address, &labels));
    }
    let get = async |namespace: &str, token: &str| {
        ask(site.address, "GET", &format!("/v1/policy/seen?namespace={namespace}"), Some(token)).await
    };
    let read = |body: &str| serde_json::from_str::<PolicySeen>(body).unwrap();
    let token = || reviews.token(VIEWER, AUDIENCE);
    assert_eq!(lacking(&get("shop", &token()).await.1), ("flows".to_owned(), Some("shop".to_owned())));
    reviews.allow(VIEWER, "get", "flows", "shop");
    let (status, body) = get("shop", &token()).await;
    assert_eq!((status, lacking(&body)), (403, ("pods".to_owned(), Some("shop".to_owned()))), "labels are of pods");
    reviews.allow(VIEWER, "get", "pods", "shop");
    let viewer = token();
    let (status, body) = get("shop", &viewer).await;
    assert_eq!((status, read(&body).seen.pods, reviews.wide_lists()), (200, 0, 0), "nobody to be named: {body}");

    site.attach_seen("shop", "web", &[to(DB, "pay/db", 5432), to(CACHE, "shop/cache", 80), to(DB, "pay/old", 1)]);
    site.attach_seen("pay", "db", &[to(WEB, "shop/web", 9999)]);
    let (status, body) = get("shop", &viewer).await;
    let PolicySeen { seen, lacking: missing, not_asked } = read(&body);
    assert_eq!((status, seen.pods, seen.lost, seen.flows.len(), not_asked), (200, 1, 1, 3, 0), "{body}");
    assert!(!body.contains("app-of-pay") && !body.contains("of-dns") && !body.contains("\"port\":9999"), "{body}");
    let peers: Vec<&Peer> = seen.flows.iter().map(|flow| &flow.peer).collect();
    assert!(peers.contains(&&Peer::Namespace("pay".to_owned())) && peers.contains(&&Peer::Gone(DB.parse().unwrap())));
    assert_eq!(seen.known.keys().collect::<Vec<_>>(), ["shop"]);
    assert_eq!(seen.dns, Some(Peer::Namespace("kube-system".to_owned())));
    let missing: Vec<_> = missing.into_iter().map(|lacking| (lacking.resource, lacking.namespace.unwrap())).collect();
    assert_eq!(missing, ["kube-system", "pay"].map(|namespace| ("pods".to_owned(), namespace.to_owned())));

    reviews.allow(VIEWER, "get", "pods", "pay");
    let (_, body) = get("shop", &token()).await;
    let shown = read(&body);
    assert_eq!((shown.lacking.len(), shown.seen.known.len()), (1, 2), "{body}");
    assert!(body.contains("app-of-pay") && !body.contains("of-dns"), "{body}");

    for namespace in ["", "..%2Fpay", "*", "shop&namespace=pay"] {
        assert_eq!(get(namespace, &viewer).await.0, 400, "{namespace}");
    }
    // All pods are not listed as often as anybody asks.
    let mut answers = Vec::new();
    for _ in 0..20 {
        answers.push(get("shop", &viewer).await.0);
    }
    assert!(answers.contains(&429) && answers.iter().all(|status| [200, 429].contains(status)), "{answers:?}");
    assert!(reviews.wide_lists() <= 14, "{}", reviews.wide_lists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_asks_about_a_bounded_number_of_permissions_and_about_one_for_those_who_may_see_all() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.pod("shop", pod("shop", "web", "n1", WEB, &json!({"app": "web"})));
    let spaces: Vec<(String, String)> = (0..80).map(|n| (format!("ns-{n:02}"), format!("10.244.2.{n}"))).collect();
    for (namespace, address) in &spaces {
        reviews.pod(namespace, pod(namespace, "x", "n2", address, &json!({"app": "secret"})));
        // The last ones might be seen.
        if namespace.as_str() > "ns-70" {
            reviews.allow(VIEWER, "get", "pods", namespace);
        }
    }
    let flows: Vec<_> = spaces.iter().map(|(namespace, address)| to(address, &format!("{namespace}/x"), 80)).collect();
    site.attach_seen("shop", "web", &flows);
    for resource in ["flows", "pods"] {
        reviews.allow(VIEWER, "get", resource, "shop");
        reviews.allow(OPERATOR, "get", resource, "*");
    }
    let seen = async |user: &str| {
        let (before, token) = (reviews.asked().1, reviews.token(user, AUDIENCE));
        let (status, body) = ask(site.address, "GET", "/v1/policy/seen?namespace=shop", Some(&token)).await;
        assert_eq!(status, 200, "{body}");
        (serde_json::from_str::<PolicySeen>(&body).unwrap(), reviews.asked().1 - before)
    };
    let (few, asked) = seen(VIEWER).await;
    // Two for the namespace, one for all, and those of 64.
    assert_eq!((few.lacking.len(), few.not_asked, asked), (64, 17, 67));
    assert!(few.seen.flows.iter().all(|flow| matches!(flow.peer, Peer::Namespace(_))));
    let (all, asked) = seen(OPERATOR).await;
    assert_eq!((all.lacking.len(), all.not_asked, asked), (0, 0, 3));
    assert_eq!((all.seen.flows.len(), all.seen.known.len()), (80, 81));
}
