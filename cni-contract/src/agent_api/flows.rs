//! Flow records as a stream of lines.

use serde::{Deserialize, Serialize};

use crate::flow_records::FlowRecord;

/// A line of the stream: a record, or how far the stream is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowLine {
    /// A record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flow: Option<Box<FlowRecord>>,
    /// How far the stream is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<FlowsState>,
}

/// How far the stream is: comes after the records that are there, and again and again while there are no others. A
/// stream without a last one was cut off.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowsState {
    /// Whether nothing follows.
    pub is_last: bool,
    /// What to ask from (`after=`) to go on.
    pub newest: u64,
    /// Whether there were more records, which are older, than were asked for.
    pub is_cut: bool,
    /// Whether the time for the answer was over before all records were looked at.
    pub is_late: bool,
    /// Records that gave way to others before the agent asked for them.
    pub lost: u64,
    /// Whether more may be asked for at once, with another token: the stream was as long as one may be.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_renewable: bool,
    /// Why the stream ended although more was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// No line is longer: a record has some hundred short texts at most.
pub const MAX_LINE: usize = 512 << 10;
