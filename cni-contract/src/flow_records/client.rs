//! What an instance is asked for its records on its status socket, and what it answers.

use std::io;

use super::{FlowRecord, FlowRecords};
use crate::instance_status::body_of;

/// What an instance is sent to ask it for the records that are told under a higher number than this.
#[must_use]
pub fn request(after: u64) -> String {
    format!("GET {RECORDS_PATH}?after={after} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n")
}

/// Reads an answer, and bounds what is in it.
///
/// # Errors
/// Returns `Unsupported` if the instance is of a release that has no records, `InvalidData` if it answers something
/// else.
pub fn read_answer(answer: &[u8]) -> io::Result<FlowRecords> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the instance does not say which flows it recorded");
    let body = body_of(answer, "its instance is of a release that records no flows", invalid)?;
    let mut read: FlowRecords = serde_json::from_str(body).map_err(|_| invalid())?;
    read.is_cut |= read.records.len() > MAX_RECORDS;
    read.records.truncate(MAX_RECORDS);
    if let Some(last) = read.records.last().filter(|_| read.is_cut) {
        read.next = last.number;
    }
    read.records.iter_mut().for_each(bound);
    Ok(read)
}

/// What an instance says of others is bounded here, too: it serves one pod, and is not trusted with the node.
fn bound(record: &mut FlowRecord) {
    for end in [&mut record.source, &mut record.destination] {
        end.groups.truncate(MAX_GROUPS);
    }
    record.texts_mut().for_each(cut);
}

fn cut(text: &mut String) {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
}

/// Path of the answer on the status socket.
pub const RECORDS_PATH: &str = "/records";
/// An instance answers with no more records at once.
pub const MAX_RECORDS: usize = 1024;
/// No answer is longer.
pub const MAX_ANSWER: u64 = 8 << 20;
/// As many as a certificate may have in practice; and longer than a name in Kubernetes with its namespace.
pub(super) const MAX_GROUPS: usize = 256;
pub(super) const MAX_TEXT: usize = 512;
