//! Secret headers of requests: one `NAME: VALUE` a line, as in a request.

use std::path::Path;

use ureq::http::{HeaderName, HeaderValue};
use zeroize::Zeroizing;

use crate::durable;

/// Headers that no log shows.
#[derive(Default)]
pub(super) struct Headers(Vec<(HeaderName, HeaderValue)>);

impl std::fmt::Debug for Headers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_tuple("Headers").field(&names).finish()
    }
}

/// Why there are none. It says nothing of what is in the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(super) enum HeadersError {
    /// The file system refuses.
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    /// It is no header.
    #[error("line {0} is not NAME: VALUE in visible characters of ASCII")]
    Line(usize),
    /// It would change what a request means.
    #[error("line {0} has a header that the agent sets itself")]
    Own(usize),
    /// There are too many.
    #[error("there are more than {MOST} headers")]
    Many,
}

impl Headers {
    pub(super) fn read(path: &Path) -> Result<Self, HeadersError> {
        let bytes = Zeroizing::new(durable::read_bounded(path, MOST_BYTES)?);
        Self::parse(&bytes)
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, HeadersError> {
        let mut headers = Vec::new();
        for (at, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let wrong = || HeadersError::Line(at + 1);
            let colon = line.iter().position(|byte| *byte == b':').ok_or_else(wrong)?;
            let name = HeaderName::from_bytes(line[..colon].trim_ascii()).map_err(|_| wrong())?;
            let value = line[colon + 1..].trim_ascii();
            if value.is_empty() || !value.iter().all(|byte| (b' '..=b'~').contains(byte)) {
                return Err(wrong());
            }
            if OWN.contains(&name.as_str()) {
                return Err(HeadersError::Own(at + 1));
            }
            let mut value = HeaderValue::from_bytes(value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.push((name, value));
            if headers.len() > MOST {
                return Err(HeadersError::Many);
            }
        }
        Ok(Self(headers))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &(HeaderName, HeaderValue)> {
        self.0.iter()
    }
}

const OWN: [&str; 8] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "transfer-encoding",
    "upgrade",
];
const MOST: usize = 32;
const MOST_BYTES: u64 = 16 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers_are_lines_and_no_text_of_ours_shows_their_values() {
        let headers = Headers::parse(b"Authorization: Bearer s3cret\n\n  x-tenant :shop \r\n").unwrap();
        let found: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        assert_eq!(found, [("authorization", "Bearer s3cret"), ("x-tenant", "shop")]);
        assert!(!format!("{headers:?} {:?}", headers.0).contains("s3cret"));
    }

    #[test]
    fn what_is_no_header_or_would_change_the_request_is_refused_by_its_line_only() {
        for (text, says) in [
            ("Bearer s3cret", "line 1 is not"),
            ("a: b\ns3 cret: x", "line 2 is not"),
            ("a: s3cret\u{e4}", "line 1 is not"),
            ("a:", "line 1 is not"),
            ("a: b\nHost: s3cret", "line 2 has"),
            ("content-length: 7", "line 1 has"),
        ] {
            let error = Headers::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("s3"), "{text}: {error}");
        }
        assert!(Headers::parse("a: b\n".repeat(33).as_bytes()).unwrap_err().to_string().contains("more than 32"));
    }

    proptest! {
        #[test]
        fn any_file_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(headers) = Headers::parse(&bytes) {
                prop_assert!(headers.iter().all(|(_, value)| value.to_str().is_ok()));
            }
        }
    }
}
