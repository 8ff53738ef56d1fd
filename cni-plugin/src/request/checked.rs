//! Checks shared by the code that reads our configuration keys; a refusal names the key and the value.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::reply::{Error, code};
use crate::request::{NetworkConfig, shown};

/// An error that names the key and the value.
pub(crate) fn refused(key: &str, value: &Value, expected: &str) -> Error {
    let value = shown(&value.to_string());
    Error::new(code::CONFIG, format!("network configuration: key {key:?} has value {value}: expected {expected}"))
}

/// Reads a key that is on or off.
pub(crate) fn boolean(config: &NetworkConfig, key: &str, default: bool) -> Result<bool, Error> {
    let value = config.value(key)?.unwrap_or(Value::Bool(default));
    value.as_bool().ok_or_else(|| refused(key, &value, "true or false"))
}

/// Refuses unknown keys in objects that only we read, because there they are typing errors.
pub(crate) fn refuse_other_keys(name: &str, object: &Map<String, Value>, known: &[&str]) -> Result<(), Error> {
    match object.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, value)) => {
            let expected = format!("{}only the keys {} in {name}", hint(key, known), known.join(", "));
            Err(refused(&format!("{name}.{key}"), value, &expected))
        }
        None => Ok(()),
    }
}

/// The known key that `key` was probably meant to be, as the beginning of a sentence; empty if none is near.
#[must_use]
pub fn hint(key: &str, known: &[&str]) -> String {
    // Of a short key, most of it must be right.
    let most = key.len().min(MAX_COMPARED) / 3 + 1;
    let distance = |known: &&&str| strsim::osa_distance(&key.to_ascii_lowercase(), &known.to_ascii_lowercase());
    let nearest = known.iter().filter(|_| key.len() <= MAX_COMPARED).min_by_key(distance);
    nearest.filter(|known| distance(known) <= most).map_or_else(String::new, |known| format!("{known:?}? There are "))
}

/// Reads a list of prefixes. Host bits are refused, because one of address and length is wrong then; so are numbers
/// with leading zeros, because some programs read them as octal.
pub(crate) fn prefixes(key: &str, value: &Value) -> Result<Vec<IpNet>, Error> {
    const EXPECTED: &str = "a list of at most 64 prefixes such as [\"10.42.0.0/16\"]";
    let list =
        value.as_array().filter(|list| list.len() <= MAX_PREFIXES).ok_or_else(|| refused(key, value, EXPECTED))?;
    let read = |item: &Value| {
        let prefix = item.as_str().and_then(prefix).ok_or_else(|| refused(key, item, EXPECTED))?;
        if prefix == prefix.trunc() {
            return Ok(prefix);
        }
        let network = prefix.trunc();
        Err(refused(
            key,
            item,
            &format!("no bits behind the prefix length: the network with that address is {network}"),
        ))
    };
    list.iter().map(read).collect()
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
/// Longer keys are compared with none.
const MAX_COMPARED: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_key_is_named_and_none_that_is_far() {
        let known = ["isolate", "ranges", "dns", "overlay"];
        for (key, nearest) in
            [("isolat", "isolate"), ("Isolate", "isolate"), ("range", "ranges"), ("dsn", "dns"), ("overaly", "overlay")]
        {
            assert_eq!(hint(key, &known), format!("{nearest:?}? There are "), "{key}");
        }
        for far in ["metrics", "x", "", &"isolate".repeat(100_000)] {
            assert_eq!(hint(far, &known), "", "{far:.20}");
        }
    }
}
