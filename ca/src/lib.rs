//! The certificate service: decides who gets which Nebula certificate, signs it, and remembers that it did.
//!
//! A caller proves who it is ([`nebula_cert::issuance`] has the messages): a host with a one-time enrolment token, a
//! pod with its node's token or its own, the holder of a certificate with its key. If the policy says so, a Kubernetes
//! API server confirms tokens and pods, and nothing is issued while it is unavailable. The [`Policy`] decides who gets
//! what. The certificate is signed, written to the ledger, and only then handed out. Private keys of hosts never come
//! here.
//!
//! Certificates that are released or revoked, and those of deleted pods, are blocked until they expire; whoever follows
//! the trust bundle learns of it at once. [`Rollover`] replaces the CA itself.
//!
//! [`Server`] runs one service from one [`Directory`]; [`call`] sends it an operator's [`Command`]. Several services
//! can share one ledger in PostgreSQL.

mod address;
mod admission;
mod agents;
mod audit;
mod authority;
mod backup;
#[cfg_attr(not(feature = "kubernetes"), allow(dead_code, reason = "asked by nobody without the feature"))]
mod cluster;
mod connections;
mod control;
mod control_socket;
mod directory;
mod followers;
mod http;
mod init;
mod issuer;
mod ledger_copy;
mod members;
mod metrics;
mod operators;
mod page;
mod pod;
mod policy;
#[cfg(all(test, feature = "postgres"))]
#[path = "../tests/service/postgres_server.rs"]
#[allow(
    dead_code,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a helper of tests, which the tests of the service use more of"
)]
mod postgres_server;
mod proof;
mod quota;
mod rate_limit;
mod refusal;
mod refusal_throttle;
mod revocation;
mod rollover;
mod server;
mod service;
mod settings;
mod store;
mod time;
mod tls;
mod trust;
mod trust_config_map;

pub use address::{AddressMode, Subject};
pub use authority::{AuthorityError, PASSPHRASE, ca_curve};
pub use backup::{Backup, BackupError, back_up, restore};
pub use control::{Command, CommandOutcome, ListedAddress, ListedCertificate, ListedPod, ListedToken, NewToken};
pub use control_socket::{ControlError, call};
pub use directory::{Directory, FileError};
pub use followers::{Hears, ListedHolder, Unaware};
pub use init::{InitError, NewCa};
pub use pod::KubernetesPolicy;
pub use pod::PodFacts;
pub use policy::{PodPolicy, Policy, PolicyError};
pub use proof::token::{ENROLMENT_PREFIX, TokenHash, generate};
pub use refusal::Refusal;
pub use rollover::{Rollover, RolloverError};
pub use server::Server;
pub use settings::{ServeError, ServerSettings};
pub use store::{IssuedRecord, KeptAddresses, StoreError, TokenRecord, TokenUse};
pub use time::{now, parse_duration, time_left};
pub use tls::{TlsError, TlsIdentity, default_tls_names};
