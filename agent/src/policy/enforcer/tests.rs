//! The enforcer by itself: numbers that are used again, bounds, and what a change costs.

use nebula_cni_contract::clock::{Clock as _, SystemClock};
use nebula_cni_policy::program::{Peer, Verdict};
use serde_json::{Value, json};

use super::*;
use crate::policy::described::Descriptions;
use crate::policy::said::Weighed;
use crate::table::kept::Keep as _;
use crate::table::member;

/// Pods and policies of a cluster; the node has the address 192.0.2.1.
#[derive(Default)]
struct Town {
    said: Said,
    holders: Vec<Holder>,
    own: Vec<OwnPod>,
    descriptions: Descriptions,
}

fn address(n: usize) -> IpAddr {
    IpAddr::from([10, 244, (n / 250) as u8, (n % 250) as u8])
}

impl Town {
    fn with_namespaces(count: usize) -> Self {
        let mut town = Self::default();
        for n in 0..count {
            let labels = [("team".to_owned(), (n % 4).to_string())].into();
            town.said.namespaces.insert(space(n).into(), Packed::of(&labels).map(Arc::new));
        }
        town
    }

    fn described(&mut self, namespace: usize, app: &str, unique: usize) -> Arc<Described> {
        let labels = [("app", app.to_owned()), ("pod-name", unique.to_string())];
        let labels = labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        self.descriptions.share(Described::new(&space(namespace), Some(&labels), [], []))
    }

    fn pod(&mut self, n: usize, namespace: usize, app: &str, is_own: bool) {
        let described = self.described(namespace, app, n);
        if is_own {
            let addresses = member::addresses([address(n)]);
            self.own.push(OwnPod { addresses, incarnation: 1, described: Arc::clone(&described) });
        }
        self.holders.push(Holder { address: address(n), incarnation: 1, described: Some(described) });
    }

    fn relabel(&mut self, n: usize, namespace: usize, app: &str) {
        let described = self.described(namespace, app, n);
        self.holders.iter_mut().filter(|holder| holder.address == address(n)).for_each(|holder| {
            holder.described = Some(Arc::clone(&described));
        });
        let own = self.own.iter_mut().filter(|own| own.addresses == member::addresses([address(n)]));
        own.for_each(|own| own.described = Arc::clone(&described));
    }

    fn policy(&mut self, namespace: usize, name: &str, spec: Value) {
        let object = json!({"metadata": {"namespace": space(namespace), "name": name}, "spec": spec});
        let policy = Weighed::policy(&serde_json::from_value(object).unwrap());
        self.said.policies.put(format!("{}/{name}", space(namespace)).into(), Some(policy));
    }

    fn records(&self, enforcer: &mut Enforcer) -> Records {
        let nodes = Vec::new;
        enforcer.records(&Scene {
            said: &self.said,
            missing: &[],
            bystanders: &[],
            holders: &self.holders,
            own: &self.own,
            node: &[IpAddr::from([192, 0, 2, 1])],
            resolvers: &[],
            nodes: &nodes,
        })
    }
}

fn space(n: usize) -> String {
    format!("space-{n}")
}

/// What the ingress program of one pod says about another one, by the numbers of the same records.
fn ingress(records: &Records, from: usize, to: usize) -> Verdict {
    let number = |n| records.identities.iter().find(|(at, _)| *at == address(n)).and_then(|(_, number)| *number);
    let program = records.programs.iter().find(|(at, _)| *at == address(to)).map(|(_, programs)| &programs[0]).unwrap();
    let peer = Peer::pod(Identity::new(number(from).unwrap()).unwrap(), Some(address(from)));
    Program::read(program).unwrap().judge(&peer, 6, 80)
}

fn allows_app(app: &str) -> Value {
    let peer = json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}});
    json!({"podSelector": {}, "ingress": [{"from": [peer]}]})
}

#[test]
fn a_number_is_used_again_for_other_labels_after_half_an_hour_and_programs_follow() {
    let (mut town, mut enforcer) = (Town::with_namespaces(1), Enforcer::default());
    town.pod(0, 0, "db", true);
    town.pod(1, 0, "web", false);
    town.policy(0, "web", allows_app("web"));
    let first = town.records(&mut enforcer);
    assert!(ingress(&first, 1, 0).is_allowed());
    let (start, old) = (SystemClock.now(), first.identities[1].1);
    enforcer.published(start);
    town.relabel(1, 0, "other");
    let second = town.records(&mut enforcer);
    assert!(!ingress(&second, 1, 0).is_allowed());
    for minutes in [2, 40, 80] {
        enforcer.published(start + Duration::from_secs(60 * minutes));
    }
    town.relabel(1, 0, "third");
    let third = town.records(&mut enforcer);
    assert_eq!(third.identities[1].1, old, "that of the labels that no pod has had for long");
    assert!(!ingress(&third, 1, 0).is_allowed(), "it means other labels now");
}

