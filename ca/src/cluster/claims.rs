//! Unverified claims of a token, used only to explain why a review refused it.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use nebula_cert::UnixTime;
use serde::Deserialize;

/// Claims of a JSON Web Token, not verified.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Claims {
    #[serde(default)]
    aud: Audience,
    exp: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Audience {
    One(String),
    Many(Vec<String>),
}

impl Default for Audience {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl Claims {
    /// `None` if `token` is not a JSON Web Token.
    pub(crate) fn of(token: &str) -> Option<Self> {
        let payload = token.trim().split('.').nth(1)?;
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
    }

    pub(crate) fn is_for(&self, audience: &str) -> bool {
        match &self.aud {
            Audience::One(one) => one == audience,
            Audience::Many(many) => many.iter().any(|one| one == audience),
        }
    }

    pub(crate) fn has_expired(&self, now: UnixTime) -> bool {
        #[allow(clippy::cast_precision_loss, reason = "seconds since 1970 are far below 2^52")]
        self.exp.is_some_and(|exp| exp <= now as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(json: &str) -> Option<Claims> {
        Claims::of(&format!("e30.{}.sig", BASE64_URL_SAFE_NO_PAD.encode(json)))
    }

    #[test]
    fn audience_and_end_are_read_in_every_form() {
        let one = claims(r#"{"aud": "a", "exp": 10}"#).unwrap();
        assert!(one.is_for("a") && !one.is_for("b") && one.has_expired(10) && !one.has_expired(9));
        let many = claims(r#"{"aud": ["a", "b"]}"#).unwrap();
        assert!(many.is_for("b") && !many.has_expired(i64::MAX));
    }

    #[test]
    fn what_is_no_token_says_nothing() {
        for text in ["", ".", "..", "a.b.c", "a.eyJ.c", "é.é.é"] {
            assert!(Claims::of(text).is_none(), "{text}");
        }
    }
}
