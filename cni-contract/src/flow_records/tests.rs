//! Tests of records as a document: what is read of other releases, what is bounded, and what filters let through.

use std::io;

use proptest::prelude::*;

use super::client::{MAX_GROUPS, MAX_TEXT};
use super::*;

/// A record with everything in it, as this release writes it.
const WRITTEN: &str = r#"{"number":1700000000000007,"id":1700000000000001,"event":"ended","end":"idle","verdict":"audit","reason":"network_policy","direction":"outbound","protocol":6,"source":{"address":"10.42.0.1","port":5000,"name":"web-1.shop.pod","groups":["web"],"fingerprint":"00ff","pod":"shop/web-1"},"destination":{"address":"10.42.0.2","port":8080,"name":"db-1.pay.pod"},"original":{"source":"10.42.0.1:5000","destination":"10.96.0.7:80"},"forward":{"packets":3,"bytes":300},"reply":{"packets":2,"bytes":20000},"rule":4,"policy":{"reason":"rule","tier":"Admin","policy":"p","rule":2,"rule_name":"r"},"path":"relay","relay":"10.42.0.9","post_quantum":true,"started_ms":1000,"last_ms":3500}"#;

fn answer(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{body}").into_bytes()
}

#[test]
fn a_record_is_read_back_as_it_was_written_and_keeps_its_keys() {
    let record: FlowRecord = serde_json::from_str(WRITTEN).unwrap();
    assert_eq!(serde_json::to_string(&record).unwrap(), WRITTEN);
    assert_eq!((record.duration_ms(), record.destination.port), (2500, Some(8080)));
    let read =
        read_answer(&answer(&format!(r#"{{"records":[{WRITTEN}],"next":1700000000000007,"lost":3,"is_on":true}}"#)));
    let expected =
        FlowRecords { records: vec![record], next: 1_700_000_000_000_007, lost: 3, is_cut: false, is_on: true };
    assert_eq!(read.unwrap(), expected);
}

#[test]
fn what_another_release_adds_is_skipped_and_what_it_lacks_is_empty() {
    let read = read_answer(&answer(r#"{"records":[{"id":7,"later":1,"source":{"x":2}}],"later":{}}"#)).unwrap();
    assert_eq!(read.records, [FlowRecord { id: 7, ..FlowRecord::default() }]);
    let kind = |answer: &[u8]| read_answer(answer).unwrap_err().kind();
    assert_eq!(kind(b"HTTP/1.1 404 Not Found\r\n\r\nthere are /"), io::ErrorKind::Unsupported);
    let wrong: [&[u8]; 6] = [
        b"",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\n\r\n[1]",
        b"HTTP/1.1 500 No\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n{\"records\":[{\"protocol\":256}]}",
        b"HTTP/1.1 200 OK\r\n\r\n\xff",
    ];
    for wrong in wrong {
        assert_eq!(kind(wrong), io::ErrorKind::InvalidData, "{wrong:?}");
    }
}

#[test]
fn an_answer_is_bounded_in_records_groups_and_texts() {
    let long = "\u{20ac}".repeat(1000);
    let groups = vec![format!("{long:?}"); 300].join(",");
    let record = format!(r#"{{"number":5,"event":{long:?},"source":{{"name":{long:?},"groups":[{groups}]}}}}"#);
    let read = read_answer(&answer(&format!(r#"{{"records":[{record}]}}"#))).unwrap();
    let FlowRecord { event, source, .. } = &read.records[0];
    assert!(event.len() <= MAX_TEXT && source.name.as_ref().unwrap().len() <= MAX_TEXT && !event.is_empty());
    assert!(source.groups.len() == MAX_GROUPS && source.groups.iter().all(|group| group.len() <= MAX_TEXT));
    let many = (1..=2000).map(|n| format!(r#"{{"number":{n}}}"#)).collect::<Vec<_>>().join(",");
    let read = read_answer(&answer(&format!(r#"{{"records":[{many}],"next":2000}}"#))).unwrap();
    assert_eq!((read.records.len(), read.next, read.is_cut), (MAX_RECORDS, MAX_RECORDS as u64, true));
}

#[test]
fn a_filter_lets_through_what_meets_all_conditions() {
    let record: FlowRecord = serde_json::from_str(WRITTEN).unwrap();
    let matches = |filter: Filter| filter.matches(&record);
    assert!(matches(Filter::default()));
    for peer in ["10.42.0.1", "10.42.0.2", "::ffff:10.42.0.2", "10.96.0.7", "DB-1.pay.pod", "shop/web-1"] {
        assert!(matches(Filter { peer: Some(peer.to_owned()), ..Filter::default() }), "{peer}");
    }
    for peer in ["10.42.0.3", "db", "", "web"] {
        assert!(!matches(Filter { peer: Some(peer.to_owned()), ..Filter::default() }), "{peer}");
    }
    let port = |port| matches(Filter { port: Some(port), ..Filter::default() });
    assert_eq!([8080, 80, 5000].map(port), [true, true, false], "that of the source is any");
    let protocol = |protocol| matches(Filter { protocol: Some(protocol), ..Filter::default() });
    assert_eq!([6, 17].map(protocol), [true, false]);
    let verdict = |verdict: &str| matches(Filter { verdict: Some(verdict.to_owned()), ..Filter::default() });
    assert_eq!(["audit", "refused"].map(verdict), [true, false]);
    let since = |since| matches(Filter { since_ms: Some(since), ..Filter::default() });
    assert_eq!([3500, 3501].map(since), [true, false]);
    assert!(!matches(Filter { port: Some(80), verdict: Some("refused".to_owned()), ..Filter::default() }));
}

#[test]
fn conditions_are_written_as_people_do() {
    assert_eq!(["TCP", "icmpv6", "47"].map(|text| Filter::protocol(text).unwrap()), [6, 58, 47]);
    assert_eq!([6, 47].map(Filter::protocol_name), ["tcp", "47"]);
    assert_eq!(["90s", "15m", "2h", "1d"].map(|text| Filter::span_ms(text).unwrap() / 1000), [90, 900, 7200, 86_400]);
    for text in ["", "5", "m", "-5m", "5w", "99999999999999999999d", "9999999999999999d"] {
        assert_eq!(Filter::span_ms(text), Err(BadFilter::Span(text.to_owned())));
    }
    assert!(Filter::protocol("256").is_err() && Filter::verdict("denied").is_err() && Filter::verdict("audit").is_ok());
}

#[test]
fn conditions_in_a_url_are_checked_and_unknown_ones_are_skipped() {
    let of = |key: &'static str, value: &str| Filter::of_pairs([(key, value)]);
    assert_eq!(of("later", "x"), Ok(Filter::default()));
    assert_eq!(of("verdict", "denied"), Err(BadFilter::Verdict("denied".to_owned())));
    for (key, value) in [("port", "65536"), ("protocol", "256"), ("since_ms", "-1"), ("port", "")] {
        assert_eq!(of(key, value), Err(BadFilter::Value { key, text: value.to_owned() }));
    }
    assert!(matches!(of("peer", &"x".repeat(MAX_TEXT + 1)), Err(BadFilter::Long(_))));
}

proptest! {
    /// What is asked for in a URL is what was meant.
    #[test]
    fn conditions_in_a_url_are_read_back(
        texts in prop::collection::vec(prop::option::of("\\PC{0,12}"), 5),
        port in any::<Option<u16>>(),
        protocol in any::<Option<u8>>(),
        since_ms in any::<Option<u64>>(),
        verdict in prop::option::of(prop_oneof!["allowed", "audit", "refused"]),
    ) {
        let [namespace, pod, from_pod, to_pod, peer] = texts.try_into().unwrap();
        let filter = Filter { namespace, pod, from_pod, to_pod, peer, port, protocol, verdict, since_ms };
        let pairs = filter.pairs();
        prop_assert_eq!(Filter::of_pairs(pairs.iter().map(|(key, value)| (*key, value.as_str()))), Ok(filter));
    }

    /// Whatever an instance answers, reading it ends with records within the bounds or with an error.
    #[test]
    fn any_answer_is_read_within_bounds(
        head in "(HTTP/1\\.1 (200|404|500)[ -~]{0,20}(\r\n){0,3}){0,2}",
        body in prop::collection::vec(prop_oneof![Just(WRITTEN.to_owned()), "[ -~\u{80}-\u{fff}]{0,40}"], 0..8),
        cut in 0_usize..4096,
        flip in prop::option::of((0_usize..4096, any::<u8>())),
    ) {
        let mut bytes = format!("{head}{{\"records\":[{}]}}", body.join(",")).into_bytes();
        bytes.truncate(cut);
        if let Some((at, byte)) = flip && let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
        if let Ok(read) = read_answer(&bytes) {
            prop_assert!(read.records.len() <= MAX_RECORDS);
            for record in &read.records {
                prop_assert!(record.event.len() <= MAX_TEXT && record.source.groups.len() <= MAX_GROUPS);
                let _ = (Filter::default().matches(record), record.duration_ms());
            }
        }
    }
}
