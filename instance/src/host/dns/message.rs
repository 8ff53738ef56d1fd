//! DNS messages as this server uses them: one question, at most one record.

use std::net::IpAddr;

use hickory_resolver::proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::TXT;
use hickory_resolver::proto::rr::{RData, Record, RecordType};

/// A query.
#[derive(Debug)]
pub(super) struct Query {
    message: Message,
    /// Lower case, labels joined by dots, without the trailing dot.
    pub(super) name: String,
    pub(super) kind: RecordType,
}

/// The answer to a query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// No record of that type, and no error.
    Nothing,
    Address(IpAddr),
    Text(String),
    NoSuchName,
}

impl Query {
    /// `None` if the datagram is not a standard query with one question; such datagrams are not answered.
    pub(super) fn parse(datagram: &[u8]) -> Option<Self> {
        let message = Message::from_vec(datagram).ok()?;
        let is_query = message.metadata.message_type == MessageType::Query && message.metadata.op_code == OpCode::Query;
        let [question] = message.queries.as_slice() else { return None };
        let mut labels = Vec::new();
        for label in question.name().iter() {
            // A dot inside a label would look like a separator of two labels.
            let label = std::str::from_utf8(label).ok().filter(|label| !label.contains('.'))?;
            labels.push(label.to_ascii_lowercase());
        }
        let (name, kind) = (labels.join("."), question.query_type());
        is_query.then_some(Self { message, name, kind })
    }

    /// The response datagram, not authoritative and without recursion, as Go Nebula's. `None` if it cannot be encoded.
    pub(super) fn reply(&self, answer: &Answer) -> Option<Vec<u8>> {
        let asked = &self.message.metadata;
        let mut reply = Message::response(asked.id, OpCode::Query);
        reply.metadata.recursion_desired = asked.recursion_desired;
        reply.queries.clone_from(&self.message.queries);
        let data = match answer {
            Answer::Nothing => None,
            Answer::NoSuchName => {
                reply.metadata.response_code = ResponseCode::NXDomain;
                None
            }
            Answer::Address(IpAddr::V4(v4)) => Some(RData::A((*v4).into())),
            Answer::Address(IpAddr::V6(v6)) => Some(RData::AAAA((*v6).into())),
            Answer::Text(text) => Some(RData::TXT(TXT::from_bytes(text.as_bytes().chunks(MAX_STRING_BYTES).collect()))),
        };
        let name = reply.queries.first().map(|question| question.name().clone());
        if let (Some(name), Some(data)) = (name, data) {
            reply.answers.push(Record::from_rdata(name, TTL_SECONDS, data));
        }
        reply.to_vec().ok()
    }
}

/// Longest character-string (RFC 1035).
const MAX_STRING_BYTES: usize = 255;
/// In seconds. Addresses belong to certificates, so they rarely change.
const TTL_SECONDS: u32 = 3600;

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::host::dns) fn question(name: &str, kind: RecordType) -> Vec<u8> {
        let mut datagram = vec![0x12, 0x34, 0x01, 0x00, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.').filter(|label| !label.is_empty()) {
            datagram.push(u8::try_from(label.len()).unwrap());
            datagram.extend_from_slice(label.as_bytes());
        }
        datagram.push(0);
        datagram.extend_from_slice(&u16::from(kind).to_be_bytes());
        datagram.extend_from_slice(&1_u16.to_be_bytes());
        datagram
    }

    #[test]
    fn a_question_is_read_in_lower_case_and_what_follows_it_is_not() {
        let mut datagram = question("Host.Example", RecordType::A);
        // An OPT record, as resolvers add one.
        datagram[11] = 1;
        datagram.extend_from_slice(&[0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let query = Query::parse(&datagram).unwrap();
        assert_eq!((query.name.as_str(), query.kind), ("host.example", RecordType::A));
        let reply = query.reply(&Answer::Nothing).unwrap();
        assert_eq!(reply[2..12], [0x81, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn no_prefix_and_no_change_of_a_byte_panics() {
        let datagram = question("host.example", RecordType::AAAA);
        for end in 0..datagram.len() {
            assert!(Query::parse(&datagram[..end]).is_none(), "{end} bytes");
        }
        for at in 0..datagram.len() {
            for byte in [0, 1, 63, 64, 0xc0, 0xff] {
                let mut changed = datagram.clone();
                changed[at] = byte;
                if let Some(reply) = Query::parse(&changed).and_then(|query| query.reply(&Answer::Nothing)) {
                    assert!(reply.len() <= changed.len());
                }
            }
        }
    }

    #[test]
    fn answers_carry_the_question_and_one_record() {
        let datagram = question("h", RecordType::A);
        let query = Query::parse(&datagram).unwrap();
        let reply = query.reply(&Answer::Address("10.42.0.7".parse().unwrap())).unwrap();
        assert_eq!(reply[..12], [0x12, 0x34, 0x81, 0, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(reply[12..datagram.len()], datagram[12..]);
        assert!(reply.ends_with(&[0, 1, 0, 1, 0, 0, 0x0e, 0x10, 0, 4, 10, 42, 0, 7]));
        assert_eq!(query.reply(&Answer::NoSuchName).unwrap()[3] & 15, 3);
        assert_eq!(query.reply(&Answer::Nothing).unwrap()[3..8], [0, 0, 1, 0, 0]);
    }

    #[test]
    fn a_long_text_is_cut_into_strings() {
        let query = Query::parse(&question("10.42.0.7", RecordType::TXT)).unwrap();
        let reply = Message::from_vec(&query.reply(&Answer::Text("x".repeat(600))).unwrap()).unwrap();
        let RData::TXT(text) = &reply.answers[0].data else { panic!("{reply}") };
        assert_eq!(text.txt_data.iter().map(|part| part.len()).collect::<Vec<_>>(), [255, 255, 90]);
    }
}
