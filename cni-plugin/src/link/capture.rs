//! Capture of a pod's traffic: what sends it to the tunnel in the pod's network namespace, and the guard on the node.
//!
//! In the namespace a rule sends unmarked packets to a routing table of its own. There, pod and Service ranges are
//! unreachable unless the instance routes them to its device, and exceptions continue on the primary network. What
//! arrives on the pod's own interface is marked, and the kernel carries the mark to its answers (TCP, resets, echo
//! replies), so that probes, node ports and pods without enrolment are answered where they asked, also while the device
//! is dead. The guard comes first and goes last: it alone holds what must not leave in clear, the rest is a way for it.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nebula_cni_contract::launch::{MARK, MARK_MASK, NODE_PORT_TABLE, ROUTE_TABLE};
use nebula_cni_contract::netlink::nftables::{self, Chain, Family, Hook, Rule, Table, Verdict};
use nebula_cni_contract::netlink::policy::{DeadEnd, Fate, LAST_METRIC, PortRule, UnmarkedRule};
use nebula_cni_contract::netns::{Netns, in_namespace};
use serde::{Deserialize, Serialize};

use crate::link::capture_guard::CaptureGuard;
use crate::link::capture_rules;
use crate::link::service_choice;

/// The capture of one pod, as it was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodCapture {
    /// The pod's own interface.
    ifname: String,
    /// Pod and Service ranges, which go to the tunnel.
    captured: Vec<IpNet>,
    /// What stays on the primary network although it is in these ranges.
    excepted: Vec<IpNet>,
    /// First and last of the ports of nodes, which go to the tunnel whatever the address, but for `port_exceptions`.
    #[serde(default)]
    node_ports: Option<(u16, u16)>,
    #[serde(default)]
    port_exceptions: Vec<IpNet>,
    /// The rules on the node.
    pub guard: CaptureGuard,
}

/// Makes and removes captures.
pub trait Captures {
    /// Installs the guard and then what sends the pod's traffic to the tunnel, leaving what is there already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn install(&self, netns: &Netns, capture: &PodCapture) -> io::Result<()>;

    /// Names what is missing in the pod's namespace and on the node.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn missing(&self, netns: &Netns, capture: &PodCapture) -> io::Result<Vec<String>>;

    /// Names the missing rules of the guard.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn unguarded(&self, capture: &PodCapture) -> io::Result<Vec<String>>;

    /// Removes a capture, from the pod's namespace only if that still exists. `addresses` are those of the pod, without
    /// any that another captured pod has now.
    ///
    /// # Errors
    /// Returns the first error of the kernel, after everything was tried.
    fn remove(&self, netns: Option<&Netns>, capture: &PodCapture, addresses: &[IpAddr]) -> io::Result<()>;

    /// Removes the guard of an attachment whose record is lost. `addresses` are those of the pod, unless another pod
    /// has them now.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn remove_lost(&self, attachment: &str, addresses: &[IpAddr]) -> io::Result<()>;

    /// Removes guards of links that are gone.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn sweep(&self) -> io::Result<()>;
}

impl PodCapture {
    /// `captured` are the ranges of pods and Services, `node` the node's addresses on its way to the pod.
    #[must_use]
    pub fn new(ifname: String, captured: Vec<IpNet>, exclude: &[IpNet], node: &[IpAddr], guard: CaptureGuard) -> Self {
        let hosts = node.iter().map(|address| IpNet::from(*address));
        let is_captured = |network: &IpNet| captured.iter().any(|range| range.contains(network));
        let mut excepted: Vec<IpNet> = exclude.iter().copied().chain(hosts).chain(link_scope()).collect();
        excepted.retain(is_captured);
        excepted.sort();
        excepted.dedup();
        Self { ifname, captured, excepted, node_ports: None, port_exceptions: Vec::new(), guard }
    }

    /// Also captures what is sent to these ports, except at `exclude`.
    #[must_use]
    pub fn with_node_ports(self, node_ports: Option<(u16, u16)>, exclude: &[IpNet]) -> Self {
        let port_exceptions = if node_ports.is_some() { [exclude, &link_scope()].concat() } else { Vec::new() };
        Self { node_ports, port_exceptions, ..self }
    }

