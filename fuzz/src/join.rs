//! The strings that somebody pastes on a host or its CA: join tokens and keys of hosts.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use nebula_cert::{HostKey, JoinToken};
use sha2::{Digest, Sha256};

/// The input as it is, and as the contents of each kind of string with a good check, which chance would not find.
pub(crate) fn join(data: &[u8]) {
    let text = String::from_utf8_lossy(data).into_owned();
    let body = |prefix: &str| {
        let check: [u8; 32] = Sha256::digest(data).into();
        format!("{prefix}{}", BASE64_URL_SAFE_NO_PAD.encode([data, &check[..4]].concat()))
    };
    for text in [text, body("nebula-join-2-"), body("nebula-key-1-")] {
        if let Ok(token) = text.parse::<JoinToken>() {
            let authority = token.url().strip_prefix("https://").expect("an address of a service");
            assert!(
                !authority.is_empty() && !authority.contains(['/', '@', '?', '#', ' ', '\r', '\n']),
                "{authority:?}"
            );
            assert!(token.secret().bytes().all(|byte| byte.is_ascii_graphic()) && !token.secret().is_empty());
            assert!(!token.networks().is_empty() && token.networks().iter().all(|network| *network == network.trunc()));
            assert_eq!(format!("{token:?}"), format!("JoinToken({}, redacted)", token.url()));
            assert_eq!(token.to_text().parse(), Ok(token), "a join token reads back as another one");
        }
        if let Ok(key) = text.parse::<HostKey>() {
            assert_eq!(key.to_string().parse(), Ok(key), "a key reads back as another one");
        }
    }
}
