//! Whether network policies allow a flow of the pod: by the pod's programs in the cluster table, which the node agent
//! compiles.

use std::net::IpAddr;
use std::sync::Arc;

use nebula_cni_contract::cluster_table::{Labels, Table};
use nebula_cni_policy::program::{
    self, Decision, Explained, Identity, Layout, Peer, Program, Reason, Tier, Verdict, Who,
};
use nebula_core::FlowKey;
use nebula_core::counters::Direction;
use nebula_core::firewall::{NetworkPolicy, Occasion, OtherEnd, PolicyDecision, PolicyVerdict};
use nebula_linux::clock::since_epoch;

use super::seen_flows::Kind;
use super::{ClusterDirectory, VerdictCounters};

/// One version of the pod's programs. Without one, everything is refused.
#[derive(Debug)]
pub(crate) struct PodPolicy {
    directory: Arc<ClusterDirectory>,
    /// For ingress and egress.
    layouts: Option<[Layout; 2]>,
    verdicts: Arc<VerdictCounters>,
}

impl PodPolicy {
    pub(crate) fn of(directory: Arc<ClusterDirectory>, verdicts: Arc<VerdictCounters>) -> Self {
        let programs = directory.contents().and_then(|table| table.programs(directory.own_address()?));
        let layouts = programs.and_then(|programs| {
            let [ingress, egress] = programs.map(Layout::read);
            let both = ingress.and_then(|ingress| Ok([ingress, egress?]));
            both.inspect_err(|error| {
                tracing::error!(%error, "The pod is closed: its policy program cannot be used");
            })
            .ok()
        });
        Self { layouts, directory, verdicts }
    }

    /// What the pod's program says about a flow, by the table that it is in.
    fn judge_by<T>(
        &self,
        direction: program::Direction,
        flow: &FlowKey,
        end: &OtherEnd<'_>,
        then: impl FnOnce(Option<&Program<'_>>, &Verdict) -> T,
    ) -> T {
        let table = self.directory.contents();
        let judged = table.as_ref().and_then(|table| {
            let [ingress, egress] = table.programs(self.directory.own_address()?)?;
            let [for_ingress, for_egress] = self.layouts.as_ref()?;
            let (layout, bytes, port) = match direction {
                program::Direction::Ingress => (for_ingress, ingress, flow.local_port),
                program::Direction::Egress => (for_egress, egress, flow.remote_port),
            };
            let peer = Peer { who: who(table, end), address: Some(end.address) };
            let program = layout.program(bytes);
            // Those of a host are not those of a network behind it.
            let groups = if end.is_peer { end.groups } else { &[] };
            Some((program, program.judge_carrying(&peer, groups, flow.protocol, port)))
        });
        match &judged {
            Some((program, verdict)) => then(Some(program), verdict),
            None => then(None, &CLOSED),
        }
    }
}

impl PodPolicy {
    /// Notes a flow that passes.
    fn note(&self, direction: program::Direction, flow: &FlowKey, end: &OtherEnd<'_>) {
        let port = match direction {
            program::Direction::Ingress => flow.local_port,
            program::Direction::Egress => flow.remote_port,
        };
        let has_ports = [TCP, UDP, SCTP].contains(&flow.protocol);
        let table = self.directory.contents().filter(|_| end.is_peer);
        let kind = Kind {
            direction,
            peer: end.address,
            incarnation: table.and_then(|table| table.incarnation(end.address)).unwrap_or(0),
            protocol: flow.protocol,
            port: if has_ports { port } else { 0 },
        };
        self.verdicts.seen.note(&kind, since_epoch());
    }
}

/// What a pod may do whatever policies say needs none.
fn is_worth_noting(verdict: &Verdict) -> bool {
    verdict.is_allowed() && !matches!(verdict.enforced.reason, Reason::Itself | Reason::OwnNode)
}

impl NetworkPolicy for PodPolicy {
    fn version(&self) -> u64 {
        self.directory.table_version().unwrap_or(0)
    }

    fn judge(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>, occasion: Occasion) -> PolicyVerdict {
        let direction = seen_from_the_pod(direction);
        self.judge_by(direction, flow, end, |program, verdict| {
            if occasion == Occasion::NewFlow && is_worth_noting(verdict) {
                self.note(direction, flow, end);
            }
            if occasion != Occasion::Question {
                self.verdicts.count(direction, program, verdict, occasion == Occasion::NewFlow);
            }
            match verdict.enforced.is_allowed {
                false => PolicyVerdict::Refuse,
                true if verdict.would_deny().is_some() => PolicyVerdict::AllowInAudit,
                true => PolicyVerdict::Allow,
            }
        })
    }

