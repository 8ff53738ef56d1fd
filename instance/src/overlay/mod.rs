//! What both products need around a tunnel: the device, its addresses and its routes.

pub(crate) mod lan;
pub mod link;
