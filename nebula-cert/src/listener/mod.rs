//! What our programs share where they listen: all addresses of a system with or without IPv6 ([`listen`]), whose a connection is
//! ([`Source`]), and how many there may be at a time without one source keeping the others out ([`Places`]). Not about certificates; it is in this crate because all
//! programs have it.

mod everywhere;
mod places;
mod source;

pub use everywhere::listen;
pub use places::{Place, Places};
pub use source::Source;