    fn reason(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>) -> Option<String> {
        let direction = seen_from_the_pod(direction);
        self.judge_by(direction, flow, end, |program, verdict| {
            let refused = (!verdict.enforced.is_allowed).then_some(verdict.enforced);
            let decision = refused.or_else(|| verdict.would_deny())?;
            let explained = match program {
                Some(program) => program.explain(decision),
                None => Explained { decision, policy: None, rule: None },
            };
            let audit = if refused.is_some() { "" } else { "in audit, " };
            Some(format!("{audit}{} {explained}", direction.name()))
        })
    }

    fn decision(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>) -> Option<PolicyDecision> {
        let direction = seen_from_the_pod(direction);
        Some(self.judge_by(direction, flow, end, |program, verdict| {
            let refused = (!verdict.enforced.is_allowed).then_some(verdict.enforced);
            named(program, refused.or_else(|| verdict.would_deny()).unwrap_or(verdict.enforced))
        }))
    }
}

/// A decision with the names that the program has for it.
fn named(program: Option<&Program<'_>>, decision: Decision) -> PolicyDecision {
    let explained = program.map(|program| program.explain(decision));
    let (tier, rule) = match decision.reason {
        Reason::Rule { tier, rule, .. } => (Some(tier), Some(rule)),
        Reason::Isolated { .. } => (Some(Tier::NetworkPolicy), None),
        _ => (None, None),
    };
    PolicyDecision {
        reason: decision.reason.word(),
        tier: tier.map(Tier::name),
        policy: explained.as_ref().and_then(|explained| Some(explained.policy?.into())),
        rule,
        rule_name: explained.as_ref().and_then(|explained| Some(explained.rule?.into())),
    }
}

fn seen_from_the_pod(direction: Direction) -> program::Direction {
    match direction {
        Direction::Inbound => program::Direction::Ingress,
        Direction::Outbound => program::Direction::Egress,
    }
}

/// Of a pod without a program that can be used.
const CLOSED: Verdict = Verdict { enforced: Decision { is_allowed: false, reason: Reason::Closed }, audited: None };

/// A network behind a host has no labels, whoever the host is.
fn who(table: &Table<'_>, end: &OtherEnd<'_>) -> Who {
    if !end.is_peer {
        return Who::Outside;
    }
    match table.labels(end.address) {
        Labels::Set(number) => Identity::new(number).map_or(Who::Unnumbered, Who::Pod),
        Labels::NoPod => Who::Outside,
        Labels::Unknown if is_outside(table, end.address) => Who::Outside,
        Labels::Unknown => Who::Unnumbered,
    }
}

/// Whether an address is of a machine outside the cluster (of a sealed prefix). An address that the table does not
/// have may be a pod's that the agent has not heard of.
fn is_outside(table: &Table<'_>, address: IpAddr) -> bool {
    table.incarnation(address) == Some(0)
}

const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

#[cfg(test)]
mod tests {
    use nebula_cert::{CaPool, Curve, Identity as Credentials, PrivateKey, SigningKey, Template};
    use nebula_cni_contract::cluster_table::Builder;
    use nebula_cni_contract::instance_status::{PolicyVerdicts, SeenFlows};
    use nebula_cni_policy::compile::{Cluster, Subject};
    use nebula_cni_policy::model;
    use nebula_config::Settings;
    use nebula_core::Config;
    use nebula_core::capture::Directory;

    use super::*;
    use crate::pod::capture::table_file::TableFile;
    use crate::pod::capture::table_file::tests::{spec, write};
    use crate::pod::data_path::reload;

