//! gRPC over the overlay with tonic: a service in a router of axum, and a channel that connects over the overlay.
//! Programs with a `.proto` file have the messages and both halves of `Greeter` generated.
//!
//! ```sh
//! cargo run --features tower --example grpc
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::uri::PathAndQuery;
use axum::routing::post;
use common::hosts;
use nebula_net::Net;
use nebula_net::tower::{Connector, Peer};
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status, client, server};
use tonic_prost::ProstCodec;

#[derive(Clone, PartialEq, prost::Message)]
struct Greeting {
    #[prost(string, tag = "1")]
    text: String,
}

type Codec = ProstCodec<Greeting, Greeting>;
const METHOD: &str = "/example.Greeter/Greet";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [(near_socket, near), (far_socket, far)] = hosts()?;
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).start()?;

    let greet = async |ConnectInfo(peer): ConnectInfo<Peer>, request: axum::extract::Request| {
        let name = peer.name().unwrap_or("stranger").to_owned();
        let greet = tower::service_fn(move |request: Request<Greeting>| {
            let text = format!("{}, {name}", request.into_inner().text);
            async move { Ok::<_, Status>(Response::new(Greeting { text })) }
        });
        server::Grpc::new(Codec::default()).unary(greet, request).await
    };
    let service = Router::new().route(METHOD, post(greet));
    tokio::spawn(axum::serve(far.listen(80)?, service.into_make_service_with_connect_info::<Peer>()).into_future());

    let channel = Endpoint::from_static("http://10.42.0.2").connect_with_connector(Connector::new(near)).await?;
    let mut client = client::Grpc::new(channel);
    client.ready().await?;
    let request = Request::new(Greeting { text: "hello".to_owned() });
    let answer: Response<Greeting> = client.unary(request, PathAndQuery::from_static(METHOD), Codec::default()).await?;
    println!("{}", answer.into_inner().text);
    Ok(())
}
