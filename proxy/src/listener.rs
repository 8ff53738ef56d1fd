//! Accepts connections, a limited number at a time.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_instance::log;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tracing::Level;

use crate::pipe::Connection;

/// Pause after an error of the system, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Connections of one listener.
pub(crate) struct Connections {
    name: String,
    free: Arc<Semaphore>,
    open: JoinSet<()>,
}

impl Connections {
    /// At most `limit` at a time. `name` is that of the listener, for log lines.
    pub(crate) fn new(name: String, limit: usize) -> Self {
        Self { name, free: Arc::new(Semaphore::new(limit)), open: JoinSet::new() }
    }

    /// Serves a connection beside the others, unless there are too many. All end when this is dropped.
    pub(crate) fn begin(&mut self, from: SocketAddr, serve: impl Future<Output = ()> + Send + 'static) {
        while self.open.try_join_next().is_some() {}
        let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() else {
            const FULL: &str = "Too many connections at a time, one is refused; -connections allows more";
            if log::admits(Level::WARN, FULL, &self.name) {
                tracing::warn!(listener = self.name, %from, "{FULL}");
            }
            return;
        };
        self.open.spawn(async move {
            serve.await;
            drop(permit);
        });
    }
}

/// Accepts connections of programs of this host until it is dropped.
pub(crate) async fn accept_local<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    mut connections: Connections,
    serve: impl Fn(TcpStream, SocketAddr) -> F,
) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                prepare(&stream);
                // Whoever is not served, or not to the end, is told so.
                stream.set_reset_on_drop(true);
                connections.begin(from, serve(stream, from));
            }
            Err(error) => pause(&connections.name, &error).await,
        }
    }
}

/// Waits after an error of a listener or a socket, which may last.
pub(crate) async fn pause(listener: &str, error: &io::Error) {
    const FAILED: &str = "Cannot accept or receive";
    if log::admits(Level::ERROR, FAILED, listener) {
        tracing::error!(listener, %error, "{FAILED}");
    }
    tokio::time::sleep(PAUSE).await;
}

/// Sets what a connection outside of the overlay needs: small segments at once, and an end if the other side is gone.
pub(crate) fn prepare(stream: &TcpStream) {
    // Without them it works as well.
    let _ = stream.set_nodelay(true);
    let _ = setsockopt(stream, sockopt::KeepAlive, &true);
}
