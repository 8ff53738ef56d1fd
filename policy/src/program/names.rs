//! The names in a program, by which a verdict is explained.

use super::format::{POLICY_AUDITED, POLICY_ISOLATES, SectionKind};
use super::layout::{Program, Record};
use super::verdict::Tier;

/// A policy of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyName<'a> {
    /// Its tier, which says its kind, too.
    pub tier: Tier,
    /// `namespace/name` of a NetworkPolicy, `name` of a ClusterNetworkPolicy.
    pub name: &'a str,
    /// Its priority; 0 for a NetworkPolicy.
    pub priority: u16,
    /// Whether it is evaluated for audit only.
    pub is_audited: bool,
    /// Whether it isolates the pod: denies what no NetworkPolicy allows.
    pub isolates: bool,
}

/// The policies of a program, in the order of evaluation.
#[derive(Debug, Clone)]
pub struct PolicyNames<'a> {
    program: Program<'a>,
    next: u32,
}

impl<'a> Iterator for PolicyNames<'a> {
    type Item = PolicyName<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let policy = self.program.policy(self.next)?;
        self.next += 1;
        Some(policy)
    }
}

impl<'a> Program<'a> {
    /// The policies that select the pod in the program's direction.
    #[must_use]
    pub const fn policies(&self) -> PolicyNames<'a> {
        PolicyNames { program: *self, next: 0 }
    }

    /// The policy with a number of a [`super::Reason`]; `None` if the program has no such policy.
    #[must_use]
    pub fn policy(&self, number: u32) -> Option<PolicyName<'a>> {
        let record: Record<'_, 12> = self.record(SectionKind::Policies, number)?;
        let flags = record.u8(7);
        Some(PolicyName {
            tier: Tier::from_number(record.u8(6))?,
            name: self.string(record.u32(0), record.u16(4).into())?,
            priority: record.u16(8),
            is_audited: flags & POLICY_AUDITED != 0,
            isolates: flags & POLICY_ISOLATES != 0,
        })
    }

    /// The name of a rule, which is searched for among all; `None` if it has none.
    #[must_use]
    pub fn rule(&self, policy: u32, rule: u16) -> Option<&'a str> {
        let rows =
            (0..self.layout.count(SectionKind::Rows)).filter_map(|row| self.record::<16>(SectionKind::Rows, row));
        let row = { rows }.find(|row| row.u32(0) == policy && row.u16(4) == rule)?;
        self.string(row.u32(8), row.u32(12)).filter(|name| !name.is_empty())
    }

    pub(super) fn string(&self, offset: u32, len: u32) -> Option<&'a str> {
        core::str::from_utf8(self.packed(SectionKind::Strings, offset, len)?).ok()
    }
}
