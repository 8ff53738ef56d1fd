//! Which records are wanted.

use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::client::MAX_TEXT;
use super::{FlowEnd, FlowRecord};

/// Conditions, all of which a record must meet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Filter {
    /// A pod of this namespace wrote the record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// This pod (`namespace/name`, or only its name) wrote the record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// This pod opened it: `namespace/name`, or the name in its certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_pod: Option<String>,
    /// It was opened to this pod, named in the same way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_pod: Option<String>,
    /// One end has this address, this name in its certificate, or is this pod (`namespace/name`); or the flow was
    /// opened to this address of a Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// Port of the destination, in the tunnel or before translation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Number of the protocol.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocol: Option<u8>,
    /// `allowed`, `audit` or `refused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<String>,
    /// Seen at this time or later, in milliseconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
}

/// A condition that nothing can meet.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadFilter {
    /// The protocol has no such name.
    #[error("unknown protocol {0:?}: it is tcp, udp, sctp, icmp, icmpv6 or a number below 256")]
    Protocol(String),
    /// There is no such verdict.
    #[error("unknown verdict {0:?}: it is allowed, audit or refused")]
    Verdict(String),
    /// It is no span of time.
    #[error("unknown time {0:?}: it is a number and a unit, such as 90s, 15m, 2h or 1d")]
    Span(String),
    /// A text is longer than any that is looked for.
    #[error("no name or address begins with {0:?} and is that long")]
    Long(String),
    /// The value of a condition cannot be one.
    #[error("condition {key:?} cannot be {text:?}")]
    Value {
        /// Its name.
        key: &'static str,
        /// Its value, shortened.
        text: String,
    },
}

impl Filter {
    /// Whether a record meets all conditions.
    #[must_use]
    pub fn matches(&self, record: &FlowRecord) -> bool {
        let before = record.original.as_ref().map(|original| original.destination);
        let is_port =
            |port| record.destination.port == Some(port) || before.is_some_and(|before| before.port() == port);
        let is_peer = |peer: &String| {
            let address = peer.parse::<IpAddr>().ok().map(|address| address.to_canonical());
            let is_service = address.is_some() && address == before.map(|before| before.ip());
            is_service || is_end(&record.source, peer, address) || is_end(&record.destination, peer, address)
        };
        let of_namespace = |namespace: &String| {
            record.own_end().pod.as_ref().and_then(|pod| pod.split_once('/')).is_some_and(|(of, _)| of == namespace)
        };
        let is_own = |wanted: &String| {
            let own = record.own_end().pod.as_ref();
            own.is_some_and(|pod| pod == wanted || pod.split_once('/').is_some_and(|(_, name)| name == wanted))
        };
        self.namespace.as_ref().is_none_or(of_namespace)
            && self.pod.as_ref().is_none_or(is_own)
            && self.from_pod.as_ref().is_none_or(|pod| record.source.is_pod(pod))
            && self.to_pod.as_ref().is_none_or(|pod| record.destination.is_pod(pod))
            && self.port.is_none_or(is_port)
            && self.protocol.is_none_or(|protocol| record.protocol == protocol)
            && self.verdict.as_ref().is_none_or(|verdict| record.verdict == *verdict)
            && self.since_ms.is_none_or(|since| record.last_ms >= since)
            && self.peer.as_ref().is_none_or(is_peer)
    }

    /// The conditions as names and values, for a URL.
    #[must_use]
    pub fn pairs(&self) -> Vec<(&'static str, String)> {
        let numbers = [
            ("port", self.port.map(u64::from)),
            ("protocol", self.protocol.map(u64::from)),
            ("since_ms", self.since_ms),
        ];
        let numbers = numbers.into_iter().filter_map(|(key, value)| Some((key, value?.to_string())));
        let texts = [
            ("namespace", &self.namespace),
            ("pod", &self.pod),
            ("from_pod", &self.from_pod),
            ("to_pod", &self.to_pod),
            ("peer", &self.peer),
            ("verdict", &self.verdict),
        ];
        texts.into_iter().filter_map(|(key, value)| Some((key, value.clone()?))).chain(numbers).collect()
    }

