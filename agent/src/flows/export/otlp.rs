//! Records as a request of OTLP. Attributes have the names of OpenTelemetry's semantic conventions where there are
//! some, and begin with `nebula.` otherwise.
//!
//! Attributes are encoded by hand: the generated types would allocate some sixty strings for each record. All else is
//! made of those types, and tests read everything with them.

use std::net::IpAddr;

use nebula_cni_contract::flow_records::{Filter, FlowEnd, FlowRecord};
use opentelemetry_proto::tonic::common::v1::{AnyValue, ArrayValue, InstrumentationScope, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::logs::v1::{LogRecord, ResourceLogs, ScopeLogs, SeverityNumber};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint};

use crate::flows::pairs;

/// Makes requests in memory that is used again.
#[derive(Debug, Default)]
pub(super) struct Encoder {
    record: Vec<u8>,
    scope: Vec<u8>,
    request: Vec<u8>,
}

impl Encoder {
    /// An encoded request with these records. `node` is the name of this node.
    pub(super) fn request(&mut self, records: &[FlowRecord], node: Option<&str>, now_ms: u64) -> &[u8] {
        let Self { record: one, scope, request } = self;
        // What was needed for records with long names is given back.
        [&mut *one, &mut *scope, &mut *request].into_iter().for_each(|bytes| {
            bytes.clear();
            bytes.shrink_to(USUAL);
        });
        let of_scope = ScopeLogs { scope: Some(this_scope()), ..ScopeLogs::default() };
        of_scope.encode_raw(scope);
        for record in records {
            one.clear();
            log_record(record, now_ms).encode_raw(one);
            attributes(record, &mut Attributes(one));
            delimited(scope, LOG_RECORDS, one);
        }
        let of_resource =
            ResourceLogs { resource: Some(resource(node)), scope_logs: Vec::new(), schema_url: SCHEMA.to_owned() };
        let mut logs = of_resource.encode_to_vec();
        encode_key(SCOPE_LOGS, WireType::LengthDelimited, &mut logs);
        encode_varint(scope.len() as u64, &mut logs);
        encode_key(RESOURCE_LOGS, WireType::LengthDelimited, request);
        encode_varint((logs.len() + scope.len()) as u64, request);
        request.extend_from_slice(&logs);
        request.extend_from_slice(scope);
        request
    }
}

fn resource(node: Option<&str>) -> Resource {
    let of_node = node.map(|node| ("k8s.node.name", node));
    let fixed = [("service.name", "nebula-cni-agent"), ("service.version", env!("CARGO_PKG_VERSION"))];
    let attribute = |(key, value): (&str, &str)| {
        let value = Some(AnyValue { value: Some(Value::StringValue(value.to_owned())) });
        KeyValue { key: key.to_owned(), value, ..KeyValue::default() }
    };
    Resource { attributes: fixed.into_iter().chain(of_node).map(attribute).collect(), ..Resource::default() }
}

fn this_scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "nebula-cni-agent/flows".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

/// A record without its attributes.
fn log_record(record: &FlowRecord, now_ms: u64) -> LogRecord {
    let (severity, text) = match &*record.verdict {
        "allowed" => (SeverityNumber::Info, "INFO"),
        _ => (SeverityNumber::Warn, "WARN"),
    };
    LogRecord {
        time_unix_nano: nanoseconds(record.last_ms),
        observed_time_unix_nano: nanoseconds(now_ms),
        severity_number: severity.into(),
        severity_text: text.to_owned(),
        body: Some(AnyValue { value: Some(Value::StringValue(summary(record))) }),
        event_name: "nebula.flow".to_owned(),
        ..LogRecord::default()
    }
}

/// What people see in a list of logs.
fn summary(record: &FlowRecord) -> String {
    let end = |end: &FlowEnd| {
        let name = end.pod.as_deref().or(end.name.as_deref()).unwrap_or("unknown");
        let name = nebula_cert::visible(name).into_owned();
        match (end.address, end.port) {
            (Some(address), Some(port)) => format!("{name} {}", std::net::SocketAddr::new(address, port)),
            (Some(address), None) => format!("{name} {address}"),
            (None, _) => name,
        }
    };
    let verdict = nebula_cert::visible(&record.verdict);
    format!("{verdict} {} {} -> {}", transport(record.protocol), end(&record.source), end(&record.destination))
}

