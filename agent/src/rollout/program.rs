//! Which program a file is: its contents, by their hash. A file that was written again with the same contents is the
//! same program, and so is a copy of it.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The contents of a program, as the SHA-256 of them in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProgramId(String);

impl ProgramId {
    /// For people: enough digits to tell programs apart.
    #[must_use]
    pub fn short(&self) -> &str {
        self.0.get(..SHORT).unwrap_or(&self.0)
    }

    /// Some program, for tests.
    #[cfg(test)]
    pub(crate) fn test(number: u8) -> Self {
        Self(format!("{number:02x}").repeat(DIGITS / 2))
    }
}

impl TryFrom<String> for ProgramId {
    type Error = NotAProgram;

    fn try_from(text: String) -> Result<Self, NotAProgram> {
        let is_hash = text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if is_hash { Ok(Self(text)) } else { Err(NotAProgram) }
    }
}

impl From<ProgramId> for String {
    fn from(id: ProgramId) -> Self {
        id.0
    }
}

/// A text that is no SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotAProgram;

impl fmt::Display for NotAProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a SHA-256 in hexadecimal digits")
    }
}

/// Identifies programs. Each file is read once: a node has a hundred processes of two programs.
#[derive(Debug, Default)]
pub struct KnownPrograms(Mutex<HashMap<Stamp, ProgramId>>);

/// What changes with the contents of a file: device, inode, size, and the times of the last changes.
type Stamp = (u64, u64, u64, [i64; 4]);

impl KnownPrograms {
    /// Identifies a program by its file. `/proc/PID/exe` is the file of a running one, also after it was replaced or
    /// deleted. Blocks.
    ///
    /// # Errors
    /// Returns the file system's error; an error if it is no file, or larger than any program of ours.
    pub fn identify(&self, path: &Path) -> io::Result<ProgramId> {
        // Without O_NONBLOCK a fifo would block.
        let mut file = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.len() > MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a program of ours"));
        }
        let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
        let stamp = (found.dev(), found.ino(), found.len(), times);
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&stamp).cloned();
        if let Some(id) = known {
            return Ok(id);
        }
        let (mut hash, mut chunk, mut left) = (Sha256::new(), vec![0; CHUNK], MAX_BYTES);
        loop {
            let read = (&mut file).take(left).read(&mut chunk)?;
            if read == 0 {
                break;
            }
            left -= read as u64;
            hash.update(&chunk[..read]);
        }
        let id = ProgramId(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MAX_KNOWN {
            known.clear();
        }
        known.insert(stamp, id.clone());
        Ok(id)
    }
}

/// Resident memory of a process, in KiB; `None` if it has ended.
#[must_use]
pub fn resident_kib(pid: i32) -> Option<u64> {
    let mut text = String::new();
    File::open(format!("/proc/{pid}/status")).ok()?.take(MAX_STATUS).read_to_string(&mut text).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

const DIGITS: usize = 64;
const SHORT: usize = 12;
const CHUNK: usize = 64 << 10;
/// Ours have some megabytes.
const MAX_BYTES: u64 = 256 << 20;
const MAX_KNOWN: usize = 64;
const MAX_STATUS: u64 = 16 << 10;

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_program_is_its_contents_and_not_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "one").unwrap();
        fs::write(&b, "one").unwrap();
        let programs = KnownPrograms::default();
        let one = programs.identify(&a).unwrap();
        assert_eq!(programs.identify(&b).unwrap(), one);
        assert_eq!(one.short(), "7692c3ad3540", "the beginning of the SHA-256");
        fs::remove_file(&a).unwrap();
        fs::write(&a, "two").unwrap();
        assert_ne!(programs.identify(&a).unwrap(), one);
        assert!(programs.identify(dir.path()).is_err());
        assert!(programs.identify(&dir.path().join("none")).is_err());
    }

    #[test]
    fn the_program_of_a_process_is_found_and_so_is_its_memory() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let programs = KnownPrograms::default();
        let running = programs.identify(Path::new(&format!("/proc/{pid}/exe"))).unwrap();
        assert_eq!(running, programs.identify(&std::env::current_exe().unwrap()).unwrap());
        assert!(resident_kib(pid).unwrap() > 100);
        assert_eq!(resident_kib(i32::MAX), None);
    }

    #[test]
    fn only_a_hash_is_read_as_a_program() {
        let text = serde_json::to_string(&ProgramId::test(7)).unwrap();
        assert_eq!(serde_json::from_str::<ProgramId>(&text).unwrap(), ProgramId::test(7));
        for bad in ["\"\"", "7", "\"../../etc\"", &text.replace("07", "0G"), &text.to_uppercase().replace("07", "AB")] {
            assert!(serde_json::from_str::<ProgramId>(bad).is_err(), "{bad}");
        }
    }
}
