//! The body of a test request that measures a path, and of its reply.
//!
//! Go Nebula answers a test request with the same body, so a node that measures paths answers with another one: that
//! is how two of them know each other. Go Nebula also follows whoever sends it anything from another endpoint, so it
//! is never sent a probe by a direct path other than the present one.

/// A test request that measures a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathProbe {
    /// Tells probes of one tunnel apart.
    pub number: u32,
    /// The sender uses this path, so the receiver follows it there. All others leave the tunnel where it is.
    pub in_use: bool,
    /// Of so many counters of the tunnel before this one, the sender wants to know how many did not arrive; 0: it
    /// does not. Go Nebula and earlier versions do not read it.
    pub span: u16,
}

/// The reply to a [`PathProbe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathReply {
    /// Number of the probe.
    pub number: u32,
    /// Who answered.
    pub by: Answerer,
    /// How many counters of the probe's span did not arrive; `None` if the peer does not tell.
    pub missing: Option<u16>,
}

/// A peer, by how it answers a [`PathProbe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answerer {
    /// It lets the other side measure the direct paths between the two, and choose.
    Follows,
    /// It does that itself.
    Leads,
    /// It knows nothing of measurements, and returned the request.
    Echoes,
}

impl PathProbe {
    /// A probe by which a host measures a relay that it may choose. Its number has a mark, which keeps the reply
    /// apart from those to the probes of a tunnel's paths.
    pub(crate) fn of_relay(number: u32) -> Self {
        Self { number: number | RELAY_MARK, in_use: true, span: 0 }
    }

    /// A number without that mark.
    pub(crate) fn number(random: u32) -> u32 {
        random & !RELAY_MARK
    }

    /// The body of the request.
    #[must_use]
    pub fn request(self) -> Vec<u8> {
        body(REQUEST, u8::from(self.in_use), self.number, Some(self.span).filter(|span| *span > 0))
    }

    /// The body of the reply, which is no longer than the request. `leads`: see [`Answerer::Leads`]. `missing`: see
    /// [`PathReply::missing`].
    #[must_use]
    pub fn reply(self, leads: bool, missing: u16) -> Vec<u8> {
        body(REPLY, u8::from(leads), self.number, Some(missing).filter(|_| self.span > 0))
    }

    /// Reads the body of a request; `None` if it is something else.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        let (flag, number, span) = parts(body.strip_prefix(REQUEST)?)?;
        Some(Self { number, in_use: flag, span: span.unwrap_or(0) })
    }
}

impl PathReply {
    /// Reads the body of a reply; `None` if it answers something else.
    #[must_use]
    pub fn read(body: &[u8]) -> Option<Self> {
        if let Some(PathProbe { number, .. }) = PathProbe::read(body) {
            return Some(Self { number, by: Answerer::Echoes, missing: None });
        }
        let (leads, number, missing) = parts(body.strip_prefix(REPLY)?)?;
        Some(Self { number, by: if leads { Answerer::Leads } else { Answerer::Follows }, missing })
    }
}

fn body(mark: &[u8; 4], flag: u8, number: u32, more: Option<u16>) -> Vec<u8> {
    let mut body = mark.to_vec();
    body.push(flag);
    body.extend(number.to_be_bytes());
    body.extend(more.iter().flat_map(|more| more.to_be_bytes()));
    body
}

/// The flag, the number, and the number of counters if it is there. Later versions may append something.
fn parts(rest: &[u8]) -> Option<(bool, u32, Option<u16>)> {
    let (&flag, rest) = rest.split_first()?;
    let (number, rest) = rest.split_first_chunk()?;
    Some((flag & 1 == 1, u32::from_be_bytes(*number), rest.first_chunk().map(|more| u16::from_be_bytes(*more))))
}

pub(super) const RELAY_MARK: u32 = 1 << 31;
const REQUEST: &[u8; 4] = b"path";
const REPLY: &[u8; 4] = b"PATH";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_tells_who_answered() {
        let probe = PathProbe { number: 0xdead_beef, in_use: false, span: 0 };
        assert_eq!(PathProbe::read(&probe.request()), Some(probe));
        for (body, by) in [
            (probe.reply(false, 7), Answerer::Follows),
            (probe.reply(true, 7), Answerer::Leads),
            (probe.request(), Answerer::Echoes),
        ] {
            assert_eq!(PathReply::read(&body), Some(PathReply { number: probe.number, by, missing: None }));
        }
    }

    #[test]
    fn who_asks_is_told_how_much_did_not_arrive_and_an_answer_is_as_long_as_the_question() {
        let probe = PathProbe { number: 7, in_use: true, span: 300 };
        assert_eq!(PathProbe::read(&probe.request()), Some(probe));
        let reply = probe.reply(false, 150);
        assert_eq!(PathReply::read(&reply).and_then(|reply| reply.missing), Some(150));
        assert_eq!(reply.len(), probe.request().len());
        assert_eq!(PathReply::read(&probe.request()).and_then(|echo| echo.missing), None);
    }

    #[test]
    fn other_tests_are_no_measurements() {
        for body in [&b""[..], b"path", b"PATH\0\0\0\0", b"pmtu\0\0\0\0\0\0\0\0\0\0\0\0"] {
            assert_eq!((PathProbe::read(body), PathReply::read(body)), (None, None));
        }
    }
}
