//! The node's end of a pod's own interface: which link it is, and whether rules on it see all of the pod's traffic
//! (rtnetlink).

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use nebula_cni_contract::netlink::{self, push_attribute};
use nebula_cni_contract::netns::{Netns, in_namespace};
use nix::ifaddrs::getifaddrs;
use nix::libc;
use nix::net::if_::if_indextoname;
use nix::sys::socket::SockaddrStorage;

use crate::link::host_route::{Routes, SystemRoutes};
use crate::link::tcx;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Both ends of a pod's interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLink {
    /// Name of the node's end.
    pub name: String,
    /// Index of the node's end.
    pub index: u32,
    /// Ethernet address of the pod's end.
    pub mac: Mac,
    /// Addresses of the pod's end with their networks.
    pub addresses: Vec<IpNet>,
    /// Whether others share the link, because the node's end is a port of a bridge or switch.
    pub is_shared: bool,
    /// The node's own Ethernet address on that bridge, if the node reaches the pod through it.
    pub node_mac: Option<Mac>,
    /// The node's addresses on the interface that leads to the pod.
    pub node_addresses: Vec<IpAddr>,
}

/// Looks up links.
pub trait Links {
    /// Finds the link of the interface `ifname` of a pod with the address `pod`.
    ///
    /// # Errors
    /// Says why rules on the node's side cannot isolate this pod.
    fn of_pod(&self, netns: &Netns, ifname: &str, pod: IpAddr) -> Result<PodLink, String>;

    /// Whether the node has a link of this name and index.
    ///
    /// # Errors
    /// Returns an error if the link cannot be examined, or if traffic control on it keeps frames away from the rules.
    fn is_there(&self, name: &str, index: u32) -> Result<bool, String>;

    /// Makes the pod ignore ICMP redirects, so that nobody on its link can divert its packets. The rules drop redirects
    /// as well.
    fn harden(&self, netns: &Netns, ifname: &str);

    /// Removes the tun device `name` of a pod, if it is still there.
    ///
    /// # Errors
    /// Returns the system's error.
    fn remove_tun(&self, netns: &Netns, name: &str) -> io::Result<()>;
}

/// The kernel's links, through rtnetlink.
#[derive(Debug)]
pub struct SystemLinks;

impl Links for SystemLinks {
    fn of_pod(&self, netns: &Netns, ifname: &str, pod: IpAddr) -> Result<PodLink, String> {
        let failed = |e: io::Error| format!("cannot look at {ifname} of the pod: {e}");
        let inside = in_namespace(&netns.file, || Ok((link(By::Name(ifname))?, addresses(ifname)?))).map_err(failed)?;
        let (Some(inside), addresses) = inside else { return Err(format!("the pod has no interface {ifname}")) };
        if inside.kind != "veth" {
            return Err(no_veth(ifname, &inside.kind));
        }
        let mac = inside.mac.ok_or_else(|| format!("{ifname} of the pod has no Ethernet address"))?;
        let elsewhere = || format!("the other end of {ifname} is not in the network namespace of the plugin");
        let index = inside.peer.ok_or_else(elsewhere)?;
        let outside = link(By::Index(index)).map_err(failed)?.ok_or_else(elsewhere)?;
        // Indexes are small numbers that repeat in every namespace, so check that the two ends name each other.
        let is_peer = outside.kind == "veth"
            && outside.peer == Some(inside.index)
            && outside.peer_namespace.is_some()
            && outside.peer_namespace == number_of(&netns.file).map_err(failed)?;
        if !is_peer {
            return Err(elsewhere());
        }
        if let Some(why) = passed_by(&outside.name, index).map_err(failed)? {
            return Err(why);
        }
        let way = SystemRoutes.like(pod, pod).ok().map(|route| route.interface);
        let master = outside.master.map(|master| link(By::Index(master))).transpose().map_err(failed)?.flatten();
        let node_mac = master.filter(|master| master.kind == "bridge" && way == Some(master.index)).and_then(|b| b.mac);
        let way_name = way.and_then(|way| if_indextoname(way).ok()?.into_string().ok());
        let node_addresses = way_name.map_or(Ok(Vec::new()), |name| self::addresses(&name)).map_err(failed)?;
        Ok(PodLink {
            name: outside.name,
            index,
            mac,
            addresses,
            is_shared: outside.master.is_some(),
            node_mac,
            node_addresses: node_addresses.iter().map(IpNet::addr).collect(),
        })
    }

