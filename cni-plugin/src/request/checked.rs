//! Checks shared by the code that reads our configuration keys; a refusal names the key and the value.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::reply::{Error, code};
use crate::request::shown;

/// An error that names the key and the value.
pub(crate) fn refused(key: &str, value: &Value, expected: &str) -> Error {
    let value = shown(&value.to_string());
    Error::new(code::CONFIG, format!("network configuration: key {key:?} has value {value}: expected {expected}"))
}

/// Refuses unknown keys in objects that only we read, because there they are typing errors.
pub(crate) fn refuse_other_keys(name: &str, object: &Map<String, Value>, known: &[&str]) -> Result<(), Error> {
    match object.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, value)) => {
            Err(refused(&format!("{name}.{key}"), value, &format!("only the keys {} in {name}", known.join(", "))))
        }
        None => Ok(()),
    }
}

/// Reads a list of prefixes. Host bits are cleared; numbers with leading zeros are refused, because some programs read
/// them as octal.
pub(crate) fn prefixes(key: &str, value: &Value) -> Result<Vec<IpNet>, Error> {
    const EXPECTED: &str = "a list of at most 64 prefixes such as [\"10.42.0.0/16\"]";
    let list =
        value.as_array().filter(|list| list.len() <= MAX_PREFIXES).ok_or_else(|| refused(key, value, EXPECTED))?;
    list.iter()
        .map(|item| {
            item.as_str().and_then(prefix).map(|prefix| prefix.trunc()).ok_or_else(|| refused(key, item, EXPECTED))
        })
        .collect()
}

/// Parses a prefix like Go's `net/netip`: leading zeros are refused, in octets and in the length.
#[must_use]
pub fn prefix(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    let plain = length.bytes().all(|byte| byte.is_ascii_digit()) && (length == "0" || !length.starts_with('0'));
    let address = address.parse().ok().filter(|_| plain)?;
    IpNet::new(address, length.parse().ok()?).ok()
}

const MAX_PREFIXES: usize = 64;
