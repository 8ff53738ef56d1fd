//! Durations in a readable form, and the only place that reads the clock.

use nebula_cert::{UnixTime, rfc3339};

/// Seconds since the epoch.
#[allow(clippy::disallowed_methods, reason = "the rim: everything inside takes the time as an argument")]
#[must_use]
pub fn now() -> UnixTime {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |age| i64::try_from(age.as_secs()).unwrap_or(i64::MAX))
}

/// Parses a duration such as `24h`, `1h30m` or `90s` (units `d`, `h`, `m`, `s`) into seconds.
///
/// # Errors
/// Returns an error for anything else, for zero, and for more than 100 years.
pub fn parse_duration(text: &str) -> Result<i64, DurationError> {
    let refuse = || DurationError(text.chars().take(40).collect());
    let (mut total, mut rest) = (0_i64, text);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(refuse)?;
        let count: i64 = rest[..digits].parse().map_err(|_| refuse())?;
        let unit = match rest.as_bytes()[digits] {
            b'd' => 86_400,
            b'h' => 3_600,
            b'm' => 60,
            b's' => 1,
            _ => return Err(refuse()),
        };
        total = count.checked_mul(unit).and_then(|part| total.checked_add(part)).ok_or_else(refuse)?;
        rest = &rest[digits + 1..];
    }
    if (1..=MAX_DURATION_SECONDS).contains(&total) { Ok(total) } else { Err(refuse()) }
}

/// The text is not a duration.
#[derive(Debug, thiserror::Error)]
#[error("not a duration between 1s and 100 years: {0:?} (write for example 24h, 1h30m or 365d)")]
pub struct DurationError(String);

/// The two largest units of a number of seconds, such as `23h59m`; `expired` if nothing is left.
#[must_use]
pub fn time_left(seconds: i64) -> String {
    match seconds {
        ..=0 => "expired".to_owned(),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// Year of an instant, in UTC.
pub(crate) fn year(at: UnixTime) -> i64 {
    rfc3339(at).split('-').next().and_then(|year| year.parse().ok()).unwrap_or(1970)
}

const MAX_DURATION_SECONDS: i64 = 100 * 366 * 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_add_up_their_units() {
        assert_eq!(parse_duration("24h").unwrap(), 86_400);
        assert_eq!(parse_duration("1h30m").unwrap(), 5_400);
        assert_eq!(parse_duration("2d1s").unwrap(), 172_801);
    }

    #[test]
    fn nonsense_and_overflow_are_refused_not_wrapped() {
        for text in ["", "h", "10", "-1h", "0s", "1w", "1h 1m", "9223372036854775807d", "99999999999999999999s", "1é"]
        {
            assert!(parse_duration(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn the_year_turns_at_midnight_utc() {
        assert_eq!((year(946_684_799), year(946_684_800)), (1999, 2000));
    }

    #[test]
    fn time_left_shows_two_units() {
        assert_eq!(time_left(0), "expired");
        assert_eq!(time_left(59), "59s");
        assert_eq!(time_left(86_399), "23h59m");
        assert_eq!(time_left(90_000), "1d01h");
    }
}
