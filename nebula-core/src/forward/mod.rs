//! The forwarding plane: shared tables that lanes read without waiting, and one lane of scratch per thread.

mod buffers;
mod captured;
mod carrier;
pub mod checksum;
mod coalesce;
mod crc32c;
mod early;
mod echo;
mod egress;
mod explain;
mod fit;
mod forwarder;
mod gateways;
mod handed_over;
mod inbound;
mod ingress;
mod lane;
mod layout;
mod mss;
mod outbound;
mod piece;
#[cfg(test)]
mod recipe;
mod records;
mod reject;
mod relayed;
mod rewrite;
mod route;
mod seal;
mod segment;
mod sort;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod throttle;
mod translated;

pub use buffers::{Delivery, Received, Run};
pub(crate) use carrier::Carrier;
pub use echo::echo_reply;
pub use explain::{Capture, Route};
pub use forwarder::Forwarder;
pub(crate) use forwarder::LocalPolicy;
pub(crate) use gateways::Health;
pub use lane::Lane;
#[cfg(feature = "io")]
pub(crate) use segment::cut_delivery;
pub use segment::cut_packet;

pub use crate::wire::offload::{Offload, Segment, SegmentKind};
