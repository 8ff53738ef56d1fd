//! The key `capture`: which traffic of a pod goes through the tunnel although its programs use addresses of the primary
//! network.

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use nebula_cni_contract::launch::{self, Capture, Underlay};
use serde_json::{Map, Value};

use crate::link::capture_guard::{Terms, is_of_link};
use crate::link::clear::{Accept, Clear, Opens};
use crate::reply::{Error, code};
use crate::request::checked::{prefixes, refuse_other_keys, refused};
use crate::settings::Settings;

/// Folder of the cluster table in the state directory, beside those of networks.
pub const CLUSTER_FOLDER: &str = "cluster";

/// The key `capture`, as the operator wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capturing {
    /// What the rules on the node follow from.
    pub terms: Terms,
    /// Whether the node agent has network policies enforced.
    pub policy: bool,
}

impl Capturing {
    /// Reads `true`, `false`, or an object. `overlay` are the ranges of pods by default.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(value: &Value, overlay: &[IpNet]) -> Result<Option<Self>, Error> {
        const EXPECTED: &str = "true, false, or an object with \"ranges\", \"services\", \"loadBalancers\", \"nodePorts\", \"exclude\", \"clear\", \
             \"accept\" and \"policy\"";
        let object = match value {
            Value::Bool(false) => return Ok(None),
            Value::Bool(true) => &Map::new(),
            Value::Object(object) => object,
            _ => return Err(refused("capture", value, EXPECTED)),
        };
        let keys = ["ranges", "services", "loadBalancers", "nodePorts", "exclude", "clear", "accept", "policy"];
        refuse_other_keys("capture", object, &keys)?;
        let list = |key: &str| object.get(key).map(|list| prefixes(&format!("capture.{key}"), list)).transpose();
        let opens = match object.get("clear").map(|value| (value.as_str(), value)) {
            None | Some((Some("outgoing"), _)) => Opens::Outgoing,
            Some((Some("allow"), _)) => Opens::Allow,
            Some((Some("deny"), _)) => Opens::Deny,
            Some((_, other)) => return Err(refused("capture.clear", other, "\"outgoing\", \"allow\" or \"deny\"")),
        };
        let node_ports = match object.get("nodePorts") {
            None => Some(NODE_PORTS),
            Some(Value::Bool(false)) => None,
            Some(value) => {
                Some(port_range(value).ok_or_else(|| refused("capture.nodePorts", value, NODE_PORTS_EXPECTED))?)
            }
        };
        let (policy, clear_policy) = object.get("policy").map_or(Ok((false, false)), policy)?;
        let accept = object.get("accept").map_or(Ok(Vec::new()), accepted)?;
        let terms = Terms {
            ranges: list("ranges")?.unwrap_or_else(|| overlay.to_vec()),
            services: list("services")?.unwrap_or_default(),
            load_balancers: list("loadBalancers")?.unwrap_or_default(),
            node_ports,
            exclude: list("exclude")?.unwrap_or_default(),
            clear: Clear { opens, accept },
            clear_policy,
        };
        Self { terms, policy }.checked(overlay).map(Some)
    }

    fn checked(self, overlay: &[IpNet]) -> Result<Self, Error> {
        let Terms { ranges, services, load_balancers, exclude, .. } = &self.terms;
        if ranges.is_empty() {
            let msg = "network configuration: \"capture\" needs \"capture.ranges\" or \"overlay\"";
            return Err(Error::new(code::CONFIG, msg).details("list the address ranges of the cluster's pods"));
        }
        // The routing table of the primary network does not lead to the device.
        let is_captured = |network: &&IpNet| ranges.iter().any(|range| range.contains(*network));
        if let Some(network) = overlay.iter().find(|network| !is_captured(network)) {
            let msg = format!("network configuration: \"overlay\" {network} is in none of \"capture.ranges\"");
            return Err(
                Error::new(code::CONFIG, msg).details("add it there: with capture, only these lead to the tunnel")
            );
        }
        // The rules on the node let everything pass from and to both of these.
        for (key, open, instead) in [
            ("exclude", exclude, "leave the range out of \"capture.ranges\" instead"),
            ("services", services, "list the range of cluster IPs only"),
            ("loadBalancers", load_balancers, "list the addresses that load balancers get only"),
        ] {
            if let Some(network) = open.iter().find(|open| ranges.iter().any(|range| open.contains(range))) {
                let msg = format!("network configuration: \"capture.{key}\" {network} contains a whole range of pods");
                return Err(Error::new(code::CONFIG, msg).details(instead));
            }
        }
        Ok(self)
    }

    /// Refuses what capture does not go together with.
    ///
    /// # Errors
    /// Code 7, naming the other key.
    pub(super) fn check(settings: &Settings) -> Result<(), Error> {
        let other = [
            (settings.renumber, "renumber", "with capture the pod keeps its address, so leave \"renumber\" out"),
            (
                settings.underlay == Underlay::Pod,
                "underlay",
                "the tunnel's own packets would be captured as well, so leave \"underlay\" at \"host\"",
            ),
            (
                settings.isolate.is_some(),
                "isolate",
                "its rules are stricter: leave out \"capture\" if pods must reach nothing but the overlay, else \"isolate\"",
            ),
        ];
        match other.iter().find(|(is_set, ..)| *is_set && settings.capture.is_some()) {
            Some((_, key, what)) => {
                let msg = format!("network configuration: \"capture\" and {key:?} do not go together");
                Err(Error::new(code::CONFIG, msg).details(*what))
            }
            None => Ok(()),
        }
    }

    /// Refuses a pod that the capture would not cover as a whole, so that nobody takes it for captured.
    ///
    /// # Errors
    /// Code 118, naming the address and what to do about it.
    pub fn check_pod(&self, addresses: &[IpAddr]) -> Result<(), Error> {
        let refused = |msg: String| Err(Error::new(code::CAPTURE, msg).details(COVER_HELP));
        if let Some(address) = addresses.iter().find(|address| !self.covers(address)) {
            return refused(format!("the pod's address {address} is in none of \"capture.ranges\""));
        }
        if !addresses.iter().any(|address| holds(&self.terms.ranges, address)) {
            return refused(format!("none of the pod's addresses {addresses:?} is in \"capture.ranges\""));
        }
        Ok(())
    }

    /// Whether what is sent from and to this address of a pod is captured, or in clear because the operator says so.
    #[must_use]
    pub fn covers(&self, address: &IpAddr) -> bool {
        holds(&self.terms.ranges, address) || holds(&self.terms.exclude, address) || is_of_link(address)
    }

    /// Returns the launch contract's form of this key for a pod with these `addresses`. Its sources are the first
    /// IPv4 and the first IPv6 address in the ranges; its cluster table is the one in `state_dir`.
    #[must_use]
    pub fn of_pod(&self, addresses: &[IpAddr], state_dir: &Path) -> Capture {
        let Terms { ranges, services, load_balancers, node_ports, clear, .. } = &self.terms;
        let is_source = |address: &&IpAddr, is_v4| address.is_ipv4() == is_v4 && holds(ranges, address);
        let first = |is_v4| addresses.iter().find(|address| is_source(address, is_v4)).copied();
        // The instance refuses what the rules on the node would drop, so that programs need not wait. Answers look like
        // questions to it.
        let refuses = clear.opens == Opens::Deny;
        let mut answers: Vec<u8> = clear.accept.iter().filter(|_| refuses).map(|accept| accept.protocol).collect();
        answers.sort_unstable();
        answers.dedup();
        Capture {
            ranges: ranges.clone(),
            services: [&services[..], load_balancers].concat(),
            node_ports: *node_ports,
            sources: [true, false].into_iter().filter_map(first).collect(),
            clear: if refuses { launch::Clear::Deny } else { launch::Clear::Allow },
            answers,
            policy: self.policy,
            table: state_dir.join(CLUSTER_FOLDER).join("table"),
        }
    }
}

