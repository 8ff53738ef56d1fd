//! The two strings with which a host joins. Of its CA service: where that is, which key it shows, which networks its
//! hosts are in, and a one-time secret. Of the host, before that: its public key, to which the secret is then bound.

use std::fmt;
use std::str::FromStr;

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use ipnet::IpNet;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::key::check_public_key;
use crate::{Curve, PrivateKey};

/// What a join token holds. Its text is `nebula-join-2-` and base64url of: fingerprint (32 bytes), flags (1 byte), with
/// the flag `BOUND` a key's SHA-256 (32 bytes), then URL, secret and networks with line feeds in between and commas
/// between networks, and a check of 4 bytes, the first of the SHA-256 of all before.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinToken {
    url: String,
    fingerprint: [u8; 32],
    secret: Zeroizing<String>,
    networks: Vec<IpNet>,
    curve: Curve,
    key: Option<[u8; 32]>,
}

/// Why a text is no join token. Says nothing about its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JoinTokenError {
    /// Something else.
    #[error("this is no join token: it begins with {PREFIX:?}; make one with `nebula-ca token create --join`")]
    NotOne,
    /// Of another format.
    #[error("the join token is of another release: update this program, or make another token")]
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
    /// None, or too many.
    #[error("a join token is for 1 to {MAX_NETWORKS} networks")]
    Networks,
}

impl JoinToken {
    /// `fingerprint` is the SHA-256 of the service's TLS public key (SubjectPublicKeyInfo), `networks` are the overlay
    /// networks that hosts of the service are in.
    ///
    /// # Errors
    /// `url` is not `https://HOST[:PORT]`, `secret` cannot be one, or there are no networks or too many.
    pub fn new(url: &str, fingerprint: [u8; 32], secret: &str, networks: &[IpNet]) -> Result<Self, JoinTokenError> {
        if !is_url(url) {
            return Err(JoinTokenError::Url);
        }
        if !(1..=MAX_SECRET).contains(&secret.len()) || !secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(JoinTokenError::Secret);
        }
        let mut networks: Vec<IpNet> = networks.iter().map(IpNet::trunc).collect();
        networks.sort();
        networks.dedup();
        if !(1..=MAX_NETWORKS).contains(&networks.len()) {
            return Err(JoinTokenError::Networks);
        }
        let secret = Zeroizing::new(secret.to_owned());
        Ok(Self { url: url.to_owned(), fingerprint, secret, networks, curve: Curve::Curve25519, key: None })
    }

    /// For a CA that signs for another curve.
    #[must_use]
    pub fn with_curve(self, curve: Curve) -> Self {
        Self { curve, ..self }
    }

    /// Tells the host that the service accepts the secret for this key only.
    #[must_use]
    pub fn bound_to(self, key: &HostKey) -> Self {
        Self { curve: key.curve, key: Some(key.sha256()), ..self }
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

    /// The overlay networks outside of which the service gives this host no address.
    #[must_use]
    pub fn networks(&self) -> &[IpNet] {
        &self.networks
    }

    /// For which curve the CA signs.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }

    /// [`HostKey::sha256`] of the only key for which the secret is good, if it is bound to one.
    #[must_use]
    pub fn key(&self) -> Option<&[u8; 32]> {
        self.key.as_ref()
    }

    /// All of it, as one word.
    #[must_use]
    pub fn to_text(&self) -> Zeroizing<String> {
        // Reserved at once: growing would leave copies of the secret behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
        bytes.extend_from_slice(&self.fingerprint);
        let curve = if self.curve == Curve::P256 { P256 } else { 0 };
        bytes.push(curve | if self.key.is_some() { BOUND } else { 0 });
        bytes.extend(self.key.iter().flatten());
        bytes.extend_from_slice(self.url.as_bytes());
        bytes.push(b'\n');
        bytes.extend_from_slice(self.secret.as_bytes());
        for (at, network) in self.networks.iter().enumerate() {
            bytes.push(if at == 0 { b'\n' } else { b',' });
            bytes.extend_from_slice(network.to_string().as_bytes());
        }
        let check = check(&bytes);
        bytes.extend_from_slice(&check);
        let mut text = Zeroizing::new(String::with_capacity(MAX_TEXT));
        text.push_str(PREFIX);
        BASE64_URL_SAFE_NO_PAD.encode_string(&*bytes, &mut text);
        text
    }
}

impl FromStr for JoinToken {
    type Err = JoinTokenError;