    /// The conditions of a URL. Names that are none of a condition are skipped.
    ///
    /// # Errors
    /// Returns an error if a value cannot be one.
    pub fn of_pairs<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, BadFilter> {
        let mut filter = Self::default();
        for (key, value) in pairs {
            let place = match key {
                "namespace" => &mut filter.namespace,
                "pod" => &mut filter.pod,
                "from_pod" => &mut filter.from_pod,
                "to_pod" => &mut filter.to_pod,
                "peer" => &mut filter.peer,
                "verdict" => {
                    filter.verdict = Some(Self::verdict(value)?);
                    continue;
                }
                "port" => {
                    filter.port = Some(number("port", value)?);
                    continue;
                }
                "protocol" => {
                    filter.protocol = Some(number("protocol", value)?);
                    continue;
                }
                "since_ms" => {
                    filter.since_ms = Some(number("since_ms", value)?);
                    continue;
                }
                _ => continue,
            };
            if value.len() > MAX_TEXT {
                return Err(BadFilter::Long(shortened(value)));
            }
            *place = Some(value.to_owned());
        }
        Ok(filter)
    }

    /// The number of a protocol that is named as people do.
    ///
    /// # Errors
    /// Returns an error if there is none of this name.
    pub fn protocol(text: &str) -> Result<u8, BadFilter> {
        let named = PROTOCOLS.iter().find(|(name, _)| name.eq_ignore_ascii_case(text)).map(|(_, number)| *number);
        named.or_else(|| text.parse().ok()).ok_or_else(|| BadFilter::Protocol(text.to_owned()))
    }

    /// Name of a protocol, or its number.
    #[must_use]
    pub fn protocol_name(number: u8) -> String {
        let named = PROTOCOLS.iter().find(|(_, known)| *known == number);
        named.map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned())
    }

    /// A verdict that is named as people do.
    ///
    /// # Errors
    /// Returns an error if there is no such verdict.
    pub fn verdict(text: &str) -> Result<String, BadFilter> {
        match text {
            "allowed" | "audit" | "refused" => Ok(text.to_owned()),
            _ => Err(BadFilter::Verdict(text.to_owned())),
        }
    }

    /// A span of time in milliseconds, such as `15m`.
    ///
    /// # Errors
    /// Returns an error if it is not a number and a unit.
    pub fn span_ms(text: &str) -> Result<u64, BadFilter> {
        let bad = || BadFilter::Span(text.to_owned());
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (count, unit) = text.split_at(digits);
        let unit: u64 = match unit {
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(bad()),
        };
        count.parse::<u64>().ok().and_then(|count| count.checked_mul(unit)).ok_or_else(bad)
    }
}

impl FlowEnd {
    /// Whether it is this pod (`namespace/name`), by what is known of it or by the CA's default for names of pods; or
    /// has this name in its certificate.
    #[must_use]
    pub fn is_pod(&self, text: &str) -> bool {
        let of_certificate = text.split_once('/').map(|(namespace, name)| format!("{name}.{namespace}.pod"));
        let is_name = |name: &String| name == text || Some(name) == of_certificate.as_ref();
        // What is known of it counts more than a name.
        match &self.pod {
            Some(pod) => pod == text,
            None => self.name.as_ref().is_some_and(is_name),
        }
    }
}

fn number<T: FromStr>(key: &'static str, text: &str) -> Result<T, BadFilter> {
    text.parse().map_err(|_| BadFilter::Value { key, text: shortened(text) })
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

fn is_end(end: &FlowEnd, text: &str, address: Option<IpAddr>) -> bool {
    let is_text = |known: &Option<String>| known.as_ref().is_some_and(|known| known.eq_ignore_ascii_case(text));
    address.is_some() && end.address == address || is_text(&end.name) || is_text(&end.pod)
}

const PROTOCOLS: [(&str, u8); 5] = [("tcp", 6), ("udp", 17), ("icmp", 1), ("icmpv6", 58), ("sctp", 132)];
