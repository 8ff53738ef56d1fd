//! Two connections that become one.
//!
//! The end of one half is passed on, and the other half goes on. An error is passed on as a reset, so that what was
//! cut off does not look complete; what came before it is delivered first.

use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nix::libc;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{sleep, timeout};

/// For each direction of a connection, in bytes.
const BUFFER: usize = 16 << 10;
/// How long the side that lives may take to get what came before the other one failed: a reset would overtake it.
const LINGER: Duration = Duration::from_secs(5);
/// How often it is looked whether it has.
const LOOK: Duration = Duration::from_millis(5);

/// A connection that can be dropped such that the other side takes it for complete, or not.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Unpin + Send + Sync {
    /// Whether an error is told once: after a write that failed with a reset, a read says that the stream has ended
    /// in good order.
    fn tells_once(&self) -> bool;

    /// Whether dropping it is a reset.
    fn set_reset_on_drop(&self, resets: bool);
    /// Bytes that were written and the other side does not have yet.
    fn unsent(&self) -> usize;
}

impl Connection for tokio::net::TcpStream {
    fn tells_once(&self) -> bool {
        true
    }

    fn set_reset_on_drop(&self, resets: bool) {
        let linger = libc::linger { l_onoff: resets.into(), l_linger: 0 };
        // A socket that is dead already.
        let _ = setsockopt(self, sockopt::Linger, &linger);
    }

    #[allow(unsafe_code, reason = "nix has no safe form of this request")]
    fn unsent(&self) -> usize {
        let mut count: libc::c_int = 0;
        // SAFETY: this request (SIOCOUTQ) writes an int.
        let failed = unsafe { libc::ioctl(self.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) } < 0;
        if failed { 0 } else { usize::try_from(count).unwrap_or(0) }
    }
}

impl Connection for nebula_net::TcpStream {
    fn tells_once(&self) -> bool {
        false
    }

    fn set_reset_on_drop(&self, resets: bool) {
        self.set_reset_on_drop(resets);
    }

    fn unsent(&self) -> usize {
        self.unsent()
    }
}

/// Why a pipe broke, and on which side.
enum Broken {
    Near(io::Error),
    Far(io::Error),
}

/// Carries bytes both ways until both sides are done. `early` has what the near side sent already. If this fails, or
/// is dropped before it is done, both connections end with a reset.
pub(crate) async fn pipe<N: Connection, F: Connection>(mut near: N, mut far: F, early: &[u8]) -> io::Result<()> {
    near.set_reset_on_drop(true);
    far.set_reset_on_drop(true);
    let (error, alive): (_, &dyn Connection) = match carry(&mut near, &mut far, early).await {
        Ok(()) => {
            near.set_reset_on_drop(false);
            far.set_reset_on_drop(false);
            return Ok(());
        }
        Err(Broken::Near(error)) => (error, &far),
        Err(Broken::Far(error)) => (error, &near),
    };
    let delivered = async {
        while alive.unsent() > 0 {
            sleep(LOOK).await;
        }
    };
    let _ = timeout(LINGER, delivered).await;
    Err(error)
}

async fn carry<N: Connection, F: Connection>(near: &mut N, far: &mut F, early: &[u8]) -> Result<(), Broken> {
    let (mut up, mut down) = (Direction::new(early), Direction::new(&[]));
    poll_fn(|context| {
        // What cannot be written any more does not keep the other direction from its end, which is a reset if that
        // was the reason.
        up.is_cut_off = near.tells_once() && down.was_reset();
        let up_is_over = up.poll(context, near, far).map_err(Broken::Near)?.is_ready() || up.failure.is_some();
        down.is_cut_off = far.tells_once() && up.was_reset();
        let down_is_over = down.poll(context, far, near).map_err(Broken::Far)?.is_ready() || down.failure.is_some();
        if up_is_over && down_is_over { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await?;
    match (up.failure, down.failure) {
        (None, None) => Ok(()),
        (_, Some(error)) => Err(Broken::Near(error)),
        (Some(error), None) => {
            // The server has said its last word, but the client speaks on. Until it has heard that, what it says is
            // dropped.
            up.failure = Some(io::ErrorKind::BrokenPipe.into());
            let _ = timeout(LINGER, poll_fn(|context| up.poll(context, near, far))).await;
            Err(Broken::Far(error))
        }
    }
}

/// Bytes on their way from one connection to the other.
struct Direction {
    buffer: Vec<u8>,
    waiting: Range<usize>,
    is_ended: bool,
    is_over: bool,
    /// Where it comes from, the connection was reset.
    is_cut_off: bool,
    /// Why no more can be written. What comes is dropped then.
    failure: Option<io::Error>,
}

impl Direction {
    fn new(early: &[u8]) -> Self {
        let mut buffer = early.to_vec();
        buffer.resize(BUFFER.max(early.len()), 0);
        Self { buffer, waiting: 0..early.len(), is_ended: false, is_over: false, is_cut_off: false, failure: None }
    }

    /// Carries what can be carried now. Ready when everything up to the end was passed on, or dropped.
    fn poll<R, W>(&mut self, context: &mut Context<'_>, from: &mut R, to: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        while !self.is_over {
            if self.failure.is_none()
                && let Err(error) = ready!(self.poll_pass_on(context, to))
            {
                self.failure = Some(error);
            }
            if self.is_ended {
                self.is_over = true;
                break;
            }
            let mut free = ReadBuf::new(&mut self.buffer);
            ready!(Pin::new(&mut *from).poll_read(context, &mut free))?;
            self.waiting = 0..free.filled().len();
            self.is_ended = self.waiting.is_empty();
            if self.is_ended && self.is_cut_off {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Whether it cannot be written because the connection was reset. One whose other side closed before, as it may,
    /// has a broken pipe.
    fn was_reset(&self) -> bool {
        self.failure.as_ref().is_some_and(|error| error.kind() != io::ErrorKind::BrokenPipe)
    }

    /// Writes what waits, or the end.
    fn poll_pass_on<W: AsyncWrite + Unpin>(&mut self, context: &mut Context<'_>, to: &mut W) -> Poll<io::Result<()>> {
        while !self.waiting.is_empty() {
            let count = ready!(Pin::new(&mut *to).poll_write(context, &self.buffer[self.waiting.clone()]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.waiting.start += count;
        }
        if self.is_ended { Pin::new(to).poll_shutdown(context) } else { Poll::Ready(Ok(())) }
    }
}
