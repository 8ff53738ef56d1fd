//! A small cluster whose policies are JSON, and whose flows are lines of text.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::kubernetes;
use nebula_cni_policy::model::{
    ClusterNetworkPolicy, Direction, Labels, NamedPort, NetworkPolicy, Problem, Profile, Protocol,
};
use nebula_cni_policy::program::{Identity, Peer, Program, Verdict};
use serde_json::{Value, json};

pub(crate) struct Pod {
    pub(crate) identity: Identity,
    addresses: Vec<IpAddr>,
}

/// Pods `web` and `db` of the namespaces `shop` (label `team: a`) and `pay` (`team: b`), each labelled with its name as
/// `app` and with `env: live`. Containers of `web` have the port `http` (TCP 8080), those of `db` the ports `sql` (TCP
/// 5432) and, in `pay`, `http` (TCP 9090). The node of all has the address 10.1.0.1.
pub(crate) struct Town {
    pub(crate) cluster: Cluster,
    pub(crate) pods: BTreeMap<String, Pod>,
}

pub(crate) const NODE: &str = "10.1.0.1";

pub(crate) fn labels(pairs: &[(&str, &str)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
}

impl Town {
    pub(crate) fn new() -> Self {
        let mut town = Self { cluster: Cluster::new(), pods: BTreeMap::new() };
        for (namespace, team) in [("shop", "a"), ("pay", "b")] {
            for app in ["web", "db"] {
                let port = |name: &str, port| NamedPort { name: name.into(), protocol: Protocol::Tcp, port };
                let ports = match (app, namespace) {
                    ("web", _) => vec![port("http", 8080)],
                    (_, "pay") => vec![port("sql", 5432), port("http", 9090)],
                    _ => vec![port("sql", 5432)],
                };
                town.add(app, namespace, &[("app", app), ("env", "live")], &[("team", team)], ports);
            }
        }
        town
    }

    pub(crate) fn add(
        &mut self,
        name: &str,
        namespace: &str,
        of_pod: &[(&str, &str)],
        of_namespace: &[(&str, &str)],
        ports: Vec<NamedPort>,
    ) -> Identity {
        let profile = Profile::new(namespace, labels(of_namespace), labels(of_pod), ports).unwrap();
        let identity = self.cluster.identify(profile).unwrap();
        self.cluster.watch(identity);
        let n = self.pods.len() as u8 + 1;
        let addresses = vec![IpAddr::from([10, 0, 0, n]), format!("fd00::{n}").parse().unwrap()];
        self.pods.insert(format!("{name}.{namespace}"), Pod { identity, addresses });
        identity
    }

    /// Adds a NetworkPolicy of namespace `shop`, or the one in its metadata, with the name `policy` or that one.
    pub(crate) fn policy(&mut self, spec: Value) -> Vec<Problem> {
        self.policy_with(json!({"name": "policy", "namespace": "shop"}), spec)
    }

    pub(crate) fn policy_with(&mut self, metadata: Value, spec: Value) -> Vec<Problem> {
        let object = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        self.cluster.set_policy(&NetworkPolicy::try_from(&object).unwrap())
    }

    /// Adds a ClusterNetworkPolicy with the name `policy`.
    pub(crate) fn cluster_policy(&mut self, spec: Value) -> Vec<Problem> {
        self.cluster_policy_with(json!({"name": "policy"}), spec)
    }

    pub(crate) fn cluster_policy_with(&mut self, metadata: Value, spec: Value) -> Vec<Problem> {
        let object: kubernetes::ClusterNetworkPolicy =
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        self.cluster.set_cluster_policy(&ClusterNetworkPolicy::try_from(&object).unwrap()).unwrap()
    }

    pub(crate) fn program(&self, pod: &str, direction: Direction) -> Vec<u8> {
        let pod = &self.pods[pod];
        let node = vec![NODE.parse().unwrap()];
        let subject = Subject { identity: pod.identity, addresses: pod.addresses.clone(), node };
        let compiled = self.cluster.compile(&subject, direction);
        assert!(!compiled.is_closed);
        compiled.bytes
    }

    fn peer(&self, end: &str, is_v6: bool) -> Peer {
        match self.pods.get(end) {
            Some(pod) => Peer::pod(pod.identity, pod.addresses.get(usize::from(is_v6)).copied()),
            None => Peer::outside(end.parse().unwrap()),
        }
    }

    /// The verdict of one end of a flow: `web.shop -> db.pay TCP/5432` or `web.shop <- 192.0.2.1 ICMP`, seen from the
    /// first pod.
    pub(crate) fn judge(&self, flow: &str) -> Verdict {
        self.judge_in(flow, false)
    }

    fn judge_in(&self, flow: &str, is_v6: bool) -> Verdict {
        let [pod, arrow, peer, service] = flow.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let direction = if arrow == "->" { Direction::Egress } else { Direction::Ingress };
        let (protocol, port) = service.split_once('/').unwrap_or((service, "0"));
        let protocol = match protocol {
            "ICMP" if is_v6 => 58,
            "ICMP" => 1,
            "GRE" => 47,
            name => Protocol::from_name(name).unwrap().number(),
        };
        let bytes = self.program(pod, direction);
        let program = Program::read(&bytes).unwrap();
        assert_eq!(program.direction(), direction);
        program.judge(&self.peer(peer, is_v6), protocol, port.parse().unwrap())
    }

    /// Whether a flow between pods passes both of its ends, or one from or to outside its only one; in both families.
    fn passes(&self, flow: &str) -> bool {
        let [from, _, to, service] = flow.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let passes = |is_v6| {
            let ends = [(from, "->", to), (to, "<-", from)];
            let judged = ends.iter().filter(|(pod, ..)| self.pods.contains_key(*pod));
            judged.clone().count() > 0 && { judged }
                .all(|(pod, arrow, peer)| self.judge_in(&format!("{pod} {arrow} {peer} {service}"), is_v6).is_allowed())
        };
        let (v4, v6) = (passes(false), passes(true));
        assert!(
            v4 == v6 || !self.pods.contains_key(from) || !self.pods.contains_key(to),
            "{flow}: {v4} by IPv4, {v6} by IPv6"
        );
        v4
    }

    /// Lines of flows that must pass, and of flows that must not.
    pub(crate) fn check(&self, allowed: &[&str], denied: &[&str]) {
        for flow in allowed {
            assert!(self.passes(flow), "{flow} must be allowed");
        }
        for flow in denied {
            assert!(!self.passes(flow), "{flow} must be denied");
        }
    }
}
