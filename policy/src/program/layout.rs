//! The checked header of a program, and access to its records.

use super::Direction;
use super::format::{
    Error, HEADER_LEN, MAGIC, MAJOR, MAX_ROWS, MIN_SECTIONS, NONE, SECTION_LEN, SECTIONS, SectionKind,
};
use super::verdict::Identity;

/// The checked header of a program. Whoever keeps the bytes of a program reads it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub(super) direction: Direction,
    pub(super) flags: u8,
    pub(super) identity: Option<Identity>,
    pub(super) admin_end: u32,
    pub(super) policies_end: u32,
    pub(super) outside: u32,
    pub(super) audited: u32,
    pub(super) isolating: [u32; 2],
    sections: [Section; SECTIONS],
}

/// Where the records of one section are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Section {
    offset: usize,
    count: u32,
    stride: usize,
}

/// A program and its header.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    pub(super) layout: Layout,
    bytes: &'a [u8],
}

impl Layout {
    /// Reads the header of `bytes`, in constant time: records are checked when they are used.
    ///
    /// # Errors
    /// Returns an error if the bytes are no program, one of another major version, shorter than the header says, or
    /// larger than a program may be.
    pub fn read(bytes: &[u8]) -> Result<Self, Error> {
        let header: Record<'_, HEADER_LEN> = bytes.first_chunk().map(Record).ok_or(Error::NotAProgram)?;
        if !bytes.starts_with(&MAGIC) {
            return Err(Error::NotAProgram);
        }
        let major = header.u16(10);
        if major != MAJOR {
            return Err(Error::OtherFormat { found: major });
        }
        let (expected, found) = (header.u32(16), bytes.len());
        let bytes = bytes.get(..expected as usize).ok_or(Error::Truncated { expected, found })?;
        let count = header.u32(12) as usize;
        if count < MIN_SECTIONS {
            return Err(Error::Header);
        }
        let mut sections = [Section::default(); SECTIONS];
        for (place, (section, kind)) in sections.iter_mut().zip(SectionKind::ALL).take(count).enumerate() {
            *section = read_section(bytes, place, kind).ok_or(Error::Section(place))?;
        }
        let direction = match header.u8(20) {
            0 => Direction::Ingress,
            1 => Direction::Egress,
            _ => return Err(Error::Header),
        };
        let layout = Self {
            direction,
            flags: header.u8(21),
            identity: Identity::new(header.u32(24)),
            admin_end: header.u32(28),
            policies_end: header.u32(32),
            outside: header.u32(36),
            audited: header.u32(40),
            isolating: [header.u32(44), header.u32(48)],
            sections,
        };
        let rows = layout.count(SectionKind::Rows);
        if rows > MAX_ROWS {
            return Err(Error::Section(SectionKind::Rows as usize));
        }
        let is_ordered = layout.admin_end <= layout.policies_end && layout.policies_end <= rows;
        if is_ordered { Ok(layout) } else { Err(Error::Header) }
    }

    /// The program, whose bytes are those that [`Layout::read`] got. With other bytes verdicts are wrong, and nothing
    /// else happens.
    #[must_use]
    pub const fn program<'a>(&self, bytes: &'a [u8]) -> Program<'a> {
        Program { layout: *self, bytes }
    }

    fn section(&self, kind: SectionKind) -> Section {
        // One for each kind, in their order.
        self.sections.get(kind as usize).copied().unwrap_or_default()
    }

    pub(super) fn count(&self, kind: SectionKind) -> u32 {
        self.section(kind).count
    }
}

impl<'a> Program<'a> {
    /// Reads the header of `bytes`, as [`Layout::read`] does.
    ///
    /// # Errors
    /// As [`Layout::read`].
    pub fn read(bytes: &'a [u8]) -> Result<Self, Error> {
        Layout::read(bytes).map(|layout| layout.program(bytes))
    }

    /// Which flows of its pod it judges.
    #[must_use]
    pub const fn direction(&self) -> Direction {
        self.layout.direction
    }

    /// The bytes of a record, as many as this release knows.
    #[inline]
    pub(super) fn record<const N: usize>(&self, kind: SectionKind, index: u32) -> Option<Record<'a, N>> {
        let section = self.layout.section(kind);
        if index >= section.count {
            return None;
        }
        let at = section.stride.checked_mul(index as usize)?.checked_add(section.offset)?;
        self.bytes.get(at..)?.first_chunk().map(Record)
    }

    /// The bytes of `count` records of a packed section, from `first` on.
    #[inline]
    pub(super) fn packed(&self, kind: SectionKind, first: u32, count: u32) -> Option<&'a [u8]> {
        let section = self.layout.section(kind);
        let end = first.checked_add(count)?;
        if end > section.count {
            return None;
        }
        let at = section.stride.checked_mul(first as usize)?.checked_add(section.offset)?;
        let len = section.stride.checked_mul(count as usize)?;
        self.bytes.get(at..at.checked_add(len)?)
    }

    /// A mask, by its number.
    #[inline]
    pub(super) fn mask(&self, number: u32) -> Option<Mask<'a>> {
        if number == NONE {
            return Some(Mask(&[]));
        }
        let words = self.layout.count(SectionKind::Rows).div_ceil(64);
        self.packed(SectionKind::Masks, number.checked_mul(words)?, words).map(Mask)
    }

    /// The last of the records from `first` to `end` of which `is_until` says that its key is at most the wanted one.
    /// The outer `None`: a record is outside.
    #[inline]
    pub(super) fn last_until<const N: usize>(
        &self,
        kind: SectionKind,
        (mut first, mut end): (u32, u32),
        is_until: impl Fn(Record<'a, N>) -> bool,
    ) -> Option<Option<Record<'a, N>>> {
        let mut last = None;
        while first < end {
            let middle = first.midpoint(end);
            let record = self.record(kind, middle)?;
            if is_until(record) {
                last = Some(record);
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        Some(last)
    }
}

/// A set of rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mask<'a>(&'a [u8]);

impl Mask<'_> {
    /// No row.
    pub(super) const EMPTY: Self = Mask(&[]);

    /// The rows from `64 * place` on.
    #[inline]
    pub(super) fn word(self, place: u32) -> u64 {
        let at = place as usize * 8;
        self.0.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }
}

/// One record of a section.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record<'a, const N: usize>(pub(super) &'a [u8; N]);

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

    pub(super) fn u128(self, at: usize) -> u128 {
        u128::from_le_bytes(self.field(at))
    }

    /// Zeroes outside the record, which no field of this release is.
    #[inline(always)]
    fn field<const M: usize>(self, at: usize) -> [u8; M] {
        self.0.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; M])
    }
}

fn read_section(bytes: &[u8], place: usize, kind: SectionKind) -> Option<Section> {
    let entry: Record<'_, SECTION_LEN> = bytes.get(HEADER_LEN + place * SECTION_LEN..)?.first_chunk().map(Record)?;
    let (offset, count, stride) = (entry.u32(0) as usize, entry.u32(4), entry.u32(8) as usize);
    let end = stride.checked_mul(count as usize)?.checked_add(offset)?;
    let fits = if kind.is_packed() { stride == kind.record_len() } else { stride >= kind.record_len() };
    (fits && end <= bytes.len()).then_some(Section { offset, count, stride })
}
