//! SOCKS5 (RFC 1928) with user and password (RFC 1929): CONNECT and UDP ASSOCIATE.

mod associate;
pub mod message;
pub(crate) mod owner;
mod server;

pub(crate) use server::{LOGIN_DELAY, Server, log_denied, read_request, serve};