    fn from_str(text: &str) -> Result<Self, JoinTokenError> {
        let text = text.trim();
        let Some(encoded) = text.strip_prefix(PREFIX) else {
            return Err(match text {
                _ if text.starts_with(FAMILY) => JoinTokenError::Version,
                _ => JoinTokenError::NotOne,
            });
        };
        if text.len() > MAX_TEXT {
            return Err(JoinTokenError::Damaged);
        }
        let mut bytes = Zeroizing::new(vec![0; MAX_BYTES + 8]);
        let length = BASE64_URL_SAFE_NO_PAD.decode_slice(encoded, &mut bytes).map_err(|_| JoinTokenError::Damaged)?;
        let body = checked(&bytes[..length]).ok_or(JoinTokenError::Damaged)?;
        let (fingerprint, rest) = body.split_first_chunk::<32>().ok_or(JoinTokenError::Damaged)?;
        let (flags, rest) = rest.split_first().ok_or(JoinTokenError::Damaged)?;
        if flags & !(P256 | BOUND) != 0 {
            return Err(JoinTokenError::Version);
        }
        let (key, rest) = match flags & BOUND {
            0 => (None, rest),
            _ => rest.split_first_chunk::<32>().map(|(key, rest)| (Some(*key), rest)).ok_or(JoinTokenError::Damaged)?,
        };
        let rest = std::str::from_utf8(rest).map_err(|_| JoinTokenError::Damaged)?;
        let mut lines = rest.split('\n');
        let (Some(url), Some(secret), Some(networks), None) = (lines.next(), lines.next(), lines.next(), lines.next())
        else {
            return Err(JoinTokenError::Damaged);
        };
        let networks: Result<Vec<IpNet>, _> = networks.split(',').take(MAX_NETWORKS + 1).map(str::parse).collect();
        let networks = networks.map_err(|_| JoinTokenError::Damaged)?;
        let curve = if flags & P256 == 0 { Curve::Curve25519 } else { Curve::P256 };
        Ok(Self { curve, key, ..Self::new(url, *fingerprint, secret, &networks)? })
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinToken({}, redacted)", self.url)
    }
}

/// A host's public key as one word, to be copied to its CA: `nebula-key-1-` and base64url of the curve (1 byte), the
/// key, and a check of 4 bytes as in a [`JoinToken`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostKey {
    curve: Curve,
    public_key: Vec<u8>,
}

/// Why a text is no host key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HostKeyError {
    /// Something else.
    #[error("this is no key of a host: it begins with {KEY_PREFIX:?}; `nebula up -prepare` prints it")]
    NotOne,
    /// Cut off, or mistyped.
    #[error("the key of the host is incomplete or has a typing mistake; copy all of it again")]
    Damaged,
}

impl HostKey {
    /// The public half of a key.
    #[must_use]
    pub fn of(key: &PrivateKey) -> Self {
        Self { curve: key.curve(), public_key: key.public_key() }
    }

    /// Its curve.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }

    /// SHA-256 of the public key as certificates contain it.
    #[must_use]
    pub fn sha256(&self) -> [u8; 32] {
        Sha256::digest(&self.public_key).into()
    }
}

