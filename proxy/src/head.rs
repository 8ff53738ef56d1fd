//! What a client says before its connection becomes a pipe.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

/// What a parser found in the bytes that have arrived: a message and its length, or `None` if it is not complete.
pub(crate) type Parsed<T, E> = Result<Option<(T, usize)>, E>;

/// Bytes of a client that nobody has read yet.
#[derive(Debug, Default)]
pub(crate) struct Head {
    buffer: Vec<u8>,
}

/// Why there is no message.
#[derive(Debug)]
pub(crate) enum Failed<E> {
    /// The connection failed or ended, or the message is too long.
    Io(io::Error),
    /// The parser refused it.
    Refused(E),
}

impl Head {
    /// Reads one message of at most `limit` bytes.
    pub(crate) async fn read<S: AsyncRead + Unpin, T, E>(
        &mut self,
        stream: &mut S,
        limit: usize,
        parse: impl Fn(&[u8]) -> Parsed<T, E>,
    ) -> Result<T, Failed<E>> {
        loop {
            if let Some((message, len)) = parse(&self.buffer).map_err(Failed::Refused)? {
                self.buffer.drain(..len);
                return Ok(message);
            }
            let room = limit.saturating_sub(self.buffer.len());
            if room == 0 {
                return Err(Failed::Io(io::Error::new(io::ErrorKind::InvalidData, "the message is too long")));
            }
            let read = stream.take(room as u64).read_buf(&mut self.buffer).await.map_err(Failed::Io)?;
            if read == 0 {
                return Err(Failed::Io(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// What the client sent behind its last message.
    pub(crate) fn into_rest(self) -> Vec<u8> {
        self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line.
    fn line(bytes: &[u8]) -> Parsed<Vec<u8>, &'static str> {
        if bytes.starts_with(b"!") {
            return Err("no");
        }
        Ok(bytes.iter().position(|byte| *byte == b'\n').map(|end| (bytes[..end].to_vec(), end + 1)))
    }

    #[tokio::test]
    async fn messages_come_one_after_the_other_and_the_rest_stays() {
        let mut stream = tokio_test_stream(&[b"on", b"e\ntwo\nre", b"st"]);
        let mut head = Head::default();
        assert_eq!(head.read(&mut stream, 10, line).await.unwrap(), b"one");
        assert_eq!(head.read(&mut stream, 10, line).await.unwrap(), b"two");
        assert_eq!(head.into_rest(), b"re");
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_or_refused_is_none() {
        for (bytes, error) in [(&b"12345678901\n"[..], "too long"), (b"!x\n", "no"), (b"12", "UnexpectedEof")] {
            let failed = Head::default().read(&mut &bytes[..], 10, line).await.unwrap_err();
            assert!(format!("{failed:?}").contains(error), "{failed:?}");
        }
    }

    /// A stream that gives these parts, one for each read.
    fn tokio_test_stream(parts: &[&'static [u8]]) -> impl AsyncRead + Unpin {
        let mut all: Box<dyn AsyncRead + Unpin> = Box::new(tokio::io::empty());
        for part in parts.iter().rev() {
            all = Box::new(AsyncReadExt::chain(*part, all));
        }
        all
    }
}
