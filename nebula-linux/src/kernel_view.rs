//! Read-only queries to the kernel (rtnetlink): which route a packet would take, and the state of a link.

use std::io;
use std::net::IpAddr;

use nebula_cni_contract::netlink::{self, attribute, octets};
use nix::libc;

use crate::rtnetlink::LinkState;

/// The route that a packet to a destination takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The outgoing device.
    pub device: Option<String>,
    /// Interface index of the device.
    pub(crate) index: u32,
    /// Whether the destination is an address of this machine.
    pub local: bool,
    /// MTU of the route, or else of the device.
    pub mtu: Option<u32>,
}

/// State of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub up: bool,
    pub mtu: u32,
    pub addresses: Vec<IpAddr>,
}

/// Returns the route to `destination`, with this mark if it is not 0.
///
/// # Errors
/// Returns the kernel's error: there is no route, or the route is of type unreachable, blackhole or prohibit.
pub fn route_to(destination: IpAddr, mark: u32) -> io::Result<Taken> {
    let (family, bits) = if destination.is_ipv4() { (libc::AF_INET, 32) } else { (libc::AF_INET6, 128) };
    // struct rtmsg.
    let mut body = vec![family as u8, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    netlink::push_attribute(&mut body, libc::RTA_DST, &octets(destination));
    if mark != 0 {
        netlink::push_attribute(&mut body, libc::RTA_MARK, &mark.to_ne_bytes());
    }
    let answers = netlink::ask_route(libc::RTM_GETROUTE, 0, &body)?;
    let answer = answers.first().filter(|answer| answer.len() >= RTMSG);
    let answer = answer.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    let (kind, attributes) = (answer[7], &answer[RTMSG..]);
    match kind {
        libc::RTN_UNREACHABLE => return Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH)),
        libc::RTN_BLACKHOLE | libc::RTN_PROHIBIT => return Err(io::Error::from_raw_os_error(libc::EACCES)),
        _ => {}
    }
    let index = number(attributes, libc::RTA_OIF).unwrap_or_default();
    let metrics = attribute(attributes, libc::RTA_METRICS).unwrap_or_default();
    let device = device_name(index);
    let of_route = number(metrics, RTAX_MTU).filter(|mtu| *mtu > 0);
    let mtu = of_route.or_else(|| Some(link(device.as_deref()?).ok()?.mtu));
    Ok(Taken { device, index, local: kind == libc::RTN_LOCAL, mtu })
}

/// Reads the state of a link by name.
///
/// # Errors
/// Returns an error if there is no such link, or the kernel does not answer.
pub fn link(device: &str) -> io::Result<Link> {
    let index = nix::net::if_::if_nametoindex(device)?;
    let state = LinkState::read(index)?.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
    Ok(Link { up: state.is_up, mtu: state.mtu, addresses: addresses(index)? })
}

fn addresses(index: u32) -> io::Result<Vec<IpAddr>> {
    let answers = netlink::ask_route(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; IFADDRMSG])?;
    let of_link = answers.iter().filter(|answer| answer.get(4..8) == Some(&index.to_ne_bytes()));
    let address = |answer: &Vec<u8>| {
        let attributes = answer.get(IFADDRMSG..)?;
        let own = attribute(attributes, libc::IFA_LOCAL).or_else(|| attribute(attributes, libc::IFA_ADDRESS))?;
        netlink::address(own)
    };
    Ok(of_link.filter_map(address).collect())
}

fn number(attributes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_ne_bytes(*attribute(attributes, kind)?.first_chunk()?))
}

fn device_name(index: u32) -> Option<String> {
    nix::net::if_::if_indextoname(index).ok()?.into_string().ok()
}

// Lengths of struct rtmsg and ifaddrmsg.
const RTMSG: usize = 12;
const IFADDRMSG: usize = 8;
// linux/rtnetlink.h: a route metric.
const RTAX_MTU: u16 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_up_and_has_its_address_and_packets_to_it_stay_here() {
        let lo = link("lo").unwrap();
        assert!(lo.up && lo.mtu >= 1500, "{lo:?}");
        assert!(lo.addresses.contains(&[127, 0, 0, 1].into()), "{lo:?}");
        let taken = route_to([127, 0, 0, 1].into(), 0).unwrap();
        assert_eq!((taken.device.as_deref(), taken.local, taken.mtu), (Some("lo"), true, Some(lo.mtu)));
        assert!(link("no-such-link").is_err());
    }
}
