//! The answers of the control socket: what the daemon writes and `nebula ctl` reads.
//!
//! Programs read them, too (`nebula ctl --json`), so a field keeps its name and meaning. A field that a document
//! lacks, because a daemon of another release wrote it, reads as absent, empty or false; one that is not known is
//! skipped.

mod certificate;
mod facts;
mod peer;
mod status;
#[cfg(test)]
mod tests;
mod trace;
mod tunnel;

pub use certificate::{Certificate, Certificates, Details, Identity, Validity};
pub use facts::{
    Clock, ClockStep, Configuration, Double, Drop, Elsewhere, Facts, GatewayFacts, Host, LighthouseFacts, Link, Mtu,
    NetworkRoute, RefusedRelaying, RegisteredNames, ReplacedRoute, RoutedSubnet, SameName, SendFailure, TrustedCa,
    UnderlayPath,
};
pub use peer::{
    Attempt, Endpoint, Found, Known, LighthouseAnswer, PeerFacts, PeerTunnel, Probe, Refusal, RelayHop, RelayTunnel,
    Reported, Tried, Unheard,
};
pub use status::{FullFlowTable, LastReload, Lighthouse, MissingListener, OfferedRelay, Status, Unmet};
pub use trace::{Captured, Conntrack, Ends, FirewallVerdict, KernelRoute, NearestRule, NumberedRule, Route, Trace};
pub use tunnel::{Closed, Gateway, Gateways, Level, Path, Peers, Tunnel, TunnelOfPeer, Tunnels, Upgraded};
