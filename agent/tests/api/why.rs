//! What an agent says about a flow that does not pass, to somebody who may see one namespace.

use nebula_cni_contract::agent_api::{AUDIENCE, Refused, WhyFacts};
use nebula_cni_contract::why::Target;
use serde_json::json;

use super::fake_reviews::FakeReviews;
use super::site::Site;
use super::{VIEWER, ask};

#[tokio::test(flavor = "multi_thread")]
async fn the_destination_is_shown_to_those_who_may_see_its_namespace_only() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    for (namespace, name, node, address) in
        [("shop", "web", "n1", "10.244.0.7"), ("pay", "db", "n2", "10.244.1.7"), ("shop", "cache", "n2", "10.244.1.8")]
    {
        let pod = json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        reviews.pod(namespace, pod);
    }
    reviews.allow(VIEWER, "get", "pods", "shop");
    let token = reviews.token(VIEWER, AUDIENCE);
    let why = async |from: &str, to: &str| {
        ask(site.address, "GET", &format!("/v1/why?from={from}&to={to}"), Some(&token)).await
    };
    let facts = |body: &str| serde_json::from_str::<WhyFacts>(body).unwrap();

    let (status, body) = why("shop/web", "shop/cache:80").await;
    let known = facts(&body);
    assert_eq!((status, known.lacking.is_none(), known.facts.port), (200, true, 80), "{body}");
    assert_eq!(known.facts.destination().unwrap().node, "n2", "so that one knows whom to ask");
    assert!(known.facts.source_end.is_some() && known.facts.way.is_some(), "{body}");

    let (status, body) = why("shop/web", "pay/db:80").await;
    let known = facts(&body);
    assert_eq!((status, &known.facts.target, known.facts.way), (200, &Target::Hidden, None), "{body}");
    assert_eq!(known.lacking.unwrap().namespace.as_deref(), Some("pay"));
    assert!(!body.contains("10.244.1.7") && !body.contains("n2"), "{body}");
    let (_, same) = why("shop/web", "pay/nothing:80").await;
    assert_eq!(facts(&same).facts.target, Target::Hidden, "whether there is such a pod is not said: {same}");

    let (status, body) = why("pay/db", "shop/web:80").await;
    let refused: Refused = serde_json::from_str(&body).unwrap();
    assert_eq!((status, refused.lacking.unwrap().namespace.as_deref()), (403, Some("pay")));
    for (from, to) in
        [("web", "shop/cache"), ("shop/web", "cache"), ("shop/web", "shop/cache:0"), ("", ""), ("shop/..%2Fx", "a/b")]
    {
        let (status, body) = why(from, to).await;
        assert!(status == 400 && body.contains("is no end of a flow"), "{from} {to}: {body}");
    }
    reviews.allow(VIEWER, "get", "pods", "pay");
    let other = reviews.token(VIEWER, AUDIENCE);
    let (_, body) = ask(site.address, "GET", "/v1/why?from=shop/web&to=pay/db:80", Some(&other)).await;
    assert_eq!(facts(&body).facts.destination().unwrap().full_name(), "pay/db");
}
