//! The bytes of a program. All integers are little-endian, all offsets count from the start, nothing needs alignment.
//!
//! | offset | bytes | header |
//! | --- | --- | --- |
//! | 0 | 8 | `nebpolcy` |
//! | 8 | 4 | format: minor version in the low 16 bits, major version in the high 16 bits |
//! | 12 | 4 | number of sections, at least 13 |
//! | 16 | 4 | length of the program |
//! | 20 | 1 | direction: 0 ingress, 1 egress |
//! | 21 | 1 | flags: 1 closed, 2 has audited policies, 4 has enforced policies |
//! | 22 | 2 | zero |
//! | 24 | 4 | identity of the pod |
//! | 28 | 4 | end of the rows of tier Admin |
//! | 32 | 4 | end of the rows of NetworkPolicies, where those of tier Baseline begin |
//! | 36 | 4 | mask of the rows that match peers that are no pods |
//! | 40 | 4 | mask of the rows of audited policies |
//! | 44 | 4 | the first enforced policy that isolates the pod, or none |
//! | 48 | 4 | the first policy that isolates the pod, enforced or audited, or none |
//! | 52 | 4 | zero |
//! | 56 | 12 each | sections: offset (4), number of records (4), bytes per record (4) |
//!
//! | section | record | at least |
//! | --- | --- | --- |
//! | 0 rows | policy (4), place of the rule in it (2), action (1), zero (1), rule's name: offset in the strings (4), length (4) | 16 |
//! | 1 masks | 64 rows, the first one in the lowest bit; as many records for each mask as the rows need | 8 |
//! | 2 classes | mask (4), first of its named ports (4), number of them (4) | 12 |
//! | 3 runs | first identity (4), class (4); in order, each until the next | 8 |
//! | 4 dense | class (2) of the identity that is the record's place | 2 |
//! | 5 named ports | protocol and port (4), mask (4); in order within one class | 8 |
//! | 6 ports | first protocol and port (4), mask (4); in order, each until the next | 8 |
//! | 7 IPv4 | first address (4), mask (4); in order, each until the next | 8 |
//! | 8 IPv6 | first address (16), mask (4); in order, each until the next | 20 |
//! | 9 own | address of the pod (16) | 16 |
//! | 10 node | address of its node (16); in order | 16 |
//! | 11 policies | name: offset in the strings (4), length (2), tier (1), flags (1): 1 audited, 2 isolates; priority (2), zero (2) | 12 |
//! | 12 strings | UTF-8 | 1 |
//! | 13 groups | name: offset in the strings (4), length (4), mask (4); in the order of the names; missing where no policy names any | 12 |
//!
//! A row is a rule. Rows are in the order of evaluation: tier Admin, NetworkPolicies, tier Baseline, and within a tier
//! by priority, name and place in the policy. A mask is a set of rows. A flow matches the rows
//! `(peer | address) & (port | named port)`: `peer` is the mask of the class of the peer's identity, or for a peer that
//! is no pod the one in the header; `address` follows from the peer's address, `port` from protocol and destination
//! port, and `named port` from the same by the list of the peer's class (egress only: the names of the pod's own ports
//! are resolved by the compiler). Mask `0xffffffff` is the empty one.
//!
//! A peer that is no pod and carries a group also matches `group & port` in the rows of NetworkPolicies. Readers of
//! minor version 0 do not know groups, and refuse such peers.
//!
//! Class 0 is that of every pod that is not in the runs or, if there are any dense records, beyond them. A program has
//! runs or dense records, whichever are smaller. Protocol and port are `protocol << 16 | port`. Addresses of 16 octets
//! are in network order, IPv4 ones those mapped into IPv6; those of sections 7 and 8 are numbers.
//! Actions: 0 accept, 1 deny, 2 pass. Tiers: 0 Admin, 1 NetworkPolicy, 2 Baseline.
//!
//! A reader refuses another major version. A minor version may add sections and lengthen records; readers skip both.

