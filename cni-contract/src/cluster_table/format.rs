//! The bytes of a table. All integers are little-endian, all offsets count from the start of the file, and nothing
//! needs alignment. Addresses are 16 octets in network order, IPv4 addresses those mapped into IPv6 (`::ffff:a.b.c.d`).
//!
//! | offset | bytes | header |
//! | --- | --- | --- |
//! | 0 | 8 | `nebcltbl` |
//! | 8 | 4 | format: minor version in the low 16 bits, major version in the high 16 bits |
//! | 12 | 4 | number of sections, at least 9 |
//! | 16 | 8 | length of the table |
//! | 24 | 8 | version of the contents, which rises with every change |
//! | 32 | 8 | seed of the hash tables |
//! | 40 | 16 each | sections: offset (8), number of records (4), bytes per record (4) |
//!
//! | section | record | at least |
//! | --- | --- | --- |
//! | 0 pod buckets | u32 first pod of the bucket; one record more than there are buckets | 4 |
//! | 1 pods | address (16), incarnation (8) | 24 |
//! | 2 clear buckets | u32 | 4 |
//! | 3 clear | address known not to be enrolled (16) | 16 |
//! | 4 clear ranges | first and last address (32); in order, disjoint | 32 |
//! | 5 sealed ranges | the same | 32 |
//! | 6 service buckets | u32 | 4 |
//! | 7 services | address (16), port (2), IP protocol (1), kind (1), first endpoint (4), enrolled endpoints to choose from (4), enrolled endpoints in all (4), seconds of session affinity or 0 (4), endpoints to choose from that are not enrolled (4), port of the endpoints (2), zero (2) | 44 |
//! | 8 endpoints | index of the pod (4), port or 0 (2), tag (2) | 8 |
//! | 9 nodes | address of a node (16); in order; since version 2.1 | 16 |
//! | 10 ends | index of the pod (4), port (2), another port or 0 (2), address of its node (16); in order, at most one for each pod; since version 2.2 | 24 |
//! | 11 identities | index of the pod (4), number of its set of labels (4); in order; since version 2.3 | 8 |
//! | 12 programs | address (16), ingress program (8), egress program (8); in order; since version 2.3 | 32 |
//! | 13 bytes of programs | since version 2.3 | 1 |
//!
//! A key's bucket is its hash modulo the number of buckets, which is a power of two. The hash of a key (address, n)
//! is `m(m(m(seed ^ high) ^ low) ^ n)`, where `high` and `low` are the halves of the address read as a big-endian
//! number and `m` is the finalizer of SplitMix64; n is 0 for addresses and `port << 8 | protocol` for services.
//!
//! Kinds of services: 0 is a port with the endpoints that the record counts, which may be none; 1 is a port with
//! endpoints, none of which is an enrolled pod or known not to be one; 2 says that the address is a Service's, with
//! port and protocol 0. The enrolled endpoints of a service are listed: first those to choose from, then those that
//! only serve the flows they have, each group ordered by (index of the pod, port). Ports of a Service with the same
//! endpoints share one list, whose records have port 0: each service's record has the port then. Of endpoints that
//! are not enrolled there is only the number: a flow to one of them leaves on the primary network, whose own choice
//! counts. A tag, from 1 on, tells an enrolled endpoint from the others of its group. It follows from addresses
//! alone, so it stays the same in later tables: by it an instance chooses the same endpoint for the same flow again.
//!
//! A Service's port on the nodes (node port) is a service with the unspecified address of its family. It stands for
//! this port of each address of a node, unless that has a service of its own.
//!
//! Pods whose labels policies cannot tell apart have the same number; 0xffffffff is that of a machine that is no pod.
//! The labels of an enrolled address without a record of identities are not known yet. A program is its first byte in
//! the next section (4) and its length (4). A pod of this node has programs, whatever policies there are, if the agent
//! enforces policies: see the crate `nebula-cni-policy`, which reads them.
//!
//! An end says where the tunnel of a pod probably ends: at these UDP ports of its node's address. The pod's certificate
//! proves whether it does.
//!
//! A reader refuses another major version. A minor version may add sections and lengthen records; readers skip both.

/// First bytes of a table.
pub(super) const MAGIC: [u8; 8] = *b"nebcltbl";
/// Major version; a reader refuses any other.
pub const MAJOR: u16 = 2;
/// Minor version.
pub const MINOR: u16 = 3;

pub(super) const HEADER_LEN: usize = 40;
pub(super) const SECTION_LEN: usize = 16;
pub(super) const SECTIONS: usize = 14;
/// Tables of version 2.0 have so many.
const SECTIONS_AT_LEAST: usize = 9;

/// Why a file is not a table that this release reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It does not begin like one.
    #[error("it is not a cluster table")]
    NotATable,
    /// It is of a release with another format.
    #[error(
        "its format is version {found}, and this release reads version {MAJOR}: agent and instance are of different releases"
    )]
    OtherFormat {
        /// Its major version.
        found: u16,
    },
    /// It is shorter than it says.
    #[error("it is truncated: {found} bytes of {expected}")]
    Truncated {
        /// Bytes that it says it has.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// A section does not fit into it, or its records are too short.
    #[error("its section {0} is malformed")]
    Malformed(usize),
}

/// The sections of a table, by their place in the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SectionKind {
    PodBuckets,
    Pods,
    ClearBuckets,
    Clear,
    ClearRanges,
    SealedRanges,
    ServiceBuckets,
    Services,
    Endpoints,
    Nodes,
    Ends,
    Identities,
    Programs,
    ProgramBytes,
}