#[test]
fn policies_of_namespaces_without_own_pods_are_left_out() {
    let (mut town, mut enforcer) = (Town::with_namespaces(2), Enforcer::default());
    town.pod(0, 0, "db", true);
    town.pod(1, 1, "web", false);
    town.policy(0, "web", allows_app("web"));
    town.policy(1, "x", json!({"podSelector": {"matchLabels": {"pod-name": "1"}}}));
    town.records(&mut enforcer);
    assert_eq!((enforcer.report().policies, enforcer.report().identities), ([1, 0], 2));
    town.pod(2, 1, "web", true);
    let records = town.records(&mut enforcer);
    assert_eq!((enforcer.report().policies, enforcer.report().identities), ([2, 0], 3));
    assert!(ingress(&records, 1, 0).is_allowed() && ingress(&records, 0, 2).is_allowed());
    town.own.pop();
    town.records(&mut enforcer);
    assert_eq!((enforcer.report().policies, enforcer.report().identities), ([1, 0], 2));
}

#[test]
fn pods_that_share_an_address_or_leave_end_no_other_pods_programs() {
    let (mut town, mut enforcer) = (Town::with_namespaces(1), Enforcer::default());
    (0..3).for_each(|n| town.pod(n, 0, "db", true));
    town.policy(0, "web", allows_app("web"));
    assert_eq!(town.records(&mut enforcer).programs.len(), 3);
    town.own.remove(0);
    town.holders.remove(0);
    town.policy(0, "web", allows_app("db"));
    let records = town.records(&mut enforcer);
    assert_eq!(records.programs.len(), 2);
    assert!(ingress(&records, 1, 2).is_allowed(), "the change reached those that stay");
}

#[test]
fn a_namespace_whose_programs_are_too_large_together_is_closed_in_part_and_others_are_not() {
    let (mut town, mut enforcer) = (Town::with_namespaces(2), Enforcer::default());
    (0..110).for_each(|n| town.pod(n, 0, "db", true));
    town.pod(110, 1, "web", true);
    let block = |n: usize| json!({"ipBlock": {"cidr": format!("10.1.{}.{}/32", n / 120, 2 * (n % 120))}});
    let blocks: Vec<Value> = (0..4_000).map(block).collect();
    town.policy(0, "large", json!({"podSelector": {}, "ingress": [{"from": blocks}]}));
    let records = town.records(&mut enforcer);
    let bytes: usize = records.programs.iter().flat_map(|(_, programs)| programs).map(Vec::len).sum();
    assert!(bytes < PROGRAMS_OF_NAMESPACE + (64 << 10), "{bytes}");
    let report = enforcer.report();
    assert!(report.closed.get(TOO_LARGE).is_some_and(|count| (1..110).contains(count)), "{report:?}");
    assert!(ingress(&records, 0, 110).is_allowed());
    assert!(!ingress(&records, 110, 109).is_allowed());
}

/// Memory of this process, which other tests may use at the same time.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn one_label_among_ten_thousand_pods_and_a_thousand_policies_costs_little() {
    let (mut town, mut enforcer) = (Town::with_namespaces(100), Enforcer::default());
    for n in 0..10_000 {
        town.pod(n, n % 100, &format!("app-{}", n % 37), n < 110);
    }
    for n in 0..1_000 {
        town.policy(n % 100, &format!("p-{}", n / 100), allows_app(&format!("app-{}", n % 37)));
    }
    let took = |enforcer: &mut Enforcer, town: &Town| {
        let began = SystemClock.now();
        let records = town.records(enforcer);
        (SystemClock.now().saturating_duration_since(began), records)
    };
    let before_enforcer = resident_kib();
    let (all, records) = took(&mut enforcer, &town);
    let memory = resident_kib().saturating_sub(before_enforcer);
    let bytes: usize = records.programs.iter().flat_map(|(_, programs)| programs).map(Vec::len).sum();
    let (nothing, again) = took(&mut enforcer, &town);
    assert_eq!(again, records, "nothing is different");
    let from = 5_000;
    let allowed = |records: &Records| (0..110).filter(|n| ingress(records, from, *n).is_allowed()).count();
    let before = allowed(&records);
    town.relabel(from, from % 100, "nobody-asks-for-this");
    let (one, records) = took(&mut enforcer, &town);
    assert!(before > 0 && allowed(&records) == 0);
    let Report { identities, .. } = enforcer.report();
    println!(
        "110 own pods of 10,000, 1,000 policies, {identities} sets of labels: all {all:?}, nothing {nothing:?}, one label {one:?}; \
         programs {bytes} bytes; \
         memory {memory} KiB more"
    );
    // The bound is for builds without optimization on a busy machine.
    assert!(one < all && one < Duration::from_secs(2), "{one:?}");
}
