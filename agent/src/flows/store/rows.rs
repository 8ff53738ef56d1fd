//! A record as a row, and as the words that it shares with others.

use std::net::{IpAddr, SocketAddr};

use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord, Original, PolicyDecision};
use serde::{Deserialize, Serialize};

/// What many records of a pod have in common, besides who they are between.
#[derive(Debug, Clone, Default, Hash, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Kind {
    pub(super) event: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<String>,
    pub(super) verdict: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    pub(super) direction: String,
    pub(super) protocol: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rule: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) policy: Option<PolicyDecision>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) relay: Option<IpAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) post_quantum: Option<bool>,
}

/// A flow before translation, without the port of its source.
#[derive(Debug, Clone, Hash, Serialize, Deserialize)]
pub(super) struct Before {
    pub(super) service: SocketAddr,
    pub(super) address: IpAddr,
}

/// The numbers of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) seq: i64,
    pub(super) flow: i64,
    pub(super) destination_port: Option<u16>,
    pub(super) source_port: Option<u16>,
    pub(super) original_port: Option<u16>,
    pub(super) last_ms: i64,
    pub(super) lasted_ms: i64,
    pub(super) amounts: [i64; 4],
}

/// What is kept of what an instance says. Its own end is the pod that the agent knows, which it cannot name for the far
/// end; and nothing is seen in the future.
pub(super) fn corrected(mut record: FlowRecord, pod: &str, now_ms: u64) -> FlowRecord {
    let own = record.own_end_mut();
    let (address, port) = (own.address, own.port);
    *own = FlowEnd { address, port, pod: Some(pod.to_owned()), ..FlowEnd::default() };
    record.far_end_mut().pod = None;
    // What the file cannot tell apart.
    record.last_ms = record.last_ms.min(now_ms).min(MOST);
    record.started_ms = record.started_ms.min(record.last_ms);
    for amount in [&mut record.forward, &mut record.reply] {
        *amount = Amount { packets: amount.packets.min(MOST), bytes: amount.bytes.min(MOST) };
    }
    record
}

/// A record in its parts.
pub(super) fn apart(record: FlowRecord) -> (Kind, [FlowEnd; 2], Option<Before>, Row) {
    let row = Row {
        seq: 0,
        flow: record.id.cast_signed(),
        destination_port: record.destination.port,
        source_port: record.source.port,
        original_port: record.original.as_ref().map(|original| original.source.port()),
        last_ms: record.last_ms.cast_signed(),
        lasted_ms: record.duration_ms().cast_signed(),
        amounts: [record.forward.packets, record.forward.bytes, record.reply.packets, record.reply.bytes]
            .map(u64::cast_signed),
    };
    let original = record.original.as_ref();
    let before = original.map(|original| Before { service: original.destination, address: original.source.ip() });
    let kind = Kind {
        event: record.event,
        end: record.end,
        verdict: record.verdict,
        reason: record.reason,
        direction: record.direction,
        protocol: record.protocol,
        rule: record.rule,
        policy: record.policy,
        path: record.path,
        relay: record.relay,
        post_quantum: record.post_quantum,
    };
    let ends = [record.source, record.destination].map(|end| FlowEnd { port: None, ..end });
    (kind, ends, before, row)
}

/// The record of its parts; its number is that of the row.
pub(super) fn together(kind: Kind, ends: [FlowEnd; 2], before: Option<Before>, row: &Row) -> FlowRecord {
    let [source, destination] = ends;
    let [packets, bytes, reply_packets, reply_bytes] = row.amounts.map(i64::cast_unsigned);
    let original = before
        .zip(row.original_port)
        .map(|(before, port)| Original { source: SocketAddr::new(before.address, port), destination: before.service });
    FlowRecord {
        number: row.seq.cast_unsigned(),
        id: row.flow.cast_unsigned(),
        event: kind.event,
        end: kind.end,
        verdict: kind.verdict,
        reason: kind.reason,
        direction: kind.direction,
        protocol: kind.protocol,
        source: FlowEnd { port: row.source_port, ..source },
        destination: FlowEnd { port: row.destination_port, ..destination },
        original,
        forward: Amount { packets, bytes },
        reply: Amount { packets: reply_packets, bytes: reply_bytes },
        rule: kind.rule,
        policy: kind.policy,
        path: kind.path,
        relay: kind.relay,
        post_quantum: kind.post_quantum,
        started_ms: row.last_ms.saturating_sub(row.lasted_ms).cast_unsigned(),
        last_ms: row.last_ms.cast_unsigned(),
    }
}

const MOST: u64 = i64::MAX as u64;
