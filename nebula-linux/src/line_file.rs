//! A file of lines that grows to a bound, and the one before it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc;

/// Appends to a file, which becomes `NAME.1` when it has half of what both may have.
pub struct LineFile {
    path: PathBuf,
    most: u64,
    file: Option<Opened>,
}

struct Opened {
    file: File,
    /// Of whole lines.
    length: u64,
}

impl LineFile {
    /// A file at this path; it and the one before it have at most `bytes` together.
    #[must_use]
    pub fn new(path: PathBuf, bytes: u64) -> Self {
        Self { path, most: bytes / 2, file: None }
    }

    /// Appends lines, each with its line feed. What was written when an error is returned is whole lines.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn append(&mut self, lines: impl IntoIterator<Item = String>) -> io::Result<()> {
        let written = self.write(lines);
        if written.is_err() {
            self.file = None;
        }
        written
    }

    /// Begins another file; the one that is there becomes the one before it.
    ///
    /// # Errors
    /// Returns the error of the file system.
    pub fn turn(&mut self) -> io::Result<()> {
        self.file = None;
        fs::rename(&self.path, before(&self.path))
    }

    fn write(&mut self, lines: impl IntoIterator<Item = String>) -> io::Result<()> {
        if self.file.as_ref().is_some_and(|opened| !is_at(&opened.file, &self.path)) {
            // Somebody else has moved or removed it.
            self.file = None;
        }
        let mut text = String::new();
        for line in lines {
            let length = self.opened()?.length + text.len() as u64;
            if length > 0 && length + line.len() as u64 > self.most {
                self.add(&text)?;
                text.clear();
                self.turn()?;
            }
            text.push_str(&line);
        }
        self.add(&text)
    }

    fn add(&mut self, text: &str) -> io::Result<()> {
        let opened = self.opened()?;
        let written = opened.file.write_all(text.as_bytes());
        match written {
            Ok(()) => opened.length += text.len() as u64,
            // No part of a line stays.
            Err(_) => opened.file.set_len(opened.length)?,
        }
        written
    }

    fn opened(&mut self) -> io::Result<&mut Opened> {
        let opened = match self.file.take() {
            Some(opened) => opened,
            None => open(&self.path)?,
        };
        Ok(self.file.insert(opened))
    }
}

fn open(path: &Path) -> io::Result<Opened> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    // A pipe must not block, and a link must not lead elsewhere.
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW;
    let mut file =
        OpenOptions::new().read(true).append(true).create(true).mode(0o600).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    // A machine that died may have left a part of a line.
    let length = whole_lines(&mut file, metadata.len())?;
    if length < metadata.len() {
        file.set_len(length)?;
    }
    Ok(Opened { file, length })
}

/// Length of a file without what follows its last line feed.
fn whole_lines(file: &mut File, length: u64) -> io::Result<u64> {
    let mut end = length;
    let mut block = [0; 4096];
    while end > 0 {
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..usize::try_from(end - start).unwrap_or_default()];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(at) = part.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

fn is_at(file: &File, path: &Path) -> bool {
    let of = |metadata: io::Result<fs::Metadata>| metadata.map(|found| (found.dev(), found.ino())).ok();
    of(file.metadata()).is_some_and(|opened| of(fs::symlink_metadata(path)) == Some(opened))
}

/// Where the file before the one at `path` is.
#[must_use]
pub fn before(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn lines(numbers: std::ops::Range<u32>) -> Vec<String> {
        numbers.map(|number| format!("line {number}\n")).collect()
    }

    fn read(path: &Path) -> String {
        fs::read_to_string(path).unwrap_or_default()
    }

    #[test]
    fn lines_are_read_back_as_they_were_and_the_files_stay_within_their_bound() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log/flows.jsonl");
        let mut file = LineFile::new(path.clone(), 4_000);
        for start in (0..1000).step_by(50) {
            file.append(lines(start..start + 50)).unwrap();
            let size = |path: &Path| fs::metadata(path).map_or(0, |file| file.len());
            assert!(size(&path) + size(&before(&path)) <= 4_000);
        }
        let all = read(&before(&path)) + &read(&path);
        let first = 1000 - all.lines().count() as u32;
        assert!(first < 900 && all == lines(first..1000).concat(), "{first}");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_part_of_a_line_is_cut_off_and_a_file_that_was_moved_is_begun_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flows.jsonl");
        LineFile::new(path.clone(), 1 << 20).append(lines(0..2)).unwrap();
        fs::write(&path, format!("{}{}", read(&path), "half a line".repeat(1000))).unwrap();
        let mut file = LineFile::new(path.clone(), 1 << 20);
        file.append(lines(2..3)).unwrap();
        assert_eq!(read(&path), lines(0..3).concat());
        fs::rename(&path, folder.path().join("moved")).unwrap();
        file.append(lines(3..4)).unwrap();
        assert_eq!((read(&path), read(&folder.path().join("moved"))), (lines(3..4).concat(), lines(0..3).concat()));
        file.turn().unwrap();
        file.append(lines(4..5)).unwrap();
        assert_eq!((read(&path), read(&before(&path))), (lines(4..5).concat(), lines(3..4).concat()));
        fs::write(&path, "no line at all").unwrap();
        LineFile::new(path.clone(), 1 << 20).append(lines(5..6)).unwrap();
        assert_eq!(read(&path), lines(5..6).concat());
    }

    #[test]
    fn pipes_links_and_folders_are_refused_and_block_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(folder.path().join("secret"), "x").unwrap();
        symlink("secret", folder.path().join("link")).unwrap();
        for name in ["pipe", "link", "."] {
            assert!(LineFile::new(folder.path().join(name), 1 << 20).append(lines(0..1)).is_err(), "{name}");
        }
        assert_eq!(read(&folder.path().join("secret")), "x");
    }
}
