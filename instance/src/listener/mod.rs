//! What the servers share: deadlines of connections, HTTP, and threads that can be stopped and joined.

pub(crate) mod deadline;
pub(crate) mod http;
pub(crate) mod until_stopped;
