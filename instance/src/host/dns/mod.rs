//! Names of the overlay: the DNS server of a lighthouse, and the resolver of a host, which asks it.

mod lighthouse;
mod message;
mod records;
mod resolved;
mod resolver;
mod reverse;
mod server;

pub(crate) use lighthouse::Served;
pub(crate) use resolver::Resolving;
pub(crate) use server::Server;
