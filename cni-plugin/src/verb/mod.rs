//! The verbs: each turns a request into the text for stdout.

pub mod add;
pub mod attach;
pub mod check;
pub mod del;
pub mod gc;
mod node_token;
pub mod present;
pub mod reconcile;
pub mod refresh;
pub mod status;
pub mod table;
pub mod upgrade;

use crate::host::Host;
use crate::reply::{self, Error};
use crate::request::Request;

/// Answers a request. Returns the text for stdout, which is empty for verbs without a result.
///
/// # Errors
/// Returns the error to print.
pub fn answer(request: &Request, host: &Host<'_>) -> Result<String, Error> {
    let silent = |()| String::new();
    match request {
        Request::Add(add) => add::run(add, host),
        Request::Check(check) => check::run(check, host).map(silent),
        Request::Del(del) => del::run(del, host).map(silent),
        Request::Gc(gc) => gc::run(gc, host).map(silent),
        Request::Status(config) => status::run(config, host).map(silent),
        Request::Version(asked) => Ok(reply::version(asked.as_deref())),
    }
}
