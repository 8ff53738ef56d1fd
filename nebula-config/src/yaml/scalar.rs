//! What a scalar stands for, by go-yaml's `resolve`: a mixture of YAML 1.1 and 1.2.

use std::borrow::Cow;

use base64::Engine as _;

use crate::Value;

pub(super) const STR: &str = "!!str";
/// The plain text that has this tag.
pub(crate) const MERGE_KEY: &str = "<<";
pub(super) const MERGE: &str = "!!merge";

/// The tags that the text must fit.
const RESOLVED: [&str; 5] = ["!!bool", "!!int", "!!float", "!!null", "!!timestamp"];

/// A scalar's value, and its tag in short form.
#[derive(Debug, PartialEq)]
pub(super) struct Scalar<'a> {
    pub(super) value: Value,
    pub(super) tag: Cow<'a, str>,
}

impl<'a> Scalar<'a> {
    /// # Errors
    /// Returns an error if the text cannot have the type that its tag names.
    pub(super) fn resolve(text: &str, is_plain: bool, tag: Option<&'a str>) -> Result<Self, String> {
        let wanted = match tag {
            Some(STR) => return Ok(Self::text(text, STR)),
            None if !is_plain => return Ok(Self::text(text, STR)),
            None if text == MERGE_KEY => return Ok(Self::text(text, MERGE)),
            Some("!!binary") => {
                let clean: String = text.chars().filter(|c| !matches!(c, '\n' | '\r')).collect();
                let bytes = base64::engine::general_purpose::STANDARD
                    .decode(clean)
                    .map_err(|_| "!!binary value contains invalid base64 data".to_owned())?;
                return Ok(Self::text(&String::from_utf8_lossy(&bytes), "!!binary"));
            }
            // Any text may have a tag that says nothing to go-yaml.
            Some(other) if !RESOLVED.contains(&other) => {
                return Ok(Self { value: Value::String(text.to_owned()), tag: Cow::Borrowed(other) });
            }
            other => other,
        };
        let (value, found) = untagged(text, wanted);
        match (wanted, value) {
            (None, value) => Ok(Self { value, tag: Cow::Borrowed(found) }),
            (Some(wanted), value) if wanted == found => Ok(Self { value, tag: Cow::Borrowed(found) }),
            (Some("!!float"), Value::Int(value)) => {
                Ok(Self { value: Value::Float(value as f64), tag: Cow::Borrowed("!!float") })
            }
            (Some(wanted), _) => Err(format!("cannot decode {found} `{text}` as a {wanted}")),
        }
    }

    /// The tag alone, as it counts for the question whether a key is text.
    pub(super) fn tag(text: &str, is_plain: bool, tag: Option<&'a str>) -> Cow<'a, str> {
        match tag {
            Some(tag) => Cow::Borrowed(tag),
            None if !is_plain => Cow::Borrowed(STR),
            None if text == MERGE_KEY => Cow::Borrowed(MERGE),
            None => Cow::Borrowed(untagged(text, None).1),
        }
    }

    fn text(text: &str, tag: &'static str) -> Self {
        Self { value: Value::String(text.to_owned()), tag: Cow::Borrowed(tag) }
    }
}

fn untagged(text: &str, wanted: Option<&str>) -> (Value, &'static str) {
    let word = match text {
        "" | "~" | "null" | "Null" | "NULL" => Some((Value::Null, "!!null")),
        "true" | "True" | "TRUE" => Some((Value::Bool(true), "!!bool")),
        "false" | "False" | "FALSE" => Some((Value::Bool(false), "!!bool")),
        ".nan" | ".NaN" | ".NAN" => Some((Value::Float(f64::NAN), "!!float")),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Some((Value::Float(f64::INFINITY), "!!float")),
        "-.inf" | "-.Inf" | "-.INF" => Some((Value::Float(f64::NEG_INFINITY), "!!float")),
        _ => None,
    };
    let number = || match text.as_bytes().first()? {
        b'.' => float(text),
        b'0'..=b'9' | b'+' | b'-' => {
            let is_time = matches!(wanted, None | Some("!!timestamp")) && is_timestamp(text);
            if is_time { Some((Value::String(text.to_owned()), "!!timestamp")) } else { number(&text.replace('_', "")) }
        }
        _ => None,
    };
    word.or_else(number).unwrap_or_else(|| (Value::String(text.to_owned()), STR))
}

/// Reads a number without `_`.
fn number(text: &str) -> Option<(Value, &'static str)> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    let lower = digits.to_ascii_lowercase();
    let (radix, rest) = match lower.as_bytes() {
        [b'0', b'x', ..] => (16, &digits[2..]),
        [b'0', b'o', ..] => (8, &digits[2..]),
        [b'0', b'b', ..] => (2, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    if !rest.is_empty() && rest.chars().all(|c| c.is_digit(radix)) {
        if let Ok(value) = i64::from_str_radix(&format!("{sign}{rest}"), radix) {
            return Some((Value::Int(value), "!!int"));
        }
        // Go's ParseUint takes no sign.
        if !text.starts_with(['+', '-'])
            && let Ok(value) = u64::from_str_radix(rest, radix)
        {
            return Some((Value::Uint(value), "!!int"));
        }
    }
    float(text)
}

/// Reads digits with a point or an exponent or both. A number that is too large for 64 bits is none, as in Go.
fn float(text: &str) -> Option<(Value, &'static str)> {
    let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['-', '+']).unwrap_or(exponent))),
        None => (unsigned, None),
    };
    let are_digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let is_float = are_digits(whole)
        && are_digits(fraction)
        && !(whole.is_empty() && fraction.is_empty())
        && exponent.is_none_or(|exponent| !exponent.is_empty() && are_digits(exponent));
    let value: f64 = if is_float { text.parse().ok()? } else { return None };
    value.is_finite().then_some((Value::Float(value), "!!float"))
}

