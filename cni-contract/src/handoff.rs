//! The protocol between an instance and whoever shows it its pod's token: the init container of the pod or, when that
//! has ended, this node (the plugin's verb `present`). And how each authenticates the other.
//!
//! The instance listens on an abstract unix socket in the pod's network namespace before ADD returns: no program of the
//! pod runs yet, so none can have taken the name, and no raw socket sees the traffic. Init connects and shows the pod's
//! token, and gets the certificate, which is no secret: the private key stays with the instance. Init accepts a
//! certificate only from a listener that is root of the node.
//!
//! Each message is a JSON object on a line: [`Hello`], then any number of [`Word`]s, then a [`Receipt`].

use std::io::{self, BufRead, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

/// Name of the socket. Its last part is the version of the protocol.
pub const NAME: &str = "nebula-cni/init/2";
/// Longest token, in bytes.
pub const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Longest message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;
/// Longest reason, in bytes.
pub const MAX_REASON_BYTES: usize = 2 << 10;

/// The first message, sent by init.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// The pod's service-account token.
    pub token: String,
}

/// A message from the instance.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Word {
    /// Why there is no certificate yet.
    Reason(String),
    /// The certificate.
    Delivery(Delivery),
}

/// The last message, sent by init.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Why init could not accept the delivery.
    pub refused: Option<String>,
}

/// What init receives.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Delivery {
    /// PEM of the certificate.
    pub certificate: String,
    /// PEM bundle of the CAs to trust.
    pub ca: String,
}

impl Drop for Hello {
    fn drop(&mut self) {
        self.token.zeroize();
    }
}

/// The address of an abstract name, in the network namespace of the process that uses it.
///
/// # Errors
/// Returns an error if the name is too long.
pub fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

/// Serializes a message and terminates it with a newline.
///
/// # Errors
/// Returns an error if the message cannot be written as JSON.
pub fn line(message: &impl Serialize) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(serde_json::to_vec(message)?);
    bytes.push(b'\n');
    Ok(bytes)
}

/// Reads the next message; `None` at the end of the connection.
///
/// # Errors
/// Returns an error if reading fails, or if the message is longer than `limit` or malformed.
pub fn read<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead, limit: usize) -> io::Result<Option<T>> {
    // Allocated at its largest size: growing would leave copies of parts of a secret in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(limit + 1));
    from.take(limit as u64 + 1).read_until(b'\n', &mut bytes)?;
    match bytes.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&bytes)?)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "too long, or cut short")),
    }
}

/// Whether `text` could be a token: one word of visible characters, as in any HTTP header that carries one.
#[must_use]
pub fn is_token(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_TOKEN_BYTES && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_one_word() {
        assert!(is_token("eyJhbGciOiJSUzI1NiJ9.e30.c2ln"));
        for bad in ["", "two words", "line\nbreak", "é", &"x".repeat(MAX_TOKEN_BYTES + 1)] {
            assert!(!is_token(bad));
        }
    }

    #[test]
    fn a_message_is_one_whole_line_of_the_agreed_form_and_length() {
        let hello = line(&Hello { token: "t".into() }).unwrap();
        let read = |bytes: &[u8], limit| read::<Hello>(&mut &*bytes, limit).map(|hello| hello.map(|h| h.token.clone()));
        assert_eq!(read(&hello, 100).unwrap().as_deref(), Some("t"));
        assert_eq!(read(b"", 100).unwrap(), None);
        for bad in [&hello[..hello.len() - 1], b"GET / HTTP/1.1\r\n", b"{\"token\":\"t\",\"more\":1}\n", b"\n"] {
            assert!(read(bad, 100).is_err());
        }
        assert!(read(&hello, 5).is_err());
    }
}
