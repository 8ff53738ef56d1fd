//! TLS to an agent as the API server's proxy has it: no certificate is verified.

use std::net::SocketAddr;

use nebula_agent::api::connector;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

pub(crate) async fn connect(address: SocketAddr) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from("nebula-cni-agent").unwrap();
    connector().unwrap().connect(name, TcpStream::connect(address).await?).await
}
