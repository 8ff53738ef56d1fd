//! What an isolated pod may reach besides the overlay: read from the key `isolate`, completed with what the node knows.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use ipnet::IpNet;
use serde_json::Value;

use crate::launch::Isolate;
use crate::reply::Error;
use crate::settings::{prefixes, refuse_other_keys, refused};

/// The key `isolate`, as the operator wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Isolation {
    ranges: Vec<IpNet>,
    dns: Vec<IpAddr>,
    probes: Option<Vec<IpAddr>>,
}

impl Isolation {
    /// `true`, `false`, or an object with `ranges`, `dns` and `probes`.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(value: &Value) -> Result<Option<Self>, Error> {
        const EXPECTED: &str = "true, false, or an object with \"ranges\", \"dns\" and \"probes\"";
        if let Value::Bool(isolate) = value {
            return Ok(isolate.then(Self::default));
        }
        let object = value.as_object().ok_or_else(|| refused("isolate", value, EXPECTED))?;
        refuse_other_keys("isolate", object, &["ranges", "dns", "probes"])?;
        Ok(Some(Self {
            ranges: object.get("ranges").map_or(Ok(Vec::new()), |list| prefixes("isolate.ranges", list))?,
            dns: object.get("dns").map_or(Ok(Vec::new()), |list| addresses("isolate.dns", list))?,
            probes: object.get("probes").map(|list| addresses("isolate.probes", list)).transpose()?,
        }))
    }

    /// For one pod. Without a list, probes come from the address this node would use itself towards the pod.
    #[must_use]
    pub fn of_pod(&self, pod_address: IpAddr) -> Isolate {
        let probes = self.probes.clone().unwrap_or_else(|| source_towards(pod_address).into_iter().collect());
        Isolate { ranges: self.ranges.clone(), dns: self.dns.clone(), probes }
    }
}

// Connecting a datagram socket asks the kernel for a route and sends nothing.
fn source_towards(pod: IpAddr) -> Option<IpAddr> {
    let any = if pod.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(pod, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

fn addresses(key: &str, value: &Value) -> Result<Vec<IpAddr>, Error> {
    const EXPECTED: &str = "a list of at most 64 IP addresses";
    let list = value.as_array().filter(|list| list.len() <= MAX).ok_or_else(|| refused(key, value, EXPECTED))?;
    let address = |item: &Value| item.as_str().and_then(|text| text.parse().ok());
    list.iter().map(|item| address(item).ok_or_else(|| refused(key, item, EXPECTED))).collect()
}

const MAX: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn isolation_is_off_on_or_with_exceptions() {
        assert_eq!(Isolation::read(&json!(false)).unwrap(), None);
        assert_eq!(Isolation::read(&json!(true)).unwrap(), Some(Isolation::default()));
        let some = json!({"ranges": ["10.1.2.3/8"], "dns": ["10.96.0.10"], "probes": ["192.0.2.1"]});
        let isolate = Isolation::read(&some).unwrap().unwrap().of_pod("10.4.0.7".parse().unwrap());
        assert_eq!(isolate.ranges, ["10.0.0.0/8".parse::<IpNet>().unwrap()]);
        assert_eq!(isolate.dns, ["10.96.0.10".parse::<IpAddr>().unwrap()]);
        assert_eq!(isolate.probes, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn probes_come_from_the_node_s_address_towards_the_pod() {
        let local: IpAddr = "127.0.0.1".parse().unwrap();
        assert_eq!(Isolation::default().of_pod(local).probes, [local]);
    }
}
