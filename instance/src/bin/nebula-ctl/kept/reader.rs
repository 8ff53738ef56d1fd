//! Reads the records that were kept, from the newest to the oldest.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use nebula_cni_contract::flow_records::{Filter, FlowRecord, FlowRecords, MAX_RECORDS};
use nebula_linux::line_file::before;

use super::file_in;

/// The newest records that match, each flow as it stood last.
///
/// # Errors
/// Returns the error of the file system; `NotFound` if nothing was ever kept there.
pub(crate) fn read(folder: &Path, filter: &Filter) -> io::Result<FlowRecords> {
    let path = file_in(folder);
    let texts = [text(&path)?, text_if_any(&before(&path))?];
    // Of a flow its last line counts. A daemon that was started again may give the id of a flow to another one.
    let mut seen = HashSet::new();
    let mut records = Vec::new();
    let mut is_cut = false;
    for line in texts.iter().flat_map(|text| text.rsplit(|byte| *byte == b'\n')) {
        // The rest of a line of a machine that died, and lines of other releases.
        let Ok(record) = serde_json::from_slice::<FlowRecord>(line) else { continue };
        if !seen.insert((record.id, record.started_ms)) || !filter.matches(&record) {
            continue;
        }
        if records.len() == MAX_RECORDS {
            is_cut = true;
            break;
        }
        records.push(record);
    }
    records.reverse();
    Ok(FlowRecords { records, is_cut, is_on: true, ..FlowRecords::default() })
}

/// The number of the last record that was kept; 0 if there is none.
///
/// # Errors
/// Returns the error of the file system.
pub(super) fn last_number(path: &Path) -> io::Result<u64> {
    let newest = match last(&end_of(path)?) {
        Some(record) => Some(record),
        None => last(&end_of(&before(path))?),
    };
    Ok(newest.map_or(0, |record| record.number))
}

/// When the last record of a file was seen.
///
/// # Errors
/// Returns the error of the file system.
pub(super) fn last_time(path: &Path) -> io::Result<Option<u64>> {
    Ok(last(&end_of(path)?).map(|record| record.last_ms))
}

fn last(text: &[u8]) -> Option<FlowRecord> {
    text.rsplit(|byte| *byte == b'\n').find_map(|line| serde_json::from_slice(line).ok())
}

fn text(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn text_if_any(path: &Path) -> io::Result<Vec<u8>> {
    match text(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        text => text,
    }
}

/// The last lines of a file, without reading the others.
fn end_of(path: &Path) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;

    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        file => file?,
    };
    let length = file.metadata()?.len();
    let start = length.saturating_sub(MAX_LINE);
    let mut bytes = vec![0; usize::try_from(length - start).unwrap_or_default()];
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes)
}

/// Half of the largest `--max-mib`.
const MAX_FILE: u64 = 2 << 30;
/// A record with as many groups as a certificate can have is shorter.
const MAX_LINE: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn line(number: u64, id: u64, event: &str, port: u16) -> String {
        let mut record = FlowRecord { number, id, event: event.into(), ..FlowRecord::default() };
        record.destination.port = Some(port);
        serde_json::to_string(&record).unwrap() + "\n"
    }

    fn numbers(folder: &Path, filter: &Filter) -> (Vec<u64>, bool) {
        let read = read(folder, filter).unwrap();
        (read.records.iter().map(|record| record.number).collect(), read.is_cut)
    }

    #[test]
    fn each_flow_is_there_once_as_it_stood_last_in_whichever_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = file_in(folder.path());
        assert_eq!(read(folder.path(), &Filter::default()).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(before(&path), line(1, 1, "created", 80) + &line(2, 2, "created", 443)).unwrap();
        fs::write(
            &path,
            line(3, 1, "ended", 80) + "{\"of another release\": [}\n" + &line(4, 3, "created", 80) + "{\"num",
        )
        .unwrap();
        assert_eq!(numbers(folder.path(), &Filter::default()), (vec![2, 3, 4], false));
        let filter = Filter { port: Some(80), ..Filter::default() };
        assert_eq!(numbers(folder.path(), &filter), (vec![3, 4], false));
        assert_eq!((last_number(&path).unwrap(), last_time(&path).unwrap()), (4, Some(0)));
    }

    #[test]
    fn of_more_than_an_answer_has_the_newest_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let most = MAX_RECORDS as u64;
        let text: String = (1..=most + 7).map(|number| line(number, number, "created", 80)).collect();
        fs::write(file_in(folder.path()), text).unwrap();
        let (numbers, is_cut) = numbers(folder.path(), &Filter::default());
        assert!(is_cut && numbers == (8..=most + 7).collect::<Vec<_>>());
    }
}
