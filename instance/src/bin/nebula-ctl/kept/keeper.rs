//! Takes the records of the daemon in turns, and appends them to a file.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nebula_cert::json_line;
use nebula_cni_contract::flow_records::{FlowRecord, FlowRecords};
use nebula_linux::clock::since_epoch;
use nebula_linux::line_file::{LineFile, before};
use serde_json::json;

use super::{Bound, file_in, reader};
use crate::daemon::{self, Failure};

/// Runs until the file cannot be written, or a signal ends the process. A daemon that is away is asked again.
///
/// # Errors
/// Returns an error if no place in the file system can be used.
pub(crate) fn run(socket: Option<&Path>, folder: &Path, bound: Bound) -> Result<(), Failure> {
    let path = file_in(folder);
    let refused = |error: io::Error| Failure::Refused(format!("cannot write {}: {error}", path.display()));
    // Before the daemon is asked: what it says once would be lost.
    let mut keeper = Keeper::open(folder, bound).map_err(refused)?;
    let mut is_away = false;
    loop {
        let asked = daemon::find(socket).and_then(|path| {
            let answer = daemon::ask(&path, &json!({"command": "flows", "after": keeper.after}))?;
            serde_json::from_value::<FlowRecords>(answer).map_err(|error| daemon::not_understood(&path, &error))
        });
        let pause = match asked {
            Ok(answer) => {
                if is_away {
                    note("the daemon answers again");
                }
                is_away = false;
                if answer.lost > keeper.lost {
                    note(&format!(
                        "{} records gave way before they were asked for (flows.ring)",
                        answer.lost - keeper.lost
                    ));
                }
                keeper.lost = answer.lost;
                keeper.keep(&answer).map_err(refused)?;
                if answer.is_cut { Duration::ZERO } else { EVERY }
            }
            Err(failure) => {
                if !is_away {
                    note(&format!("{failure}; asking again every {} s", AWAY_EVERY.as_secs()));
                }
                is_away = true;
                AWAY_EVERY
            }
        };
        keeper.age().map_err(refused)?;
        thread::sleep(pause);
    }
}

/// The file, and how far it is.
struct Keeper {
    path: PathBuf,
    file: LineFile,
    bound: Bound,
    /// What the daemon is asked from.
    after: u64,
    lost: u64,
}

impl Keeper {
    /// Goes on where the file ends.
    fn open(folder: &Path, bound: Bound) -> io::Result<Self> {
        let path = file_in(folder);
        let mut file = LineFile::new(path.clone(), bound.bytes);
        file.append([])?;
        let after = reader::last_number(&path)?;
        Ok(Self { path, file, bound, after, lost: u64::MAX })
    }

    fn keep(&mut self, answer: &FlowRecords) -> io::Result<()> {
        self.after = answer.next;
        self.file.append(answer.records.iter().map(line))
    }

    /// Removes the older file when all of it is too old, and begins another one in time for that.
    fn age(&mut self) -> io::Result<()> {
        let now = u64::try_from(since_epoch().as_millis()).unwrap_or(u64::MAX);
        let oldest = now.saturating_sub(u64::try_from(self.bound.age.as_millis()).unwrap_or(u64::MAX));
        let half = now.saturating_sub(u64::try_from(self.bound.age.as_millis() / 2).unwrap_or(u64::MAX));
        let older = before(&self.path);
        if reader::last_time(&older)?.is_some_and(|last| last < oldest) {
            fs::remove_file(older)?;
        }
        match first_time(&self.path)? {
            Some(first) if first < half => self.file.turn(),
            _ => Ok(()),
        }
    }
}

/// When the first record of a file was seen.
fn first_time(path: &Path) -> io::Result<Option<u64>> {
    let file = match File::open(path) {
        // Until the next record.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut line = String::new();
    BufReader::new(file).read_line(&mut line)?;
    Ok(serde_json::from_str::<FlowRecord>(&line).ok().map(|record| record.last_ms))
}

fn line(record: &FlowRecord) -> String {
    // Numbers and texts are all that there is in it.
    json_line(serde_json::to_string(record).unwrap_or_default())
}

fn note(text: &str) {
    let _ = writeln!(io::stderr(), "nebula-ctl: {}", nebula_cert::visible(text));
}

const EVERY: Duration = Duration::from_secs(2);
const AWAY_EVERY: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(age: Duration) -> Bound {
        Bound { bytes: 1 << 20, age }
    }

    fn record(number: u64, last_ms: u64) -> FlowRecord {
        FlowRecord { number, id: number, last_ms, ..FlowRecord::default() }
    }

    fn numbers(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str::<FlowRecord>(line).unwrap().number).collect()
    }

    #[test]
    fn it_goes_on_behind_the_last_record_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut keeper = Keeper::open(folder.path(), bound(Duration::from_secs(60))).unwrap();
        assert_eq!(keeper.after, 0);
        let records = vec![record(3, 1), record(7, 2)];
        keeper.keep(&FlowRecords { records, next: 9, ..FlowRecords::default() }).unwrap();
        assert_eq!(keeper.after, 9);
        assert_eq!(Keeper::open(folder.path(), keeper.bound).unwrap().after, 7);
        keeper.file.turn().unwrap();
        assert_eq!(Keeper::open(folder.path(), keeper.bound).unwrap().after, 7, "of the file before");
    }

    #[test]
    fn old_records_go_and_new_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let now = u64::try_from(since_epoch().as_millis()).unwrap();
        let mut keeper = Keeper::open(folder.path(), bound(Duration::from_secs(100))).unwrap();
        let keep = |keeper: &mut Keeper, number, age_ms| {
            let records = vec![record(number, now - age_ms)];
            keeper.keep(&FlowRecords { records, next: number, ..FlowRecords::default() }).unwrap();
            keeper.age().unwrap();
        };
        keep(&mut keeper, 1, 40_000);
        assert_eq!((numbers(&keeper.path), numbers(&before(&keeper.path))), (vec![1], vec![]));
        fs::write(&keeper.path, line(&record(1, now - 60_000))).unwrap();
        let mut keeper = Keeper::open(folder.path(), keeper.bound).unwrap();
        keep(&mut keeper, 2, 0);
        assert_eq!((numbers(&keeper.path), numbers(&before(&keeper.path))), (vec![], vec![1, 2]));
        keeper.age().expect("also while the daemon is away and nothing comes");
        keep(&mut keeper, 3, 0);
        fs::write(before(&keeper.path), line(&record(2, now - 101_000))).unwrap();
        keeper.age().unwrap();
        assert_eq!((numbers(&keeper.path), numbers(&before(&keeper.path))), (vec![3], vec![]));
    }
}
