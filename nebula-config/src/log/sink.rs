//! Writes lines to standard output or standard error, and drops them if nobody reads: a full pipe must not block the
//! program, nor keep it from exiting.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::write as write_some;

use crate::log::Output;

/// What became of the lines before.
#[derive(Debug, Default)]
struct Sink {
    /// Lines that were left out since the last one that was written.
    lost: u64,
    /// The end of the last one is missing.
    is_torn: bool,
}

static SINK: Mutex<Sink> = Mutex::new(Sink { lost: 0, is_torn: false });
static KEEPS_ALL: AtomicBool = AtomicBool::new(false);

/// From now on, waits for the reader however long it takes: for output that is read page by page.
pub(crate) fn keep_all() {
    KEEPS_ALL.store(true, Ordering::Relaxed);
}

/// Writes a line, unless nobody reads for a second. After lines that were left out it first writes what `notice` makes
/// of their number.
pub(super) fn write(output: Output, line: &str, notice: impl FnOnce(u64) -> String) {
    match output {
        Output::Stdout => write_to(std::io::stdout().as_fd(), line, notice),
        Output::Stderr => write_to(std::io::stderr().as_fd(), line, notice),
    }
}

fn write_to(fd: BorrowedFd<'_>, line: &str, notice: impl FnOnce(u64) -> String) {
    let mut sink = SINK.lock().unwrap_or_else(PoisonError::into_inner);
    sink.write(fd, line, notice, KEEPS_ALL.load(Ordering::Relaxed));
}

impl Sink {
    fn write(&mut self, fd: BorrowedFd<'_>, line: &str, notice: impl FnOnce(u64) -> String, keeps_all: bool) {
        let patience = match self.lost {
            _ if keeps_all => PollTimeout::NONE,
            0 => PollTimeout::from(PATIENCE_MS),
            // Whoever read nothing for so long does not read now.
            _ => PollTimeout::ZERO,
        };
        let before = if self.lost > 0 { notice(self.lost) } else { String::new() };
        let end_of_last = if self.is_torn { "\n" } else { "" };
        for (part, is_notice) in [(end_of_last, false), (&before, true), (line, false)] {
            let written = write_all(fd, part.as_bytes(), patience);
            if written < part.len() {
                self.is_torn |= written > 0;
                self.lost += 1;
                return;
            }
            self.is_torn &= part.is_empty();
            if is_notice {
                self.lost = 0;
            }
        }
    }
}

/// Returns how many bytes could be written; all of them if the output is closed, which must not end the program.
fn write_all(fd: BorrowedFd<'_>, bytes: &[u8], patience: PollTimeout) -> usize {
    let mut written = 0;
    while written < bytes.len() {
        let mut ready = [PollFd::new(fd, PollFlags::POLLOUT)];
        if poll(&mut ready, patience) == Ok(0) {
            return written;
        }
        // A pipe that is ready takes this many bytes at once.
        let end = bytes.len().min(written + PIPE_BYTES);
        match write_some(fd, &bytes[written..end]) {
            Ok(len) => written += len,
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => return bytes.len(),
        }
    }
    written
}

const PATIENCE_MS: u16 = 1000;
// PIPE_BUF.
const PIPE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use std::io::Read;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};

    use super::*;
    use nebula_linux::clock::now;

    #[test]
    fn a_pipe_that_nobody_reads_holds_up_one_line_and_who_reads_again_is_told_how_many_were_lost() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        while write_some(&writer, &[b'.'; 4096]).is_ok() {}
        fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let mut sink = Sink::default();
        let begin = now();
        for _ in 0..100 {
            sink.write(writer.as_fd(), "lost\n", |_| "notice\n".to_owned(), false);
        }
        assert!((900..5000).contains(&begin.elapsed().as_millis()), "{:?}", begin.elapsed());
        let mut page = vec![0; 1 << 20];
        let stale = reader.read(&mut page).unwrap();
        assert!(page[..stale].iter().all(|byte| *byte == b'.'));
        sink.write(writer.as_fd(), "kept\n", |lost| format!("{lost} lost\n"), false);
        sink.write(writer.as_fd(), "next\n", |lost| format!("{lost} lost\n"), false);
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "100 lost\nkept\nnext\n");
    }

    #[test]
    fn a_line_longer_than_a_pipe_is_torn_where_the_reader_stopped_and_the_next_begins_anew() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut sink = Sink::default();
        let long = "x".repeat(1 << 20) + "\n";
        sink.write(writer.as_fd(), &long, |_| String::new(), false);
        assert!(sink.is_torn && sink.lost == 1);
        let mut page = vec![0; 1 << 20];
        let stale = reader.read(&mut page).unwrap();
        assert!(page[..stale].iter().all(|byte| *byte == b'x'));
        sink.write(writer.as_fd(), "next\n", |lost| format!("{lost} lost\n"), false);
        drop(writer);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest.trim_start_matches('x'), "\n1 lost\nnext\n");
    }

    #[test]
    fn an_output_that_takes_nothing_costs_no_time() {
        let closed = std::fs::File::open("/dev/null").unwrap();
        let (mut sink, begin) = (Sink::default(), now());
        sink.write(closed.as_fd(), "line\n", |_| String::new(), false);
        assert!(sink.lost == 0 && begin.elapsed().as_millis() < 900);
    }
}