    fn is_there(&self, name: &str, index: u32) -> Result<bool, String> {
        let failed = |e: io::Error| format!("cannot look at {name}: {e}");
        let Some(found) = link(By::Index(index)).map_err(failed)? else { return Ok(false) };
        if found.name != name || found.kind != "veth" {
            return Ok(false);
        }
        passed_by(name, index).map_err(failed)?.map_or(Ok(true), Err)
    }

    fn harden(&self, netns: &Netns, ifname: &str) {
        let switch_off = || {
            for family in ["ipv4", "ipv6"] {
                for interface in ["all", "default", ifname] {
                    let switch = format!("/proc/sys/net/{family}/conf/{interface}/accept_redirects");
                    // Without IPv6 the file does not exist.
                    let _ = std::fs::write(switch, "0");
                }
            }
            // The rules on the link let through questions for neighbours from the pod's address on it, no other.
            let _ = std::fs::write(format!("/proc/sys/net/ipv4/conf/{ifname}/arp_announce"), "2");
            Ok(())
        };
        let _ = in_namespace(&netns.file, switch_off);
    }

    fn remove_tun(&self, netns: &Netns, name: &str) -> io::Result<()> {
        in_namespace(&netns.file, || {
            let Some(found) = link(By::Name(name))?.filter(|found| found.kind == "tun") else { return Ok(()) };
            let mut body = vec![0; IFINFOMSG];
            body[4..8].copy_from_slice(&found.index.to_ne_bytes());
            netlink::ask_route(libc::RTM_DELLINK, 0, &body).map(drop)
        })
    }
}

struct Link {
    index: u32,
    name: String,
    kind: String,
    mac: Option<Mac>,
    peer: Option<u32>,
    /// The id of the peer's namespace, as seen from this namespace.
    peer_namespace: Option<i32>,
    master: Option<u32>,
}

enum By<'a> {
    Name(&'a str),
    Index(u32),
}

fn link(by: By<'_>) -> io::Result<Option<Link>> {
    // struct ifinfomsg.
    let mut body = vec![0; IFINFOMSG];
    match by {
        By::Name(name) => push_attribute(&mut body, libc::IFLA_IFNAME, &[name.as_bytes(), &[0]].concat()),
        By::Index(index) => body[4..8].copy_from_slice(&index.to_ne_bytes()),
    }
    let bodies = match netlink::ask_route(libc::RTM_GETLINK, 0, &body) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
        other => other?,
    };
    Ok(bodies.first().and_then(|body| read_link(body)))
}

fn read_link(body: &[u8]) -> Option<Link> {
    let (head, attributes) = body.split_first_chunk::<IFINFOMSG>()?;
    let word = |kind: u16| Some(u32::from_ne_bytes(netlink::attribute(attributes, kind)?.try_into().ok()?));
    let kind = netlink::attribute(attributes, libc::IFLA_LINKINFO).and_then(|info| netlink::text(info, INFO_KIND));
    Some(Link {
        index: u32::from_ne_bytes([head[4], head[5], head[6], head[7]]),
        name: netlink::text(attributes, libc::IFLA_IFNAME).unwrap_or_default(),
        kind: kind.unwrap_or_default(),
        mac: netlink::attribute(attributes, libc::IFLA_ADDRESS).and_then(|mac| mac.try_into().ok()),
        peer: word(libc::IFLA_LINK),
        peer_namespace: word(LINK_NETNSID).map(u32::cast_signed),
        master: word(libc::IFLA_MASTER),
    })
}

/// Decodes a link message, for the fuzzer.
pub(crate) fn fuzz(body: &[u8]) {
    let _ = read_link(body);
}

/// The id of another network namespace as seen from this one, if it has one.
fn number_of(netns: &File) -> io::Result<Option<i32>> {
    // struct rtgenmsg, padded.
    let mut body = vec![0; 4];
    push_attribute(&mut body, NETNSA_FD, &netns.as_raw_fd().to_ne_bytes());
    let bodies = netlink::ask_route(libc::RTM_GETNSID, 0, &body)?;
    let number = bodies.first().and_then(|body| netlink::attribute(body.get(4..)?, NETNSA_NSID)?.try_into().ok());
    Ok(number.map(i32::from_ne_bytes).filter(|number| *number >= 0))
}

