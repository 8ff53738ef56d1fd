//! Parses YAML text into a [`Value`] by the rules of go-yaml v3, which Go Nebula reads its configuration with.

mod decode;
mod node;
mod scalar;

use super::{Error, Value};
pub(super) use node::{Document, Kind};
pub(super) use scalar::MERGE_KEY;

/// Longest text of one configuration file, in bytes.
pub const MAX_TEXT: usize = 8 << 20;

/// Parses the first document of `text`. The root must be a mapping; an empty text is an empty mapping.
///
/// # Errors
/// Returns an error if the text is not YAML, has a duplicate key or another kind of root, or is too long or too deep.
pub fn parse(text: &str) -> Result<Value, Error> {
    if text.len() > MAX_TEXT {
        return Err(Error::Yaml(format!("longer than {} MiB", MAX_TEXT >> 20)));
    }
    let document = Document::compose(text).map_err(Error::Yaml)?;
    decode::root(&document).map_err(Error::Yaml)
}
