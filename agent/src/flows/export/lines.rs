//! Records as lines of JSON in a file.

use std::path::PathBuf;

use nebula_cni_contract::flow_records::FlowRecord;
use nebula_linux::line_file::LineFile;

use super::{SendError, Sent, Sink};
use crate::flows::command::line;

/// Appends to a file, which becomes `NAME.1` when it has half of what both may have.
pub(super) struct Lines {
    path: PathBuf,
    file: LineFile,
}

impl Lines {
    pub(super) fn new(path: PathBuf, bytes: u64) -> Self {
        Self { file: LineFile::new(path.clone(), bytes), path }
    }
}

impl Sink for Lines {
    fn place(&self) -> String {
        self.path.display().to_string()
    }

    fn send(&mut self, records: &[FlowRecord]) -> Result<Sent, SendError> {
        self.file.append(records.iter().map(line)).map(|()| Sent::default()).map_err(SendError::File)
    }
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::flow_records::FlowEnd;

    use super::*;

    #[test]
    fn records_are_read_back_as_they_were_whatever_names_say() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log/flows.jsonl");
        let name = Some("a\n\u{202e}\"name\"".to_owned());
        let destination = FlowEnd { name, ..FlowEnd::default() };
        let of = |number| FlowRecord { number, destination: destination.clone(), ..FlowRecord::default() };
        let records: Vec<FlowRecord> = (0..3).map(of).collect();
        Lines::new(path.clone(), 40_000).send(&records).unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let read: Vec<FlowRecord> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(read, records);
    }
}