/// Whether go-yaml takes the text for a date, or a date with a time.
fn is_timestamp(text: &str) -> bool {
    let is_number =
        |text: &str, most: usize| (1..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    let within = |text: &str, range: std::ops::RangeInclusive<u32>| {
        is_number(text, 2) && text.parse().is_ok_and(|number| range.contains(&number))
    };
    let end = text.find(['T', 't', ' ']).unwrap_or(text.len());
    let (date, time) = text.split_at(end);
    let mut parts = date.splitn(3, '-');
    let (Some(year), Some(month), Some(day)) = (parts.next(), parts.next(), parts.next()) else { return false };
    if year.len() != 4 || !is_number(year, 4) || !within(month, 1..=12) || !within(day, 1..=days(year, month)) {
        return false;
    }
    let Some(separator) = time.chars().next() else { return true };
    let time = &time[1..];
    // A zone belongs to the form with a `T`, and must be there.
    let (clock, zone) = match time.find(['Z', '+', '-']) {
        Some(at) if separator != ' ' => time.split_at(at),
        None if separator == ' ' => (time, "Z"),
        _ => return false,
    };
    let mut parts = clock.splitn(3, ':');
    let (Some(hour), Some(minute), Some(seconds)) = (parts.next(), parts.next(), parts.next()) else { return false };
    let (second, fraction) = seconds.split_once('.').unwrap_or((seconds, "0"));
    let is_zone = match zone.strip_prefix(['+', '-']) {
        Some(offset) => offset
            .split_once(':')
            .is_some_and(|(h, m)| h.len() == 2 && m.len() == 2 && within(h, 0..=24) && within(m, 0..=60)),
        None => zone == "Z",
    };
    within(hour, 0..=23)
        && within(minute, 0..=59)
        && within(second, 0..=59)
        && is_number(fraction, usize::MAX)
        && is_zone
}

fn days(year: &str, month: &str) -> u32 {
    let year: u32 = year.parse().unwrap_or(0);
    match month.trim_start_matches('0') {
        "4" | "6" | "9" | "11" => 30,
        "2" if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
        "2" => 28,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> (Value, String) {
        let scalar = Scalar::resolve(text, true, None).unwrap();
        (scalar.value, scalar.tag.into_owned())
    }

    #[test]
    fn numbers_are_those_of_go() {
        let integers: [(&str, i64); 14] = [
            ("0", 0),
            ("0x1F", 31),
            ("0X1f", 31),
            ("0o17", 15),
            ("017", 15),
            ("0b11", 3),
            ("0B1", 1),
            ("1_000", 1000),
            ("1_", 1),
            ("1__0", 10),
            ("+1", 1),
            ("-0x10", -16),
            ("-0b1", -1),
            ("-9223372036854775808", i64::MIN),
        ];
        for (text, value) in integers {
            assert_eq!(plain(text), (Value::Int(value), "!!int".to_owned()), "{text}");
        }
        assert_eq!(plain("18446744073709551615").0, Value::Uint(u64::MAX));
        for (text, value) in
            [("1.", 1.0), (".5", 0.5), ("1e3", 1000.0), ("-1.5E-1", -0.15), ("09", 9.0), ("1_0.5", 10.5)]
        {
            assert_eq!(plain(text), (Value::Float(value), "!!float".to_owned()), "{text}");
        }
        for text in
            ["0x", "0b2", "0o8", "1e400", "1:30", "-", "+", ".", "1e", "--1", "0x1.8", "_1", "yes", "on", "tRUE"]
        {
            assert_eq!(plain(text).1, STR, "{text}");
        }
    }

    #[test]
    fn dates_are_neither_numbers_nor_text() {
        for text in ["2001-01-01", "2001-1-2", "2000-02-29", "2001-12-14t21:59:43.10-05:00", "2001-12-14 21:59:43.1"] {
            assert_eq!(plain(text).1, "!!timestamp", "{text}");
        }
        for text in ["2001-02-29", "2001-13-01", "2001-01", "2001-12-14T21:59:43", "2001-12-14 21:59:43Z", "2001-1-1x"]
        {
            assert_eq!(plain(text).1, STR, "{text}");
        }
    }

    #[test]
    fn a_tag_that_the_text_cannot_have_is_refused() {
        let tagged = |text, tag| Scalar::resolve(text, true, Some(tag)).map(|scalar| scalar.value);
        assert_eq!(tagged("1", "!!str"), Ok(Value::String("1".to_owned())));
        assert_eq!(tagged("1", "!!float"), Ok(Value::Float(1.0)));
        assert_eq!(tagged("aGk=", "!!binary"), Ok(Value::String("hi".to_owned())));
        assert_eq!(tagged("1", "!mine"), Ok(Value::String("1".to_owned())));
        for (text, tag) in [("x", "!!int"), ("1.5", "!!int"), ("x", "!!null"), ("yes", "!!bool"), ("x", "!!binary")] {
            assert!(tagged(text, tag).is_err(), "{tag} {text}");
        }
    }
}
