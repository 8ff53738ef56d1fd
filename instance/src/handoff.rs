//! What passes between an instance and the init container of its pod: HTTP on the loopback address of the pod's network
//! namespace, which nobody outside the pod reaches.
//!
//! | Call | Body | Answer |
//! | --- | --- | --- |
//! | `GET /token` | | the pod's service-account token |
//! | `POST /` | [`Delivery`] | 204, after which init ends |
//! | `POST /reason` | why there is no certificate yet, a line of text | 204 |

use std::time::Duration;

use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use crate::netns::Foothold;

/// Port on which init listens unless told otherwise.
pub const PORT: u16 = 4242;
/// Path of the pod's token.
pub const TOKEN_PATH: &str = "/token";
/// Path that takes the certificate.
pub const DELIVERY_PATH: &str = "/";
/// Path that takes the reason why there is none yet.
pub const REASON_PATH: &str = "/reason";
/// Longest token, in bytes.
pub const MAX_TOKEN: usize = 16 << 10;
/// Longest delivery, in bytes.
pub const MAX_DELIVERY: usize = 1 << 20;
/// Longest reason, in bytes.
pub const MAX_REASON: usize = 2 << 10;

/// What a pod gets.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delivery {
    /// PEM of the certificate.
    pub certificate: String,
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// PEM of the private key, if the operator wants the pod to have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl std::fmt::Debug for Delivery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Delivery").field("certificate", &self.certificate).field("key", &self.key.is_some()).finish()
    }
}

/// The instance's end.
#[derive(Debug, Clone)]
pub struct InitClient {
    pod: Foothold,
    port: u16,
}

/// Why init got or gave nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nobody listens: the init container does not run yet, or no more.
    #[error("no init container listens on 127.0.0.1:{0} in the pod")]
    Nobody(u16),
    /// It does something else than was agreed.
    #[error("the init container {0}")]
    Odd(String),
}

impl InitClient {
    /// For the pod with this foothold.
    #[must_use]
    pub fn new(pod: Foothold, port: u16) -> Self {
        Self { pod, port }
    }

    /// The pod's token.
    ///
    /// # Errors
    /// Nobody listens, or the answer is no token.
    pub fn token(&self) -> Result<Zeroizing<String>, Error> {
        let port = self.port;
        self.there(move || {
            let mut response = agent().get(url(port, TOKEN_PATH)).call().map_err(|error| failed(port, &error))?;
            let status = response.status().as_u16();
            let body = response.body_mut().with_config().limit(MAX_TOKEN as u64).read_to_vec();
            let mut body = body.map_err(|error| failed(port, &error))?;
            let text = std::str::from_utf8(&body).ok().map(str::trim);
            let token = text.filter(|text| is_token(text)).map(|text| Zeroizing::new(text.to_owned()));
            body.zeroize();
            match (status, token) {
                (200, Some(token)) => Ok(token),
                (200, None) => Err(Error::Odd("gave something that is no token".to_owned())),
                _ => Err(Error::Odd(format!("answered {status} to the question for its token"))),
            }
        })
    }

    /// Hands the certificate over.
    ///
    /// # Errors
    /// Nobody listens, or init could not take it.
    pub fn deliver(&self, delivery: &Delivery) -> Result<(), Error> {
        let body = serde_json::to_vec(delivery).map(Zeroizing::new).map_err(|error| Error::Odd(error.to_string()))?;
        self.post(DELIVERY_PATH, body)
    }

    /// Tells why there is no certificate yet.
    ///
    /// # Errors
    /// Nobody listens.
    pub fn explain(&self, reason: &str) -> Result<(), Error> {
        let end = reason.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_REASON).last();
        self.post(REASON_PATH, Zeroizing::new(reason.as_bytes()[..end.unwrap_or(0)].to_vec()))
    }

    fn post(&self, path: &'static str, body: Zeroizing<Vec<u8>>) -> Result<(), Error> {
        let port = self.port;
        self.there(move || {
            let response = agent().post(url(port, path)).send(&body[..]).map_err(|error| failed(port, &error))?;
            match response.status().as_u16() {
                200..300 => Ok(()),
                status => Err(Error::Odd(format!("answered {status}; see its log"))),
            }
        })
    }

    fn there<T: Send + 'static>(&self, call: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
        self.pod.run("init-client", call).unwrap_or_else(|error| Err(Error::Odd(error.to_string())))
    }
}

fn url(port: u16, path: &str) -> String {
    format!("http://127.0.0.1:{port}{path}")
}

fn failed(port: u16, error: &ureq::Error) -> Error {
    match error {
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Error::Nobody(port),
        // The loopback link of a new namespace comes up a little later.
        ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::NetworkUnreachable => Error::Nobody(port),
        ureq::Error::ConnectionFailed => Error::Nobody(port),
        other => Error::Odd(format!("cannot be asked: {other}")),
    }
}

/// Whether it could be a token: one word of visible characters, as in any HTTP header that carries one.
#[must_use]
pub fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_TOKEN && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .input_buffer_size(MAX_TOKEN * 2)
        .output_buffer_size(MAX_TOKEN)
        .max_idle_connections(0)
        .timeout_global(Some(PATIENCE))
        .build();
    ureq::Agent::new_with_config(config)
}

// It is on the same machine and does nothing else.
const PATIENCE: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_there_is_told_apart_from_an_odd_answer() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = InitClient::new(Foothold::Here, port);
        let other = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut stream, b"SSH-2.0-x\r\n").unwrap();
        });
        assert!(matches!(client.token(), Err(Error::Odd(_))));
        other.join().unwrap();
        assert!(matches!(client.token(), Err(Error::Nobody(at)) if at == port));
    }

    #[test]
    fn a_token_is_one_word() {
        assert!(is_token("eyJhbGciOiJSUzI1NiJ9.e30.c2ln"));
        for bad in ["", "two words", "line\nbreak", "é", &"x".repeat(MAX_TOKEN + 1)] {
            assert!(!is_token(bad));
        }
    }

    #[test]
    fn a_delivery_does_not_show_the_key() {
        let key = Some("secret".to_owned());
        let delivery = Delivery { certificate: "c".to_owned(), ca: "a".to_owned(), key };
        assert!(!format!("{delivery:?}").contains("secret"));
    }
}
