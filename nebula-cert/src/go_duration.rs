//! Durations as Go writes them: `8760h`, `1h30m`, `1.5s`.

use std::str::FromStr;
use std::time::Duration;

/// A signed length of time in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(pub i64);

impl GoDuration {
    /// Adds the duration to `time` and rounds down to seconds.
    #[must_use]
    pub fn after(self, time: Duration) -> i64 {
        let nanoseconds = i128::try_from(time.as_nanos()).unwrap_or(i128::MAX).saturating_add(self.0.into());
        i64::try_from(nanoseconds.div_euclid(1_000_000_000)).unwrap_or(i64::MAX)
    }
}

impl FromStr for GoDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid = |what| format!("invalid duration {text:?}: {what}");
        let (sign, mut rest) = match text.strip_prefix('-') {
            Some(rest) => (-1, rest),
            None => (1, text.strip_prefix('+').unwrap_or(text)),
        };
        if rest == "0" {
            return Ok(Self(0));
        }
        if rest.is_empty() {
            return Err(invalid("a number with a unit such as 24h is expected"));
        }
        let mut total = 0_i128;
        while !rest.is_empty() {
            let (whole, after) = split_while(rest, |c| c.is_ascii_digit());
            let (fraction, after) = match after.strip_prefix('.') {
                Some(after) => split_while(after, |c| c.is_ascii_digit()),
                None => ("", after),
            };
            if whole.is_empty() && fraction.is_empty() {
                return Err(invalid("a number is expected"));
            }
            let (unit, after) = split_while(after, |c| !c.is_ascii_digit() && c != '.');
            let unit = nanoseconds(unit).ok_or_else(|| invalid("each number needs a unit: h, m, s, ms, us or ns"))?;
            let too_long = || invalid("longer than 290 years");
            let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_long())? };
            total = whole.checked_mul(unit).and_then(|part| total.checked_add(part)).ok_or_else(too_long)?;
            total += fraction_of(fraction, unit);
            rest = after;
        }
        i64::try_from(sign * total).map(Self).map_err(|_| invalid("longer than 290 years"))
    }
}

fn fraction_of(digits: &str, unit: i128) -> i128 {
    // Eighteen digits are finer than a nanosecond in every unit.
    let digits: Vec<_> = digits.bytes().take(18).collect();
    digits.iter().rev().fold(0, |value, digit| (value + i128::from(digit - b'0') * unit * FRACTION_SCALE) / 10)
        / FRACTION_SCALE
}

fn nanoseconds(unit: &str) -> Option<i128> {
    Some(match unit {
        "ns" => 1,
        // Micro sign and Greek mu.
        "us" | "\u{b5}s" | "\u{3bc}s" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        "m" => 60_000_000_000,
        "h" => 3_600_000_000_000,
        _ => return None,
    })
}

fn split_while(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

const FRACTION_SCALE: i128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_read_as_go_reads_them() {
        for (text, nanoseconds) in [
            ("0", 0),
            ("8760h", 8_760 * 3_600_000_000_000),
            ("876000h", 876_000 * 3_600_000_000_000),
            ("1h30m", 5_400_000_000_000),
            ("1.5s", 1_500_000_000),
            (".5m", 30_000_000_000),
            ("-1h", -3_600_000_000_000),
            ("+3ms2us1ns", 3_002_001),
            ("1\u{b5}s", 1_000),
        ] {
            assert_eq!(text.parse(), Ok(GoDuration(nanoseconds)), "{text}");
        }
    }

    #[test]
    fn what_go_refuses_is_refused() {
        for text in ["", "-", "1", "1d", "h", "1h ", " 1h", ".s", "1..5s", "3000000h", "1e3s", "99999999999999999999h"]
        {
            assert!(text.parse::<GoDuration>().is_err(), "{text}");
        }
    }
}
