//! Addresses, MTU and state of the tun link (rtnetlink).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use ipnet::IpNet;
use nebula_core::io::Tun;
use nix::libc;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, connect, recv, send, socket,
};

use crate::netns::Namespace;

/// How a link is to look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayLink {
    /// Name of the device.
    pub device: String,
    /// MTU.
    pub mtu: u32,
    /// Transmit queue length.
    pub tx_queue: u32,
    /// Own addresses with the prefix lengths of their networks; the kernel adds the routes to these networks.
    pub addresses: Vec<IpNet>,
    /// Further prefixes routed to the device.
    pub routes: Vec<IpNet>,
}

/// Why a link could not be configured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The namespace cannot be entered.
    #[error(transparent)]
    Namespace(#[from] crate::netns::Error),
    /// No netlink socket.
    #[error("cannot open a netlink socket")]
    Socket(#[source] io::Error),
    /// The kernel refused a change.
    #[error("{device}: cannot {what}: {source}")]
    Refused {
        /// Device.
        device: String,
        /// What was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// There is no such device.
    #[error("{0}: no such network device")]
    NoDevice(String),
}

impl OverlayLink {
    /// Brings the link up with exactly these settings, in `namespace`.
    ///
    /// # Errors
    /// The first step that fails; the device is left as it is then.
    pub fn configure(&self, namespace: &Namespace) -> Result<(), Error> {
        match namespace {
            Namespace::Own => self.configure_here(),
            // A netlink socket belongs to the namespace of the thread that opens it, so all of it happens on one thread.
            Namespace::At { .. } => namespace.run("overlay-link", || self.configure_here())?,
        }
    }

    /// As [`OverlayLink::configure`], in the namespace of the calling thread.
    ///
    /// # Errors
    /// As there.
    pub fn configure_here(&self) -> Result<(), Error> {
        let mut kernel = Kernel::connect().map_err(Error::Socket)?;
        let index = interface_index(&self.device)?;
        self.forbid_link_local();

        if let Err(error) = kernel.change(index, libc::IFLA_MTU, self.mtu) {
            // As in Go: an MTU the kernel refuses does not stop the node.
            tracing::error!(device = self.device, mtu = self.mtu, %error, "Failed to set tun mtu");
        }
        if let Err(error) = kernel.change(index, libc::IFLA_TXQLEN, self.tx_queue) {
            tracing::error!(device = self.device, %error, "Failed to set tun tx queue length");
        }
        if let Some(size) = Tun::best_super_packet(self.mtu)
            && let Err(error) = kernel.change(index, libc::IFLA_GSO_MAX_SIZE, size)
        {
            // Only a matter of speed: super-packets of another size leave in two parts.
            tracing::debug!(device = self.device, size, %error, "The size of super-packets stays as it is");
        }
        for address in &self.addresses {
            kernel
                .add_address(index, *address)
                .map_err(|source| self.refused(format!("add the address {address}"), source))?;
        }
        kernel.bring_up(index).map_err(|source| self.refused("bring the link up".into(), source))?;
        for route in &self.routes {
            kernel.add_route(index, *route).map_err(|source| self.refused(format!("add the route {route}"), source))?;
        }
        Ok(())
    }

    /// Best effort: without IPv6 in the kernel, or with a read-only /proc, there is nothing to forbid or no way to.
    fn forbid_link_local(&self) {
        let path = format!("/proc/sys/net/ipv6/conf/{}/addr_gen_mode", self.device);
        if let Err(error) = std::fs::write(&path, "1") {
            tracing::debug!(path, %error, "Link-local addresses stay enabled on the tun");
        }
    }

    fn refused(&self, what: String, source: io::Error) -> Error {
        Error::Refused { device: self.device.clone(), what, source }
    }
}

fn interface_index(device: &str) -> Result<u32, Error> {
    nix::net::if_::if_nametoindex(device).map_err(|_| Error::NoDevice(device.to_owned()))
}

/// Asks the kernel for one change at a time and waits for its answer. The four messages are written here (rtnetlink(7)): a
/// library that knows all of them would be a tenth of the program.
struct Kernel {
    socket: OwnedFd,
    sequence: u32,
}

impl Kernel {
    fn connect() -> io::Result<Self> {
        let route = SockProtocol::NetlinkRoute;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, route)?;
        connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    fn change(&mut self, index: u32, attribute: u16, value: u32) -> io::Result<()> {
        let mut body = link_header(index, 0);
        push_attribute(&mut body, attribute, &value.to_ne_bytes());
        self.ask(libc::RTM_NEWLINK, 0, &body)
    }

    fn bring_up(&mut self, index: u32) -> io::Result<()> {
        self.ask(libc::RTM_NEWLINK, 0, &link_header(index, libc::IFF_UP as u32))
    }

    fn add_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.ask(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &address_body(index, address))
    }

    fn add_route(&mut self, index: u32, network: IpNet) -> io::Result<()> {
        self.ask(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &route_body(index, network))
    }

    fn ask(&mut self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        self.sequence += 1;
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&flags.to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(body);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut answer = [0; 4096];
        loop {
            let len = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            if let Some(code) = answer_to(self.sequence, &answer[..len]) {
                return if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code.saturating_neg())) };
            }
        }
    }
}

