//! The log file for an instance's stderr when there is no journal. Its size is bounded: the launcher limits what the
//! instance may write, and the plugin truncates a file that has become too long.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Size limit in bytes of every file that an instance writes.
pub(super) const MAX: u64 = 1 << 20;

/// Opens the log for appending.
pub(super) fn open(path: &Path) -> io::Result<File> {
    cut(path);
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Truncates a log that has become too long to its last lines. Processes that append to it continue at the new end.
pub(crate) fn cut(path: &Path) {
    if fs::metadata(path).is_ok_and(|meta| meta.len() > MAX / 2) {
        let Some(end) = tail(path, KEPT_BYTES) else { return };
        if let Ok(mut file) = OpenOptions::new().append(true).open(path) {
            // Losing log lines is better than failing.
            let _ = file.set_len(0).and_then(|()| file.write_all(&end));
        }
    }
}

/// The last line that is not an ordinary event, or else the last one: the other instance of a pod writes its events to
/// the same file while this one fails. Reads only the end of the file.
pub(super) fn last_line(path: &Path) -> Option<String> {
    let tail = tail(path, TAIL)?;
    let text = String::from_utf8_lossy(&tail);
    let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let is_ordinary = |line: &&str| ORDINARY.iter().any(|level| line.contains(level));
    lines.clone().find(|line| !is_ordinary(line)).or_else(|| lines.next()).map(str::to_owned)
}

fn tail(path: &Path, length: u64) -> Option<Vec<u8>> {
    let mut file = File::open(path).ok()?;
    let end = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(end.saturating_sub(length))).ok()?;
    let mut tail = Vec::new();
    file.take(length).read_to_end(&mut tail).ok()?;
    Some(tail)
}

const KEPT_BYTES: u64 = 64 << 10;
const TAIL: u64 = 4096;
/// As in both formats of an instance's log.
const ORDINARY: [&str; 4] = ["level=INFO", "level=DEBUG", "\"level\":\"info\"", "\"level\":\"debug\""];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_log_is_the_last_that_says_something() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert_eq!(last_line(&path), None);
        fs::write(&path, "").unwrap();
        assert_eq!(last_line(&path), None);
        fs::write(&path, format!("{}\nfirst\n  last \n\n", "x".repeat(10_000))).unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("last"));
    }

    #[test]
    fn an_ordinary_event_of_another_instance_does_not_hide_why_one_failed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "level=INFO msg=one\nno free port\ntime=x level=INFO msg=two\n").unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("no free port"));
        fs::write(&path, "level=INFO msg=one\nlevel=INFO msg=two\n").unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("level=INFO msg=two"));
    }

    #[test]
    fn a_long_log_loses_its_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "short").unwrap();
        cut(&path);
        assert_eq!(fs::read(&path).unwrap(), b"short");
        fs::write(&path, format!("{}the end", "x".repeat(600_000))).unwrap();
        let mut writer = open(&path).unwrap();
        writer.write_all(b", and more").unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("the end, and more") && text.len() < 70_000, "{}", text.len());
    }
}
