//! `lighthouse.calculated_remotes`.

use nebula_core::config::{CalculatedRemotes, Calculation};

use super::allow_list::{go_type, map, prefix, refuse, shown};
use super::section::Section;
use super::{Invalid, Refused, Value};
use crate::go::netip;

const PATH: &str = "lighthouse.calculated_remotes";

pub(super) fn read(section: &Section<'_>) -> Result<CalculatedRemotes, Refused> {
    let mut ranges = Vec::new();
    for (text, entries) in map(section, PATH)?.into_iter().flatten() {
        let range = prefix(PATH, text)?;
        let at = |cause: String| refuse(format!("config '{PATH}.{text}': {cause}"));
        let Value::List(entries) = entries else {
            return Err(at(format!("calculated_remotes entry has invalid type: {}", go_type(entries))));
        };
        let calculations = entries.iter().map(calculation).collect::<Result<Vec<_>, _>>();
        ranges.push((range, calculations.map_err(|cause| at(format!("calculated_remotes entry: {cause}")))?));
    }
    CalculatedRemotes::new(ranges)
        .map_err(|error| refuse(format!("config '{PATH}.{}': calculated_remotes entry: {error}", error.range)))
}

fn calculation(entry: &Value) -> Result<Calculation, Invalid> {
    let Value::Map(entry) = entry else { return Err(format!("invalid type: {}", go_type(entry)).into()) };
    let mask = match entry.get("mask") {
        None | Some(Value::Null) => return Err("missing mask: it must be a prefix such as 192.168.0.0/16".into()),
        Some(Value::String(text)) => netip::prefix(text).ok_or_else(|| format!("invalid mask: {text}"))?,
        Some(other) => return Err(format!("invalid mask (type {}): {}", go_type(other), shown(other)).into()),
    };
    let port = match entry.get("port") {
        None | Some(Value::Null) => return Err("missing port: it must be a UDP port".into()),
        Some(value @ (Value::Int(_) | Value::String(_))) => {
            value.int().ok_or_else(|| format!("invalid port: {}", shown(value)))?
        }
        Some(other) => return Err(format!("invalid port (type {}): {}", go_type(other), shown(other)).into()),
    };
    let port = u16::try_from(port).map_err(|_| format!("invalid port: {port}"))?;
    Ok(Calculation { mask, port })
}
