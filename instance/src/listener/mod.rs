//! Sockets that serve strangers: deadlines, and an end that can be waited for.

pub(crate) mod deadline;
pub(crate) mod http;
pub(crate) mod until_stopped;
