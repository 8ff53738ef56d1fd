//! Helpers for the benchmarks: simulated hosts, prepared packets and measured steps.

mod cluster;
pub mod heap;
mod host;
mod packet;
mod step;

use std::time::Duration;

use criterion::Criterion;

pub use cluster::{capture, service};
pub use host::{Host, connect, identity, network};
pub use packet::{Stream, readdress, tcp_acknowledgement, tcp_super_packet, udp};
pub use step::{Go, NO_GO, Step, cpu_time, note};

/// Criterion set up for short runs: the whole suite takes less than three minutes.
#[must_use]
pub fn criterion() -> Criterion {
    Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}

/// Whether each benchmark runs only once, to check that it works.
#[must_use]
pub fn is_smoke_test() -> bool {
    std::env::args().any(|arg| arg == "--test")
}