use core::fmt;
use core::net::IpAddr;

/// First bytes of a program.
pub(crate) const MAGIC: [u8; 8] = *b"nebpolcy";
/// Major version; a reader refuses any other.
pub const MAJOR: u16 = 1;
/// Minor version of programs with groups; others have 0.
pub const MINOR: u16 = 1;
/// A program has at most this many rows. It bounds what one verdict may cost.
pub const MAX_ROWS: u32 = 8192;

pub(crate) const HEADER_LEN: usize = 56;
pub(crate) const SECTION_LEN: usize = 12;
pub(crate) const SECTIONS: usize = 14;
/// Those of minor version 0.
pub(crate) const MIN_SECTIONS: usize = 13;

pub(crate) const FLAG_CLOSED: u8 = 1;
pub(crate) const FLAG_AUDITED: u8 = 2;
pub(crate) const FLAG_ENFORCED: u8 = 4;
pub(crate) const POLICY_AUDITED: u8 = 1;
pub(crate) const POLICY_ISOLATES: u8 = 2;
/// No mask, or no policy.
pub(crate) const NONE: u32 = u32::MAX;

/// What a row does with the flows that it matches.
pub(crate) mod action {
    pub(crate) const ACCEPT: u8 = 0;
    pub(crate) const DENY: u8 = 1;
    pub(crate) const PASS: u8 = 2;
}

/// Protocol and port as one number. Only protocols with ports have one.
pub(crate) const fn port_key(protocol: u8, port: u16) -> u32 {
    (protocol as u32) << 16 | port as u32
}

/// An address as 16 octets.
pub(crate) fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Why bytes are not a program that this release reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// They do not begin like one.
    NotAProgram,
    /// They are of a release with another format.
    OtherFormat {
        /// Their major version.
        found: u16,
    },
    /// They are fewer than the header says.
    Truncated {
        /// Bytes that the header says.
        expected: u32,
        /// Bytes that there are.
        found: usize,
    },
    /// A number in the header is impossible.
    Header,
    /// A section is outside, or its records are too short or too many.
    Section(usize),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAProgram => write!(f, "it is not a policy program"),
            Self::OtherFormat { found } => {
                write!(f, "its format is version {found}, and this release reads version {MAJOR}")
            }
            Self::Truncated { expected, found } => write!(f, "it is truncated: {found} bytes of {expected}"),
            Self::Header => write!(f, "its header is malformed"),
            Self::Section(place) => write!(f, "its section {place} is malformed"),
        }
    }
}

impl core::error::Error for Error {}

/// The sections of a program, by their place in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SectionKind {
    Rows,
    Masks,
    Classes,
    Runs,
    Dense,
    NamedPorts,
    Ports,
    V4,
    V6,
    Own,
    Node,
    Policies,
    Strings,
    Groups,
}

impl SectionKind {
    pub(crate) const ALL: [Self; SECTIONS] = [
        Self::Rows,
        Self::Masks,
        Self::Classes,
        Self::Runs,
        Self::Dense,
        Self::NamedPorts,
        Self::Ports,
        Self::V4,
        Self::V6,
        Self::Own,
        Self::Node,
        Self::Policies,
        Self::Strings,
        Self::Groups,
    ];

    /// Bytes of a record that this release knows.
    pub(crate) const fn record_len(self) -> usize {
        match self {
            Self::Strings => 1,
            Self::Dense => 2,
            Self::Masks | Self::Runs | Self::NamedPorts | Self::Ports | Self::V4 => 8,
            Self::Classes | Self::Policies | Self::Groups => 12,
            Self::Rows | Self::Own | Self::Node => 16,
            Self::V6 => 20,
        }
    }

    /// Whether the records are read as one run of bytes, so that later releases may not lengthen them.
    pub(super) const fn is_packed(self) -> bool {
        matches!(self, Self::Masks | Self::Strings)
    }
}
