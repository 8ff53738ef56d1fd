//! Policy routing: the rule that sends unmarked packets to a routing table, and routes that lead nowhere (rtnetlink).

use std::io;

use ipnet::IpNet;
use nix::libc;

use crate::netlink::{self, octets, push_attribute};

/// Sends packets of one family that lack a mark to a routing table (`not fwmark MARK/MASK lookup TABLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnmarkedRule {
    /// Whether it is for IPv4, else for IPv6.
    pub is_v4: bool,
    /// Rules with a lower number come first.
    pub priority: u32,
    /// The mark of packets that the rule leaves alone.
    pub mark: u32,
    /// The bits of the mark that count.
    pub mask: u32,
    /// Number of the table.
    pub table: u32,
}

impl UnmarkedRule {
    /// Adds the rule in the network namespace of the calling thread, unless it is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn add(&self) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        but(netlink::ask_route(libc::RTM_NEWRULE, flags, &self.body()), &[libc::EEXIST])
    }

    /// Removes the rule if it is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        but(netlink::ask_route(libc::RTM_DELRULE, 0, &self.body()), &GONE)
    }

    /// Whether the rule is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn exists(&self) -> io::Result<bool> {
        let rules = netlink::ask_route(libc::RTM_GETRULE, libc::NLM_F_DUMP, &header(self.is_v4, 0, 0, 0, 0))?;
        Ok(rules.iter().any(|rule| Self::read(rule) == Some(*self)))
    }

    fn read(rule: &[u8]) -> Option<Self> {
        let (head, attributes) = rule.split_first_chunk::<HEADER>()?;
        let [family, destination, source, _, _, _, _, action, flags @ ..] = *head;
        // One that has more conditions is another rule.
        let plain = (destination, source, action) == (0, 0, ACTION_TO_TABLE)
            && u32::from_ne_bytes(flags) & INVERT != 0
            && [ATTRIBUTE_FROM, ATTRIBUTE_BY].iter().all(|kind| netlink::attribute(attributes, *kind).is_none());
        let word = |kind| word(attributes, kind);
        plain.then_some(Self {
            is_v4: i32::from(family) == libc::AF_INET,
            priority: word(ATTRIBUTE_PRIORITY)?,
            mark: word(ATTRIBUTE_MARK)?,
            mask: word(ATTRIBUTE_MASK)?,
            table: word(ATTRIBUTE_TABLE)?,
        })
    }

    fn body(&self) -> Vec<u8> {
        // struct fib_rule_hdr has the layout of struct rtmsg; the number of the table is an attribute.
        let mut body = header(self.is_v4, 0, 0, ACTION_TO_TABLE, INVERT);
        let words = [
            (ATTRIBUTE_PRIORITY, self.priority),
            (ATTRIBUTE_MARK, self.mark),
            (ATTRIBUTE_MASK, self.mask),
            (ATTRIBUTE_TABLE, self.table),
        ];
        words.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, &value.to_ne_bytes()));
        body
    }
}

/// Sends packets of one family without a mark to a routing table, if they are to some ports of a protocol
/// (`fwmark 0/MASK ipproto PROTOCOL dport FIRST-LAST lookup TABLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRule {
    /// Whether it is for IPv4, else for IPv6.
    pub is_v4: bool,
    /// Rules with a lower number come first.
    pub priority: u32,
    /// The bits of the mark that the packets do not have.
    pub mask: u32,
    /// IP protocol number.
    pub protocol: u8,
    /// First and last destination port.
    pub ports: (u16, u16),
    /// Number of the table.
    pub table: u32,
}

