//! The pod's network where this plugin is the first of its list (`"primary": true`): an interface, addresses and
//! routes of our own, and no other plugin.
//!
//! | file | what |
//! | --- | --- |
//! | `settings.rs` | the keys |
//! | `range.rs` | which address comes next |
//! | `leases.rs` | which container has which address |
//! | `delegate.rs` | addresses from another plugin |
//! | `network.rs` | makes, checks and removes all of it |
//! | `forwarding.rs` | lets the node route |
//! | `result.rs` | the result of ADD |
//!
//! The links and rules themselves are in `link/`: `veth.rs`, `own_source.rs`, `masquerade.rs`. Once there is a result,
//! a pod gets its tunnel as behind any other plugin.

mod delegate;
mod forwarding;
pub mod leases;
pub mod network;
pub mod range;
mod result;
pub mod settings;
