//! HTTP CONNECT (RFC 9110 section 9.3.6): the proxy that most programs know.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::credentials::Credentials;
use crate::head::{Failed, Head, Parsed};
use crate::overlay::{Overlay, Unreached, log_unreached};
use crate::pipe::{Connection, pipe};
use crate::socks::{LOGIN_DELAY, log_denied};
use crate::target::Target;

/// Longest head of a request, in bytes, and the most fields in it.
const MAX_HEAD: usize = 8 << 10;
const MAX_FIELDS: usize = 64;

/// What all clients share.
pub(crate) struct Server {
    pub(crate) overlay: Overlay,
    pub(crate) credentials: Option<Arc<Credentials>>,
    /// How long a client may take until its request is complete.
    pub(crate) head_timeout: Duration,
}

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    /// A connection, and whether the client may have it.
    Connect { target: Target, allowed: bool },
    /// Something that this proxy does not do.
    OtherMethod,
}

/// Bytes that are no request, or name no target.
#[derive(Debug, PartialEq, Eq)]
struct Malformed;

/// Serves one client.
pub(crate) async fn serve(server: Arc<Server>, mut stream: TcpStream, client: SocketAddr) {
    // An answer has to arrive.
    stream.set_reset_on_drop(false);
    let mut head = Head::default();
    let parse = |bytes: &[u8]| parse(bytes, server.credentials.as_deref());
    let read = tokio::time::timeout(server.head_timeout, head.read(&mut stream, MAX_HEAD, parse)).await;
    let served = match read {
        Ok(Ok(Request::Connect { target, allowed: true })) => match server.overlay.connect(&target).await {
            Ok(peer) => {
                tracing::debug!(%client, %target, "Connected by HTTP");
                async {
                    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
                    pipe(stream, peer, &head.into_rest()).await
                }
                .await
            }
            Err(error) => {
                log_unreached("HTTP", client, &target, &error);
                answer(&mut stream, status_of(&error), "", &error.to_string()).await
            }
        },
        Ok(Ok(Request::Connect { allowed: false, .. })) => {
            tokio::time::sleep(LOGIN_DELAY).await;
            log_denied("HTTP", client);
            let field = "Proxy-Authenticate: Basic realm=\"nebula-proxy\", charset=\"UTF-8\"\r\n";
            answer(&mut stream, "407 Proxy Authentication Required", field, "name and password are missing or wrong")
                .await
        }
        Ok(Ok(Request::OtherMethod)) => {
            let text = "this proxy knows CONNECT only: use it as proxy for https, or by SOCKS5";
            answer(&mut stream, "405 Method Not Allowed", "Allow: CONNECT\r\n", text).await
        }
        Ok(Err(Failed::Refused(Malformed))) => {
            answer(&mut stream, "400 Bad Request", "", "no request to connect to HOST:PORT").await
        }
        Ok(Err(Failed::Io(error))) if error.kind() == io::ErrorKind::InvalidData => {
            answer(&mut stream, "431 Request Header Fields Too Large", "", "the head of the request is too long").await
        }
        Ok(Err(Failed::Io(error))) => Err(error),
        Err(_) => answer(&mut stream, "408 Request Timeout", "", "no request in time").await,
    };
    if let Err(error) = served {
        tracing::debug!(%client, %error, "A connection by HTTP ended");
    }
}

fn parse(bytes: &[u8], credentials: Option<&Credentials>) -> Parsed<Request, Malformed> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut request = httparse::Request::new(&mut fields);
    let httparse::Status::Complete(len) = request.parse(bytes).map_err(|_| Malformed)? else { return Ok(None) };
    if request.method != Some("CONNECT") {
        return Ok(Some((Request::OtherMethod, len)));
    }
    let target = request.path.and_then(|path| path.parse().ok()).ok_or(Malformed)?;
    let shown = request.headers.iter().find(|field| field.name.eq_ignore_ascii_case("proxy-authorization"));
    let allowed = credentials.is_none_or(|known| shown.is_some_and(|field| known.allow_basic(field.value)));
    Ok(Some((Request::Connect { target, allowed }, len)))
}

fn status_of(error: &Unreached) -> &'static str {
    match error {
        Unreached::Outside(_) => "403 Forbidden",
        Unreached::Failed(error) if error.kind() == io::ErrorKind::TimedOut => "504 Gateway Timeout",
        Unreached::UnknownName(_) | Unreached::Failed(_) => "502 Bad Gateway",
    }
}

/// Answers without a connection.
async fn answer(stream: &mut TcpStream, status: &str, fields: &str, text: &str) -> io::Result<()> {
    let answer = format!(
        "HTTP/1.1 {status}\r\n{fields}Content-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}\n",
        text.len() + 1
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_to_connect_are_served() {
        let head = b"CONNECT db:5432 HTTP/1.1\r\nHost: db:5432\r\n\r\n";
        for len in 0..head.len() {
            assert_eq!(parse(&head[..len], None), Ok(None));
        }
        let connect = Request::Connect { target: "db:5432".parse().unwrap(), allowed: true };
        assert_eq!(parse(&[&head[..], b"early"].concat(), None), Ok(Some((connect, head.len()))));
        let get = b"GET http://db/ HTTP/1.1\r\n\r\n";
        assert_eq!(parse(get, None), Ok(Some((Request::OtherMethod, get.len()))));
        for malformed in ["CONNECT db HTTP/1.1\r\n\r\n", "CONNECT http://db/ HTTP/1.1\r\n\r\n", "\x05\x01\0\r\n\r\n"] {
            assert_eq!(parse(malformed.as_bytes(), None), Err(Malformed), "{malformed:?}");
        }
    }

    #[test]
    fn a_target_outside_of_the_overlay_is_forbidden() {
        assert_eq!(status_of(&Unreached::Outside([192, 0, 2, 1].into())), "403 Forbidden");
        assert_eq!(status_of(&io::Error::from(io::ErrorKind::ConnectionRefused).into()), "502 Bad Gateway");
        assert_eq!(status_of(&io::Error::from(io::ErrorKind::TimedOut).into()), "504 Gateway Timeout");
    }
}
