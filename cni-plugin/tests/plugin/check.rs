//! CHECK, tested as a function on a fake node that can be broken at will, and once on the kernel's network namespaces.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use nebula_cni_contract::clock::SystemClock;
use nebula_cni_contract::labels::Program;
use nebula_cni_contract::netns::{Link, Namespaces, Netns, NetnsId, SystemNamespaces};
use nebula_cni_plugin::host::Host;
use nebula_cni_plugin::link::capture::SystemCaptures;
use nebula_cni_plugin::link::guard::SystemGuards;
use nebula_cni_plugin::link::host_route::SystemRoutes;
use nebula_cni_plugin::link::pod_link::SystemLinks;
use nebula_cni_plugin::reply::Error;
use nebula_cni_plugin::request::{self, Env, Request};
use nebula_cni_plugin::supervisor::{Direct, Systemd};
use nebula_cni_plugin::{attachment::record::State, verb};
use serde_json::json;

use crate::harness::Node;

struct Pretended {
    link: RefCell<Option<Link>>,
}

impl Namespaces for Pretended {
    fn open(&self, path: &Path) -> io::Result<Netns> {
        SystemNamespaces.open(path)
    }

    fn own(&self) -> io::Result<NetnsId> {
        SystemNamespaces.own()
    }

    fn link(&self, _: &Netns, name: &str) -> io::Result<Option<Link>> {
        assert_eq!(name, "nebula0");
        Ok(self.link.borrow().clone())
    }

    fn set_mtu(&self, _: &Netns, _: &str, _: u32) -> io::Result<()> {
        Ok(())
    }
}

fn check(node: &Node, namespaces: &dyn Namespaces) -> Result<String, Error> {
    let mut env: Env = node.env.iter().map(|(k, v)| (k.into(), v.into())).collect();
    env.insert("CNI_COMMAND".into(), "CHECK".into());
    let host = Host {
        clock: &SystemClock,
        namespaces,
        direct: &Direct::new(),
        systemd: &Systemd,
        routes: &SystemRoutes,
        links: &SystemLinks,
        guards: &SystemGuards,
        captures: &SystemCaptures,
        labels: &Program,
        plugin_dir: None,
    };
    let request = request::read(&env, node.stdin().as_bytes()).1.unwrap().unwrap();
    assert!(matches!(request, Request::Check(_)));
    verb::answer(&request, &host)
}

fn link(up: bool) -> Option<Link> {
    Some(Link { up, addresses: vec![("10.42.0.7".parse::<IpAddr>().unwrap(), 16)], is_without_v6: false })
}

#[test]
fn check_passes_right_after_add_and_names_each_thing_that_is_broken() {
    let mut node = Node::with_nebula(json!({"fakeOverlay": ["10.42.0.7/16"]}));
    node.call("ADD").expect_ok();
    let namespaces = Pretended { link: RefCell::new(link(true)) };
    let code = |node: &Node| check(node, &namespaces).unwrap_err().code;
    assert_eq!(check(&node, &namespaces).unwrap(), "");

    namespaces.link.replace(link(false));
    assert_eq!(code(&node), 111);
    namespaces.link.replace(Some(Link { up: true, addresses: vec![], is_without_v6: false }));
    assert_eq!(code(&node), 111);
    namespaces.link.replace(None);
    assert_eq!(code(&node), 111);
    namespaces.link.replace(link(true));

    node.set("CNI_NETNS", "/proc/self/ns/ipc");
    assert_eq!(code(&node), 8);
    node.set("CNI_NETNS", "/nonexistent/netns");
    assert_eq!(code(&node), 8);
    node.set("CNI_NETNS", crate::harness::NETNS);

    let record = node.record().unwrap();
    let socket = node.files().status_socket();
    std::fs::rename(&socket, node.root().join("aside")).unwrap();
    assert_eq!(code(&node), 101);
    std::fs::rename(node.root().join("aside"), &socket).unwrap();
    let mut intent = record.clone();
    intent.state = State::Intent;
    intent.save(&node.files()).unwrap();
    assert_eq!(code(&node), 3);
    std::fs::write(node.files().record(), "{").unwrap();
    assert_eq!(code(&node), 5);
    record.save(&node.files()).unwrap();
    assert_eq!(check(&node, &namespaces).unwrap(), "");

    record.process.unwrap().stop(&SystemClock).unwrap();
    assert_eq!(code(&node), 101);
    node.call("DEL").expect_ok();
    assert_eq!(code(&node), 3);
    node.prev_result = None;
    assert_eq!(code(&node), 7);
}

#[test]
fn a_pod_whose_init_container_never_asked_is_not_well() {
    let node = Node::with_nebula(json!({"fakeOverlay": ["10.42.0.7/16"], "fakeInitOverdue": true}));
    node.call("ADD").expect_ok();
    let error = check(&node, &Pretended { link: RefCell::new(link(true)) }).unwrap_err();
    assert!(error.code == 117 && error.details.contains("nebula-cni-init"), "{error:?}");
    node.call("DEL").expect_ok();
}

/// A named network namespace, removed on drop.
struct NamedNetns(String);

impl NamedNetns {
    fn new() -> Self {
        let netns = Self(format!("ncp-check-{}", std::process::id()));
        ip(&["netns", "add", &netns.0]);
        netns
    }
}

impl Drop for NamedNetns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().expect("the tests need ip (package iproute2)");
    assert!(status.success(), "ip {arguments:?}");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn check_sees_the_device_in_the_pods_namespace_and_the_caller_stays_outside() {
    let netns = NamedNetns::new();
    let in_netns = |arguments: &[&str]| ip(&[&["-n", netns.0.as_str()], arguments].concat());
    let mut node = Node::with_nebula(json!({"fakeOverlay": ["10.42.0.7/16"]}));
    node.set("CNI_NETNS", &format!("/var/run/netns/{}", netns.0));
    node.call("ADD").expect_ok();
    assert_eq!(node.call("CHECK").code(), 111);
    // Any kind of device will do: the plugin looks at its name, state and addresses.
    in_netns(&["link", "add", "nebula0", "type", "veth", "peer", "name", "other"]);
    in_netns(&["address", "add", "10.42.0.7/16", "dev", "nebula0"]);
    assert_eq!(node.call("CHECK").code(), 111);
    in_netns(&["link", "set", "nebula0", "up"]);
    node.call("CHECK").expect_ok();
    in_netns(&["address", "del", "10.42.0.7/16", "dev", "nebula0"]);
    assert_eq!(node.call("CHECK").code(), 111);

    let before = SystemNamespaces.own().unwrap();
    let opened = SystemNamespaces.open(Path::new(&node.env["CNI_NETNS"])).unwrap();
    assert_ne!(opened.id, before);
    assert!(SystemNamespaces.link(&opened, "nebula0").unwrap().unwrap().up);
    assert_eq!(SystemNamespaces.own().unwrap(), before);
    assert!(File::open("/proc/self/ns/net").is_ok());
    node.call("DEL").expect_ok();
}
