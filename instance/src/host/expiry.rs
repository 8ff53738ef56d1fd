//! Warns before this host's certificate expires.

use nebula_cert::UnixTime;

/// Logs a warning if a certificate of this validity expires soon.
pub(crate) fn report((not_before, not_after): (UnixTime, UnixTime), now: UnixTime) {
    let left = not_after - now;
    match look(not_before, not_after, now) {
        Look::Fine => {}
        Look::Soon => tracing::warn!(
            secondsLeft = left,
            "The certificate of this host expires soon: renew it, replace pki.cert and send SIGHUP"
        ),
        Look::Expired => tracing::error!(
            secondsLeft = left,
            "The certificate of this host has expired, peers refuse it: renew it, replace pki.cert and send SIGHUP"
        ),
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Look {
    Fine,
    Soon,
    Expired,
}

/// A short-lived certificate is renewed often, so its last quarter is soon enough.
fn look(not_before: UnixTime, not_after: UnixTime, now: UnixTime) -> Look {
    let notice = ((not_after - not_before) / 4).min(MAX_NOTICE_SECONDS);
    match not_after - now {
        left if left <= 0 => Look::Expired,
        left if left < notice => Look::Soon,
        _ => Look::Fine,
    }
}

const MAX_NOTICE_SECONDS: i64 = 30 * 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_month_or_the_last_quarter_is_soon() {
        const DAY: i64 = 86_400;
        for (lifetime, left, expected) in [
            (365 * DAY, 31 * DAY, Look::Fine),
            (365 * DAY, 29 * DAY, Look::Soon),
            (DAY, DAY / 3, Look::Fine),
            (DAY, DAY / 5, Look::Soon),
            (DAY, 0, Look::Expired),
            (365 * DAY, -1, Look::Expired),
        ] {
            assert_eq!(look(0, lifetime, lifetime - left), expected, "{left} of {lifetime}");
        }
    }
}