    /// A pod that these policies of its namespace select, and one other pod.
    fn pod_under(policies: &[model::NetworkPolicy]) -> (tempfile::TempDir, PodPolicy) {
        let folder = tempfile::tempdir().unwrap();
        let spec = spec(&folder);
        let mut cluster = Cluster::new();
        let own = spec.sources.clone();
        let profile = model::Profile::new("shop", model::Labels::new(), model::Labels::new(), Vec::new()).unwrap();
        let identity = cluster.identify(profile).unwrap();
        for policy in policies {
            assert_eq!(cluster.set_policy(policy), []);
        }
        let mut builder = Builder::new();
        for address in own.iter().chain([&other().address]) {
            builder.pod(*address, 1);
            builder.identity(*address, Some(identity.number()));
        }
        let subject = Subject { identity, addresses: own.clone(), node: Vec::new() };
        let compile = |direction| cluster.compile(&subject, direction).bytes;
        builder.programs(own[0], program::Direction::ALL.map(compile));
        write(&folder, &builder.finish(1));
        let table = TableFile::new(&spec.table).read_newer(None).unwrap();
        let directory = ClusterDirectory::unknown(Arc::new(spec), Arc::default()).with(table);
        (folder, PodPolicy::of(Arc::new(directory), Arc::default()))
    }

    fn other() -> OtherEnd<'static> {
        OtherEnd { name: "web-0.shop.pod", groups: &[], address: IpAddr::from([10, 244, 1, 9]), is_peer: true }
    }

    fn to(port: u16) -> FlowKey {
        let local = IpAddr::from([10, 244, 1, 7]);
        FlowKey {
            local,
            remote: other().address,
            local_port: 40_000,
            remote_port: port,
            protocol: TCP,
            fragment: false,
        }
    }

    fn judge(policy: &PodPolicy, port: u16, occasion: Occasion) -> PolicyVerdict {
        policy.judge(Direction::Outbound, &to(port), &other(), occasion)
    }

    /// Egress of all pods of the namespace, to one port.
    fn only(name: &str, port: u16) -> model::NetworkPolicy {
        let ports = vec![model::PortMatch::port(model::Protocol::Tcp, port)];
        let egress = vec![model::Rule { peers: Vec::new(), ports }];
        let types = vec![model::Direction::Egress];
        model::NetworkPolicy { types, egress, ..model::NetworkPolicy::new("shop", name) }
    }

    fn row(tier: &str, policy: &str, [allowed, denied, would_deny]: [u64; 3]) -> PolicyVerdicts {
        let (direction, tier, policy) = ("egress".to_owned(), tier.to_owned(), policy.to_owned());
        PolicyVerdicts { direction, tier, policy, allowed, denied, would_deny }
    }

    #[test]
    fn verdicts_are_counted_by_policy_and_explained_by_name() {
        let (_folder, policy) = pod_under(&[only("web", 80)]);
        let verdicts = [80, 80, 443].map(|port| judge(&policy, port, Occasion::NewFlow));
        assert_eq!(verdicts, [PolicyVerdict::Allow, PolicyVerdict::Allow, PolicyVerdict::Refuse]);
        judge(&policy, 443, Occasion::Question);
        judge(&policy, 80, Occasion::KnownFlow);
        assert_eq!(policy.verdicts.report(), [row("NetworkPolicy", "shop/web", [2, 1, 0])]);
        let reason = |port| policy.reason(Direction::Outbound, &to(port), &other());
        assert_eq!(reason(80), None);
        let why = "egress denied: shop/web isolates the pod, and no NetworkPolicy allows the flow";
        assert_eq!(reason(443).as_deref(), Some(why));
        assert_eq!(policy.judge(Direction::Inbound, &to(80), &other(), Occasion::NewFlow), PolicyVerdict::Allow);
        let ingress = PolicyVerdicts { direction: "ingress".into(), ..row("none", "no-policy", [1, 0, 0]) };
        assert_eq!(policy.verdicts.report()[0], ingress);
    }

    #[test]
    fn a_policy_in_audit_refuses_nothing_and_is_counted() {
        let audited = model::NetworkPolicy { is_audited: true, ..only("web", 80) };
        let (_folder, policy) = pod_under(&[audited]);
        let verdicts = [80, 443].map(|port| judge(&policy, port, Occasion::NewFlow));
        assert_eq!(verdicts, [PolicyVerdict::Allow, PolicyVerdict::AllowInAudit]);
        // A connection that goes on.
        assert_eq!(judge(&policy, 443, Occasion::KnownFlow), PolicyVerdict::AllowInAudit);
        let expected = [row("none", "no-policy", [2, 0, 0]), row("NetworkPolicy", "shop/web", [0, 0, 2])];
        assert_eq!(policy.verdicts.report(), expected);
        let why = "in audit, egress denied: shop/web isolates the pod, and no NetworkPolicy allows the flow";
        assert_eq!(policy.reason(Direction::Outbound, &to(443), &other()).as_deref(), Some(why));
    }