    /// Everything in the namespace of the calling thread. Until the rule is there, nothing of it has an effect on
    /// what the pod sends.
    fn install_here(&self) -> io::Result<()> {
        self.routes().iter().try_for_each(DeadEnd::add)?;
        for switch in self.switches() {
            fs::write(&switch, "1").map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", switch.display())))?;
        }
        if !self.has_marks()? {
            self.marks().install()?;
        }
        self.rules().iter().try_for_each(UnmarkedRule::add)?;
        self.port_rules().iter().try_for_each(PortRule::add)
    }

    fn missing_here(&self) -> io::Result<Vec<String>> {
        let mut missing = Vec::new();
        for rule in self.rules() {
            if !rule.exists()? {
                missing.push(format!("the routing rule (priority {PRIORITY}, {})", family(rule.is_v4)));
            }
        }
        for rule in self.port_rules() {
            if !rule.exists()? {
                let (first, last) = rule.ports;
                let what = format!("protocol {}, ports {first}-{last}, {}", rule.protocol, family(rule.is_v4));
                missing.push(format!("the routing rule about ports of nodes (priority {PORTS_PRIORITY}, {what})"));
            }
        }
        let mut present = Vec::new();
        for table in [ROUTE_TABLE, NODE_PORT_TABLE] {
            present.extend(DeadEnd::list(true, table)?);
            present.extend(DeadEnd::list(false, table).unwrap_or_default());
        }
        for route in self.routes().iter().filter(|route| !present.contains(route)) {
            let kind = match route.fate {
                Fate::Unreachable => "unreachable",
                Fate::Throw => "throw",
            };
            missing.push(format!("the route {kind} {} in table {}", route.network, route.table));
        }
        if !self.has_marks()? {
            missing.push(format!("the rule that marks what arrives (nft table netdev {MARKS})"));
        }
        for switch in self.switches() {
            if fs::read_to_string(&switch).is_ok_and(|value| value.trim() == "0") {
                missing.push(format!("the setting {}", switch.display()));
            }
        }
        Ok(missing)
    }

    /// In the opposite order.
    fn remove_here(&self) -> io::Result<()> {
        let mut outcomes: Vec<io::Result<()>> = self.port_rules().iter().map(PortRule::remove).collect();
        outcomes.extend(self.rules().iter().map(UnmarkedRule::remove));
        outcomes.push(nftables::remove(Family::Link, MARKS));
        for switch in self.switches() {
            // The interface may be gone, and its settings with it.
            let _ = fs::write(switch, "0");
        }
        outcomes.extend(self.routes().iter().map(DeadEnd::remove));
        outcomes.into_iter().collect()
    }

    fn rules(&self) -> Vec<UnmarkedRule> {
        let rule = |is_v4| UnmarkedRule { is_v4, priority: PRIORITY, mark: MARK, mask: MARK_MASK, table: ROUTE_TABLE };
        [true, false].into_iter().filter(|is_v4| self.has_family(*is_v4)).map(rule).collect()
    }

    fn port_rules(&self) -> Vec<PortRule> {
        let Some(ports) = self.node_ports else { return Vec::new() };
        let rule = |is_v4| {
            move |protocol| PortRule {
                is_v4,
                priority: PORTS_PRIORITY,
                mask: MARK_MASK,
                protocol,
                ports,
                table: NODE_PORT_TABLE,
            }
        };
        let families = [true, false].into_iter().filter(|is_v4| self.has_family(*is_v4));
        families.flat_map(|is_v4| PROTOCOLS.map(rule(is_v4))).collect()
    }

    fn routes(&self) -> Vec<DeadEnd> {
        let route = |table, fate| {
            move |network: &IpNet| {
                let metric = if fate == Fate::Unreachable { LAST_METRIC } else { EXCEPTION_METRIC };
                DeadEnd { network: *network, table, fate, metric }
            }
        };
        let everywhere: &[IpNet] = if self.node_ports.is_some() { &EVERYWHERE } else { &[] };
        let refused = self.captured.iter().map(route(ROUTE_TABLE, Fate::Unreachable));
        let refused = refused.chain(everywhere.iter().map(route(NODE_PORT_TABLE, Fate::Unreachable)));
        let excepted = self.excepted.iter().map(route(ROUTE_TABLE, Fate::Throw));
        let excepted = excepted.chain(self.port_exceptions.iter().map(route(NODE_PORT_TABLE, Fate::Throw)));
        let mut routes: Vec<DeadEnd> =
            refused.chain(excepted).filter(|route| self.has_family(route.network.addr().is_ipv4())).collect();
        routes.dedup();
        routes
    }

