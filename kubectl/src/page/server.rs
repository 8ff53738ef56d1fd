//! The server of the page: on loopback, for browsers on this machine.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body, Bytes};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use nebula_cert::listener::{Places, Source};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use super::guard::{API, Denied, Guard, HEADERS};
use super::refresh::now_ms;
use super::view::View;

/// Answers browsers. Places are shared out by user: others on this machine do not keep this one out.
pub(super) async fn serve(listener: TcpListener, guard: Guard, view: Arc<View>) -> Infallible {
    let (guard, places) = (Arc::new(guard), Places::new(MOST_CONNECTIONS));
    loop {
        let accepted = listener.accept().await.and_then(|(stream, peer)| Ok((stream.local_addr()?, peer, stream)));
        let Ok((local, peer, stream)) = accepted else {
            // Most likely out of descriptors.
            tokio::time::sleep(AFTER_FAILED_ACCEPT).await;
            continue;
        };
        let ended = Arc::new(Notify::new());
        let end = Arc::clone(&ended);
        let Some(place) = places.admit(Source::of_tcp(local, peer), move || end.notify_one()) else { continue };
        let (guard, view) = (Arc::clone(&guard), Arc::clone(&view));
        tokio::spawn(async move {
            let _place = place;
            tokio::select! {
                _ = tokio::time::timeout(MOST_TIME, connection(stream, &guard, &view)) => {}
                () = ended.notified() => {}
            }
        });
        // The one that has to end does so before the next one comes.
        tokio::task::yield_now().await;
    }
}

async fn connection(stream: TcpStream, guard: &Guard, view: &View) -> hyper::Result<()> {
    let service = service_fn(async |request| Ok::<_, Infallible>(answer(guard, view, &request).await));
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(MOST_HEAD);
    server.serve_connection(TokioIo::new(stream), service).await
}

async fn answer<B: Body>(guard: &Guard, view: &View, request: &Request<B>) -> Response<Full<Bytes>> {
    if let Err(denied) = guard.check(request.method(), request.uri(), request.headers()) {
        let mut response = text(denied.status(), &denied.to_string());
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        if denied == Denied::Method {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET"));
        }
        return response;
    }
    let (path, query) = (request.uri().path(), request.uri().query().unwrap_or_default());
    if path.starts_with(API) {
        return match view.answer(path, query, now_ms()).await {
            Ok(json) => response(StatusCode::OK, "application/json", json),
            Err(error) => text(error.status(), &error.to_string()),
        };
    }
    match ASSETS.iter().find(|(known, ..)| *known == path) {
        Some((_, form, content)) => response(StatusCode::OK, form, Bytes::from_static(content.as_bytes())),
        None => text(StatusCode::NOT_FOUND, "there is no such page"),
    }
}

fn text(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    response(status, "text/plain; charset=utf-8", Bytes::from(format!("{text}\n")))
}

