//! What an isolated pod may reach besides the overlay: read from the key `isolate`, with defaults taken from the node.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;

use ipnet::IpNet;
use nebula_cni_contract::launch::Isolate;
use serde_json::Value;

use crate::reply::Error;
use crate::request::NetworkConfig;
use crate::request::checked::{prefixes, refuse_other_keys, refused};
use crate::request::prev_result::{PrevResult, reachable};

/// The key `isolate`, as the operator wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Isolation {
    ranges: Vec<IpNet>,
    dns: Option<Vec<IpAddr>>,
    probes: Option<Vec<IpAddr>>,
}

impl Isolation {
    /// Reads `true`, `false`, or an object with `ranges`, `dns` and `probes`.
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
            dns: object.get("dns").map(|list| addresses("isolate.dns", list)).transpose()?,
            probes: object.get("probes").map(|list| addresses("isolate.probes", list)).transpose()?,
        }))
    }

    /// Resolves the settings for one pod. By default, probes come from the address that this node uses towards the pod,
    /// and the DNS servers are those that the runtime reports for the pod, else those of the previous plugin, else the
    /// node's own.
    #[must_use]
    pub fn of_pod(&self, pod_address: IpAddr, config: &NetworkConfig, prev_result: &PrevResult) -> Isolate {
        let probes = self.probes.clone().unwrap_or_else(|| source_towards(pod_address).into_iter().collect());
        let mut dns = self.dns.clone().unwrap_or_else(|| {
            let told =
                [servers_of_runtime(config), prev_result.name_servers(), servers_of_node(&RESOLV_CONF.map(Path::new))];
            told.into_iter().find(|servers| !servers.is_empty()).unwrap_or_default()
        });
        dns.truncate(MAX_ADDRESSES);
        Isolate { ranges: self.ranges.clone(), dns, probes }
    }

    /// Whether a pod for which these settings were resolved would get the same. What depends on its node and runtime is
    /// taken to be so.
    #[must_use]
    pub fn allows(&self, isolate: &Isolate) -> bool {
        let is_same = |written: &Option<Vec<IpAddr>>, resolved: &Vec<IpAddr>| {
            written.as_ref().is_none_or(|written| written.iter().take(MAX_ADDRESSES).eq(resolved))
        };
        self.ranges == isolate.ranges && is_same(&self.dns, &isolate.dns) && is_same(&self.probes, &isolate.probes)
    }
}

/// The pod's DNS servers, which runtimes pass to plugins with the capability `dns`.
fn servers_of_runtime(config: &NetworkConfig) -> Vec<IpAddr> {
    let runtime = config.value("runtimeConfig").ok().flatten().unwrap_or_default();
    let servers = runtime.get("dns").and_then(|dns| dns.get("servers")).and_then(Value::as_array).cloned();
    servers.unwrap_or_default().iter().filter_map(|server| reachable(server.as_str()?)).collect()
}

/// The servers in the first file that names any. A stub resolver on a loopback address serves only the node; its
/// upstream servers are in the second file.
fn servers_of_node(files: &[&Path]) -> Vec<IpAddr> {
    let servers = |path: &&Path| -> Vec<IpAddr> {
        let text = fs::read_to_string(path).unwrap_or_default();
        let word = |line: &str| line.trim().strip_prefix("nameserver")?.split_whitespace().next().and_then(reachable);
        text.lines().filter_map(word).collect()
    };
    files.iter().map(servers).find(|servers| !servers.is_empty()).unwrap_or_default()
}

// Connecting a datagram socket looks up a route and sends nothing.
pub(crate) fn source_towards(pod: IpAddr) -> Option<IpAddr> {
    let any = if pod.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).ok()?;
    socket.connect(SocketAddr::new(pod, 9)).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

fn addresses(key: &str, value: &Value) -> Result<Vec<IpAddr>, Error> {
    const EXPECTED: &str = "a list of at most 64 IP addresses";
    let list =
        value.as_array().filter(|list| list.len() <= MAX_ADDRESSES).ok_or_else(|| refused(key, value, EXPECTED))?;
    let address = |item: &Value| item.as_str().and_then(|text| text.parse().ok());
    list.iter().map(|item| address(item).ok_or_else(|| refused(key, item, EXPECTED))).collect()
}

const MAX_ADDRESSES: usize = 64;
const RESOLV_CONF: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::settings::tests::config;

    fn of_pod(isolate: Value, more: Value) -> Isolate {
        let config = config(&more);
        let prev_result = config.prev_result().unwrap().unwrap();
        Isolation::read(&isolate).unwrap().unwrap().of_pod("127.0.0.1".parse().unwrap(), &config, &prev_result)
    }

    #[test]
    fn isolation_is_off_on_or_with_exceptions() {
        assert_eq!(Isolation::read(&json!(false)).unwrap(), None);
        assert_eq!(Isolation::read(&json!(true)).unwrap(), Some(Isolation::default()));
        let some = json!({"ranges": ["10.0.0.0/8"], "dns": ["10.96.0.10"], "probes": ["192.0.2.1"]});
        let isolate = of_pod(some, json!({"prevResult": {}}));
        assert_eq!(isolate.ranges, ["10.0.0.0/8".parse::<IpNet>().unwrap()]);
        assert_eq!(isolate.dns, ["10.96.0.10".parse::<IpAddr>().unwrap()]);
        assert_eq!(isolate.probes, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn probes_come_from_the_node_s_address_towards_the_pod() {
        let local: IpAddr = "127.0.0.1".parse().unwrap();
        assert_eq!(of_pod(json!(true), json!({"prevResult": {}})).probes, [local]);
    }

    #[test]
    fn dns_servers_are_the_listed_ones_else_the_runtime_s_else_the_primary_plugin_s() {
        let runtime = json!({"dns": {"servers": ["10.96.0.10", "127.0.0.53", "nonsense"]}});
        let result = json!({"dns": {"nameservers": ["192.0.2.53"]}});
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let both = json!({"runtimeConfig": runtime, "prevResult": result});
        assert_eq!(of_pod(json!({"dns": ["10.9.9.9"]}), both.clone()).dns, [address("10.9.9.9")]);
        assert!(of_pod(json!({"dns": []}), both.clone()).dns.is_empty(), "none is meant");
        assert_eq!(of_pod(json!(true), both).dns, [address("10.96.0.10")]);
        assert_eq!(of_pod(json!(true), json!({"prevResult": result})).dns, [address("192.0.2.53")]);
    }

    #[test]
    fn the_node_s_servers_are_those_that_a_pod_can_reach_too() {
        let dir = tempfile::tempdir().unwrap();
        let [stub, real] = ["stub", "real"].map(|name| dir.path().join(name));
        fs::write(&stub, "# nameserver 192.0.2.9\nnameserver 127.0.0.53\nsearch example\n").unwrap();
        fs::write(&real, "nameserver 192.0.2.53\nnameserver\tfd00::53 \n").unwrap();
        let expected = ["192.0.2.53", "fd00::53"].map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(servers_of_node(&[&stub, &real]), expected);
        assert_eq!(servers_of_node(&[&stub, Path::new("/nonexistent")]), [] as [IpAddr; 0]);
    }
}
