//! Accepts connections, a limited number at a time.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::listener::{Places, Source};
use nebula_config::log;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::Level;

use crate::pipe::Connection;

/// Pause after an error of the system, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// What a listener serves at a time, connections or sources of UDP. Where all places are taken, one of the source
/// that has the most ends for a new one, so that one user or peer does not keep the others out.
pub(crate) struct Tasks {
    name: String,
    full: &'static str,
    places: Arc<Places>,
    open: JoinSet<()>,
}

/// Connections of one listener.
pub(crate) struct Connections(Tasks);

impl Tasks {
    /// At most `limit` at a time. `name` is that of the listener, for log lines; `full` is the line if one ends for
    /// another.
    pub(crate) fn new(name: String, limit: usize, full: &'static str) -> Self {
        Self { name, full, places: Places::new(limit), open: JoinSet::new() }
    }

    /// Serves one more beside the others. All end when this is dropped. Returns `false` if there is no place for it.
    pub(crate) async fn begin(
        &mut self,
        (source, from): (Source, SocketAddr),
        serve: impl Future<Output = ()> + Send + 'static,
    ) -> bool {
        while self.open.try_join_next().is_some() {}
        let ended = Arc::new(Notify::new());
        let (end, name, full) = (Arc::clone(&ended), self.name.clone(), self.full);
        let tell = move || {
            if log::admits(Level::WARN, full, &name) {
                tracing::warn!(listener = name, %from, "{full}");
            }
        };
        let told = tell.clone();
        let place = self.places.admit(source, move || {
            told();
            end.notify_one();
        });
        let Some(place) = place else {
            tell();
            return false;
        };
        self.open.spawn(async move {
            tokio::select! {
                () = serve => {}
                () = ended.notified() => {}
            }
            drop(place);
        });
        // One that has to end for this one does so before the next one comes.
        tokio::task::yield_now().await;
        true
    }
}

impl Connections {
    /// At most `limit` at a time. `name` is that of the listener, for log lines.
    pub(crate) fn new(name: String, limit: usize) -> Self {
        const FULL: &str = "Too many connections at a time, one ends; -connections allows more";
        Self(Tasks::new(name, limit, FULL))
    }

    /// Serves a connection beside the others. All end when this is dropped.
    pub(crate) async fn begin(
        &mut self,
        whose: (Source, SocketAddr),
        serve: impl Future<Output = ()> + Send + 'static,
    ) {
        self.0.begin(whose, serve).await;
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
                let source = stream
                    .local_addr()
                    .map_or_else(|_| Source::of_address(from.ip()), |local| Source::of_tcp(local, from));
                connections.begin((source, from), serve(stream, from)).await;
            }
            Err(error) => pause(&connections.0.name, &error).await,
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
