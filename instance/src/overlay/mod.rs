//! What both products need around a tunnel: the device, its addresses and its routes, and memory that is given back.

pub(crate) mod idle;
pub(crate) mod lan;
mod leftovers;
pub mod link;
pub(crate) mod stored_tun;
