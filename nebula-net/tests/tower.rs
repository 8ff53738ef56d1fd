//! A service of axum between nodes of this process.

#[path = "../examples/common/mod.rs"]
mod common;

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use common::{hosts, overlay};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use nebula_net::Net;
use nebula_net::tower::{Connector, Peer, RequireGroup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Status and body of an answer.
async fn ask(net: &Net, path: &str) -> (u16, String) {
    let exchange = async {
        let mut stream = net.dial_address(SocketAddr::new(overlay(2).into(), 80)).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    let answer = tokio::time::timeout(Duration::from_secs(60), exchange).await.expect("soon").expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head[9..12].parse().expect("a status"), body.to_owned())
}

async fn who(ConnectInfo(peer): ConnectInfo<Peer>) -> String {
    format!("{} {} {}", peer.name().unwrap_or_default(), peer.address().ip(), peer.certificate().is_some())
}

/// `host-1` has the group `example`.
fn service() -> Router {
    Router::new()
        .route("/anybody", get(who))
        .route("/example", get(who).layer(RequireGroup::new("example")))
        .route("/either", get(who).layer(RequireGroup::any_of(["ops", "example"])))
        .route("/ops", get(who).layer(RequireGroup::new("ops")))
        .route("/nobody", get(who).layer(RequireGroup::any_of([""; 0])))
}

#[tokio::test]
async fn a_service_sees_the_certificate_of_its_peer_and_decides_by_its_groups() {
    let start = |(socket, config)| Net::builder(config).socket(socket).start().expect("it starts");
    let [near, far] = hosts().expect("two hosts").map(start);
    let served = service().into_make_service_with_connect_info::<Peer>();
    tokio::spawn(axum::serve(far.listen(80).expect("a free port"), served).into_future());
    for (path, status) in [("/anybody", 200), ("/example", 200), ("/either", 200), ("/ops", 403), ("/nobody", 403)] {
        let (got, body) = ask(&near, path).await;
        assert_eq!(got, status, "{path}: {body}");
        if status == 200 {
            assert_eq!(body, "host-1 10.42.0.1 true");
        } else {
            assert!(body.contains("groups that are required"), "{body}");
        }
    }
}

#[tokio::test]
async fn nobody_is_let_through_where_peers_are_not_known() {
    let start = |(socket, config)| Net::builder(config).socket(socket).start().expect("it starts");
    let [near, far] = hosts().expect("two hosts").map(start);
    let unaware = Router::new().route("/example", get(|| async { "in" }).layer(RequireGroup::new("example")));
    tokio::spawn(axum::serve(far.listen(80).expect("a free port"), unaware).into_future());
    assert_eq!(ask(&near, "/example").await.0, 403);
}

#[tokio::test]
async fn a_client_of_hyper_connects_by_name_and_knows_who_answers() {
    let start = |(socket, config)| Net::builder(config).socket(socket).start().expect("it starts");
    let [near, far] = hosts().expect("two hosts").map(start);
    let served = service().into_make_service_with_connect_info::<Peer>();
    tokio::spawn(axum::serve(far.listen(80).expect("a free port"), served).into_future());
    near.up(overlay(2).into()).await.expect("a tunnel");
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build(Connector::new(near));
    for uri in ["http://host-2/anybody", "http://10.42.0.2:80/example", "http://[fd42::2]/anybody"] {
        let answer = tokio::time::timeout(Duration::from_secs(60), client.get(uri.parse().expect("a URI")));
        let answer = answer.await.expect("soon").expect("an answer");
        let peer = answer.extensions().get::<Peer>().expect("the peer is known");
        assert_eq!((answer.status().as_u16(), peer.name()), (200, Some("host-2")), "{uri}");
    }
    let refused = client.get("http://host-2:81/".parse().expect("a URI")).await.expect_err("nobody listens");
    assert!(refused.is_connect(), "{refused}");
}
