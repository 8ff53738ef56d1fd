//! JSON of a certificate, in the shape of `nebula-cert print -json` since 1.10.

use serde::Serialize as _;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value, json};

use crate::timestamp::rfc3339;
use crate::{Certificate, Fingerprint, Version, hex, visible_json};

impl Certificate {
    /// One object of the array that `nebula-cert print -json` prints; keys in alphabetical order, times in UTC.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut details = Map::new();
        let mut outer = Map::new();
        let curve = ("curve".to_owned(), json!(self.curve().to_string()));
        let public_key = ("publicKey".to_owned(), json!(hex::encode(self.public_key())));
        match self.version() {
            Version::V1 => details.extend([curve]),
            Version::V2 => outer.extend([curve]),
        }
        details.extend([
            ("groups".to_owned(), self.list(self.groups())),
            ("isCa".to_owned(), json!(self.is_ca())),
            ("issuer".to_owned(), json!(self.issuer().as_ref().map(Fingerprint::to_string).unwrap_or_default())),
            ("name".to_owned(), json!(self.name())),
            ("networks".to_owned(), self.list(self.networks())),
            ("notAfter".to_owned(), json!(rfc3339(self.not_after()))),
            ("notBefore".to_owned(), json!(rfc3339(self.not_before()))),
        ]);
        if self.version() == Version::V1 {
            details.extend([public_key.clone()]);
        }
        details.extend([("unsafeNetworks".to_owned(), self.list(self.unsafe_networks()))]);
        outer.extend([
            ("details".to_owned(), Value::Object(details)),
            ("fingerprint".to_owned(), json!(self.fingerprint().to_string())),
        ]);
        if self.version() == Version::V2 {
            outer.extend([public_key]);
        }
        outer.extend([
            ("signature".to_owned(), json!(hex::encode(self.signature()))),
            ("version".to_owned(), json!(self.version().number())),
        ]);
        Value::Object(outer)
    }

    /// An empty list: null in v2, and [] in v1, as in Go.
    fn list(&self, items: &[impl ToString]) -> Value {
        if items.is_empty() && self.version() == Version::V2 {
            return Value::Null;
        }
        items.iter().map(ToString::to_string).collect()
    }
}

/// Encodes a document like Go's encoder: on one line, or with each level indented by `indent`.
#[must_use]
pub fn go_json(document: &Value, indent: Option<&str>) -> String {
    let plain = match indent {
        None => document.to_string(),
        Some(indent) => {
            let mut out = Vec::new();
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            // Writing a value into memory cannot fail.
            let _ = document.serialize(&mut Serializer::with_formatter(&mut out, formatter));
            String::from_utf8_lossy(&out).into_owned()
        }
    };
    // Go escapes these characters, which can only occur inside strings, and U+2028 and U+2029 as we do.
    let escapes = [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026")];
    let escaped = escapes.iter().fold(plain, |text, (character, escape)| text.replace(*character, escape));
    visible_json(&escaped).into_owned()
}
