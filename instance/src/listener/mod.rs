//! What servers share: deadlines of connections, HTTP, threads that stop and can be joined.

pub(crate) mod deadline;
pub(crate) mod http;
pub(crate) mod until_stopped;
