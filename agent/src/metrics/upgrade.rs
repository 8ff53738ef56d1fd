//! Metrics of the roll-out of the instances' program.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{head, one};

/// What can become of an upgrade.
pub(super) const RESULTS: [&str; 3] = ["upgraded", "rolled_back", "failed"];

/// How far the roll-out is.
#[derive(Debug, Default)]
pub(super) struct UpgradeNumbers {
    results: BTreeMap<&'static str, u64>,
    outdated: usize,
    is_paused: bool,
}

impl UpgradeNumbers {
    pub(super) fn ended(&mut self, result: &'static str) {
        *self.results.entry(result).or_default() += 1;
    }

    pub(super) fn looked(&mut self, outdated: usize, is_paused: bool) {
        (self.outdated, self.is_paused) = (outdated, is_paused);
    }

    pub(super) fn write_to(&self, out: &mut String) {
        head(out, "nebula_cni_upgrades_total", "counter", "Upgrades of running instances by result.");
        for result in RESULTS {
            let count = self.results.get(result).copied().unwrap_or_default();
            let _ = writeln!(out, "nebula_cni_upgrades_total{{result=\"{result}\"}} {count}");
        }
        let help = "Instances that run another program than the installed one.";
        one(out, "nebula_cni_outdated_instances", "gauge", help, self.outdated);
        let help = "Whether the upgrade of instances is paused on this node.";
        one(out, "nebula_cni_upgrade_paused", "gauge", help, u8::from(self.is_paused));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_is_shown_from_the_start() {
        let (mut numbers, mut out) = (UpgradeNumbers::default(), String::new());
        RESULTS.iter().skip(1).for_each(|result| numbers.ended(result));
        numbers.looked(7, true);
        numbers.write_to(&mut out);
        for line in [
            "nebula_cni_upgrades_total{result=\"upgraded\"} 0\n",
            "nebula_cni_upgrades_total{result=\"rolled_back\"} 1\n",
            "nebula_cni_upgrades_total{result=\"failed\"} 1\n",
            "nebula_cni_outdated_instances 7\n",
            "nebula_cni_upgrade_paused 1\n",
        ] {
            assert!(out.contains(line), "{line}: {out}");
        }
    }
}
