//! What the table of an earlier agent says for policies. A new agent goes on with it until everything has been listed
//! once, so that no pod is more open than before, nor closed without need.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;

use nebula_cni_contract::cluster_table::contents::Contents;
use nebula_cni_contract::cluster_table::{Layout, MAX_BYTES};

use crate::durable;

/// Numbers and programs, which mean each other and nothing else.
#[derive(Debug, Default)]
pub(crate) struct Carried {
    /// By enrolled address, with the incarnation of its pod.
    numbers: HashMap<IpAddr, (u64, Option<u32>)>,
    programs: HashMap<IpAddr, [Vec<u8>; 2]>,
}

impl Carried {
    /// Of the table there; nothing if there is none that can be read.
    pub(crate) fn of_table(path: &Path) -> Self {
        let bytes = durable::read_bounded(path, MAX_BYTES).unwrap_or_default();
        let Ok(layout) = Layout::read(&bytes) else { return Self::default() };
        let table = layout.table(&bytes);
        let enrolled = Contents::of(&table).enrolled;
        let programs = enrolled.iter().filter_map(|pod| {
            let programs = table.programs(pod.address)?;
            Some((pod.address, programs.map(<[u8]>::to_vec)))
        });
        Self {
            programs: programs.collect(),
            numbers: enrolled.iter().map(|pod| (pod.address, (pod.incarnation, pod.labels))).collect(),
        }
    }

    /// The number of a pod that was there already.
    pub(crate) fn number(&self, address: IpAddr, incarnation: u64) -> Option<u32> {
        let (before, number) = self.numbers.get(&address)?;
        number.filter(|_| *before == incarnation)
    }

    /// The programs of a pod that was there already.
    pub(crate) fn programs(&self, address: IpAddr, incarnation: u64) -> Option<&[Vec<u8>; 2]> {
        let (before, _) = self.numbers.get(&address)?;
        self.programs.get(&address).filter(|_| *before == incarnation)
    }
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::cluster_table::Builder;

    use super::*;

    #[test]
    fn only_the_same_pod_goes_on_with_what_it_had() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let (own, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let mut builder = Builder::new();
        builder.pod(own, 7);
        builder.pod(other, 8);
        builder.identity(own, Some(3));
        builder.identity(other, None);
        builder.programs(own, [vec![1], vec![2]]);
        std::fs::write(&path, builder.finish(1)).unwrap();
        let carried = Carried::of_table(&path);
        assert_eq!(carried.programs(own, 7), Some(&[vec![1], vec![2]]));
        assert_eq!((carried.number(own, 7), carried.number(other, 8)), (Some(3), None));
        assert!(carried.number(own, 9).is_none() && carried.programs(own, 9).is_none(), "another pod has the address");
        assert!(carried.programs(other, 8).is_none());
        std::fs::write(&path, "nonsense").unwrap();
        assert!(Carried::of_table(&path).number(own, 7).is_none());
    }
}
