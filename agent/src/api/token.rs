//! The token of a request. It is erased when the request is done, and never printed.

use std::fmt;

use axum::http::HeaderMap;
use nebula_cni_contract::agent_api::TOKEN_HEADER;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::denied::Denied;

/// A token of which nothing is known but its form.
#[derive(Clone)]
pub(super) struct Token(Zeroizing<String>);

/// Tells tokens apart without being one: the SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TokenId([u8; 32]);

impl Token {
    /// The token in the headers, from which it is taken away.
    pub(super) fn take(headers: &mut HeaderMap) -> Result<Self, Denied> {
        let value = headers.remove(TOKEN_HEADER).ok_or(Denied::NoToken)?;
        let text = value.to_str().map_err(|_| Denied::NoToken)?;
        // The characters of a JSON Web Token, and of those that other authenticators know.
        let is_fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
        if text.is_empty() || text.len() > MAX_TOKEN || !text.bytes().all(is_fine) {
            return Err(Denied::NoToken);
        }
        Ok(Self(Zeroizing::new(text.to_owned())))
    }

    pub(super) fn id(&self) -> TokenId {
        TokenId(Sha256::digest(self.0.as_bytes()).into())
    }

    /// The token itself, for the API server.
    pub(super) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Those of API servers have about one KiB.
const MAX_TOKEN: usize = 8 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_taken_once_and_is_never_printed() {
        let mut headers = HeaderMap::new();
        headers.insert(TOKEN_HEADER, "eyJ.secret.x".parse().unwrap());
        let token = Token::take(&mut headers).unwrap();
        assert_eq!((token.expose(), format!("{token:?}").as_str()), ("eyJ.secret.x", "Token(…)"));
        assert!(matches!(Token::take(&mut headers), Err(Denied::NoToken)), "it is gone from the request");
        for bad in ["", "a b", "a\"b", &"x".repeat(MAX_TOKEN + 1)] {
            headers.insert(TOKEN_HEADER, bad.parse().unwrap());
            assert!(matches!(Token::take(&mut headers), Err(Denied::NoToken)), "{bad:?}");
        }
    }
}
