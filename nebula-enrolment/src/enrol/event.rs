//! What `nebula-enrol -follow` tells the daemon that started it: one JSON object per line on its standard output.
//!
//! The daemon treats these lines as hostile input: lines and texts are bounded, and a line only ever causes a log line
//! or a reload of the daemon's own files.

use std::fmt::Display;

use nebula_cert::UnixTime;
use serde::{Deserialize, Serialize};

use crate::ca_client::life_cycle::Standing;

/// Something that the daemon logs; [`Event::is_new_state`] tells whether it also reloads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The enrolment is usable, and the CA service is followed from now on.
    Following {
        /// Address of the service.
        url: String,
    },
    /// The files of the enrolment are unusable; the program ends.
    Unusable {
        /// Which file, and why.
        error: String,
    },
    /// The program may not write its folder.
    NotWritable {
        /// The system's error.
        error: String,
    },
    /// Key, certificate and trust have been replaced.
    Renewed {
        /// Name in the new certificate.
        cert: String,
        /// Last second of its validity.
        not_after: UnixTime,
        /// Its fingerprint, in hex.
        fingerprint: String,
    },
    /// A renewal failed; it is tried again.
    NotRenewed {
        /// Why.
        error: String,
        /// The code of the CA's refusal; `None`: it did not decide.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<String>,
    },
    /// Trust bundle, blocklist or lighthouses have been replaced.
    TrustChanged {
        /// Number of trusted CA certificates.
        authorities: usize,
        /// What the new trust says about this host's certificate.
        standing: Standing,
    },
    /// The CA did not say whom to trust.
    TrustUnknown {
        /// Why.
        error: String,
    },
    /// What the CA said about trust cannot be written.
    TrustNotWritten {
        /// The system's error.
        error: String,
    },
    /// The certificate expired before it could be renewed.
    Expired,
    /// The certificate is on the blocklist.
    Revoked,
}

impl Event {
    /// The line for this event, with its line break; at most [`MAX_LINE_BYTES`] long.
    #[must_use]
    pub fn to_line(&self) -> String {
        let mut line = serde_json::to_string(self).unwrap_or_default();
        line.push('\n');
        line
    }

    /// Parses a line without its line break.
    ///
    /// # Errors
    /// Returns an error if it is no event that this version knows.
    pub fn from_line(line: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(line)
    }

    /// Whether files have changed that the daemon must read again.
    #[must_use]
    pub fn is_new_state(&self) -> bool {
        matches!(self, Self::Renewed { .. } | Self::TrustChanged { .. })
    }
}

/// Text for an event: one line of bounded length.
pub(crate) fn text(value: impl Display) -> String {
    value.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TEXT_CHARS).collect()
}

/// Longest line. A longer one is not from `nebula-enrol`.
pub const MAX_LINE_BYTES: usize = 4096;
const MAX_TEXT_CHARS: usize = 480;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_event_is_read_as_it_was_written() {
        let error = || text("cannot ask https://ca:8443/v1/trust: timeout\nsecond line");
        for event in [
            Event::Following { url: "https://ca:8443".to_owned() },
            Event::Unusable { error: error() },
            Event::NotWritable { error: error() },
            Event::Renewed { cert: "web \"1\"".to_owned(), not_after: 7, fingerprint: "ab".repeat(32) },
            Event::NotRenewed { error: error(), code: None },
            Event::NotRenewed { error: error(), code: Some("renewal_too_late".to_owned()) },
            Event::TrustChanged { authorities: 2, standing: Standing::Orphaned },
            Event::TrustUnknown { error: error() },
            Event::TrustNotWritten { error: error() },
            Event::Expired,
            Event::Revoked,
        ] {
            let line = event.to_line();
            assert_eq!(line.find('\n'), Some(line.len() - 1), "{line:?}");
            assert_eq!(Event::from_line(line.trim_end().as_bytes()).unwrap(), event);
        }
    }

    #[test]
    fn a_line_of_a_newer_program_is_an_error_unless_it_only_says_more() {
        let event = Event::TrustChanged { authorities: 1, standing: Standing::Good };
        let later = event.to_line().replacen('{', "{\"of_next_year\":[1],", 1);
        assert_eq!(Event::from_line(later.as_bytes()).unwrap(), event);
        assert!(Event::from_line(br#"{"event":"moved"}"#).is_err(), "the daemon logs it and goes on");
    }

    #[test]
    fn only_new_files_cause_a_reload() {
        assert!(Event::TrustChanged { authorities: 1, standing: Standing::Good }.is_new_state());
        assert!(!Event::NotRenewed { error: String::new(), code: None }.is_new_state());
        assert!(!Event::Expired.is_new_state());
    }

    proptest! {
        #[test]
        fn any_text_fits_into_a_line(name in ".{0,600}", error in "\\PC{0,2000}") {
            let renewed = Event::Renewed { cert: text(name), not_after: i64::MIN, fingerprint: "f".repeat(64) };
            for event in [renewed, Event::NotRenewed { error: text(error), code: None }] {
                prop_assert!(event.to_line().len() <= MAX_LINE_BYTES);
                prop_assert_eq!(Event::from_line(event.to_line().trim_end().as_bytes()).unwrap(), event);
            }
        }

        #[test]
        fn any_bytes_are_an_event_or_refused(line in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Event::from_line(&line);
        }
    }
}
