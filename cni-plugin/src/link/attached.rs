//! What the kernel has of each captured pod in the table for frames.

use nebula_cni_contract::netlink::nftables::{Existing, Family, Transaction};

use crate::link::capture_guard::{TABLE, attachment_of, chain_names};
use crate::link::clear::asked_sets;
use crate::link::clear_policy;

/// The chains of one attachment.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Attached {
    pub(super) attachment: String,
    /// The link whose frames they see; `None` if it is gone.
    pub(super) link: Option<String>,
    chains: Vec<String>,
}

impl Attached {
    /// Sorts the chains of the table by attachment.
    pub(super) fn of(chains: &[Existing]) -> Vec<Self> {
        let mut all = Vec::<Self>::new();
        for chain in chains {
            let Some(attachment) = attachment_of(&chain.name) else { continue };
            let known = all.iter().position(|attached| attached.attachment == attachment);
            let at = known.unwrap_or_else(|| {
                all.push(Self { attachment: attachment.to_owned(), link: None, chains: Vec::new() });
                all.len() - 1
            });
            let Some(attached) = all.get_mut(at) else { continue };
            attached.chains.push(chain.name.clone());
            attached.link = attached.link.take().or_else(|| chain.link.clone());
        }
        all
    }

    /// Removes the chains, those that lead to others first.
    pub(super) fn remove_chains(&self, change: &mut Transaction) {
        let in_order = chain_names(&self.attachment);
        for name in in_order.iter().filter(|name| self.chains.contains(name)) {
            change.remove_chain(Family::Link, TABLE, name);
        }
    }

    /// Removes the sets, after the chains: they were made together.
    pub(super) fn remove_sets(&self, change: &mut Transaction) {
        self.remove_asked_sets(change);
        self.remove_policy_sets(change);
    }

    /// Those of `capture.clear`.
    pub(super) fn remove_asked_sets(&self, change: &mut Transaction) {
        let [.., incoming] = chain_names(&self.attachment);
        if self.chains.contains(&incoming) {
            asked_sets(&self.attachment).iter().for_each(|set| change.remove_set(Family::Link, TABLE, set));
        }
    }

    /// Those of network policies.
    pub(super) fn remove_policy_sets(&self, change: &mut Transaction) {
        if self.has_policy() {
            let names = clear_policy::set_names(&self.attachment);
            names.iter().for_each(|set| change.remove_set(Family::Link, TABLE, set));
        }
    }

    /// Whether network policies are enforced for it.
    pub(super) fn has_policy(&self) -> bool {
        let [_, _, _, ingress, _, _] = chain_names(&self.attachment);
        self.chains.contains(&ingress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chains_of_a_pod_belong_to_its_link_also_those_without_one() {
        let chain = |name: &str, link: Option<&str>| Existing {
            table: TABLE.to_owned(),
            name: name.to_owned(),
            link: link.map(str::to_owned),
            uses: 1,
        };
        let chains = [
            chain("in-7", None),
            chain("from-7", Some("veth7")),
            chain("to-7", Some("veth7")),
            chain("out-7", None),
            chain("from-8", None),
            chain("other", Some("veth9")),
        ];
        let [seven, eight] = &Attached::of(&chains)[..] else { panic!("two pods") };
        assert_eq!((seven.attachment.as_str(), seven.link.as_deref()), ("7", Some("veth7")));
        assert_eq!(seven.chains.len(), 4);
        assert_eq!((eight.attachment.as_str(), eight.link.as_deref()), ("8", None));
    }
}