fn attributes(record: &FlowRecord, all: &mut Attributes<'_>) {
    let own = record.own_end();
    if let Some((namespace, name)) = own.pod.as_ref().and_then(|pod| pod.split_once('/')) {
        all.text("k8s.namespace.name", namespace);
        all.text("k8s.pod.name", name);
    }
    all.text("network.transport", &transport(record.protocol));
    if let Some(address) = record.source.address.or(record.destination.address) {
        all.text("network.type", if address.is_ipv4() { "ipv4" } else { "ipv6" });
    }
    all.end(&record.source, ["source.address", "source.port"], SOURCE);
    all.end(&record.destination, ["destination.address", "destination.port"], DESTINATION);
    all.number("nebula.flow.number", record.number);
    all.number("nebula.flow.id", record.id);
    all.text("nebula.flow.event", &record.event);
    all.optional("nebula.flow.end", record.end.as_deref());
    all.text("nebula.flow.verdict", &record.verdict);
    all.optional("nebula.flow.reason", record.reason.as_deref());
    all.text("nebula.flow.direction", &record.direction);
    all.number("nebula.flow.started_ms", record.started_ms);
    all.number("nebula.flow.duration_ms", record.duration_ms());
    all.number("nebula.flow.forward.packets", record.forward.packets);
    all.number("nebula.flow.forward.bytes", record.forward.bytes);
    all.number("nebula.flow.reply.packets", record.reply.packets);
    all.number("nebula.flow.reply.bytes", record.reply.bytes);
    if let Some(original) = &record.original {
        all.address("nebula.original.source.address", original.source.ip());
        all.number("nebula.original.source.port", original.source.port());
        all.address("nebula.original.destination.address", original.destination.ip());
        all.number("nebula.original.destination.port", original.destination.port());
    }
    if let Some(rule) = record.rule {
        all.number("nebula.rule", u64::try_from(rule).unwrap_or(u64::MAX));
    }
    if let Some(policy) = &record.policy {
        all.text("nebula.policy.reason", &policy.reason);
        all.optional("nebula.policy.tier", policy.tier.as_deref());
        all.optional("nebula.policy.name", policy.policy.as_deref());
        all.optional("nebula.policy.rule.name", policy.rule_name.as_deref());
        if let Some(rule) = policy.rule {
            all.number("nebula.policy.rule", rule);
        }
    }
    all.optional("nebula.path", record.path.as_deref());
    if let Some(relay) = record.relay {
        all.address("nebula.relay.address", relay);
    }
    if let Some(post_quantum) = record.post_quantum {
        all.boolean("nebula.post_quantum", post_quantum);
    }
}

/// Appends attributes to an encoded log record: fields may come in any order.
struct Attributes<'a>(&'a mut Vec<u8>);

impl Attributes<'_> {
    /// The head of an attribute whose value has this number of bytes.
    fn head(&mut self, key: &str, value: usize) {
        let length = encoded_len(key.len()) + encoded_len(value);
        encode_key(ATTRIBUTES, WireType::LengthDelimited, self.0);
        encode_varint(length as u64, self.0);
        delimited(self.0, KEY, key.as_bytes());
        encode_key(VALUE, WireType::LengthDelimited, self.0);
        encode_varint(value as u64, self.0);
    }

    fn text(&mut self, key: &str, value: &str) {
        self.head(key, encoded_len(value.len()));
        delimited(self.0, STRING, value.as_bytes());
    }

    fn optional(&mut self, key: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.text(key, value);
        }
    }

    fn number(&mut self, key: &str, value: impl Into<u64>) {
        let value = value.into().min(i64::MAX as u64);
        self.head(key, 1 + encoded_len_varint(value));
        encode_key(INTEGER, WireType::Varint, self.0);
        encode_varint(value, self.0);
    }

    fn boolean(&mut self, key: &str, value: bool) {
        self.head(key, 2);
        encode_key(BOOLEAN, WireType::Varint, self.0);
        encode_varint(value.into(), self.0);
    }

    fn address(&mut self, key: &str, address: IpAddr) {
        self.text(key, &address.to_string());
    }

    fn texts(&mut self, key: &str, values: &[String]) {
        let value = |text: &String| AnyValue { value: Some(Value::StringValue(text.clone())) };
        let values = ArrayValue { values: values.iter().map(value).collect() };
        let value = AnyValue { value: Some(Value::ArrayValue(values)) }.encode_to_vec();
        self.head(key, value.len());
        self.0.extend_from_slice(&value);
    }

    fn end(&mut self, end: &FlowEnd, [address, port]: [&str; 2], names: [&str; 5]) {
        let [namespace, pod, name, groups, fingerprint] = names;
        if let Some(of) = end.address {
            self.address(address, of);
        }
        if let Some(of) = end.port {
            self.number(port, of);
        }
        self.text(namespace, pairs::namespace(end));
        self.optional(pod, end.pod.as_ref().and_then(|pod| pod.split_once('/')).map(|(_, name)| name));
        self.optional(name, end.name.as_deref());
        self.optional(fingerprint, end.fingerprint.as_deref());
        if !end.groups.is_empty() {
            self.texts(groups, &end.groups);
        }
    }
}

/// Length of a field with this number of bytes, whose tag takes one.
fn encoded_len(length: usize) -> usize {
    1 + encoded_len_varint(length as u64) + length
}