    /// A kernel without IPv6 sends nothing of it.
    fn has_family(&self, is_v4: bool) -> bool {
        self.captured.iter().any(|range| range.addr().is_ipv4() == is_v4) && (is_v4 || has_ipv6())
    }

    /// Marks every frame that arrives on the pod's own interface: questions for neighbours (ARP) as well, because the
    /// kernel answers them only if the way back to who asked is this interface.
    fn marks(&self) -> Table {
        let arrival = Chain::new(Hook::FromLink(self.ifname.clone()), vec![Rule::mark(Vec::new(), MARK)]);
        Table::new(Family::Link, MARKS).with(arrival.otherwise(Verdict::Accept))
    }

    fn has_marks(&self) -> io::Result<bool> {
        Ok(nftables::chains_on_link(MARKS, &self.ifname)? == (1, 1))
    }

    /// What carries the mark from a packet to its answers, and into the check of its source (rp_filter): without the
    /// mark the way back would be the tunnel.
    fn switches(&self) -> Vec<PathBuf> {
        let base = PathBuf::from("/proc/sys/net");
        let mut switches = vec![
            base.join("ipv4/tcp_fwmark_accept"),
            base.join("ipv4/fwmark_reflect"),
            base.join("ipv4/conf").join(&self.ifname).join("src_valid_mark"),
        ];
        if has_ipv6() {
            switches.push(base.join("ipv6/fwmark_reflect"));
        }
        switches
    }
}

fn has_ipv6() -> bool {
    fs::exists("/proc/sys/net/ipv6").unwrap_or_default()
}

fn family(is_v4: bool) -> &'static str {
    if is_v4 { "IPv4" } else { "IPv6" }
}

/// What is no address of a pod or a Service in any range: link-local and group addresses.
fn link_scope() -> [IpNet; 5] {
    let v4 = |octets: [u8; 4], bits| IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from(octets), bits));
    let v6 = |first, bits| IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, 0), bits));
    [v4([169, 254, 0, 0], 16), v4([224, 0, 0, 0], 4), v4([255; 4], 32), v6(0xfe80, 10), v6(0xff00, 8)]
}

/// The captures in the kernel. The guard is in the plugin's own network namespace.
#[derive(Debug)]
pub struct SystemCaptures;

impl Captures for SystemCaptures {
    fn install(&self, netns: &Netns, capture: &PodCapture) -> io::Result<()> {
        capture_rules::install(&capture.guard)?;
        in_namespace(&netns.file, || capture.install_here())
    }

    fn missing(&self, netns: &Netns, capture: &PodCapture) -> io::Result<Vec<String>> {
        let mut missing = self.unguarded(capture)?;
        missing.extend(in_namespace(&netns.file, || capture.missing_here())?);
        Ok(missing)
    }

    fn unguarded(&self, capture: &PodCapture) -> io::Result<Vec<String>> {
        capture_rules::missing(&capture.guard)
    }

    fn remove(&self, netns: Option<&Netns>, capture: &PodCapture, addresses: &[IpAddr]) -> io::Result<()> {
        let inside = netns.map_or(Ok(()), |netns| in_namespace(&netns.file, || capture.remove_here()));
        let guard = capture_rules::remove(capture.guard.attachment(), addresses).and_then(|()| without_pods());
        inside.and(guard)
    }

    fn remove_lost(&self, attachment: &str, addresses: &[IpAddr]) -> io::Result<()> {
        capture_rules::remove(attachment, addresses).and_then(|()| without_pods())
    }

    fn sweep(&self) -> io::Result<()> {
        capture_rules::sweep().and_then(|()| without_pods())
    }
}

/// Takes away what the node agent has made for captured pods, if there are none left.
fn without_pods() -> io::Result<()> {
    match capture_rules::tables_with_clear_sets() {
        Ok(None) => service_choice::replace(&[], &[]),
        Ok(Some(_)) => Ok(()),
        Err(error) if nftables::has_no_tables(&error) => Ok(()),
        Err(error) => Err(error),
    }
}

