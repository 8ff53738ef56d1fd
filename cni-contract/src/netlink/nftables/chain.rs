//! Chains: where the rules of a table see packets.

use nix::libc;

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::rule::{Rule, Verdict};
use crate::netlink::nftables::transaction::{attributes, push_nested, push_number, push_text};

/// Where a chain sees packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Packets addressed to this network namespace.
    Input,
    /// Packets forwarded by this network namespace.
    Forward,
    /// Packets sent by this network namespace.
    Output,
    /// The first packet of each connection that comes to this network namespace, before anything else can translate its
    /// destination.
    Translate,
    /// The first packet of each connection that leaves this network namespace, when its source can be translated.
    Leave,
    /// Frames received from a link.
    FromLink(String),
    /// Frames sent to a link.
    ToLink(String),
}

/// A chain of rules. The first rule that decides about a packet ends its evaluation.
#[derive(Debug, Clone)]
pub struct Chain {
    pub(super) name: String,
    /// `None` for a chain that only other chains lead to.
    hook: Option<Hook>,
    policy: Verdict,
    pub(super) rules: Vec<Rule>,
}

impl Hook {
    fn name(&self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Translate => "translate",
            Self::Leave => "leave",
            Self::FromLink(_) => "from-link",
            Self::ToLink(_) => "to-link",
        }
    }

    fn number(&self) -> u32 {
        match self {
            // NF_NETDEV_INGRESS, NF_NETDEV_EGRESS, NF_INET_PRE_ROUTING.
            Self::FromLink(_) | Self::Translate => 0,
            Self::ToLink(_) | Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
            // NF_INET_POST_ROUTING.
            Self::Leave => 4,
        }
    }

    fn priority(&self) -> i32 {
        match self {
            // Before NF_IP_PRI_NAT_DST, where kube-proxy translates.
            Self::Translate => libc::NF_IP_PRI_NAT_DST - 1,
            Self::Leave => libc::NF_IP_PRI_NAT_SRC,
            _ => 0,
        }
    }

    fn chain_type(&self) -> &'static str {
        if matches!(self, Self::Translate | Self::Leave) { "nat" } else { "filter" }
    }
}

impl Chain {
    /// A chain that drops every packet about which no rule decides, named after its hook.
    #[must_use]
    pub fn new(hook: Hook, rules: Vec<Rule>) -> Self {
        Self { name: hook.name().to_owned(), hook: Some(hook), policy: Verdict::Drop, rules }
    }

    /// A chain that sees the packets that a rule of another chain leaves to it ([`Rule::goto`]). Its last rule
    /// decides about all of them.
    #[must_use]
    pub fn without_hook(name: impl Into<String>, rules: Vec<Rule>) -> Self {
        Self { name: name.into(), hook: None, policy: Verdict::Drop, rules }
    }

    /// Names the chain.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Sets what becomes of packets about which no rule decides.
    #[must_use]
    pub fn otherwise(mut self, verdict: Verdict) -> Self {
        self.policy = verdict;
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How often it leads to another chain.
    #[must_use]
    pub fn leads_to(&self, other: &Self) -> u32 {
        self.rules.iter().filter(|rule| rule.leads_to(&other.name)).count() as u32
    }

    /// Whether it sees packets by itself.
    #[must_use]
    pub fn has_hook(&self) -> bool {
        self.hook.is_some()
    }

    /// The number of its rules.
    #[must_use]
    pub fn rules(&self) -> u32 {
        self.rules.len() as u32
    }

    pub(super) fn attributes(&self, table: &str) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::CHAIN_TABLE, table);
            push_text(out, attribute::CHAIN_NAME, &self.name);
            let Some(hook) = &self.hook else { return };
            push_nested(out, attribute::CHAIN_HOOK, |out| {
                push_number(out, attribute::HOOK_NUMBER, hook.number());
                push_number(out, attribute::HOOK_PRIORITY, hook.priority().cast_unsigned());
                if let Hook::FromLink(link) | Hook::ToLink(link) = hook {
                    push_text(out, attribute::HOOK_DEVICE, link);
                }
            });
            push_number(out, attribute::CHAIN_POLICY, self.policy as u32);
            push_text(out, attribute::CHAIN_TYPE, hook.chain_type());
        })
    }
}
