//! Two connections that become one.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional_with_sizes};

/// For each direction of a connection, in bytes.
const BUFFER: usize = 16 << 10;

/// Carries bytes both ways until both sides are done. `early` has what the near side sent already.
pub(crate) async fn pipe<N, F>(mut near: N, mut far: F, early: &[u8]) -> io::Result<()>
where
    N: AsyncRead + AsyncWrite + Unpin,
    F: AsyncRead + AsyncWrite + Unpin,
{
    far.write_all(early).await?;
    copy_bidirectional_with_sizes(&mut near, &mut far, BUFFER, BUFFER).await.map(drop)
}
