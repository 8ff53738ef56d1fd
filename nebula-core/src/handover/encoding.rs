//! The bytes of a [`State`]: protobuf with a version in front, bounded in every list and as a whole.
//!
//! A release with another minor version has more or fewer fields: those that are not known are skipped, and what is
//! missing counts as not known. Another major version is refused. `tests/vectors/handover` has a
//! recorded document of each version.

mod parts;

use nebula_cert::protobuf::{Fields, Malformed, Value, Writer};
use zeroize::Zeroizing;

pub(super) use self::parts::{MAX_AFFINITIES, MAX_ATTACHED, MAX_FLOWS, MAX_HOPS, MAX_PEERS, MAX_SESSIONS};
use super::State;

/// Maximum length of a document in bytes: more than 100,000 peers with as many sessions and a million flows have.
pub const MAX_DOCUMENT: usize = 256 << 20;

const MAGIC: &[u8] = b"nebula handover";
const MAJOR: u64 = 1;
const MINOR: u64 = 1;

/// Why bytes are not a state that this release understands, or a state cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// They are something else.
    #[error("this is no hand-over document of nebula")]
    Foreign,
    /// They were written by a release whose documents this one does not understand.
    #[error("the hand-over document has version {major}, and this release understands version {MAJOR} only")]
    Version {
        /// Major version of the document.
        major: u64,
    },
    /// There is more of something than a node has.
    #[error("the hand-over document has too many {0}")]
    TooMany(&'static str),
    /// They are too long.
    #[error("the hand-over document has more than {MAX_DOCUMENT} bytes")]
    TooLong,
    /// They are damaged.
    #[error("the hand-over document is damaged: {0}")]
    Malformed(#[from] Malformed),
}

impl State {
    /// The state as bytes, which are erased when they are dropped.
    ///
    /// # Errors
    /// Returns an error if they would be more than [`MAX_DOCUMENT`].
    pub fn encode(&self) -> Result<Zeroizing<Vec<u8>>, DecodeError> {
        let room = parts::upper_bound(self);
        if room > MAX_DOCUMENT {
            return Err(DecodeError::TooLong);
        }
        let mut writer = Writer::with_capacity(room);
        writer.bytes(1, MAGIC);
        writer.number(2, MAJOR);
        writer.number(3, MINOR);
        writer.message(4, |body| parts::write(self, body));
        let document = Zeroizing::new(writer.finish());
        // It would have grown, and left copies of keys behind.
        if document.len() > room {
            return Err(DecodeError::TooLong);
        }
        Ok(document)
    }

    /// Reads what [`State::encode`] of this release, or of one before or after it, wrote.
    ///
    /// # Errors
    /// Returns an error for anything else.
    pub fn decode(document: &[u8]) -> Result<Self, DecodeError> {
        if document.len() > MAX_DOCUMENT {
            return Err(DecodeError::TooLong);
        }
        let mut fields = Fields::new(document);
        if !matches!(fields.next(), Some(Ok((1, Value::Bytes(MAGIC))))) {
            return Err(DecodeError::Foreign);
        }
        match fields.next() {
            Some(Ok((2, Value::Varint(MAJOR)))) => {}
            Some(Ok((2, Value::Varint(major)))) => return Err(DecodeError::Version { major }),
            Some(Err(malformed)) => return Err(malformed.into()),
            _ => return Err(DecodeError::Foreign),
        }
        let mut state = None;
        for field in fields {
            if let (4, value) = field? {
                state = Some(parts::read(value.bytes()?)?);
            }
        }
        state.ok_or(DecodeError::Malformed(Malformed("there is no state in it")))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
