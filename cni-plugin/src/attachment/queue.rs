//! The queue of starts: a node that starts a hundred pods at once works on a few at a time, in the order in which they
//! came, instead of on all of them until each one's time is up.
//!
//! Every ADD draws a number and locks a file of that name. With W starts at a time, number N waits for number N-W:
//! until its file is gone, or its owner died, or it has had a head start. The head start keeps ADDs that wait for the
//! CA, and use no processor, from holding up all others.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};

use crate::reply::{Error, code};

/// The right to work. It ends when this is dropped, or with the process.
#[derive(Debug)]
pub struct Turn {
    path: PathBuf,
    file: File,
}

impl Turn {
    /// Waits until it is the caller's turn. At most `width` callers have theirs at the same time, except for those that
    /// have had it for long.
    ///
    /// # Errors
    /// Code 11 if it is not the caller's turn by the deadline, code 5 for a file system error.
    pub fn wait(state_dir: &Path, width: u64, clock: &dyn Clock, deadline: Deadline) -> Result<Self, Error> {
        let dir = state_dir.join(DIR);
        let failed = |e: io::Error| Error::new(code::IO, format!("cannot queue in {}: {e}", dir.display()));
        let (number, mut turn) = draw(&dir).map_err(failed)?;
        let mut before = number;
        while let Some(ahead) = before.checked_sub(width.max(1)) {
            match Ahead::wait(&dir.join(ahead.to_string()), clock, deadline).map_err(failed)? {
                Ahead::Done => break,
                // It died before its turn, so what it waited for still counts.
                Ahead::Vanished => before = ahead,
                Ahead::Late => {
                    return Err(Error::new(code::TRY_AGAIN, "this node starts too many pods at the same time")
                        .details("it works on them in the order in which they came; try again"));
                }
            }
        }
        turn.file.write_all(STARTED).map_err(failed)?;
        Ok(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What became of a caller further ahead.
enum Ahead {
    /// It has worked, or for long enough.
    Done,
    /// It died while it waited.
    Vanished,
    /// It still holds its place at the deadline.
    Late,
}

impl Ahead {
    fn wait(path: &Path, clock: &dyn Clock, deadline: Deadline) -> io::Result<Self> {
        let file = match File::open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::Done),
            other => other?,
        };
        let unlocked = unlocked(&file)?;
        let mut head_start = None;
        loop {
            match unlocked.recv_timeout(LOOK_INTERVAL.min(deadline.left(clock))) {
                Ok(locked) => {
                    locked?;
                    // Its owner removes the file and then unlocks it; whoever died does neither.
                    let _ = fs::remove_file(path);
                    return Ok(if has_started(&file)? { Self::Done } else { Self::Vanished });
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("nobody waits for its lock")),
            }
            let head_start_ends = || Deadline::after(clock, HEAD_START);
            if has_started(&file)? && head_start.get_or_insert_with(head_start_ends).is_over(clock) {
                return Ok(Self::Done);
            }
            if deadline.is_over(clock) {
                return Ok(Self::Late);
            }
        }
    }
}

fn has_started(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.len() > 0)
}

/// Tells when the owner of `file` has unlocked it or died. A thread waits for that, or until this process ends: a
/// hundred callers that look again and again would take the time of a processor from those who work.
fn unlocked(file: &File) -> io::Result<Receiver<io::Result<()>>> {
    let (tell, told) = mpsc::channel();
    let file = file.try_clone()?;
    let wait = move || {
        let locked = loop {
            match file.lock_shared() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        // Nobody listens any more after the head start.
        let _ = tell.send(locked);
    };
    thread::Builder::new().name("queue".to_owned()).spawn(wait)?;
    Ok(told)
}

/// Draws the next number.
fn draw(dir: &Path) -> io::Result<(u64, Turn)> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let create =
        |path: &Path| OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
    let mut next = create(&dir.join("next"))?;
    next.lock()?;
    let mut text = String::new();
    (&next).take(MAX_DIGITS).read_to_string(&mut text)?;
    // After a file that was torn or tampered with, counting starts over; at worst a few more callers work at the same
    // time.
    let number: u64 = text.trim().parse().unwrap_or(0);
    if number.is_multiple_of(SWEEP_EVERY) {
        sweep(dir);
    }
    let path = dir.join(number.to_string());
    let file = create(&path)?;
    file.lock()?;
    next.rewind()?;
    next.set_len(0)?;
    next.write_all(number.wrapping_add(1).to_string().as_bytes())?;
    Ok((number, Turn { path, file }))
}

