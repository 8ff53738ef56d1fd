//! Standard output, shared by what runs at one time: whole lines, each with a mark of whose it is.

use std::io::Write;
use std::sync::Mutex;

use crate::schedule::lock;

pub(crate) struct Output {
    to: Mutex<Box<dyn Write + Send>>,
}

impl Output {
    pub(crate) fn new(to: impl Write + Send + 'static) -> Self {
        Self { to: Mutex::new(Box::new(to)) }
    }

    /// Prints a line. Where nobody reads them any more, the tests go on.
    pub(crate) fn line(&self, mark: &str, line: &[u8]) {
        let whole = [mark.as_bytes(), line, b"\n"].concat();
        let mut to = lock(&self.to);
        let _ = to.write_all(&whole).and_then(|()| to.flush());
    }

    pub(crate) fn say(&self, line: &str) {
        self.line("", line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::thread;

    use super::*;

    /// Takes one byte at a time, as a pipe may.
    struct Slow(Arc<Mutex<Vec<u8>>>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            thread::yield_now();
            lock(&self.0).push(bytes[0]);
            Ok(1)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_several_at_one_time_stay_whole() {
        let written = Arc::new(Mutex::new(Vec::new()));
        let output = Output::new(Slow(Arc::clone(&written)));
        thread::scope(|scope| {
            for mark in ["a | ", "b | ", ""] {
                let output = &output;
                scope.spawn(move || (0..50).for_each(|_| output.line(mark, b"some words")));
            }
        });
        let written = String::from_utf8(lock(&written).clone()).unwrap();
        let count = |line: &str| written.lines().filter(|one| *one == line).count();
        assert_eq!([count("a | some words"), count("b | some words"), count("some words")], [50, 50, 50]);
    }
}
