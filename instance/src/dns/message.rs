//! DNS datagrams (RFC 1035), as far as a server of addresses needs them.

use std::net::IpAddr;

/// What is asked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Query<'a> {
    id: u16,
    wants_recursion: bool,
    /// Lower case, labels joined by dots, without the last one.
    pub(super) name: String,
    pub(super) kind: u16,
    /// The question as it came.
    question: &'a [u8],
}

pub(super) const A: u16 = 1;
pub(super) const AAAA: u16 = 28;

/// What is answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Nothing of that family: no error, no record.
    Nothing,
    Address(IpAddr),
    NoSuchName,
}

impl<'a> Query<'a> {
    /// `None` for what is no standard query of one question; nobody is answered then.
    pub(super) fn parse(datagram: &'a [u8]) -> Option<Self> {
        let header = datagram.first_chunk::<HEADER>()?;
        let word = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let flags = word(2);
        if flags & (RESPONSE | OPCODE) != 0 || word(4) != 1 {
            return None;
        }
        let mut name = String::new();
        let mut rest = &datagram[HEADER..];
        loop {
            let (length, tail) = rest.split_first()?;
            // Two high bits are a pointer, which a question does not need.
            let (label, tail) = tail.split_at_checked(usize::from(*length)).filter(|_| *length < 64)?;
            rest = tail;
            if label.is_empty() {
                break;
            }
            // A dot inside a label would look like two labels.
            if label.contains(&b'.') || name.len() + label.len() > LONGEST_NAME {
                return None;
            }
            if !name.is_empty() {
                name.push('.');
            }
            name.push_str(&std::str::from_utf8(label).ok()?.to_ascii_lowercase());
        }
        let (ends, after) = rest.split_first_chunk::<4>()?;
        let question = &datagram[HEADER..datagram.len() - after.len()];
        let kind = u16::from_be_bytes([ends[0], ends[1]]);
        Some(Self { id: word(0), wants_recursion: flags & RECURSION_DESIRED != 0, name, kind, question })
    }

    /// The datagram that answers; not authoritative and without recursion, as Go Nebula's.
    pub(super) fn reply(&self, answer: &Answer) -> Vec<u8> {
        let code = if *answer == Answer::NoSuchName { NXDOMAIN } else { 0 };
        let recursion = if self.wants_recursion { RECURSION_DESIRED } else { 0 };
        let records = u16::from(matches!(answer, Answer::Address(_)));
        let mut reply = Vec::with_capacity(HEADER + self.question.len() + 28);
        for word in [self.id, RESPONSE | recursion | code, 1, records, 0, 0] {
            reply.extend_from_slice(&word.to_be_bytes());
        }
        reply.extend_from_slice(self.question);
        if let Answer::Address(address) = answer {
            let (kind, octets) = match address {
                IpAddr::V4(v4) => (A, v4.octets().to_vec()),
                IpAddr::V6(v6) => (AAAA, v6.octets().to_vec()),
            };
            reply.extend_from_slice(&QUESTION_NAME.to_be_bytes());
            for word in [kind, INTERNET] {
                reply.extend_from_slice(&word.to_be_bytes());
            }
            reply.extend_from_slice(&TTL.to_be_bytes());
            reply.extend_from_slice(&u16::try_from(octets.len()).unwrap_or(0).to_be_bytes());
            reply.extend_from_slice(&octets);
        }
        reply
    }
}

const HEADER: usize = 12;
const LONGEST_NAME: usize = 253;
const RESPONSE: u16 = 0x8000;
const OPCODE: u16 = 0x7800;
const RECURSION_DESIRED: u16 = 0x0100;
const NXDOMAIN: u16 = 3;
const INTERNET: u16 = 1;
/// A pointer to the question's name.
const QUESTION_NAME: u16 = 0xc00c;
/// Seconds. Addresses belong to certificates, so they do not change often.
const TTL: u32 = 3600;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::dns) fn question(name: &str, kind: u16) -> Vec<u8> {
        let mut datagram = vec![0x12, 0x34, 0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.').filter(|label| !label.is_empty()) {
            datagram.push(u8::try_from(label.len()).unwrap());
            datagram.extend_from_slice(label.as_bytes());
        }
        datagram.push(0);
        datagram.extend_from_slice(&kind.to_be_bytes());
        datagram.extend_from_slice(&1_u16.to_be_bytes());
        datagram
    }

    #[test]
    fn a_question_is_read_in_lower_case_and_what_follows_it_is_not() {
        let mut datagram = question("Host.Example", A);
        // An OPT record, as resolvers add.
        datagram[11] = 1;
        datagram.extend_from_slice(&[0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let query = Query::parse(&datagram).unwrap();
        assert_eq!((query.name.as_str(), query.kind, query.wants_recursion), ("host.example", A, true));
    }

    #[test]
    fn no_prefix_and_no_change_of_a_byte_panics() {
        let datagram = question("host.example", AAAA);
        for end in 0..datagram.len() {
            assert_eq!(Query::parse(&datagram[..end]), None, "{end} bytes");
        }
        for at in 0..datagram.len() {
            for byte in [0, 1, 63, 64, 0xc0, 0xff] {
                let mut changed = datagram.clone();
                changed[at] = byte;
                if let Some(query) = Query::parse(&changed) {
                    assert!(query.reply(&Answer::Nothing).len() <= changed.len());
                }
            }
        }
    }

    #[test]
    fn answers_carry_the_question_and_one_record() {
        let datagram = question("h", A);
        let query = Query::parse(&datagram).unwrap();
        let reply = query.reply(&Answer::Address("10.42.0.7".parse().unwrap()));
        assert_eq!(reply[..12], [0x12, 0x34, 0x81, 0, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(reply[12..datagram.len()], datagram[12..]);
        assert_eq!(reply[datagram.len()..], [0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0x0e, 0x10, 0, 4, 10, 42, 0, 7]);
        assert_eq!(query.reply(&Answer::NoSuchName)[3] & 15, 3);
        assert_eq!(query.reply(&Answer::Nothing)[3..8], [0, 0, 1, 0, 0]);
    }
}