fn delimited(out: &mut Vec<u8>, tag: u32, bytes: &[u8]) {
    encode_key(tag, WireType::LengthDelimited, out);
    encode_varint(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

/// The conventions name `tcp` and `udp`; others have their own names.
fn transport(protocol: u8) -> String {
    Filter::protocol_name(protocol)
}

fn nanoseconds(ms: u64) -> u64 {
    ms.saturating_mul(1_000_000)
}

const SOURCE: [&str; 5] = [
    "nebula.source.namespace",
    "nebula.source.pod",
    "nebula.source.name",
    "nebula.source.groups",
    "nebula.source.fingerprint",
];
const DESTINATION: [&str; 5] = [
    "nebula.destination.namespace",
    "nebula.destination.pod",
    "nebula.destination.name",
    "nebula.destination.groups",
    "nebula.destination.fingerprint",
];
/// The conventions from which the names are.
const SCHEMA: &str = "https://opentelemetry.io/schemas/1.37.0";
/// Numbers of fields in the protocol: of ExportLogsServiceRequest, ResourceLogs, ScopeLogs, LogRecord, KeyValue and
/// AnyValue.
const RESOURCE_LOGS: u32 = 1;
const SCOPE_LOGS: u32 = 2;
const LOG_RECORDS: u32 = 2;
const ATTRIBUTES: u32 = 6;
const KEY: u32 = 1;
const VALUE: u32 = 2;
const STRING: u32 = 1;
const INTEGER: u32 = 3;
const BOOLEAN: u32 = 2;
const USUAL: usize = 512 << 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::flow_records::{Amount, Original, PolicyDecision};
    use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
    use proptest::prelude::*;

    use super::*;

    fn text() -> impl Strategy<Value = String> {
        prop_oneof!["[a-z0-9./-]{0,20}", "\\PC{0,300}"]
    }

    fn any_end() -> impl Strategy<Value = FlowEnd> {
        let address = prop::option::of(any::<IpAddr>());
        let texts = (prop::option::of(text()), prop::collection::vec(text(), 0..6), prop::option::of(text()));
        (address, any::<Option<u16>>(), texts).prop_map(|(address, port, (name, groups, fingerprint))| FlowEnd {
            address,
            port,
            name,
            groups,
            fingerprint,
            pod: None,
        })
    }

    fn any_record() -> impl Strategy<Value = FlowRecord> {
        let numbers = (any::<u64>(), any::<u64>(), any::<u8>(), prop::collection::vec(any::<u64>(), 4), any::<u64>());
        (numbers, any_end(), any_end(), text(), any::<bool>()).prop_map(|(numbers, source, destination, word, more)| {
            let (number, id, protocol, amounts, last_ms) = numbers;
            let policy = PolicyDecision { reason: word.clone(), rule: Some(7), ..PolicyDecision::default() };
            let original =
                Original { source: "10.42.0.1:40000".parse().unwrap(), destination: "[fd00::1]:443".parse().unwrap() };
            FlowRecord {
                number,
                id,
                protocol,
                source,
                destination,
                verdict: word.clone(),
                path: more.then_some(word),
                post_quantum: more.then_some(number % 2 == 0),
                policy: more.then_some(policy),
                original: more.then_some(original),
                forward: Amount { packets: amounts[0], bytes: amounts[1] },
                reply: Amount { packets: amounts[2], bytes: amounts[3] },
                last_ms,
                ..FlowRecord::default()
            }
        })
    }

    proptest! {
        /// Whatever a record says, the generated types read it as it was.
        #[test]
        fn the_generated_types_read_every_request(records in prop::collection::vec(any_record(), 0..5)) {
            let mut encoder = Encoder::default();
            encoder.request(&[FlowRecord::default()], None, 7);
            let read = ExportLogsServiceRequest::decode(encoder.request(&records, Some("node-1"), 7)).unwrap();
            let scope = &read.resource_logs[0].scope_logs[0];
            prop_assert_eq!(read.resource_logs[0].resource.as_ref().unwrap().attributes.len(), 3);
            prop_assert_eq!(scope.log_records.len(), records.len());
            for (read, record) in scope.log_records.iter().zip(&records) {
                let of = |key: &str| {
                    let found: Vec<_> = read.attributes.iter().filter(|attribute| attribute.key == key).collect();
                    assert!(found.len() < 2, "{key} is there twice");
                    found.first().and_then(|found| found.value.clone()?.value)
                };
                let text = |text: &str| Some(Value::StringValue(text.to_owned()));
                let number = |number: u64| Some(Value::IntValue(number.min(i64::MAX as u64).cast_signed()));
                prop_assert_eq!(of("nebula.flow.number"), number(record.number));
                prop_assert_eq!(of("nebula.flow.reply.bytes"), number(record.reply.bytes));
                prop_assert_eq!(of("nebula.flow.verdict"), text(&record.verdict));
                prop_assert_eq!(of("nebula.post_quantum"), record.post_quantum.map(Value::BoolValue));
                prop_assert_eq!(of("nebula.path"), record.path.as_deref().and_then(text));
                prop_assert_eq!(of("source.port"), record.source.port.and_then(|port| number(port.into())));
                prop_assert_eq!(of("nebula.destination.name"), record.destination.name.as_deref().and_then(text));
                let groups = match of("nebula.destination.groups") {
                    Some(Value::ArrayValue(groups)) => groups.values.into_iter().map(|group| group.value).collect(),
                    _ => Vec::new(),
                };
                prop_assert_eq!(groups, record.destination.groups.iter().map(|group| text(group)).collect::<Vec<_>>());
            }
        }
    }
}
