//! Writes the bytes of a program.

use std::net::IpAddr;

use super::masks::Mask;
use crate::program::{
    Direction, HEADER_LEN, MAGIC, MAJOR, MIN_SECTIONS, MINOR, SECTION_LEN, SECTIONS, SectionKind, octets,
};

/// The numbers of a program's header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) direction: Direction,
    pub(super) flags: u8,
    pub(super) identity: u32,
    pub(super) admin_end: u32,
    pub(super) policies_end: u32,
    pub(super) outside: u32,
    pub(super) audited: u32,
    /// The first policy that isolates the pod: among the enforced ones, and among all.
    pub(super) isolating: [u32; 2],
}

/// The sections of a program while they are written.
#[derive(Debug, Default)]
pub(super) struct Sections {
    bytes: [Vec<u8>; SECTIONS],
}

impl Sections {
    fn section(&mut self, kind: SectionKind) -> &mut Vec<u8> {
        let [rows, masks, classes, runs, dense, named, ports, v4, v6, own, node, policies, strings, groups] =
            &mut self.bytes;
        match kind {
            SectionKind::Rows => rows,
            SectionKind::Masks => masks,
            SectionKind::Classes => classes,
            SectionKind::Runs => runs,
            SectionKind::Dense => dense,
            SectionKind::NamedPorts => named,
            SectionKind::Ports => ports,
            SectionKind::V4 => v4,
            SectionKind::V6 => v6,
            SectionKind::Own => own,
            SectionKind::Node => node,
            SectionKind::Policies => policies,
            SectionKind::Strings => strings,
            SectionKind::Groups => groups,
        }
    }

    pub(super) fn string(&mut self, text: &str) -> u32 {
        let strings = self.section(SectionKind::Strings);
        let offset = strings.len() as u32;
        strings.extend_from_slice(text.as_bytes());
        offset
    }

    pub(super) fn row(&mut self, policy: u32, rule: u16, action: u8, name: &str) {
        let offset = self.string(name);
        let row = self.section(SectionKind::Rows);
        row.extend(policy.to_le_bytes());
        row.extend(rule.to_le_bytes());
        row.extend([action, 0]);
        row.extend(offset.to_le_bytes());
        row.extend((name.len() as u32).to_le_bytes());
    }

    pub(super) fn policy(&mut self, title: &str, tier: u8, flags: u8, priority: u16) {
        let offset = self.string(title);
        let policy = self.section(SectionKind::Policies);
        policy.extend(offset.to_le_bytes());
        // Kubernetes has no longer ones than 253 bytes for each of the two names.
        policy.extend((title.len() as u16).to_le_bytes());
        policy.extend([tier, flags]);
        policy.extend(priority.to_le_bytes());
        policy.extend([0, 0]);
    }

    /// Called in the order of the names.
    pub(super) fn group(&mut self, name: &str, mask: u32) {
        let offset = self.string(name);
        let record = [offset, name.len() as u32, mask].into_iter().flat_map(u32::to_le_bytes);
        self.section(SectionKind::Groups).extend(record);
    }

    pub(super) fn masks(&mut self, masks: &[Mask]) {
        let bytes = masks.iter().flatten().flat_map(|word| word.to_le_bytes());
        self.section(SectionKind::Masks).extend(bytes);
    }

    pub(super) fn class(&mut self, mask: u32, named: &[(u32, u32)]) {
        let first = self.section(SectionKind::NamedPorts).len() / SectionKind::NamedPorts.record_len();
        for (key, mask) in named {
            self.pair(SectionKind::NamedPorts, *key, *mask);
        }
        let class = self.section(SectionKind::Classes);
        class.extend(mask.to_le_bytes());
        class.extend((first as u32).to_le_bytes());
        class.extend((named.len() as u32).to_le_bytes());
    }

    pub(super) fn dense(&mut self, classes: impl Iterator<Item = u16>) {
        self.section(SectionKind::Dense).extend(classes.flat_map(u16::to_le_bytes));
    }

    /// A record of two numbers.
    pub(super) fn pair(&mut self, kind: SectionKind, first: u32, second: u32) {
        self.section(kind).extend([first, second].into_iter().flat_map(u32::to_le_bytes));
    }

    pub(super) fn v6(&mut self, start: u128, mask: u32) {
        let record = self.section(SectionKind::V6);
        record.extend(start.to_le_bytes());
        record.extend(mask.to_le_bytes());
    }

    pub(super) fn addresses(&mut self, kind: SectionKind, addresses: impl IntoIterator<Item = IpAddr>) {
        let mut octets: Vec<_> = addresses.into_iter().map(octets).collect();
        octets.sort_unstable();
        octets.dedup();
        self.section(kind).extend(octets.into_iter().flatten());
    }

    /// The whole program.
    pub(super) fn finish(&self, header: &Header) -> Vec<u8> {
        let has_groups = !self.bytes[SectionKind::Groups as usize].is_empty();
        let (sections, minor) = if has_groups { (SECTIONS, MINOR) } else { (MIN_SECTIONS, 0) };
        let begin = HEADER_LEN + sections * SECTION_LEN;
        let len = begin + self.bytes.iter().map(Vec::len).sum::<usize>();
        let mut bytes = Vec::with_capacity(len);
        bytes.extend(MAGIC);
        bytes.extend((u32::from(MAJOR) << 16 | u32::from(minor)).to_le_bytes());
        bytes.extend((sections as u32).to_le_bytes());
        bytes.extend((len as u32).to_le_bytes());
        bytes.extend([header.direction as u8, header.flags, 0, 0]);
        let [enforced, all] = header.isolating;
        let numbers = [header.identity, header.admin_end, header.policies_end, header.outside, header.audited];
        bytes.extend(numbers.into_iter().chain([enforced, all, 0]).flat_map(u32::to_le_bytes));
        let mut offset = begin;
        for (kind, section) in SectionKind::ALL.into_iter().zip(&self.bytes).take(sections) {
            let entry = [offset, section.len() / kind.record_len(), kind.record_len()];
            bytes.extend(entry.into_iter().flat_map(|number| (number as u32).to_le_bytes()));
            offset += section.len();
        }
        self.bytes.iter().for_each(|section| bytes.extend(section));
        bytes
    }
}
