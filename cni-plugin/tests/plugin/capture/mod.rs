//! Capture on the kernel: what is there after ADD, what CHECK and the reconciliation make of missing pieces, what is
//! left after DEL. The instance is the fake one; its device is made by the tests and read by nobody.

mod answers;
mod clear;
mod cost;
pub(crate) mod refused;
mod services;
pub(crate) mod site;

use site::{Pod, Primary, Site, ip, run};

use crate::harness::PLUGIN;

const BOTH: [Primary; 2] = [Primary::Bridge, Primary::Links];

/// What can go missing: how, in which namespace, and what CHECK says about it.
fn pieces(pod: &Pod) -> Vec<(&'static str, String, &'static str)> {
    let inside = [
        ("ip rule del priority 30000", "routing rule (priority 30000, IPv4)"),
        ("ip -6 rule del priority 30000", "routing rule (priority 30000, IPv6)"),
        ("ip route del unreachable 10.244.0.0/16 table 20034", "unreachable 10.244.0.0/16"),
        ("ip route del unreachable 10.96.0.0/12 table 20034", "unreachable 10.96.0.0/12"),
        ("ip -6 route del unreachable fd00:244::/32 table 20034 metric 4278198272", "unreachable fd00:244::/32"),
        ("ip route del throw 10.244.1.1 table 20034", "throw 10.244.1.1/32"),
        ("nft delete table netdev nebula-cni-capture", "rule that marks"),
        ("nft flush table netdev nebula-cni-capture", "rule that marks"),
        ("sysctl -qw net.ipv4.tcp_fwmark_accept=0", "tcp_fwmark_accept"),
        ("sysctl -qw net.ipv4.fwmark_reflect=0", "ipv4/fwmark_reflect"),
        ("sysctl -qw net.ipv6.fwmark_reflect=0", "ipv6/fwmark_reflect"),
        ("sysctl -qw net.ipv4.conf.eth0.src_valid_mark=0", "src_valid_mark"),
    ];
    let outside = [
        ("nft delete table netdev nebula-cni-capture", "rules on its link"),
        ("nft flush table netdev nebula-cni-capture", "rules on its link"),
        ("nft delete table inet nebula-cni-capture", "rules about forwarded packets"),
        ("nft flush table inet nebula-cni-capture", "rules about forwarded packets"),
        ("nft flush ruleset", "rules on its link"),
    ];
    let inside = inside.map(|(how, says)| ("pod", how.to_owned(), says));
    let outside = outside.map(|(how, says)| ("node", how.to_owned(), says));
    let element = format!(
        "set=$(nft list sets | grep -o 'captured4-[0-9a-f]*'); nft delete element inet nebula-cni-capture $set {{ {} }}",
        pod.v4()
    );
    let element = ("node", element, "its address in the nft set");
    inside.into_iter().chain(outside).chain([element]).collect()
}

