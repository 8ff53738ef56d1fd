//! `kubectl nebula page`: a page about the cluster for a browser on this machine. It shows, and changes nothing.
//!
//! - `server`, `guard`: answers on loopback, and to whom
//! - `view`: what is known; `refresh`: asks the agents for it, while somebody looks
//! - `held`, `topology`, `listing`: flow records, their sums, and one page of them after another
//! - `assets/`: what the browser loads

mod guard;
mod held;
mod listing;
mod refresh;
mod server;
mod topology;
mod view;

use std::sync::Arc;

use tokio::net::TcpListener;

use self::guard::{Guard, Token};
use self::refresh::Found;
use self::view::View;
use crate::cli::{Page, Place};
use crate::cluster::Cluster;
use crate::identity::Role;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

/// Serves until Ctrl-C.
pub(crate) async fn run(
    cluster: &Cluster,
    place: &Place,
    options: &Page,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let mut of_records = Found::new(cluster, place, Role::Viewer);
    // What is wrong with credentials and rights is said here, and not in a browser.
    of_records.agents().await?;
    let of_nodes = Found::new(cluster, place, Role::ClusterViewer);
    let view = Arc::new(View::new(cluster.namespace.clone()));
    let listener = TcpListener::bind(("127.0.0.1", options.port))
        .await
        .map_err(|error| ToolError::Page(format!("port {} of 127.0.0.1: {error}", options.port)))?;
    let port = listener.local_addr()?.port();
    let token = Token::generate().map_err(|error| ToolError::Page(error.to_string()))?;
    // The part behind # stays in the browser: neither a server nor a log sees it.
    printer.text(&format!("http://127.0.0.1:{port}/#token={}\n", token.text()))?;
    printer
        .note("Open this address in a browser on this machine. Whoever has it sees what you see. Ctrl-C ends it.")?;
    let guard = Guard::new(port, token);
    tokio::select! {
        never = server::serve(listener, guard, Arc::clone(&view)) => match never {},
        never = refresh::records(of_records, &view) => match never {},
        never = refresh::nodes(of_nodes, &view) => match never {},
        stopped = tokio::signal::ctrl_c() => {
            stopped?;
            Ok(Outcome::Fine)
        }
    }
}