impl PortRule {
    /// Adds the rule in the network namespace of the calling thread, unless it is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn add(&self) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        but(netlink::ask_route(libc::RTM_NEWRULE, flags, &self.body()), &[libc::EEXIST])
    }

    /// Removes the rule if it is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        but(netlink::ask_route(libc::RTM_DELRULE, 0, &self.body()), &GONE)
    }

    /// Whether the rule is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn exists(&self) -> io::Result<bool> {
        let rules = netlink::ask_route(libc::RTM_GETRULE, libc::NLM_F_DUMP, &header(self.is_v4, 0, 0, 0, 0))?;
        Ok(rules.iter().any(|rule| Self::read(rule) == Some(*self)))
    }

    fn read(rule: &[u8]) -> Option<Self> {
        let (head, attributes) = rule.split_first_chunk::<HEADER>()?;
        let [family, destination, source, _, _, _, _, action, flags @ ..] = *head;
        let plain = (destination, source, action) == (0, 0, ACTION_TO_TABLE)
            && u32::from_ne_bytes(flags) & INVERT == 0
            && word(attributes, ATTRIBUTE_MARK).unwrap_or_default() == 0
            && [ATTRIBUTE_FROM, ATTRIBUTE_BY].iter().all(|kind| netlink::attribute(attributes, *kind).is_none());
        let range = netlink::attribute(attributes, ATTRIBUTE_PORTS)?.first_chunk::<4>()?;
        let [a, b, c, d] = *range;
        plain.then_some(Self {
            is_v4: i32::from(family) == libc::AF_INET,
            priority: word(attributes, ATTRIBUTE_PRIORITY)?,
            mask: word(attributes, ATTRIBUTE_MASK)?,
            protocol: *netlink::attribute(attributes, ATTRIBUTE_PROTOCOL)?.first()?,
            ports: (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d])),
            table: word(attributes, ATTRIBUTE_TABLE)?,
        })
    }

    fn body(&self) -> Vec<u8> {
        let mut body = header(self.is_v4, 0, 0, ACTION_TO_TABLE, 0);
        let words = [
            (ATTRIBUTE_PRIORITY, self.priority),
            (ATTRIBUTE_MARK, 0),
            (ATTRIBUTE_MASK, self.mask),
            (ATTRIBUTE_TABLE, self.table),
        ];
        words.iter().for_each(|(kind, value)| push_attribute(&mut body, *kind, &value.to_ne_bytes()));
        push_attribute(&mut body, ATTRIBUTE_PROTOCOL, &[self.protocol]);
        // struct fib_rule_port_range.
        push_attribute(&mut body, ATTRIBUTE_PORTS, &[self.ports.0.to_ne_bytes(), self.ports.1.to_ne_bytes()].concat());
        body
    }
}

/// A route that leads to no device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadEnd {
    /// Destination.
    pub network: IpNet,
    /// Number of the table.
    pub table: u32,
    /// What becomes of the packets.
    pub fate: Fate,
    /// Among routes to the same network the one with the lowest metric is used; not 0 for IPv6.
    pub metric: u32,
}

/// What a route to no device does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Refuses packets.
    Unreachable,
    /// Ends the lookup in this table, so that the next rule decides.
    Throw,
}

impl DeadEnd {
    /// Adds the route in the network namespace of the calling thread, unless there is one to the same network with the
    /// same metric.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn add(&self) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        but(netlink::ask_route(libc::RTM_NEWROUTE, flags, &self.body()), &[libc::EEXIST])
    }

    /// Removes the route if it is there.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        but(netlink::ask_route(libc::RTM_DELROUTE, 0, &self.body()), &GONE)
    }

    /// Those in one table, of one family.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn list(is_v4: bool, table: u32) -> io::Result<Vec<Self>> {
        let routes = netlink::ask_route(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &header(is_v4, 0, 0, 0, 0))?;
        Ok(routes.iter().filter_map(|route| Self::read(route)).filter(|route| route.table == table).collect())
    }

    fn read(route: &[u8]) -> Option<Self> {
        let (head, attributes) = route.split_first_chunk::<HEADER>()?;
        let [family, bits, _, _, table, _, _, kind, ..] = *head;
        let fate = match kind {
            libc::RTN_UNREACHABLE => Fate::Unreachable,
            libc::RTN_THROW => Fate::Throw,
            _ => return None,
        };
        let everything: std::net::IpAddr =
            if i32::from(family) == libc::AF_INET { [0; 4].into() } else { [0_u8; 16].into() };
        let address = netlink::attribute(attributes, libc::RTA_DST).and_then(netlink::address).unwrap_or(everything);
        Some(Self {
            network: IpNet::new(address, bits).ok()?,
            table: word(attributes, libc::RTA_TABLE).unwrap_or_else(|| table.into()),
            fate,
            metric: word(attributes, libc::RTA_PRIORITY).unwrap_or_default(),
        })
    }

    fn body(&self) -> Vec<u8> {
        let kind = match self.fate {
            Fate::Unreachable => libc::RTN_UNREACHABLE,
            Fate::Throw => libc::RTN_THROW,
        };
        let is_v4 = self.network.addr().is_ipv4();
        let mut body = header(is_v4, self.network.prefix_len(), PROTOCOL, kind, 0);
        push_attribute(&mut body, libc::RTA_DST, &octets(self.network.network()));
        push_attribute(&mut body, libc::RTA_TABLE, &self.table.to_ne_bytes());
        push_attribute(&mut body, libc::RTA_PRIORITY, &self.metric.to_ne_bytes());
        body
    }
}

/// Decodes a rule and a route, for the fuzzer.
pub(crate) fn fuzz(body: &[u8]) {
    let _ = (UnmarkedRule::read(body), PortRule::read(body), DeadEnd::read(body));
}