fn holds(networks: &[IpNet], address: &IpAddr) -> bool {
    networks.iter().any(|network| network.contains(address))
}

/// Reads whether network policies are enforced in tunnels, and whether they are in clear.
fn policy(value: &Value) -> Result<(bool, bool), Error> {
    const EXPECTED: &str = "true, false, or {\"clear\": \"enforce\"}";
    match value {
        Value::Bool(is_on) => Ok((*is_on, false)),
        Value::Object(object) => {
            refuse_other_keys("capture.policy", object, &["clear"])?;
            match object.get("clear").map(|value| (value.as_str(), value)) {
                None | Some((Some("primary"), _)) => Ok((true, false)),
                Some((Some("enforce"), _)) => Ok((true, true)),
                Some((_, other)) => Err(refused("capture.policy.clear", other, "\"enforce\" or \"primary\"")),
            }
        }
        _ => Err(refused("capture.policy", value, EXPECTED)),
    }
}

/// Reads the list of ports that are open in clear.
fn accepted(value: &Value) -> Result<Vec<Accept>, Error> {
    const EXPECTED: &str =
        "a list of at most 64 objects such as {\"port\": 9090, \"proto\": \"tcp\", \"from\": [\"192.0.2.0/24\"]}";
    const PORT: &str = "a port from 1 to 65535, or two of them as \"8000-8100\"";
    let list = value.as_array().ok_or_else(|| refused("capture.accept", value, EXPECTED))?;
    let mut all = Vec::with_capacity(list.len().min(MAX_ACCEPTED));
    for item in list {
        let object = item.as_object().ok_or_else(|| refused("capture.accept", item, EXPECTED))?;
        refuse_other_keys("capture.accept", object, &["port", "proto", "from"])?;
        let protocol = match object.get("proto").map(|value| (value.as_str(), value)) {
            None | Some((Some("tcp"), _)) => 6,
            Some((Some("udp"), _)) => 17,
            Some((Some("sctp"), _)) => 132,
            Some((_, other)) => {
                return Err(refused("capture.accept.proto", other, "\"tcp\", \"udp\" or \"sctp\""));
            }
        };
        let port = object.get("port").ok_or_else(|| refused("capture.accept", item, EXPECTED))?;
        let ports = port_range(port).ok_or_else(|| refused("capture.accept.port", port, PORT))?;
        let from = object.get("from").map(|list| prefixes("capture.accept.from", list)).transpose()?;
        // An empty list would mean nobody to one reader, and everybody to another.
        if let Some(empty) = object.get("from").filter(|_| from.as_ref().is_some_and(Vec::is_empty)) {
            return Err(refused("capture.accept.from", empty, "at least one prefix; leave \"from\" out for everybody"));
        }
        all.push(Accept { protocol, ports, from: from.unwrap_or_default() });
    }
    // Each of them is a rule for each pod.
    let rules: usize = all.iter().map(|accept| accept.from.len().max(1)).sum();
    if rules > MAX_ACCEPTED {
        return Err(refused("capture.accept", value, "at most 64 pairs of a port and a prefix"));
    }
    Ok(all)
}