fn response(status: StatusCode, form: &'static str, content: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(content));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form));
    headers.extend(HEADERS.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

macro_rules! asset {
    ($path:literal, $form:literal) => {
        (concat!("/", $path), $form, include_str!(concat!("assets/", $path)))
    };
}

/// Paths, media types and contents of what browsers load.
const ASSETS: [(&str, &str, &str); 8] = [
    ("/", "text/html; charset=utf-8", include_str!("assets/page.html")),
    asset!("page.css", "text/css; charset=utf-8"),
    asset!("page.js", "text/javascript; charset=utf-8"),
    asset!("dom.js", "text/javascript; charset=utf-8"),
    asset!("topology.js", "text/javascript; charset=utf-8"),
    asset!("flows.js", "text/javascript; charset=utf-8"),
    asset!("identities.js", "text/javascript; charset=utf-8"),
    asset!("nodes.js", "text/javascript; charset=utf-8"),
];
/// A browser opens six for all its tabs.
const MOST_CONNECTIONS: usize = 64;
const HEAD_WITHIN: Duration = Duration::from_secs(10);
const MOST_HEAD: usize = 16 << 10;
/// Of a connection. A browser opens another one.
const MOST_TIME: Duration = Duration::from_secs(10 * 60);
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::super::guard::Token;
    use super::super::held::tests::record;
    use super::*;

    /// A server with one record. Returns its port and token.
    async fn start() -> (u16, String) {
        let view = Arc::new(View::new(None));
        view.records().take("n1", record("shop/<img src=x onerror=alert(1)>", "pay/\u{1b}[2J", 1, 1), u64::MAX);
        view.records_demand.answered();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, token) = (listener.local_addr().unwrap().port(), Token::generate().unwrap());
        let text = token.text().to_owned();
        tokio::spawn(serve(listener, Guard::new(port, token), view));
        (port, text)
    }

    /// What it answers to a request as it stands.
    async fn raw(port: u16, request: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    async fn ask(port: u16, line: &str, headers: &str) -> String {
        raw(port, &format!("{line} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n{headers}\r\n")).await
    }

    #[tokio::test]
    async fn every_answer_carries_the_policy_and_no_answer_lets_other_origins_in() {
        let (port, token) = start().await;
        let token = format!("x-nebula-page-token: {token}\r\n");
        let origin = "origin: http://evil.example\r\n";
        for (line, headers, status) in [
            ("GET /", String::new(), 200),
            ("GET /page.js", String::new(), 200),
            ("GET /api/flows", token.clone(), 200),
            ("GET /api/topology", format!("{token}{origin}"), 200),
            ("GET /api/flows?port=x", token.clone(), 400),
            ("GET /api/other", token.clone(), 404),
            ("GET /../../etc/passwd", String::new(), 404),
            ("GET /api/flows", String::new(), 401),
            ("POST /api/flows", token.clone(), 405),
            ("OPTIONS /api/flows", origin.to_owned(), 405),
        ] {
            let answer = ask(port, line, &headers).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{line}: {answer}");
            assert!(answer.contains("content-security-policy: default-src 'none'; script-src 'self';"), "{answer}");
            for header in ["x-content-type-options: nosniff", "cache-control: no-store", "referrer-policy: no-referrer"]
            {
                assert!(answer.contains(header), "{line}: {header}");
            }
            assert!(!answer.contains("access-control-") && !answer.contains("set-cookie"), "{answer}");
            assert!(!answer.contains("'unsafe"), "{answer}");
        }
    }

    #[tokio::test]
    async fn names_of_others_arrive_as_json_and_under_another_name_nothing_does() {
        let (port, token) = start().await;
        let answer = ask(port, "GET /api/flows", &format!("x-nebula-page-token: {token}\r\n")).await;
        assert!(answer.contains("content-type: application/json"), "{answer}");
        assert!(answer.contains("shop/<img src=x onerror=alert(1)>") && answer.contains("pay/\\u001b[2J"), "{answer}");
        let rebound = format!("GET / HTTP/1.1\r\nhost: evil.example:{port}\r\nx-nebula-page-token: {token}\r\n\r\n");
        let answer = raw(port, &rebound).await;
        assert!(answer.starts_with("HTTP/1.1 421 ") && answer.contains("connection: close"), "{answer}");
        let long = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "x".repeat(2 * MOST_HEAD));
        let answer = raw(port, &long).await;
        assert!(answer.starts_with("HTTP/1.1 431 ") || answer.starts_with("HTTP/1.1 414 "), "{answer}");
    }

    #[test]
    fn the_assets_load_nothing_from_elsewhere_and_have_nothing_inline() {
        for (path, _, content) in ASSETS {
            for word in ["https:", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"] {
                assert!(!content.contains(word), "{path}: {word}");
            }
            assert!(content.len() < 32 << 10, "{path}: {} bytes", content.len());
            assert!(content.lines().all(|line| line.chars().count() <= 120), "{path}");
        }
        let page = ASSETS[0].2;
        for word in ["style=", "<style", " onclick", "javascript:"] {
            assert!(!page.contains(word), "{word}");
        }
        assert_eq!(page.matches("<script").count(), page.matches("<script type=\"module\" src=\"/").count());
    }
}