#[test]
#[ignore = "needs root and network namespaces"]
fn check_names_each_missing_piece_and_the_reconciliation_makes_it_again() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        let pod = site.captured("pod", 7);
        site.call("CHECK", &pod).expect_ok();
        for (place, how, says) in pieces(&pod) {
            site.inside(place, &["sh", "-ec", &how]);
            let error = site.call("CHECK", &pod).error();
            assert_eq!(error["code"], 118, "{how}: {error}");
            assert!(error["msg"].as_str().unwrap().contains(says), "{how}: {error}");
            let state = site.node.entry["stateDir"].as_str().unwrap();
            site.inside("node", &[PLUGIN, "reconcile", state]);
            site.call("CHECK", &pod).expect_ok();
        }
        site.call("DEL", &pod).expect_ok();
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn del_leaves_nothing_on_the_node_and_in_the_namespace() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        let [one, two] = [site.pod("one", 7), site.pod("two", 8)];
        let before = [&one, &two].map(|pod| state_of(&site, pod));
        site.add(&one);
        site.add(&two);
        let during = state_of(&site, &one);
        assert!(during.contains("30000:") && during.contains("unreachable 10.244.0.0/16"), "{during}");
        assert!(site.rules().contains("netdev nebula-cni-capture") && site.rules().contains("inet nebula-cni-capture"));
        // Again, as runtimes do after a timeout: all is in place.
        site.call("ADD", &one).expect_ok();
        for pod in [&one, &two] {
            ip(&["-n", &pod.netns, "link", "del", "nebula0"]);
        }
        site.call("DEL", &one).expect_ok();
        assert!(site.rules().contains("nebula-cni-capture"), "the other pod needs it");
        let chains = site.inside("node", &["nft", "list", "table", "netdev", "nebula-cni-capture"]);
        assert_eq!(chains.matches("device").count(), 2, "{chains}");
        site.call("CHECK", &two).error();
        site.call("DEL", &two).expect_ok();
        site.call("DEL", &two).expect_ok();
        assert_eq!(site.rules(), "");
        assert_eq!([&one, &two].map(|pod| state_of(&site, pod)), before);
        assert_eq!(site.node.residue(), Vec::<String>::new());
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_lost_record_and_a_link_that_is_gone_leave_nothing_either() {
    let mut site = Site::new(Primary::Bridge);
    let [one, two] = [site.captured("one", 7), site.captured("two", 8)];
    for file in std::fs::read_dir(site.node.root().join("state/net")).unwrap().flatten() {
        if file.path().extension().is_some_and(|extension| extension == "json") {
            std::fs::remove_file(file.path()).unwrap();
        }
    }
    site.call("DEL", &one).expect_ok();
    let table = site.inside("node", &["nft", "list", "table", "inet", "nebula-cni-capture"]);
    assert!(!table.contains("10.244.1.7") && table.contains("10.244.1.8"), "{table}");
    ip(&["-n", &site.namespace_of("node"), "link", "del", &two.host_end()]);
    let state = site.node.entry["stateDir"].as_str().unwrap();
    site.inside("node", &[PLUGIN, "reconcile", state]);
    assert_eq!(site.rules(), "");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_del_that_comes_late_takes_no_rule_from_the_pod_that_has_the_address_now() {
    let mut site = Site::new(Primary::Bridge);
    let [old, new] = [site.captured("old", 7), site.captured("new", 7)];
    site.call("DEL", &old).expect_ok();
    site.call("CHECK", &new).expect_ok();
    let table = site.inside("node", &["nft", "list", "table", "inet", "nebula-cni-capture"]);
    assert!(table.contains("10.244.1.7") && table.contains("fd00:244:1::7"), "{table}");
    site.call("DEL", &new).expect_ok();
    assert_eq!(site.rules(), "");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn links_without_an_end_on_the_node_are_refused_with_the_reason() {
    let mut site = Site::new(Primary::Bridge);
    let pod = site.pod("pod", 7);
    let node = site.namespace_of("node");
    // As the bandwidth plugin's egressRate, or an eBPF data path.
    run("tc", &["-n", &node, "qdisc", "add", "dev", &pod.host_end(), "clsact"]);
    let error = site.call("ADD", &pod).error();
    assert_eq!(error["code"], 118, "{error}");
    assert!(error["msg"].as_str().unwrap().contains("traffic control on veth-pod"), "{error}");
    ip(&["-n", &pod.netns, "link", "del", "eth0"]);
    ip(&[
        "-n", &node, "link", "add", "eth0", "link", "under", "netns", &pod.netns, "type", "macvlan", "mode", "bridge",
    ]);
    let error = site.call("ADD", &pod).error();
    assert_eq!(error["code"], 118, "{error}");
    assert!(error["msg"].as_str().unwrap().contains("eth0 of the pod is macvlan and no veth"), "{error}");
    assert_eq!(site.rules(), "");
}

/// Rules, routes, tables and settings of a pod's namespace.
fn state_of(site: &Site, pod: &Pod) -> String {
    let commands = "ip rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all | grep -Ev 'fe80|ff00'; nft list ruleset;
        sysctl net.ipv4.tcp_fwmark_accept net.ipv4.fwmark_reflect net.ipv6.fwmark_reflect net.ipv4.conf.eth0";
    site.inside(&pod.name, &["sh", "-c", commands])
}
