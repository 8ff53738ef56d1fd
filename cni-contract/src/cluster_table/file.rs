//! The bytes of a table as they are put together, and put together again with other policies.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::format::{HEADER_LEN, MAGIC, MAJOR, MINOR, SECTION_LEN, SECTIONS, SectionKind};
use super::key_of;
use super::table::{NO_POD, Table, search};

/// The programs of pods by address, for ingress and egress.
pub(super) type Programs = BTreeMap<u128, [Vec<u8>; 2]>;

/// The table's bytes so far.
pub(super) struct File {
    header: Vec<u8>,
    /// What comes after the header.
    records: Vec<u8>,
    version: u64,
    seed: u64,
}

impl File {
    pub(super) fn new(version: u64, seed: u64) -> Self {
        Self { header: Vec::new(), records: Vec::new(), version, seed }
    }

    /// Appends a section; they come in the order of [`SectionKind::ALL`].
    pub(super) fn section<const N: usize>(
        &mut self,
        kind: SectionKind,
        records: impl ExactSizeIterator<Item = [u8; N]>,
    ) {
        debug_assert_eq!(N, kind.record_len());
        self.begin(kind, records.len());
        self.records.reserve(records.len() * N);
        for record in records {
            self.records.extend_from_slice(&record);
        }
    }

    /// Appends a section of bytes, which come in pieces.
    fn bytes<'a>(&mut self, kind: SectionKind, pieces: impl Iterator<Item = &'a Vec<u8>> + Clone) {
        let len = pieces.clone().map(Vec::len).sum();
        self.begin(kind, len);
        self.records.reserve(len);
        pieces.for_each(|piece| self.records.extend_from_slice(piece));
    }

    /// Appends the programs of pods, the last sections of a table.
    pub(super) fn programs(&mut self, programs: &Programs) {
        let mut end = 0;
        let mut place = |program: &Vec<u8>| {
            let (first, len) = (end, number(program.len()));
            end += len;
            [first, len].map(u32::to_le_bytes)
        };
        let placed = programs.iter().map(|(address, programs)| {
            let [ingress, egress] = programs.each_ref().map(&mut place);
            record(&[&address.to_be_bytes(), ingress.as_flattened(), egress.as_flattened()])
        });
        self.section::<32>(SectionKind::Programs, placed.collect::<Vec<_>>().into_iter());
        self.bytes(SectionKind::ProgramBytes, programs.values().flatten());
    }

    fn begin(&mut self, kind: SectionKind, records: usize) {
        debug_assert_eq!(self.header.len(), kind as usize * SECTION_LEN);
        let offset = (RECORDS + self.records.len()) as u64;
        self.header.extend(offset.to_le_bytes());
        self.header.extend(number(records).to_le_bytes());
        self.header.extend(number(kind.record_len()).to_le_bytes());
    }

    pub(super) fn finish(self) -> Vec<u8> {
        let len = HEADER_LEN + self.header.len() + self.records.len();
        let mut bytes = Vec::with_capacity(len);
        bytes.extend(MAGIC);
        bytes.extend(Self::release().as_flattened());
        bytes.extend((len as u64).to_le_bytes());
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.seed.to_le_bytes());
        bytes.extend(self.header);
        bytes.extend(self.records);
        bytes
    }

    /// What the header says of the format.
    const fn release() -> [[u8; 4]; 2] {
        let format = (MAJOR as u32) << 16 | MINOR as u32;
        [format.to_le_bytes(), (SECTIONS as u32).to_le_bytes()]
    }
}

impl Table<'_> {
    /// The bytes of this table with another version, with these numbers for enrolled addresses, and with these programs
    /// in place of all others. `None` if an address has no number in it, or another release built it.
    #[must_use]
    pub fn with_policies(
        &self,
        version: u64,
        numbers: &[(IpAddr, Option<u32>)],
        programs: impl IntoIterator<Item = (IpAddr, [Vec<u8>; 2])>,
    ) -> Option<Vec<u8>> {
        let release = File::release();
        if self.bytes.get(MAGIC.len()..MAGIC.len() + release.as_flattened().len())? != release.as_flattened() {
            return None;
        }
        let [identities, first] =
            [SectionKind::Identities, SectionKind::Programs].map(|kind| self.layout.section(kind));
        let mut file = File {
            header: self.bytes.get(HEADER_LEN..HEADER_LEN + SectionKind::Programs as usize * SECTION_LEN)?.to_vec(),
            records: self.bytes.get(RECORDS..first.offset)?.to_vec(),
            version,
            seed: self.layout.seed,
        };
        for (address, number) in numbers {
            let (pod, _) = self.pod(key_of(*address))?;
            let compare = |index| Some(identities.record::<8>(self.bytes, index)?.u32(0).cmp(&pod));
            let record = identities.offset.checked_add(8 * search(0..identities.count, compare)? as usize)?;
            let place = record.checked_sub(RECORDS)?.checked_add(4)?;
            file.records
                .get_mut(place..)?
                .first_chunk_mut()
                .map(|place| *place = number.unwrap_or(NO_POD).to_le_bytes())?;
        }
        file.programs(&programs.into_iter().map(|(address, programs)| (key_of(address), programs)).collect());
        Some(file.finish())
    }
}

/// Where records begin.
const RECORDS: usize = HEADER_LEN + SECTIONS * SECTION_LEN;

/// The bytes of a record.
pub(super) fn record<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut record = [0; N];
    let mut rest = &mut record[..];
    for field in fields {
        let len = field.len().min(rest.len());
        let (place, after) = std::mem::take(&mut rest).split_at_mut(len);
        place.copy_from_slice(field.get(..len).unwrap_or_default());
        rest = after;
    }
    record
}

/// A table has fewer records than a u32 counts: more would not fit into the memory of a node.
pub(super) fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