/// The error code (0: done) in the kernel's answer to the request `sequence`; `None`: it is something else.
fn answer_to(sequence: u32, message: &[u8]) -> Option<i32> {
    let (_, rest) = message.split_first_chunk::<4>()?;
    let (kind, rest) = rest.split_first_chunk()?;
    let (_, rest) = rest.split_first_chunk::<2>()?;
    let (answered, rest) = rest.split_first_chunk()?;
    let (_, rest) = rest.split_first_chunk::<4>()?;
    let (code, _) = rest.split_first_chunk()?;
    let is_answer = i32::from(u16::from_ne_bytes(*kind)) == libc::NLMSG_ERROR;
    (is_answer && u32::from_ne_bytes(*answered) == sequence).then(|| i32::from_ne_bytes(*code))
}

/// struct ifinfomsg; the flags in `set` are switched on.
fn link_header(index: u32, set: u32) -> Vec<u8> {
    let mut body = vec![libc::AF_UNSPEC as u8, 0, 0, 0];
    for word in [index, set, set] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

/// struct ifaddrmsg and its attributes.
fn address_body(index: u32, address: IpNet) -> Vec<u8> {
    let (family, flags) = match address {
        IpNet::V4(_) => (libc::AF_INET, 0),
        // Nobody can have the same address behind a tun, and detecting that would delay its use by a second.
        IpNet::V6(_) => (libc::AF_INET6, libc::IFA_F_NODAD),
    };
    let mut body = vec![family as u8, address.prefix_len(), flags as u8, libc::RT_SCOPE_UNIVERSE];
    body.extend_from_slice(&index.to_ne_bytes());
    match address {
        IpNet::V4(network) => {
            push_attribute(&mut body, libc::IFA_ADDRESS, &network.addr().octets());
            push_attribute(&mut body, libc::IFA_LOCAL, &network.addr().octets());
            if network.prefix_len() < 31 {
                push_attribute(&mut body, libc::IFA_BROADCAST, &network.broadcast().octets());
            }
        }
        IpNet::V6(network) => {
            push_attribute(&mut body, libc::IFA_ADDRESS, &network.addr().octets());
            push_attribute(&mut body, libc::IFA_LOCAL, &network.addr().octets());
        }
    }
    body
}

/// struct rtmsg and its attributes: `network` is reached through the link itself.
fn route_body(index: u32, network: IpNet) -> Vec<u8> {
    let (family, scope) = match network {
        IpNet::V4(_) => (libc::AF_INET, libc::RT_SCOPE_LINK),
        IpNet::V6(_) => (libc::AF_INET6, libc::RT_SCOPE_UNIVERSE),
    };
    let (table, protocol, kind) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC, libc::RTN_UNICAST);
    let mut body = vec![family as u8, network.prefix_len(), 0, 0, table, protocol, scope, kind, 0, 0, 0, 0];
    match network.network() {
        IpAddr::V4(ip) => push_attribute(&mut body, libc::RTA_DST, &ip.octets()),
        IpAddr::V6(ip) => push_attribute(&mut body, libc::RTA_DST, &ip.octets()),
    }
    push_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
    body
}

/// `value` is a whole number of words, so nothing has to be padded.
fn push_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    body.extend_from_slice(&kind.to_ne_bytes());
    body.extend_from_slice(value);
}

// struct nlmsghdr.
const HEADER: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_answer_to_the_request_counts() {
        let mut message = [0; 36];
        message[4..6].copy_from_slice(&2u16.to_ne_bytes());
        message[8..12].copy_from_slice(&7u32.to_ne_bytes());
        message[16..20].copy_from_slice(&(-17i32).to_ne_bytes());
        assert_eq!(answer_to(7, &message), Some(-17));
        assert_eq!(answer_to(8, &message), None, "the answer to another request");
        assert_eq!(answer_to(7, &message[..19]), None, "cut short");
        message[4] = 16;
        assert_eq!(answer_to(7, &message), None, "news about a link");
    }

    #[test]
    fn addresses_are_written_as_the_kernel_reads_them() {
        let v4 = address_body(3, "10.1.2.3/24".parse().unwrap());
        assert_eq!(v4[..4], [2, 24, 0, 0]);
        assert_eq!(v4[8..], [8, 0, 1, 0, 10, 1, 2, 3, 8, 0, 2, 0, 10, 1, 2, 3, 8, 0, 4, 0, 10, 1, 2, 255]);
        assert_eq!(address_body(3, "10.1.2.3/32".parse().unwrap()).len(), 24, "one host has no broadcast address");
        let v6 = address_body(3, "fd00::1/64".parse().unwrap());
        assert_eq!((v6[..4].to_vec(), v6.len()), (vec![10, 64, 2, 0], 48));
    }

    #[test]
    fn routes_are_written_as_the_kernel_reads_them() {
        let v4 = route_body(3, "10.1.2.3/16".parse().unwrap());
        assert_eq!(v4[..8], [2, 16, 0, 0, 254, 4, 253, 1]);
        assert_eq!(v4[12..20], [8, 0, 1, 0, 10, 1, 0, 0]);
        assert_eq!(v4[20..24], [8, 0, 4, 0]);
        assert_eq!(route_body(3, "fd00::/8".parse().unwrap()).len(), 40);
    }

    #[test]
    fn a_refusal_of_the_kernel_comes_back_as_its_error() {
        let mut kernel = Kernel::connect().unwrap();
        let error = kernel.change(u32::MAX >> 1, libc::IFLA_MTU, 1300).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)), "{error}");
    }
}
