//! The agent's listener: health, readiness, metrics and the state of the node, in plain HTTP. Nothing secret, and
//! nothing that changes anything.

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nebula_cert::listener::{Places, Source};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::readiness::{Readiness, Standings, verdict};

/// Returns further metrics in Prometheus' text format.
pub(crate) type MoreMetrics = Arc<dyn Fn() -> String + Send + Sync>;

#[derive(Clone)]
struct Shown {
    readiness: Readiness,
    more: MoreMetrics,
}

/// Opens the listener; `::` is IPv4 where the system has no IPv6. That it fails if the address is taken also keeps two
/// agents from working on one node. To be called in a runtime.
///
/// # Errors
/// Returns the system's error.
pub(crate) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = nebula_cert::listener::listen(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Serves until the task is cancelled.
pub(crate) async fn serve(listener: TcpListener, readiness: Readiness, more: MoreMetrics) {
    let router = Router::new()
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .route("/status", get(status))
        .route("/metrics", get(metrics))
        .fallback(async || (StatusCode::NOT_FOUND, "not found\n"))
        .with_state(Shown { readiness, more });
    accept(listener, MAX_CLIENTS, |stream, _| converse(stream, router.clone())).await;
}

/// Accepts connections, and lets `converse` serve at most `most` of them at a time. Beyond this limit, clients
/// of the source that has the most are disconnected.
pub(crate) async fn accept<F>(listener: TcpListener, most: usize, converse: impl Fn(TcpStream, Source) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let places = Places::new(most);
    loop {
        // A client is accepted at once, however many there are: the kubelet must not wait for others.
        let accepted = listener.accept().await.and_then(|(stream, peer)| Ok((stream.local_addr()?, peer, stream)));
        let (local, peer, stream) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
                continue;
            }
        };
        let ended = Arc::new(Notify::new());
        let end = Arc::clone(&ended);
        let source = Source::of_tcp(local, peer);
        if let Some(place) = places.admit(source, move || end.notify_one()) {
            let conversation = converse(stream, source);
            tokio::spawn(async move {
                tokio::select! {
                    () = conversation => {}
                    () = ended.notified() => {}
                }
                drop(place);
            });
        }
        // Whoever has to end does so before the next one comes.
        tokio::task::yield_now().await;
    }
}

async fn converse(stream: TcpStream, router: Router) {
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(MAX_HEADER_BYTES)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // A client that went away, or is too slow, is not an error of the node.
    let _ = tokio::time::timeout(CONNECTION_WITHIN, connection).await;
}

async fn ready(State(shown): State<Shown>) -> Response {
    match verdict(&shown.readiness.now()) {
        Ok(()) => "ok\n".into_response(),
        Err(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons).into_response(),
    }
}

async fn status(State(shown): State<Shown>) -> Json<Standings> {
    Json(shown.readiness.now())
}

async fn metrics(State(shown): State<Shown>) -> Response {
    let text = format!("{}{}", own_metrics(&shown.readiness.now()), (shown.more)());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

pub(crate) fn own_metrics(standings: &Standings) -> String {
    let mut text = String::new();
    let ready = u8::from(verdict(standings).is_ok());
    let _ = writeln!(text, "# HELP nebula_cni_agent_ready Whether pods may be put on this node.");
    let _ = writeln!(text, "# TYPE nebula_cni_agent_ready gauge\nnebula_cni_agent_ready {ready}");
    let _ = writeln!(text, "# HELP nebula_cni_agent_condition Whether a part of the node is as it must be.");
    let _ = writeln!(text, "# TYPE nebula_cni_agent_condition gauge");
    for (part, standing) in standings {
        let ok = u8::from(standing.ok);
        let _ = writeln!(text, "nebula_cni_agent_condition{{condition=\"{}\"}} {ok}", part.name());
    }
    text
}

const MAX_CLIENTS: usize = 32;
const MAX_HEADER_BYTES: usize = 16 << 10;
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
const CONNECTION_WITHIN: Duration = Duration::from_secs(15);
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::readiness::{Part, Standing};

    async fn ask(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn three_hundred_slow_connections_keep_the_kubelet_from_no_probe() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, Readiness::default(), Arc::new(String::new)));
        let mut slow = Vec::new();
        for _ in 0..300 {
            // One that must give way at once may see that as an error.
            slow.extend(TcpStream::connect(address).await.ok());
        }
        for probe in 0..10 {
            for stream in &mut slow {
                // Those that had to end cannot be written to.
                let _ = stream.write_all(b"G").await;
            }
            let answer = tokio::time::timeout(Duration::from_secs(1), ask(address, "/healthz")).await;
            assert!(answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")), "probe {probe}");
        }
    }

    #[tokio::test]
    async fn readiness_is_served_with_the_reason_and_silent_clients_block_nobody() {
        let listener = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(bind(address).is_err(), "a second agent");
        let readiness = Readiness::default();
        tokio::spawn(serve(listener, readiness.clone(), Arc::new(|| "extra 1\n".to_owned())));
        let mut silent = Vec::new();
        for _ in 0..MAX_CLIENTS - 1 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        assert!(ask(address, "/healthz").await.starts_with("HTTP/1.1 200"));
        readiness.set(Part::Runtime, Standing::bad("has loaded network x").advice("do y"));
        let answer = ask(address, "/readyz").await;
        assert!(
            answer.starts_with("HTTP/1.1 503") && answer.contains("runtime: has loaded network x; do y"),
            "{answer}"
        );
        for part in Part::ALL {
            readiness.set(part, Standing::good("yes"));
        }
        assert!(ask(address, "/readyz").await.starts_with("HTTP/1.1 200"));
        let metrics = ask(address, "/metrics").await;
        assert!(metrics.contains("nebula_cni_agent_ready 1\n") && metrics.contains("extra 1"), "{metrics}");
        assert!(metrics.contains("nebula_cni_agent_condition{condition=\"self-test\"} 1"), "{metrics}");
        assert!(ask(address, "/status").await.contains("\"self-test\":{\"ok\":true"));
        assert!(ask(address, "/other").await.starts_with("HTTP/1.1 404"));
    }
}
