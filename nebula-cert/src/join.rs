//! The one string with which a host joins: where its CA service is, which key that shows, and a one-time secret.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// What a join token holds. Its text is `nebula-join-1-` and base64url of: fingerprint (32 bytes), URL, a line feed,
/// secret, and a check of 4 bytes, the first of the SHA-256 of all before.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    url: String,
    fingerprint: [u8; 32],
    secret: Zeroizing<String>,
}

/// Why a text is no join token. Says nothing about its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinTokenError {
    /// Something else.
    #[error("this is no join token: it begins with {PREFIX:?}; make one with `nebula-ca token create --join`")]
    NotOne,
    /// Of a later format.
    #[error("the join token is of a later release: update this program")]
    Version,
    /// Cut off, or mistyped.
    #[error("the join token is incomplete or has a typing mistake; copy all of it again")]
    Damaged,
    /// Not where a CA service can be.
    #[error("the address of the CA service must be https://HOST or https://HOST:PORT, at most {MAX_URL} characters")]
    Url,
    /// Not what a CA service makes.
    #[error("the secret must be 1 to {MAX_SECRET} printable characters without spaces")]
    Secret,
}

impl JoinToken {
    /// `fingerprint` is the SHA-256 of the service's TLS public key (SubjectPublicKeyInfo).
    ///
    /// # Errors
    /// `url` is not `https://HOST[:PORT]`, or `secret` cannot be one.
    pub fn new(url: &str, fingerprint: [u8; 32], secret: &str) -> Result<Self, JoinTokenError> {
        if !is_url(url) {
            return Err(JoinTokenError::Url);
        }
        if !(1..=MAX_SECRET).contains(&secret.len()) || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(JoinTokenError::Secret);
        }
        Ok(Self { url: url.to_owned(), fingerprint, secret: Zeroizing::new(secret.to_owned()) })
    }

    /// Where the CA service is: `https://HOST[:PORT]`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// SHA-256 of the TLS public key that the service must show before it is told the secret.
    #[must_use]
    pub fn fingerprint(&self) -> &[u8; 32] {
        &self.fingerprint
    }

    /// The one-time enrolment token.
    #[must_use]
    pub fn secret(&self) -> &Zeroizing<String> {
        &self.secret
    }

    /// All of it, as one word.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        // Reserved at once: growing would leave copies of the secret behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
        bytes.extend_from_slice(&self.fingerprint);
        bytes.extend_from_slice(self.url.as_bytes());
        bytes.push(b'\n');
        bytes.extend_from_slice(self.secret.as_bytes());
        let check = check(&bytes);
        bytes.extend_from_slice(&check);
        let mut text = Zeroizing::new(String::with_capacity(MAX_TEXT));
        text.push_str(PREFIX);
        BASE64_URL_SAFE_NO_PAD.encode_string(&*bytes, &mut text);
        text
    }
}

impl std::str::FromStr for JoinToken {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let text = text.trim();
        let Some(encoded) = text.strip_prefix(PREFIX) else {
            return Err(if text.starts_with(FAMILY) { JoinTokenError::Version } else { JoinTokenError::NotOne });
        };
        if text.len() > MAX_TEXT {
            return Err(JoinTokenError::Damaged);
        }
        let mut bytes = Zeroizing::new(vec![0; MAX_BYTES + 8]);
        let length = BASE64_URL_SAFE_NO_PAD.decode_slice(encoded, &mut bytes).map_err(|_| JoinTokenError::Damaged)?;
        let (body, found) = bytes[..length].split_last_chunk::<4>().ok_or(JoinTokenError::Damaged)?;
        if check(body) != *found {
            return Err(JoinTokenError::Damaged);
        }
        let (fingerprint, rest) = body.split_first_chunk::<32>().ok_or(JoinTokenError::Damaged)?;
        let rest = std::str::from_utf8(rest).map_err(|_| JoinTokenError::Damaged)?;
        let (url, secret) = rest.split_once('\n').ok_or(JoinTokenError::Damaged)?;
        Self::new(url, *fingerprint, secret)
    }
}

impl std::fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "JoinToken({}, redacted)", self.url)
    }
}

/// Whether this is `https://HOST[:PORT]`, and nothing in it could lead a request elsewhere.
fn is_url(url: &str) -> bool {
    let Some(authority) = url.strip_prefix("https://").filter(|_| url.len() <= MAX_URL) else { return false };
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, port)) if host.parse::<std::net::Ipv6Addr>().is_ok() => ("v6", port),
            _ => return false,
        },
        None => authority.split_at(authority.find(':').unwrap_or(authority.len())),
    };
    let is_host = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_'));
    let is_port = match port.strip_prefix(':') {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_digit()) && digits.parse::<u16>().is_ok_and(|n| n > 0),
        None => port.is_empty(),
    };
    !host.is_empty() && is_host && is_port
}

