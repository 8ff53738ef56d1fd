//! `nebula-proxy`: a host without root and without a tun device joins the overlay, and its programs use it by SOCKS5,
//! HTTP CONNECT and port forwards.
//!
//! It reads the configuration of the `nebula` daemon and runs on `nebula-net`. `docs/proxy.md` says how to use it.
//!
//! A module imports only from lines below its own:
//!
//! - [`program`], [`fuzzing`]
//! - `socks`, `http`, `forward`, `serve`
//! - `listener`, `node`, `pipe`, `sessions`
//! - `overlay`, `head`, `kept`
//! - [`arguments`], `credentials`, [`target`]

pub mod arguments;
mod credentials;
mod forward;
#[doc(hidden)]
pub mod fuzzing;
mod head;
mod http;
mod kept;
mod listener;
mod node;
mod overlay;
mod pipe;
pub mod program;
mod serve;
mod sessions;
pub mod socks;
pub mod target;
