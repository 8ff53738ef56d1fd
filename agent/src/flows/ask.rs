//! Asks one instance, which is not trusted: within a time as a whole, and a size.

use std::io;
use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::flow_records::{MAX_ANSWER, request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;

/// Why there is no answer. Its words are labels of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum AskError {
    /// Nobody listens.
    #[error("its instance is not there")]
    Gone,
    /// It took too long.
    #[error("its instance does not answer in time")]
    Late,
    /// It sent too much.
    #[error("the answer of its instance is too long")]
    Long,
    /// It sent something else.
    #[error("its instance does not say which flows it recorded")]
    Unreadable,
}

impl AskError {
    /// All of them.
    pub(crate) const ALL: [Self; 4] = [Self::Gone, Self::Late, Self::Long, Self::Unreadable];

    /// Its word.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gone => "gone",
            Self::Late => "late",
            Self::Long => "long",
            Self::Unreadable => "unreadable",
        }
    }
}

/// The bytes of an answer. `large` has the places for answers of more than [`USUAL`] bytes.
pub(super) async fn ask(socket: &Path, after: u64, large: &Semaphore) -> Result<Vec<u8>, AskError> {
    let asked = async {
        let mut stream = UnixStream::connect(socket).await.map_err(|_| AskError::Gone)?;
        stream.write_all(request(after).as_bytes()).await.map_err(unreadable)?;
        let mut answer = Vec::with_capacity(FIRST);
        (&mut stream).take(USUAL).read_to_end(&mut answer).await.map_err(unreadable)?;
        if answer.len() as u64 == USUAL {
            let _place = large.acquire().await.map_err(|_| AskError::Late)?;
            (&mut stream).take(MAX_ANSWER - USUAL).read_to_end(&mut answer).await.map_err(unreadable)?;
        }
        if answer.len() as u64 == MAX_ANSWER { Err(AskError::Long) } else { Ok(answer) }
    };
    tokio::time::timeout(WITHIN, asked).await.map_err(|_| AskError::Late)?
}

fn unreadable(_: io::Error) -> AskError {
    AskError::Unreadable
}

/// What an answer of the usual number of records takes.
const FIRST: usize = 48 << 10;
/// An answer of a full ring takes a quarter of it.
const USUAL: u64 = 1 << 20;
const WITHIN: Duration = Duration::from_secs(2);