/// Removes the files of callers that died and for which nobody waited.
fn sweep(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let is_number = entry.file_name().to_str().is_some_and(|name| name.parse::<u64>().is_ok());
        if is_number && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Beside the directories of the networks, whose names never begin with a dot.
const DIR: &str = ".starts";
const STARTED: &[u8] = b"1";
const MAX_DIGITS: u64 = 20;
const SWEEP_EVERY: u64 = 64;
// How exactly the head start is kept.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
// Several times the work of one start on an idle machine.
const HEAD_START: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use nebula_cni_contract::clock::SystemClock;

    fn wait(dir: &Path, width: u64, patience: Duration) -> Result<Turn, Error> {
        Turn::wait(dir, width, &SystemClock, Deadline::after(&SystemClock, patience))
    }

    const LONG: Duration = Duration::from_secs(30);

    #[test]
    fn callers_work_few_at_a_time_and_in_the_order_of_their_arrival() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let order = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for n in 0..20 {
                // Each draws its number before the next one comes.
                let drawn = |n: usize| {
                    let text = fs::read_to_string(dir.path().join(DIR).join("next")).unwrap_or_default();
                    text.parse::<usize>().unwrap_or(0) > n
                };
                let (dir, inside, most, order) = (dir.path(), &inside, &most, &order);
                scope.spawn(move || {
                    let turn = wait(dir, 2, LONG).unwrap();
                    order.lock().unwrap().push(n);
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(20));
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(turn);
                });
                while !drawn(n) {
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        assert!(most.into_inner() <= 2);
        let order = order.into_inner().unwrap();
        assert!(order.iter().enumerate().all(|(at, n)| at.abs_diff(*n) <= 2), "{order:?}");
        assert_eq!(fs::read_dir(dir.path().join(DIR)).unwrap().count(), 1, "only the counter is left");
    }

    #[test]
    fn a_caller_that_waits_too_long_gets_try_again_and_leaves_the_queue() {
        let dir = tempfile::tempdir().unwrap();
        let first = wait(dir.path(), 1, LONG).unwrap();
        assert_eq!(wait(dir.path(), 1, Duration::from_millis(30)).unwrap_err().code, code::TRY_AGAIN);
        drop(first);
        wait(dir.path(), 1, LONG).unwrap();
    }

    #[test]
    fn a_caller_that_died_holds_up_nobody_and_one_that_only_waits_not_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let first = wait(dir.path(), 1, LONG).unwrap();
        // Killed while it waited: its lock is gone, its file is not.
        let (number, second) = draw(&dir.path().join(DIR)).unwrap();
        let left = second.path.clone();
        drop(second);
        File::create(&left).unwrap();
        assert_eq!(number, 1);
        assert!(wait(dir.path(), 1, Duration::from_millis(50)).is_err(), "the first one still works");
        let began = SystemClock.now();
        // The first one has worked for long enough, although it holds its turn.
        wait(dir.path(), 1, LONG).unwrap();
        assert!(SystemClock.now() - began < HEAD_START * 2);
        drop(first);
        assert!(!left.exists());
    }

    #[test]
    fn a_counter_that_is_no_number_starts_over() {
        let dir = tempfile::tempdir().unwrap();
        drop(wait(dir.path(), 2, LONG).unwrap());
        for garbage in ["x", "-1", "99999999999999999999999999", ""] {
            fs::write(dir.path().join(DIR).join("next"), garbage).unwrap();
            drop(wait(dir.path(), 2, LONG).unwrap());
        }
    }
}