/// Finds typing mistakes; against forgery there is the secret.
fn check(bytes: &[u8]) -> [u8; 4] {
    let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(bytes).into();
    [a, b, c, d]
}

const FAMILY: &str = "nebula-join-";
const PREFIX: &str = "nebula-join-1-";
const MAX_URL: usize = 300;
const MAX_SECRET: usize = 128;
const MAX_BYTES: usize = 32 + MAX_URL + 1 + MAX_SECRET + 4;
const MAX_TEXT: usize = PREFIX.len() + MAX_BYTES.div_ceil(3) * 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token() -> JoinToken {
        JoinToken::new("https://ca.example:8443", [7; 32], "nebula-enrol-abc").unwrap()
    }

    /// A token that no CA makes, with a good check.
    fn forged(rest: &[u8]) -> String {
        let mut bytes = [&[7; 32], rest].concat();
        bytes.extend(check(&bytes));
        format!("{PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }

    #[test]
    fn a_token_survives_being_pasted() {
        let text = token().to_text();
        assert_eq!(format!(" {}\n", *text).parse(), Ok(token()));
        assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')), "{}", *text);
        assert!(!format!("{:?}", token()).contains("nebula-enrol"));
        let longest = format!("https://{}", "a".repeat(MAX_URL - 8));
        let longest = JoinToken::new(&longest, [255; 32], &"~".repeat(MAX_SECRET)).unwrap();
        assert_eq!(longest.to_text().parse(), Ok(longest));
    }

    #[test]
    fn every_changed_and_every_missing_character_is_noticed() {
        let text = token().to_text();
        for at in PREFIX.len()..text.len() {
            let mut bytes = text.as_bytes().to_vec();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            assert_eq!(String::from_utf8(bytes).unwrap().parse::<JoinToken>(), Err(JoinTokenError::Damaged), "{at}");
            assert_eq!(text[..at].parse::<JoinToken>(), Err(JoinTokenError::Damaged), "{at}");
        }
    }

    #[test]
    fn what_is_no_token_is_told_from_one_of_a_later_release() {
        for other in ["", "nebula-enrol-abc", "https://ca.example"] {
            assert_eq!(other.parse::<JoinToken>(), Err(JoinTokenError::NotOne));
        }
        assert_eq!(token().to_text().replace("-1-", "-2-").parse::<JoinToken>(), Err(JoinTokenError::Version));
        assert_eq!("A".repeat(1 << 20).parse::<JoinToken>(), Err(JoinTokenError::NotOne));
        assert_eq!(format!("{PREFIX}{}", "A".repeat(1 << 20)).parse::<JoinToken>(), Err(JoinTokenError::Damaged));
    }

    #[test]
    fn a_token_leads_to_no_other_place_than_a_service() {
        for url in [
            "http://ca.example",
            "https://",
            "https://:8443",
            "https://user@ca.example",
            "https://ca.example/path",
            "https://ca.example?query",
            "https://ca.example:0",
            "https://ca.example:65536",
            "https://ca.example:+1",
            "https://[::1",
            "https://[::1]x",
            "https://[ca.example]",
            "https://ca example",
            "https://ca.example\r\nhost: other",
        ] {
            assert_eq!(JoinToken::new(url, [0; 32], "secret"), Err(JoinTokenError::Url), "{url}");
            assert!(forged(format!("{url}\nsecret").as_bytes()).parse::<JoinToken>().is_err(), "{url}");
        }
        for url in ["https://ca", "https://192.0.2.7:8443", "https://[2001:db8::7]", "https://[::1]:443"] {
            assert!(JoinToken::new(url, [0; 32], "secret").is_ok(), "{url}");
        }
        for secret in ["", "a b", "a\u{e9}", "a\0", &"x".repeat(MAX_SECRET + 1)] {
            assert_eq!(JoinToken::new("https://ca", [0; 32], secret), Err(JoinTokenError::Secret), "{secret:?}");
        }
        assert_eq!(forged(b"https://ca").parse::<JoinToken>(), Err(JoinTokenError::Damaged), "no secret");
        assert_eq!(forged(b"\xff\n\xff").parse::<JoinToken>(), Err(JoinTokenError::Damaged));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_is_a_token_that_reads_back(text in "(nebula-join-1-)?\\PC{0,200}", bytes: Vec<u8>) {
            for text in [text, forged(&bytes)] {
                if let Ok(token) = text.parse::<JoinToken>() {
                    prop_assert_eq!(token.to_text().parse(), Ok(token));
                }
            }
        }
    }
}
