//! Overlay addresses of pods: which ones a pod gets, and whether another one has them.

use ipnet::IpNet;
use nebula_cert::UnixTime;

use super::{Issuer, Rules, pod::Draft};
use crate::{
    address::AddressMode,
    cluster::{Asker, Taken},
    refusal::{Refusal, kept_note},
    store::{AllotError, Allottee, Pool},
};

impl Issuer {
    /// The overlay addresses that the policy gives to the pod.
    pub(super) fn networks(&self, rules: &Rules, draft: &Draft<'_>, now: UnixTime) -> Result<Vec<IpNet>, Refusal> {
        let Draft { policy, pod, addresses, .. } = *draft;
        let networks = match policy.address {
            AddressMode::Derive => policy.derive(addresses),
            AddressMode::Same => policy.same(addresses),
            AddressMode::Pool => self.allot(rules, draft, now),
        }?;
        // In mode `same` there is no other address by which the API server could know the pod.
        pod.check_address(if policy.address == AddressMode::Same { &[] } else { &networks })?;
        Ok(networks)
    }

    fn allot(&self, rules: &Rules, draft: &Draft<'_>, now: UnixTime) -> Result<Vec<IpNet>, Refusal> {
        let pool = Pool { prefixes: &draft.policy.overlay, reserved: &draft.policy.reserved };
        // An address is free again only after the longest possible life, whatever life this certificate gets.
        let until = rules.authority.end_of_life(rules.policy.longest_pod_life(), now);
        let kept_name = draft.kept.as_ref().map(|(name, _)| name.as_str());
        let pod = Allottee { subject: &draft.subject, kept_name };
        self.store.allot(&pod, &pool, until, now).map_err(|error| match error {
            AllotError::Exhausted(prefix) => {
                let kept = self.store.kept_addresses().unwrap_or_default().into_iter();
                let is_here = |network: &IpNet| prefix.contains(&network.addr());
                let kept = kept.filter(|(_, kept)| kept.until >= now && kept.networks.iter().any(is_here));
                Refusal::PoolExhausted {
                    prefix,
                    size: pool.candidates(prefix, None).count(),
                    note: kept_note(kept.count()),
                }
            }
            AllotError::Store(error) => self.store.failed(&error),
        })
    }

    /// Refuses an address that is another one's, as the API server shows it, unless the ledger has it for this pod.
    /// Whoever the ledger has it for is judged when the certificate is recorded.
    pub(super) fn check_free(
        &self,
        rules: &Rules,
        draft: &Draft<'_>,
        networks: &[IpNet],
        now: UnixTime,
    ) -> Result<(), Refusal> {
        let Draft { policy, pod, addresses, subject, .. } = draft;
        let (Some((cluster, settings)), Some(node)) = (rules.kubernetes(), &pod.node) else { return Ok(()) };
        if policy.address == AddressMode::Pool {
            return Ok(());
        }
        let mut holders = Vec::new();
        for network in networks {
            let holder = self.store.run(|store| store.holder(network.addr()))?;
            holders.push(holder.filter(|holder| holder.until >= now));
        }
        if holders.iter().all(|holder| holder.as_ref().is_some_and(|holder| holder.is(subject))) {
            return Ok(());
        }
        let other = holders.iter().flatten().find(|holder| !holder.is(subject)).map(|holder| holder.subject.id());
        let asker = Asker {
            uid: &pod.uid,
            node,
            is_vouched: pod.is_vouched_by_node,
            holder: other.as_deref(),
            node_ranges: settings.node_ranges,
        };
        for address in [Some(addresses.first), addresses.other].into_iter().flatten() {
            match cluster.taken(address, &asker)? {
                None => {}
                Some(Taken::Pod(holder)) => return Err(Refusal::AddressInUse { address, holder }),
                Some(Taken::Node(node)) => return Err(Refusal::NodeAddress { address, node }),
                Some(Taken::Range(_)) => return Err(Refusal::OutsideNodeRanges { address, node: node.clone() }),
            }
        }
        Ok(())
    }
}
