//! RFC 3339 timestamps for JSON and error messages.

use crate::UnixTime;

/// Formats a time like `2026-11-20T13:18:40Z`. It accepts any `i64`; years after 9999 have more digits, and years
/// before 0 a minus sign.
#[must_use]
pub fn rfc3339(time: UnixTime) -> String {
    let (year, month, day) = civil_date(time.div_euclid(86_400));
    let second = time.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Converts a number of days since 1970-01-01 to year, month and day in the proleptic Gregorian calendar. Supports the
/// range of days whose seconds fit into [`UnixTime`].
#[must_use]
pub fn civil_date(days: i64) -> (i64, i64, i64) {
    // Days are counted from 0000-03-01 in eras of 400 years, so that the leap day is the last day of a year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_times_print_as_the_calendar_says() {
        for (time, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_795_180_720, "2026-11-20T13:18:40Z"),
            (4_107_542_399, "2100-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(time), text);
        }
    }

    #[test]
    fn the_ends_of_the_number_range_do_not_panic() {
        assert!(rfc3339(i64::MAX).starts_with("292277026596-12-04"));
        assert!(rfc3339(i64::MIN).starts_with('-'));
    }
}
