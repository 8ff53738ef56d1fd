//! DNS messages: queries with one question, and their replies.

use std::net::IpAddr;

use hickory_resolver::proto::op::{Message, MessageType, OpCode, ResponseCode};
use hickory_resolver::proto::rr::rdata::{PTR, TXT};
use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};

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
pub(super) struct Answer {
    pub(super) code: ResponseCode,
    /// Records of the type asked for; all have the queried name.
    pub(super) data: Vec<RData>,
    /// Time to live of the records, in seconds.
    pub(super) ttl: u32,
    /// Some of the records are an answer, too, where all of them are too long.
    pub(super) is_choice: bool,
}

impl Answer {
    /// The name exists, but has no record of that type.
    pub(super) const NOTHING: Self = Self::error(ResponseCode::NoError);
    pub(super) const NO_SUCH_NAME: Self = Self::error(ResponseCode::NXDomain);
    pub(super) const REFUSED: Self = Self::error(ResponseCode::Refused);
    pub(super) const FAILED: Self = Self::error(ResponseCode::ServFail);

    const fn error(code: ResponseCode) -> Self {
        Self { code, data: Vec::new(), ttl: 0, is_choice: false }
    }

    /// [`Answer::NOTHING`] if there are none.
    pub(super) fn records(data: Vec<RData>, ttl: u32) -> Self {
        Self { code: ResponseCode::NoError, data, ttl, is_choice: false }
    }

    pub(super) fn addresses(addresses: impl IntoIterator<Item = IpAddr>, ttl: u32) -> Self {
        Self::records(addresses.into_iter().map(RData::from).collect(), ttl)
    }

    pub(super) fn text(text: &str, ttl: u32) -> Self {
        Self::records(vec![RData::TXT(TXT::from_bytes(text.as_bytes().chunks(MAX_STRING_BYTES).collect()))], ttl)
    }

    /// The name of an address. Any bytes may be in a certificate's name, but not in one of the DNS.
    pub(super) fn name(name: &str, ttl: u32) -> Self {
        let name = Name::from_labels(name.split('.').map(str::as_bytes));
        name.map_or(Self::NO_SUCH_NAME, |name| Self::records(vec![RData::PTR(PTR(name))], ttl))
    }
}

impl Query {
    /// `None` if the message is not a standard query with one question; such messages are not answered.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let message = Message::from_vec(message).ok()?;
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

    /// The address whose name is asked for (RFC 1035 section 3.5, RFC 3596 section 2.5).
    pub(super) fn reverse(&self) -> Option<IpAddr> {
        let mut name = Name::from_ascii(&self.name).ok()?;
        name.set_fqdn(true);
        let network = name.parse_arpa_name().ok()?;
        (network.prefix_len() == network.max_prefix_len()).then(|| network.addr())
    }

    /// The most bytes of a reply in a datagram: what the client says (EDNS), else what Go Nebula sends.
    pub(super) fn max_datagram(&self) -> usize {
        self.message.edns.as_ref().map_or(MAX_DATAGRAM_BYTES, |edns| usize::from(edns.max_payload()))
    }

    /// The response, not authoritative and without recursion, as Go Nebula's. One of more than `max_bytes` is truncated
    /// (RFC 2181 section 9), unless fewer records are an answer. `None` if it cannot be encoded.
    pub(super) fn reply(&self, answer: &Answer, max_bytes: usize) -> Option<Vec<u8>> {
        let name = self.message.queries.first()?.name();
        let record = |data: &RData| Record::from_rdata(name.clone(), answer.ttl, data.clone());
        let mut reply = self.response(answer.code);
        reply.answers = answer.data.iter().map(record).collect();
        loop {
            let bytes = reply.to_vec().ok()?;
            if bytes.len() <= max_bytes {
                return Some(bytes);
            }
            if !answer.is_choice || reply.answers.len() < 2 {
                return self.truncated(answer.code);
            }
            reply.answers.pop();
        }
    }

    /// The response without records, marked as truncated.
    pub(super) fn truncated(&self, code: ResponseCode) -> Option<Vec<u8>> {
        let mut reply = self.response(code);
        reply.metadata.truncation = true;
        reply.to_vec().ok()
    }

    fn response(&self, code: ResponseCode) -> Message {
        let asked = &self.message.metadata;
        let mut reply = Message::response(asked.id, OpCode::Query);
        reply.metadata.recursion_desired = asked.recursion_desired;
        reply.metadata.response_code = code;
        reply.queries.clone_from(&self.message.queries);
        reply
    }
}