/// Any other route to the same network is better.
pub const LAST_METRIC: u32 = 4_278_198_272;

// struct rtmsg: family, two prefix lengths, type of service, table, protocol, scope, type, flags.
fn header(is_v4: bool, bits: u8, protocol: u8, kind: u8, flags: u32) -> Vec<u8> {
    let family = if is_v4 { libc::AF_INET } else { libc::AF_INET6 };
    let mut bytes = vec![family as u8, bits, 0, 0, libc::RT_TABLE_UNSPEC, protocol, libc::RT_SCOPE_UNIVERSE, kind];
    bytes.extend(flags.to_ne_bytes());
    bytes
}

fn word(attributes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_ne_bytes(netlink::attribute(attributes, kind)?.try_into().ok()?))
}

fn but(outcome: io::Result<Vec<Vec<u8>>>, tolerated: &[i32]) -> io::Result<()> {
    match outcome {
        Err(error) if error.raw_os_error().is_some_and(|code| tolerated.contains(&code)) => Ok(()),
        other => other.map(drop),
    }
}

// A rule or a route that is not there, or a kernel without that family.
const GONE: [i32; 4] = [libc::ENOENT, libc::ESRCH, libc::EAFNOSUPPORT, libc::EOPNOTSUPP];
const HEADER: usize = 12;
// The same as of the node's routes to renumbered pods.
const PROTOCOL: u8 = 78;
// linux/fib_rules.h.
const ACTION_TO_TABLE: u8 = 1;
const INVERT: u32 = 2;
const ATTRIBUTE_FROM: u16 = 3;
const ATTRIBUTE_PRIORITY: u16 = 6;
const ATTRIBUTE_MARK: u16 = 10;
const ATTRIBUTE_TABLE: u16 = 15;
const ATTRIBUTE_MASK: u16 = 16;
const ATTRIBUTE_BY: u16 = 17;
const ATTRIBUTE_PROTOCOL: u16 = 22;
const ATTRIBUTE_PORTS: u16 = 24;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_encoded_as_the_kernel_reads_it_and_read_back() {
        let rule = UnmarkedRule { is_v4: true, priority: 30_000, mark: 0x2000_0000, mask: 0x2000_0000, table: 20_034 };
        let body = rule.body();
        assert_eq!(&body[..12], &[2, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0]);
        assert_eq!(UnmarkedRule::read(&body), Some(rule));
        let other = UnmarkedRule { is_v4: false, ..rule };
        assert_eq!(UnmarkedRule::read(&other.body()), Some(other));
        let mut narrower = body.clone();
        push_attribute(&mut narrower, ATTRIBUTE_FROM, b"eth0\0");
        assert_eq!(UnmarkedRule::read(&narrower), None);
        let mut upright = body.clone();
        upright[8] = 0;
        assert_eq!(UnmarkedRule::read(&upright), None);
        assert!((0..body.len()).all(|cut| UnmarkedRule::read(&body[..cut]).is_none()));
    }

    #[test]
    fn a_rule_about_ports_is_encoded_as_the_kernel_reads_it_and_read_back() {
        let rule = PortRule {
            is_v4: true,
            priority: 29_999,
            mask: 0x2000_0000,
            protocol: 6,
            ports: (30_000, 32_767),
            table: 20_035,
        };
        let body = rule.body();
        assert_eq!(&body[..12], &[2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        assert_eq!((PortRule::read(&body), UnmarkedRule::read(&body)), (Some(rule), None));
        let other = UnmarkedRule { is_v4: true, priority: 30_000, mark: 1, mask: 1, table: 20_034 };
        assert_eq!(PortRule::read(&other.body()), None);
        assert!((0..body.len()).all(|cut| PortRule::read(&body[..cut]).is_none()));
    }

    #[test]
    fn a_route_to_nowhere_is_encoded_as_the_kernel_reads_it_and_read_back() {
        for network in ["10.244.0.0/16", "fd00:10:244::/56", "0.0.0.0/0"] {
            let network = network.parse().unwrap();
            let route = DeadEnd { network, table: 20_034, fate: Fate::Throw, metric: 7 };
            assert_eq!(DeadEnd::read(&route.body()), Some(route));
        }
        let network = "10.1.2.3/16".parse().unwrap();
        let route = DeadEnd { network, table: 254, fate: Fate::Unreachable, metric: 9 };
        assert_eq!(route.body()[..12], [2, 16, 0, 0, 0, 78, 0, 7, 0, 0, 0, 0]);
        assert_eq!(route.body()[12..20], [8, 0, 1, 0, 10, 1, 0, 0]);
        assert_eq!(DeadEnd::read(&route.body()[..11]), None);
    }
}