impl fmt::Display for HostKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = vec![self.curve.number()];
        bytes.extend_from_slice(&self.public_key);
        let check = check(&bytes);
        bytes.extend_from_slice(&check);
        write!(f, "{KEY_PREFIX}{}", BASE64_URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for HostKey {
    type Err = HostKeyError;

    fn from_str(text: &str) -> Result<Self, HostKeyError> {
        let encoded = text.trim().strip_prefix(KEY_PREFIX).ok_or(HostKeyError::NotOne)?;
        let mut bytes = [0; MAX_KEY_BYTES + 8];
        let length = BASE64_URL_SAFE_NO_PAD.decode_slice(encoded, &mut bytes).map_err(|_| HostKeyError::Damaged)?;
        let (curve, key) = checked(&bytes[..length]).and_then(<[u8]>::split_first).ok_or(HostKeyError::Damaged)?;
        let curve = Curve::from_number((*curve).into()).map_err(|_| HostKeyError::Damaged)?;
        check_public_key(curve, key).map_err(|_| HostKeyError::Damaged)?;
        Ok(Self { curve, public_key: key.to_vec() })
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

/// What is before a check that is right.
fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (body, found) = bytes.split_last_chunk::<4>()?;
    (check(body) == *found).then_some(body)
}

const FAMILY: &str = "nebula-join-";
const PREFIX: &str = "nebula-join-2-";
/// Flags of a join token: the CA signs for P-256; the secret is good for one key only.
const P256: u8 = 1;
const BOUND: u8 = 2;
const MAX_URL: usize = 300;
const MAX_SECRET: usize = 128;
const MAX_NETWORKS: usize = 8;
/// The longest network is an IPv6 one with its length, before which there is a comma or a line feed.
const MAX_NETWORK: usize = 1 + 39 + 4;
const MAX_BYTES: usize = 32 + 1 + 32 + MAX_URL + 1 + MAX_SECRET + MAX_NETWORKS * MAX_NETWORK + 4;
const MAX_TEXT: usize = PREFIX.len() + MAX_BYTES.div_ceil(3) * 4;
const KEY_PREFIX: &str = "nebula-key-1-";
/// Curve, an uncompressed point of P-256, and check.
const MAX_KEY_BYTES: usize = 1 + 65 + 4;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OVERLAY: &str = "10.42.0.0/16";

    fn new(url: &str, fingerprint: [u8; 32], secret: &str) -> Result<JoinToken, JoinTokenError> {
        JoinToken::new(url, fingerprint, secret, &[OVERLAY.parse().unwrap()])
    }

    fn token() -> JoinToken {
        new("https://ca.example:8443", [7; 32], "nebula-enrol-abc").unwrap()
    }

    /// A token that no CA makes, with a good check.
    fn forged(flags: u8, rest: &[u8]) -> String {
        let mut bytes = [&[7; 32], &[flags][..], rest].concat();
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
        let networks: Vec<IpNet> = (0..MAX_NETWORKS)
            .map(|at| format!("fd00:1111:2222:3333:4444:5555:6666:777{at}/128").parse().unwrap())
            .collect();
        let key = HostKey::of(&PrivateKey::generate(Curve::P256).unwrap());
        let longest = JoinToken::new(&longest, [255; 32], &"~".repeat(MAX_SECRET), &networks).unwrap().bound_to(&key);
        assert_eq!(longest.to_text().parse(), Ok(longest));
    }

    #[test]
    fn a_token_says_for_which_networks_curve_and_key_it_is() {
        let networks = ["fd42::7/64", "10.42.3.7/16", "10.42.0.9/16"].map(|network| network.parse().unwrap());
        let token = JoinToken::new("https://ca", [7; 32], "x", &networks).unwrap();
        let read: JoinToken = token.clone().with_curve(Curve::P256).to_text().parse().unwrap();
        assert_eq!((read.curve(), read.key()), (Curve::P256, None));
        assert_eq!(read.networks(), ["10.42.0.0/16", "fd42::/64"].map(|network| network.parse().unwrap()));
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = HostKey::of(&PrivateKey::generate(curve).unwrap());
            let read: JoinToken = token.clone().bound_to(&key).to_text().parse().unwrap();
            assert_eq!((read.curve(), read.key()), (curve, Some(&key.sha256())));
            assert_eq!(key.to_string().parse(), Ok(key.clone()));
            for at in KEY_PREFIX.len()..key.to_string().len() {
                assert_eq!(key.to_string()[..at].parse::<HostKey>(), Err(HostKeyError::Damaged), "{at}");
            }
        }
        assert_eq!(JoinToken::new("https://ca", [7; 32], "x", &[]), Err(JoinTokenError::Networks));
        let many: Vec<IpNet> = (0..=MAX_NETWORKS).map(|at| format!("10.{at}.0.0/16").parse().unwrap()).collect();
        assert_eq!(JoinToken::new("https://ca", [7; 32], "x", &many), Err(JoinTokenError::Networks));
        for other in ["", "nebula-key-2-AAAA", "25519", &*token.to_text()] {
            assert_eq!(other.parse::<HostKey>(), Err(HostKeyError::NotOne));
        }
        assert_eq!(format!("{KEY_PREFIX}{}", "A".repeat(1 << 16)).parse::<HostKey>(), Err(HostKeyError::Damaged));
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
    fn what_is_no_token_is_told_from_one_of_another_release() {
        for other in ["", "nebula-enrol-abc", "https://ca.example"] {
            assert_eq!(other.parse::<JoinToken>(), Err(JoinTokenError::NotOne));
        }
        for other in ["-1-", "-3-"] {
            assert_eq!(token().to_text().replace("-2-", other).parse::<JoinToken>(), Err(JoinTokenError::Version));
        }
        assert_eq!(forged(4, b"https://ca\nsecret\n10.0.0.0/8").parse::<JoinToken>(), Err(JoinTokenError::Version));
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
            assert_eq!(new(url, [0; 32], "secret"), Err(JoinTokenError::Url), "{url}");
            assert!(forged(0, format!("{url}\nsecret\n{OVERLAY}").as_bytes()).parse::<JoinToken>().is_err(), "{url}");
        }
        for url in ["https://ca", "https://192.0.2.7:8443", "https://[2001:db8::7]", "https://[::1]:443"] {
            assert!(new(url, [0; 32], "secret").is_ok(), "{url}");
        }
        for secret in ["", "a b", "a\u{e9}", "a\0", &"x".repeat(MAX_SECRET + 1)] {
            assert_eq!(new("https://ca", [0; 32], secret), Err(JoinTokenError::Secret), "{secret:?}");
        }
        for rest in
            ["https://ca", "https://ca\nx", "https://ca\nx\n", "https://ca\nx\n10.0.0.0", "https://ca\nx\n10.0.0.0/8\n"]
        {
            assert_eq!(forged(0, rest.as_bytes()).parse::<JoinToken>(), Err(JoinTokenError::Damaged), "{rest:?}");
        }
        assert_eq!(forged(0, b"\xff\n\xff\n\xff").parse::<JoinToken>(), Err(JoinTokenError::Damaged));
        assert_eq!(forged(BOUND, b"https://ca\nx\n10.0.0.0/8").parse::<JoinToken>(), Err(JoinTokenError::Damaged));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_is_a_token_that_reads_back(
            text in "(nebula-join-2-)?\\PC{0,200}",
            flags: u8,
            bytes: Vec<u8>,
        ) {
            let _ = text.parse::<HostKey>();
            for text in [text, forged(flags, &bytes)] {
                if let Ok(token) = text.parse::<JoinToken>() {
                    prop_assert_eq!(token.to_text().parse(), Ok(token));
                }
            }
        }
    }
}