/// Longest character-string (RFC 1035).
const MAX_STRING_BYTES: usize = 255;
/// Fits any path without fragments.
const MAX_DATAGRAM_BYTES: usize = 1232;

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

    pub(in crate::host::dns) fn query(name: &str, kind: RecordType) -> Query {
        Query::parse(&question(name, kind)).unwrap()
    }

    #[test]
    fn a_question_is_read_in_lower_case_and_what_follows_it_is_not() {
        let mut datagram = question("Host.Example", RecordType::A);
        // An OPT record, as resolvers add one.
        datagram[11] = 1;
        datagram.extend_from_slice(&[0, 0, 41, 16, 0, 0, 0, 0, 0, 0, 0]);
        let query = Query::parse(&datagram).unwrap();
        assert_eq!((query.name.as_str(), query.kind), ("host.example", RecordType::A));
        assert_eq!(query.max_datagram(), 4096);
        let reply = query.reply(&Answer::NOTHING, 512).unwrap();
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
                let query = Query::parse(&changed);
                if let Some(reply) = query.and_then(|query| query.reply(&Answer::NO_SUCH_NAME, 512)) {
                    assert!(reply.len() <= changed.len());
                }
            }
        }
    }

    #[test]
    fn answers_carry_the_question_and_the_records() {
        let datagram = question("h", RecordType::A);
        let query = Query::parse(&datagram).unwrap();
        let addresses = ["10.42.0.7", "10.42.0.8"].map(|text| text.parse().unwrap());
        let reply = query.reply(&Answer::addresses([addresses[0]], 3600), 512).unwrap();
        assert_eq!(reply[..12], [0x12, 0x34, 0x81, 0, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(reply[12..datagram.len()], datagram[12..]);
        assert!(reply.ends_with(&[0, 1, 0, 1, 0, 0, 0x0e, 0x10, 0, 4, 10, 42, 0, 7]));
        let both = Message::from_vec(&query.reply(&Answer::addresses(addresses, 5), 512).unwrap()).unwrap();
        assert_eq!(both.answers.iter().map(|record| record.ttl).collect::<Vec<_>>(), [5, 5]);
        assert_eq!(query.reply(&Answer::NO_SUCH_NAME, 512).unwrap()[3] & 15, 3);
        assert_eq!(query.reply(&Answer::NOTHING, 512).unwrap()[3..8], [0, 0, 1, 0, 0]);
    }

    #[test]
    fn a_long_text_is_cut_into_strings_and_a_reply_that_does_not_fit_is_truncated() {
        let query = query("10.42.0.7", RecordType::TXT);
        let answer = Answer::text(&"x".repeat(600), 60);
        let reply = Message::from_vec(&query.reply(&answer, 1232).unwrap()).unwrap();
        let RData::TXT(text) = &reply.answers[0].data else { panic!("{reply}") };
        assert_eq!(text.txt_data.iter().map(|part| part.len()).collect::<Vec<_>>(), [255, 255, 90]);
        let cut = Message::from_vec(&query.reply(&answer, 512).unwrap()).unwrap();
        assert!(cut.metadata.truncation && cut.answers.is_empty(), "{cut}");
    }

    #[test]
    fn of_a_choice_as_many_records_are_given_as_fit() {
        let datagram = question("web.groups.n", RecordType::A);
        let query = Query::parse(&datagram).unwrap();
        let addresses = (1..=8).map(|last| IpAddr::from([10, 42, 0, last]));
        let mut answer = Answer::addresses(addresses, 10);
        let reply = |answer: &Answer, max| Message::from_vec(&query.reply(answer, max).unwrap()).unwrap();
        let most = datagram.len() + 3 * 16;
        assert!(reply(&answer, most).metadata.truncation, "all of them count");
        answer.is_choice = true;
        let some = reply(&answer, most + 15);
        assert!(!some.metadata.truncation && some.answers.len() == 3, "{some}");
        let none = reply(&answer, datagram.len() + 15);
        assert!(none.metadata.truncation && none.answers.is_empty(), "{none}");
    }

    #[test]
    fn an_address_is_read_from_its_reverse_name_only_if_it_is_whole() {
        let reverse = |name: &str| query(name, RecordType::PTR).reverse();
        assert_eq!(reverse("7.0.42.10.in-addr.arpa"), Some("10.42.0.7".parse().unwrap()));
        let v6 = format!("7.{}2.4.d.f.ip6.arpa", "0.".repeat(27));
        assert_eq!(reverse(&v6), Some("fd42::7".parse().unwrap()));
        for wrong in ["0.42.10.in-addr.arpa", "256.0.42.10.in-addr.arpa", "host.example", "", "arpa"] {
            assert_eq!(reverse(wrong), None, "{wrong}");
        }
        let Answer { data, .. } = Answer::name("db.nebula.internal", 60);
        assert_eq!(data[0].to_string(), "db.nebula.internal.");
        assert_eq!(Answer::name(&"x".repeat(64), 60), Answer::NO_SUCH_NAME);
    }
}
