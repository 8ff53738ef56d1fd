//! Streams with a deadline, however slowly the other side reads or writes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nebula_linux::clock::now;

/// A stream whose reads and writes share one deadline; a socket's own timeout restarts with every call.
#[derive(Debug)]
pub(crate) struct DeadlineStream<'a, S> {
    stream: &'a S,
    until: Instant,
}

impl<'a, S: TimeoutStream> DeadlineStream<'a, S> {
    /// Sets the deadline to `timeout` from now.
    pub(crate) fn new(stream: &'a S, timeout: Duration) -> Self {
        Self { stream, until: now() + timeout }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.until.checked_duration_since(now()).filter(|left| !left.is_zero());
        left.ok_or_else(|| io::ErrorKind::TimedOut.into())
    }
}

impl<S: TimeoutStream> Read for DeadlineStream<'_, S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.read_within(self.left()?, buffer)
    }
}

impl<S: TimeoutStream> Write for DeadlineStream<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write_within(self.left()?, bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket with a timeout for each call.
pub(crate) trait TimeoutStream {
    fn read_within(&self, timeout: Duration, buffer: &mut [u8]) -> io::Result<usize>;
    fn write_within(&self, timeout: Duration, bytes: &[u8]) -> io::Result<usize>;
}

impl TimeoutStream for TcpStream {
    fn read_within(&self, timeout: Duration, buffer: &mut [u8]) -> io::Result<usize> {
        self.set_read_timeout(Some(timeout))?;
        (&*self).read(buffer)
    }
    fn write_within(&self, timeout: Duration, bytes: &[u8]) -> io::Result<usize> {
        self.set_write_timeout(Some(timeout))?;
        (&*self).write(bytes)
    }
}

impl TimeoutStream for UnixStream {
    fn read_within(&self, timeout: Duration, buffer: &mut [u8]) -> io::Result<usize> {
        self.set_read_timeout(Some(timeout))?;
        (&*self).read(buffer)
    }
    fn write_within(&self, timeout: Duration, bytes: &[u8]) -> io::Result<usize> {
        self.set_write_timeout(Some(timeout))?;
        (&*self).write(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_now_and_then_does_not_move_the_deadline() {
        let (mut slow, served) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            while slow.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let start = now();
        let error = DeadlineStream::new(&served, Duration::from_millis(200)).read_to_end(&mut Vec::new()).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        assert!(now() - start < Duration::from_secs(2));
        drop(served);
        writer.join().unwrap();
    }

    #[test]
    fn whoever_reads_slowly_is_left_in_time() {
        let (mut slow, served) = UnixStream::pair().unwrap();
        let reader = std::thread::spawn(move || {
            while slow.read(&mut [0; 1000]).is_ok_and(|read| read > 0) {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let start = now();
        assert!(DeadlineStream::new(&served, Duration::from_millis(200)).write_all(&vec![0; 8 << 20]).is_err());
        assert!(now() - start < Duration::from_secs(2));
        drop(served);
        reader.join().unwrap();
    }
}