impl SectionKind {
    pub(super) const ALL: [Self; SECTIONS] = [
        Self::PodBuckets,
        Self::Pods,
        Self::ClearBuckets,
        Self::Clear,
        Self::ClearRanges,
        Self::SealedRanges,
        Self::ServiceBuckets,
        Self::Services,
        Self::Endpoints,
        Self::Nodes,
        Self::Ends,
        Self::Identities,
        Self::Programs,
        Self::ProgramBytes,
    ];

    /// Bytes of a record that this release knows.
    pub(super) const fn record_len(self) -> usize {
        match self {
            Self::PodBuckets | Self::ClearBuckets | Self::ServiceBuckets => 4,
            Self::Pods | Self::Ends => 24,
            Self::Clear | Self::Nodes => 16,
            Self::ClearRanges | Self::SealedRanges | Self::Programs => 32,
            Self::Services => 44,
            Self::Endpoints | Self::Identities => 8,
            Self::ProgramBytes => 1,
        }
    }

    const fn is_buckets(self) -> bool {
        matches!(self, Self::PodBuckets | Self::ClearBuckets | Self::ServiceBuckets)
    }
}

/// Where the records of one section are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Section {
    pub(super) offset: usize,
    pub(super) count: u32,
    stride: usize,
}

impl Section {
    /// A part of a section whose records are single bytes.
    pub(super) fn bytes(self, bytes: &[u8], first: u32, len: u32) -> Option<&[u8]> {
        let end = first.checked_add(len).filter(|end| *end <= self.count && self.stride == 1)?;
        bytes.get(self.offset..)?.get(first as usize..end as usize)
    }

    /// The bytes of a record, as many as this release knows.
    #[inline(always)]
    pub(super) fn record<const N: usize>(self, bytes: &[u8], index: u32) -> Option<Record<'_, N>> {
        if index >= self.count {
            return None;
        }
        let at = self.stride.checked_mul(index as usize)?.checked_add(self.offset)?;
        bytes.get(at..)?.first_chunk().map(Record)
    }
}

/// One record of a section.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record<'a, const N: usize>(&'a [u8; N]);

impl<const N: usize> Record<'_, N> {
    pub(super) fn u8(self, at: usize) -> u8 {
        u8::from_le_bytes(self.field(at))
    }

    pub(super) fn u16(self, at: usize) -> u16 {
        u16::from_le_bytes(self.field(at))
    }

    pub(super) fn u32(self, at: usize) -> u32 {
        u32::from_le_bytes(self.field(at))
    }

    pub(super) fn u64(self, at: usize) -> u64 {
        u64::from_le_bytes(self.field(at))
    }

    pub(super) fn address(self, at: usize) -> u128 {
        u128::from_be_bytes(self.field(at))
    }

    /// Zeroes outside the record, which no field of this release is.
    #[inline(always)]
    fn field<const M: usize>(self, at: usize) -> [u8; M] {
        self.0.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; M])
    }
}

/// The checked header of a table. Whoever keeps a table's bytes reads it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub(super) version: u64,
    pub(super) seed: u64,
    sections: [Section; SECTIONS],
}

impl Layout {
    /// Reads the header of `bytes`, in constant time: records are checked when they are used.
    ///
    /// # Errors
    /// Returns an error if the bytes are no table, one of another major version, or shorter than the header says.
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        let header: Record<'_, HEADER_LEN> = bytes.first_chunk().map(Record).ok_or(Error::NotATable)?;
        if !bytes.starts_with(&MAGIC) {
            return Err(Error::NotATable);
        }
        let major = header.u16(10);
        if major != MAJOR {
            return Err(Error::OtherFormat { found: major });
        }
        let (expected, found) = (header.u64(16), bytes.len() as u64);
        let bytes = usize::try_from(expected).ok().and_then(|len| bytes.get(..len));
        let bytes = bytes.ok_or(Error::Truncated { expected, found })?;
        let mut sections = [Section::default(); SECTIONS];
        for (place, (section, kind)) in sections.iter_mut().zip(SectionKind::ALL).enumerate() {
            if place >= header.u32(12) as usize {
                if place < SECTIONS_AT_LEAST {
                    return Err(Error::Malformed(place));
                }
                break;
            }
            *section = read_section(bytes, place, kind).ok_or(Error::Malformed(place))?;
        }
        Ok(Self { version: header.u64(24), seed: header.u64(32), sections })
    }

    /// Version of the contents.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn section(&self, kind: SectionKind) -> Section {
        // One for each kind, in their order.
        self.sections.get(kind as usize).copied().unwrap_or_default()
    }
}

/// The version that the head of a file says, whatever follows; `None` if it is no table.
#[must_use]
pub fn version_of(head: &[u8]) -> Option<u64> {
    let header: Record<'_, HEADER_LEN> = head.first_chunk().map(Record)?;
    head.starts_with(&MAGIC).then(|| header.u64(24))
}

fn read_section(bytes: &[u8], place: usize, kind: SectionKind) -> Option<Section> {
    let entry: Record<'_, SECTION_LEN> = bytes.get(HEADER_LEN + place * SECTION_LEN..)?.first_chunk().map(Record)?;
    let offset = usize::try_from(entry.u64(0)).ok()?;
    let (count, stride) = (entry.u32(8), usize::try_from(entry.u32(12)).ok()?);
    let end = stride.checked_mul(count as usize)?.checked_add(offset)?;
    let is_whole = stride >= kind.record_len() && end <= bytes.len();
    let has_buckets = !kind.is_buckets() || count.checked_sub(1).is_some_and(u32::is_power_of_two);
    (is_whole && has_buckets).then_some(Section { offset, count, stride })
}