/// Why there can be no rules for an interface of this kind.
fn no_veth(ifname: &str, kind: &str) -> String {
    match kind {
        // Its programs run in the driver, and the node's end sees only what they leave.
        "netkit" => format!(
            "{ifname} of the pod is a netkit device, on which a program of eBPF (Cilium's, with bpf.datapathMode=netkit) \
             takes the pod's frames before nf_tables sees them"
        ),
        _ => {
            let kind = if kind.is_empty() { "a physical device" } else { kind };
            format!("{ifname} of the pod is {kind} and no veth, so the node has no end of it for rules")
        }
    }
}

/// Returns the reason why frames of this link may bypass the rules: traffic control sees them first and can redirect
/// them.
fn passed_by(name: &str, index: u32) -> io::Result<Option<String>> {
    // struct tcmsg.
    let mut body = vec![0; TCMSG];
    body[4..8].copy_from_slice(&index.to_ne_bytes());
    for body in netlink::ask_route(libc::RTM_GETQDISC, libc::NLM_F_DUMP, &body)? {
        let Some((head, attributes)) = body.split_first_chunk::<TCMSG>() else { continue };
        let kind = netlink::text(attributes, TCA_KIND).unwrap_or_default();
        // The kernel may dump the queueing disciplines of all links.
        if head[4..8] == index.to_ne_bytes() && ["ingress", "clsact"].contains(&kind.as_str()) {
            return Ok(Some(format!(
                "traffic control on {name} (qdisc {kind}, as of an eBPF data path or of egressRate of the bandwidth \
                 plugin) takes the pod's frames before nf_tables sees them"
            )));
        }
    }
    let programs = tcx::programs(index)?;
    Ok((programs > 0).then(|| {
        format!(
            "traffic control on {name} (tcx, {programs} of eBPF's programs, as of an eBPF data path) takes the pod's frames \
             before nf_tables sees them"
        )
    }))
}

fn addresses(name: &str) -> io::Result<Vec<IpNet>> {
    let ip = |address: &SockaddrStorage| -> Option<IpAddr> {
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))
    };
    let of_link = getifaddrs()?.filter(|entry| entry.interface_name == name);
    let network = of_link.filter_map(|entry| IpNet::with_netmask(ip(&entry.address?)?, ip(&entry.netmask?)?).ok());
    Ok(network.collect())
}

/// The link-local address that the kernel derives from an Ethernet address by default.
#[must_use]
pub fn link_local([a, b, c, d, e, f]: Mac) -> Ipv6Addr {
    let word = |high: u8, low: u8| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

/// struct ifinfomsg.
pub(super) const IFINFOMSG: usize = 16;
const TCMSG: usize = 20;
// linux/if_link.h, linux/net_namespace.h, linux/rtnetlink.h.
pub(super) const INFO_KIND: u16 = 1;
const LINK_NETNSID: u16 = 37;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
const TCA_KIND: u16 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_link_is_found_by_name_and_index_and_is_no_veth() {
        let lo = link(By::Name("lo")).unwrap().unwrap();
        assert_eq!((lo.index, lo.name.as_str(), lo.kind.as_str(), lo.peer), (1, "lo", "", None));
        assert_eq!(link(By::Index(1)).unwrap().unwrap().name, "lo");
        assert!(link(By::Name("no-such-link")).unwrap().is_none());
        assert!(!SystemLinks.is_there("lo", 1).unwrap());
        assert!(!SystemLinks.is_there("lo", u32::MAX >> 1).unwrap());
        assert_eq!(passed_by("lo", 1).unwrap(), None);
    }

    #[test]
    fn a_device_without_an_end_for_rules_is_named_with_the_reason() {
        assert_eq!(
            no_veth("eth0", "macvlan"),
            "eth0 of the pod is macvlan and no veth, so the node has no end of it for rules"
        );
        assert!(no_veth("eth0", "").contains("a physical device and no veth"));
        let netkit = no_veth("eth0", "netkit");
        assert!(netkit.starts_with("eth0 of the pod is a netkit device, on which a program of eBPF"), "{netkit}");
        assert!(!netkit.contains("no veth"), "its node's end is there: {netkit}");
    }

    #[test]
    fn a_link_local_address_is_made_of_the_ethernet_address() {
        assert_eq!(link_local([0x02, 0x42, 0xac, 0x11, 0, 2]).to_string(), "fe80::42:acff:fe11:2");
    }
}