fn port_range(value: &Value) -> Option<(u16, u16)> {
    let text = match value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => return None,
    };
    let port = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    match text.split_once('-') {
        None => port(&text).map(|port| (port, port)),
        Some((first, last)) => Some((port(first)?, port(last)?)).filter(|(first, last)| first <= last),
    }
}

/// Those of an API server that is not told otherwise.
const NODE_PORTS: (u16, u16) = (30_000, 32_767);
const NODE_PORTS_EXPECTED: &str =
    "false, or the range of the API server's --service-node-port-range, such as \"30000-32767\"";
/// What to do about an address that is not captured.
pub const COVER_HELP: &str = "add its range to \"capture.ranges\" (and to \"overlay\", if the CA is to certify it); or name it in                               \"capture.exclude\", if what is sent from and to it may be in clear";
const MAX_ACCEPTED: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::settings::STATE_DIR;
    use nebula_cni_contract::launch::CLUSTER_TABLE;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn clear(opens: Opens) -> Clear {
        Clear { opens, ..Clear::default() }
    }

    #[test]
    fn capture_is_off_on_or_with_ranges() {
        let overlay = nets(&["10.244.0.0/16"]);
        assert_eq!(Capturing::read(&json!(false), &overlay).unwrap(), None);
        let plain = Capturing::read(&json!(true), &overlay).unwrap().unwrap();
        let node_ports = Some((30_000, 32_767));
        let terms = Terms { ranges: overlay.clone(), clear: clear(Opens::Outgoing), node_ports, ..Terms::default() };
        assert_eq!(plain.terms, terms);
        let all = json!({"ranges": ["10.0.0.0/8"], "services": ["10.96.0.0/12"], "exclude": ["10.9.0.0/16"],
            "clear": "deny", "nodePorts": false, "loadBalancers": ["198.51.100.0/24"]});
        let all = Capturing::read(&all, &overlay).unwrap().unwrap();
        let capture = all.of_pod(&["10.244.1.7".parse().unwrap()], Path::new("/run"));
        assert_eq!((capture.services, capture.node_ports), (nets(&["10.96.0.0/12", "198.51.100.0/24"]), None));
        assert_eq!((all.terms.ranges, all.terms.clear), (nets(&["10.0.0.0/8"]), clear(Opens::Deny)));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let overlay = nets(&["10.244.0.0/16"]);
        for (value, text) in [
            (json!("yes"), "capture"),
            (json!({"range": []}), "capture.range"),
            (json!({"services": ["10.96.0.0"]}), "capture.services"),
            (json!({"nodePorts": true}), "capture.nodePorts"),
            (json!({"nodePorts": "32767-30000"}), "capture.nodePorts"),
            (json!({"loadBalancers": ["10.0.0.0/8"]}), "capture.loadBalancers"),
            (json!({"clear": "drop"}), "capture.clear"),
            (json!({"accept": 9090}), "capture.accept"),
            (json!({"accept": [9090]}), "capture.accept"),
            (json!({"accept": [{"proto": "tcp"}]}), "capture.accept"),
            (json!({"accept": [{"port": 0}]}), "capture.accept.port"),
            (json!({"accept": [{"port": "8100-8000"}]}), "capture.accept.port"),
            (json!({"accept": [{"port": "any"}]}), "capture.accept.port"),
            (json!({"accept": [{"port": 80, "proto": "icmp"}]}), "capture.accept.proto"),
            (json!({"accept": [{"port": 80, "from": []}]}), "capture.accept.from"),
            (json!({"accept": [{"port": 80, "from": ["10.0.0.1"]}]}), "capture.accept.from"),
            (json!({"accept": [{"port": 80, "namespace": "monitoring"}]}), "capture.accept.namespace"),
            (json!({"accept": vec![json!({"port": 80}); 65]}), "capture.accept"),
            (json!({"clear": 7}), "capture.clear"),
            (json!({"unknown": "clear"}), "capture.unknown"),
            (json!({"policy": "enforce"}), "capture.policy"),
            (json!({"policy": {"clear": true}}), "capture.policy.clear"),
            (json!({"policy": {"enforce": true}}), "capture.policy.enforce"),
            (json!({"services": ["10.0.0.0/8"]}), "capture.services"),
            (json!({"services": ["10.96.0.0/12", "10.244.0.0/16"]}), "capture.services"),
            (json!({"ranges": ["10.9.0.0/16"]}), "overlay"),
            (json!({"exclude": ["10.0.0.0/8"]}), "capture.exclude"),
            (json!({"exclude": ["10.244.0.0/16"]}), "capture.exclude"),
        ] {
            let error = Capturing::read(&value, &overlay).unwrap_err();
            assert!(error.code == code::CONFIG && error.msg.contains(text), "{value}: {error}");
        }
        assert!(Capturing::read(&json!(true), &[]).unwrap_err().msg.contains("capture.ranges"));
    }

    #[test]
    fn ports_are_accepted_from_everybody_or_from_the_prefixes_that_are_named() {
        let value = json!({"ranges": ["10.244.0.0/16"], "clear": "deny", "accept": [{"port": 9090},
            {"port": "8000-8100", "proto": "udp", "from": ["192.0.2.0/24", "fd00::/8"]}]});
        let capturing = Capturing::read(&value, &[]).unwrap().unwrap();
        let accept = |protocol, ports, from: &[&str]| Accept { protocol, ports, from: nets(from) };
        let expected = [accept(6, (9090, 9090), &[]), accept(17, (8000, 8100), &["192.0.2.0/24", "fd00::/8"])];
        assert_eq!(capturing.terms.clear.accept, expected);
        let pod = ["10.244.1.7".parse().unwrap()];
        assert_eq!(capturing.of_pod(&pod, Path::new(STATE_DIR)).answers, [6, 17], "the instance lets answers pass");
        let open = Capturing::read(&json!({"ranges": ["10.244.0.0/16"], "accept": [{"port": 9090}]}), &[]);
        let spec = open.unwrap().unwrap().of_pod(&pod, Path::new(STATE_DIR));
        assert_eq!((spec.clear, spec.answers), (launch::Clear::Allow, vec![]), "it lets everything pass");
    }

    #[test]
    fn policies_are_enforced_in_tunnels_and_in_clear_too_if_it_is_said() {
        let read = |policy: Value| {
            let read = Capturing::read(&json!({"ranges": ["10.244.0.0/16"], "policy": policy}), &[]).unwrap().unwrap();
            (read.policy, read.terms.clear_policy)
        };
        assert_eq!([json!(false), json!(true), json!({})].map(read), [(false, false), (true, false), (true, false)]);
        assert_eq!(read(json!({"clear": "primary"})), (true, false));
        assert_eq!(read(json!({"clear": "enforce"})), (true, true));
    }

    #[test]
    fn each_address_of_a_pod_is_captured_or_named_as_excluded() {
        let of = |value: Value| Capturing::read(&value, &nets(&["10.244.0.0/16"])).unwrap().unwrap();
        let both = ["10.244.1.7", "fd00:244::7", "fe80::7"].map(|text| text.parse().unwrap());
        let error = of(json!(true)).check_pod(&both).unwrap_err();
        assert!(error.code == code::CAPTURE && error.msg.contains("fd00:244::7"), "{error}");
        assert!(error.details.contains("capture.exclude"), "{error}");
        let whole = of(json!({"ranges": ["10.244.0.0/16", "fd00:244::/48"]}));
        assert!(whole.check_pod(&both).is_ok());
        let named = of(json!({"exclude": ["fd00:244::/48"]}));
        assert!(named.check_pod(&both).is_ok());
        assert_eq!(named.of_pod(&both, Path::new(STATE_DIR)).sources, both[..1], "IPv6 has no tunnel");
        assert!(named.check_pod(&both[1..]).unwrap_err().msg.contains("none of the pod's addresses"));
    }

    #[test]
    fn a_pod_has_one_source_of_each_family() {
        let capturing = Capturing::read(&json!(true), &nets(&["10.244.0.0/16", "fd00::/16"])).unwrap().unwrap();
        let addresses = ["10.244.1.7", "fd00::7", "10.244.9.9"].map(|text| text.parse().unwrap());
        let capture = capturing.of_pod(&addresses, Path::new(STATE_DIR));
        assert_eq!(capture.sources, addresses[..2]);
        assert_eq!(capture.table, Path::new(CLUSTER_TABLE));
    }
}
