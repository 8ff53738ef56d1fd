//! The arguments of this program, which every user of the machine can read (`/proc/PID/cmdline`).

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;

/// Returns the arguments from the one with this number on, and overwrites them where others see them. Best called
/// before anything else: until then they can be read.
#[must_use]
pub fn take(first: usize) -> Vec<String> {
    let words = std::env::args_os().skip(first).map(|word| word.to_string_lossy().into_owned()).collect();
    // Where this fails, there is nothing else to try; who gave a secret is told that others may have read it anyway.
    let _ = blank(first);
    words
}

fn blank(first: usize) -> io::Result<()> {
    let kept: usize = std::env::args_os().take(first).map(|word| word.as_bytes().len() + 1).sum();
    let stat = fs::read("/proc/self/stat")?;
    let (begin, end) = place(&String::from_utf8_lossy(&stat)).ok_or(io::ErrorKind::InvalidData)?;
    let begin = begin.saturating_add(kept as u64);
    let length = usize::try_from(end.saturating_sub(begin)).unwrap_or(0).min(MAX_BYTES);
    OpenOptions::new().write(true).open("/proc/self/mem")?.write_all_at(&vec![0; length], begin)
}

/// Where the arguments are in memory: `arg_start` and `arg_end` of proc_pid_stat(5), its fields 48 and 49.
fn place(stat: &str) -> Option<(u64, u64)> {
    // The name of the program, which is the second field, may have spaces and brackets.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(48 - 3);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// More than the kernel lets arguments have with its default limit for the stack.
const MAX_BYTES: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_the_arguments_is_found_and_no_other_program_is_changed_by_nonsense() {
        let stat = String::from_utf8_lossy(&fs::read("/proc/self/stat").unwrap()).into_owned();
        let (begin, end) = place(&stat).unwrap();
        let bytes: usize = std::env::args_os().map(|word| word.as_bytes().len() + 1).sum();
        assert_eq!(end - begin, bytes as u64);
        for nonsense in ["", "1 (x", "1 (x) S 1 2 3", &stat.replace(&begin.to_string(), "x")] {
            assert_eq!(place(nonsense), None, "{nonsense}");
        }
    }
}
