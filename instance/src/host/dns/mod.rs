//! Names of the overlay: the DNS server of a lighthouse, and the resolver of a host, which asks it.

mod answer_limit;
mod command;
mod lighthouse;
mod message;
mod openresolv;
mod records;
mod registration;
mod resolved;
mod resolver;
mod reverse;
mod server;

pub(crate) use lighthouse::Served;
pub(crate) use registration::Registered;
pub(crate) use resolver::{HostResolver, Resolving};
pub(crate) use server::Server;