    #[test]
    fn new_flows_that_pass_are_remembered_with_their_port() {
        let (_folder, policy) = pod_under(&[only("web", 80)]);
        assert_eq!(policy.verdicts.seen(), SeenFlows::default());
        for (port, occasion) in [(80, Occasion::NewFlow), (443, Occasion::NewFlow), (80, Occasion::KnownFlow)] {
            judge(&policy, port, occasion);
        }
        // From a network behind a host, and a message without ports.
        let behind = OtherEnd { is_peer: false, ..other() };
        let ping = FlowKey { protocol: 1, ..to(80) };
        for flow in [to(80), ping] {
            policy.judge(Direction::Inbound, &flow, &behind, Occasion::NewFlow);
        }
        let seen = policy.verdicts.seen();
        let short: Vec<_> = seen.flows.iter().map(|flow| (&*flow.direction, flow.incarnation, flow.port)).collect();
        assert_eq!(short, [("egress", 1, 80), ("ingress", 0, 40_000), ("ingress", 0, 0)]);
        assert!(seen.flows.iter().all(|flow| flow.flows == 1 && flow.last > 0 && flow.peer == other().address));
    }

    #[test]
    fn a_reload_of_the_settings_refuses_what_was_refused_before_without_another_table() {
        let (_folder, policy) = pod_under(&[only("web", 80)]);
        let signer = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = Template { public_key: signer.public_key(), ..Template::new("ca", 1..=9) }.self_sign(&signer).unwrap();
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let networks = vec!["10.244.1.7/16".parse().unwrap()];
        let own = Template { networks, public_key: key.public_key(), ..Template::new("web", 2..=8) };
        let identity = Credentials::new(vec![own.sign(&ca, &signer).unwrap()], key).unwrap();
        let mut config = Config::new(identity, CaPool::new());
        config.capture = Some(Arc::clone(&policy.directory) as Arc<dyn Directory>);
        config.network_policy = Some(Arc::new(policy));
        let judge = |config: &Config, port| {
            let policy = config.network_policy.as_ref().unwrap();
            policy.judge(Direction::Outbound, &to(port), &other(), Occasion::Question)
        };
        let expected = [PolicyVerdict::Allow, PolicyVerdict::Refuse];
        assert_eq!([80, 443].map(|port| judge(&config, port)), expected);
        let before = config.clone();

        let settings = "{tun: {mtu: 1200}, firewall: {outbound: [{port: any, proto: any, host: any}]}}";
        let settings = Settings::read_for_pod(&nebula_config::parse(settings).unwrap()).unwrap();
        for is_open in [true, false] {
            let mut config = before.clone();
            reload(&mut config, &settings, None, is_open);
            assert_eq!([80, 443].map(|port| judge(&config, port)), expected);
            assert!(config.capture.is_some());
            assert_eq!((config.path_mtu, config.firewall.outbound.len()), (Some(1200), usize::from(is_open)));
        }
    }

    #[test]
    fn policies_beyond_the_bound_share_one_row() {
        let policies: Vec<_> = (1..=300).map(|n| only(&format!("{n:03}"), n)).collect();
        let (_folder, policy) = pod_under(&policies);
        for _ in 0..2 {
            for port in 1..=300 {
                assert_eq!(judge(&policy, port, Occasion::NewFlow), PolicyVerdict::Allow);
            }
        }
        let rows = policy.verdicts.report();
        assert_eq!((rows.len(), rows.iter().map(|row| row.allowed).sum::<u64>()), (257, 600));
        assert_eq!(rows.last(), Some(&row("none", "other-policies", [88, 0, 0])));
    }

    #[test]
    fn without_a_program_everything_is_refused_and_counted_as_closed() {
        let folder = tempfile::tempdir().unwrap();
        let directory = ClusterDirectory::unknown(Arc::new(spec(&folder)), Arc::default());
        let policy = PodPolicy::of(Arc::new(directory), Arc::default());
        assert_eq!(judge(&policy, 80, Occasion::NewFlow), PolicyVerdict::Refuse);
        assert_eq!(policy.verdicts.report(), [row("none", "closed", [0, 1, 0])]);
        let why = "egress denied: the pod is closed, see \"nebula-cni-agent status\"";
        assert_eq!(policy.reason(Direction::Outbound, &to(80), &other()).as_deref(), Some(why));
    }
}
