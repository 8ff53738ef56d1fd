//! The certificate service: decides who gets which Nebula certificate, signs it, and remembers that it did.
//!
//! A caller proves who it is, with a one-time enrolment token or, for a pod, with the token of its node
//! ([`nebula_cert::issuance`] has the messages). The [`Policy`] says what it gets. The certificate is signed, written
//! to the ledger, and only then handed out. Private keys of hosts never come here.
//!
//! `Server` runs one service from one [`Directory`]; [`call`] gives an operator's [`Command`] to it.
//!
//! Not here: who a Kubernetes service account is, several services on one database, and keys in hardware.

mod address;
mod audit;
mod authority;
mod control;
mod control_socket;
mod directory;
mod http;
mod init;
mod issuer;
mod policy;
mod proof;
mod rate_limit;
mod refusal;
mod server;
mod store;
mod time;
mod trust;

pub use address::{AddressMode, Subject};
pub use authority::{AuthorityError, PASSPHRASE};
pub use control::{Answer, Command, ListedCertificate, ListedToken, NewToken};
pub use control_socket::{ControlError, call};
pub use directory::{Directory, FileError};
pub use init::{InitError, NewCa, default_tls_names};
pub use policy::{PodPolicy, Policy, PolicyError};
pub use proof::token::{ENROLMENT_PREFIX, TokenHash, generate};
pub use refusal::Refusal;
pub use server::{ServeError, Server, Settings};
pub use store::{IssuedRecord, StoreError, TokenRecord, TokenUse};
pub use time::{now, parse_duration, time_left};