const MARKS: &str = "nebula-cni-capture";
// Behind the rule of table `local` (0), before that of table `main` (32766).
const PRIORITY: u32 = 30_000;
const PORTS_PRIORITY: u32 = 29_999;
/// TCP, UDP and SCTP.
const PROTOCOLS: [u8; 3] = [6, 17, 132];
const EVERYWHERE: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];
// IPv6 takes no 0.
const EXCEPTION_METRIC: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::capture_guard::Terms;
    use crate::link::pod_link::PodLink;

    fn capture(captured: &[&str], exclude: &[&str]) -> PodCapture {
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        let link = PodLink {
            name: "veth7".into(),
            index: 7,
            mac: [2, 0, 0, 0, 0, 7],
            addresses: nets(&["10.244.1.7/24"]),
            is_shared: true,
            node_mac: None,
            node_addresses: vec![],
        };
        let node: Vec<IpAddr> = ["10.244.1.1", "192.0.2.1"].map(|text| text.parse().unwrap()).to_vec();
        let terms = Terms { ranges: nets(captured), exclude: nets(exclude), ..Terms::default() };
        let guard = CaptureGuard::new("7".into(), link, terms, node.clone());
        PodCapture::new("eth0".into(), nets(captured), &nets(exclude), &node, guard)
    }

    fn listed(capture: &PodCapture) -> Vec<String> {
        capture.routes().iter().map(|route| format!("{:?} {}", route.fate, route.network)).collect()
    }

    #[test]
    fn ranges_are_unreachable_and_exceptions_inside_them_stay_on_the_primary_network() {
        let some = capture(&["10.244.0.0/16", "10.96.0.0/12"], &["10.244.9.0/24", "172.16.0.0/12"]);
        let expected =
            ["Unreachable 10.244.0.0/16", "Unreachable 10.96.0.0/12", "Throw 10.244.1.1/32", "Throw 10.244.9.0/24"];
        assert_eq!(listed(&some), expected);
        assert_eq!(some.rules().len(), 1, "there is nothing to capture of IPv6");
    }

    #[test]
    fn ports_of_nodes_lead_to_the_tunnel_whatever_the_address_but_for_what_is_excluded_and_the_link() {
        let exclude: Vec<IpNet> = vec!["192.0.2.0/24".parse().unwrap(), "fd00:9::/64".parse().unwrap()];
        let some = capture(&["10.244.0.0/16"], &[]);
        assert!(some.port_rules().is_empty());
        let some = some.with_node_ports(Some((30_000, 32_767)), &exclude);
        assert_eq!(some.port_rules().iter().map(|rule| rule.protocol).collect::<Vec<_>>(), [6, 17, 132]);
        let routes = some.routes();
        let listed = |table| {
            let own = routes.iter().filter(|route| route.table == table);
            own.map(|route| format!("{:?} {}", route.fate, route.network)).collect::<Vec<_>>()
        };
        assert_eq!(listed(ROUTE_TABLE), ["Unreachable 10.244.0.0/16", "Throw 10.244.1.1/32"]);
        let expected = [
            "Unreachable 0.0.0.0/0",
            "Throw 192.0.2.0/24",
            "Throw 169.254.0.0/16",
            "Throw 224.0.0.0/4",
            "Throw 255.255.255.255/32",
        ];
        assert_eq!(listed(NODE_PORT_TABLE), expected);
    }

    #[test]
    fn whoever_captures_everything_keeps_its_link() {
        let all = listed(&capture(&["0.0.0.0/0"], &[]));
        for exception in ["169.254.0.0/16", "224.0.0.0/4", "255.255.255.255/32", "192.0.2.1/32"] {
            assert!(all.contains(&format!("Throw {exception}")), "{all:?}");
        }
    }

    #[test]
    fn a_capture_in_a_record_is_read_back() {
        let some = capture(&["10.244.0.0/16"], &[]);
        assert_eq!(serde_json::from_str::<PodCapture>(&serde_json::to_string(&some).unwrap()).unwrap(), some);
    }
}
