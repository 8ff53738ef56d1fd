//! Policy programs, and the objects of the API that they are compiled from.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::kubernetes::ClusterNetworkPolicy;
use nebula_cni_policy::model::{self, NamedPort, Profile, Protocol};
use nebula_cni_policy::program::{Direction, Identity, Peer, Program, Reason, Who};

/// Any bytes as a program.
pub(crate) fn program(data: &[u8]) {
    let Ok(program) = Program::read(data) else { return };
    let names = program.policies().take(64).map(|policy| policy.name.len()).sum::<usize>();
    assert!(names <= 64 * data.len());
    ask(&program, data);
}

/// A line is a policy of either kind, or the labels of a pod (an object of strings). The last pod gets programs.
pub(crate) fn objects(data: &[u8]) {
    let mut cluster = Cluster::new();
    let mut last = cluster.identify(pod(BTreeMap::new(), 0)).expect("the first identity");
    for (line, n) in data.split(|byte| *byte == b'\n').zip(0..64) {
        if let Ok(labels) = serde_json::from_slice::<BTreeMap<String, String>>(line) {
            if let Ok(identity) = cluster.identify(pod(labels, n)) {
                last = identity;
            }
        } else if let Ok(policy) = serde_json::from_slice::<NetworkPolicy>(line)
            && let Ok(policy) = model::NetworkPolicy::try_from(&policy)
        {
            let _ = cluster.set_policy(&policy);
        } else if let Ok(policy) = serde_json::from_slice::<ClusterNetworkPolicy>(line)
            && let Ok(policy) = model::ClusterNetworkPolicy::try_from(&policy)
        {
            let _ = cluster.set_cluster_policy(&policy);
        }
    }
    let subject = Subject { identity: last, addresses: vec![IpAddr::from([10, 0, 0, 1])], node: Vec::new() };
    for direction in Direction::ALL {
        let compiled = cluster.compile(&subject, direction);
        let program = Program::read(&compiled.bytes).expect("what we wrote reads");
        for reason in ask(&program, data) {
            assert_ne!(reason, Reason::Malformed);
        }
    }
}

/// A pod with these labels, which its namespace has as well; without labels if they are too many.
fn pod(labels: BTreeMap<String, String>, n: u16) -> Profile {
    let port = NamedPort { name: "web".into(), protocol: Protocol::Tcp, port: 8080 + n % 2 };
    let profile = |labels: BTreeMap<String, String>| Profile::new("shop", labels.clone(), labels, vec![port.clone()]);
    profile(labels).or_else(|_| profile(BTreeMap::new())).expect("a small profile")
}

/// Asks about some flows, among them one whose address and port are in the input.
fn ask(program: &Program<'_>, data: &[u8]) -> Vec<Reason> {
    let (mut octets, mut port) = ([0; 16], [0; 2]);
    octets.iter_mut().zip(data.iter().rev()).for_each(|(octet, byte)| *octet = *byte);
    port.iter_mut().zip(data.iter().rev().skip(16)).for_each(|(octet, byte)| *octet = *byte);
    let addresses = [IpAddr::from([10, 0, 0, 1]), IpAddr::from([192, 0, 2, 1]), IpAddr::from(octets)];
    let pods = [1, 2, 3, u32::from(u16::from_be_bytes(port)), u32::MAX].into_iter().filter_map(Identity::new);
    let mut reasons = Vec::new();
    for who in pods.map(Who::Pod).chain([Who::Outside, Who::Unnumbered]) {
        for address in addresses.into_iter().map(Some).chain([None]) {
            for (protocol, port) in [(6, 80), (6, 8080), (17, u16::from_be_bytes(port)), (1, 0)] {
                let verdict = program.judge(&Peer { who, address }, protocol, port);
                for decision in [verdict.enforced].into_iter().chain(verdict.audited) {
                    if let Reason::Rule { policy, rule, .. } = decision.reason {
                        let _ = (program.policy(policy), program.rule(policy, rule));
                    }
                    assert!(!decision.is_allowed || decision.reason != Reason::Malformed);
                    reasons.push(decision.reason);
                }
            }
        }
    }
    reasons
}
