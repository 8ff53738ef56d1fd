//! The key `capture`: which traffic of a pod goes through the tunnel although its programs use addresses of the primary
//! network.

use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::launch::{Capture, Clear, Underlay};
use crate::reply::{Error, code};
use crate::request::checked::{prefixes, refuse_other_keys, refused};
use crate::settings::Settings;

/// Folder of the cluster table in the state directory, beside those of networks.
pub const CLUSTER_FOLDER: &str = "cluster";

/// The key `capture`, as the operator wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capturing {
    /// Addresses of pods.
    pub ranges: Vec<IpNet>,
    /// Cluster IPs of Services.
    pub services: Vec<IpNet>,
    /// What stays on the primary network.
    pub exclude: Vec<IpNet>,
    clear: Clear,
}

impl Capturing {
    /// Reads `true`, `false`, or an object. `overlay` are the ranges of pods by default.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(value: &Value, overlay: &[IpNet]) -> Result<Option<Self>, Error> {
        const EXPECTED: &str = "true, false, or an object with \"ranges\", \"services\", \"exclude\" and \"clear\"";
        let object = match value {
            Value::Bool(false) => return Ok(None),
            Value::Bool(true) => &Map::new(),
            Value::Object(object) => object,
            _ => return Err(refused("capture", value, EXPECTED)),
        };
        refuse_other_keys("capture", object, &["ranges", "services", "exclude", "clear"])?;
        let list = |key: &str| object.get(key).map(|list| prefixes(&format!("capture.{key}"), list)).transpose();
        let clear = match object.get("clear") {
            None => Clear::Allow,
            Some(Value::String(word)) if word == "allow" => Clear::Allow,
            Some(Value::String(word)) if word == "deny" => Clear::Deny,
            Some(other) => return Err(refused("capture.clear", other, "\"allow\" or \"deny\"")),
        };
        let capturing = Self {
            ranges: list("ranges")?.unwrap_or_else(|| overlay.to_vec()),
            services: list("services")?.unwrap_or_default(),
            exclude: list("exclude")?.unwrap_or_default(),
            clear,
        };
        capturing.checked(overlay).map(Some)
    }

    fn checked(self, overlay: &[IpNet]) -> Result<Self, Error> {
        if self.ranges.is_empty() {
            let msg = "network configuration: \"capture\" needs \"capture.ranges\" or \"overlay\"";
            return Err(Error::new(code::CONFIG, msg).details("list the address ranges of the cluster's pods"));
        }
        // The routing table of the primary network does not lead to the device.
        let is_captured = |network: &&IpNet| self.ranges.iter().any(|range| range.contains(*network));
        if let Some(network) = overlay.iter().find(|network| !is_captured(network)) {
            let msg = format!("network configuration: \"overlay\" {network} is in none of \"capture.ranges\"");
            return Err(
                Error::new(code::CONFIG, msg).details("add it there: with capture, only these lead to the tunnel")
            );
        }
        // The rules on the node let everything pass from and to both of these.
        for (key, open, instead) in [
            ("exclude", &self.exclude, "leave the range out of \"capture.ranges\" instead"),
            ("services", &self.services, "list the range of cluster IPs only"),
        ] {
            if let Some(network) = open.iter().find(|open| self.ranges.iter().any(|range| open.contains(range))) {
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

    /// Returns the launch contract's form of this key for a pod with these `addresses`. Its sources are the first IPv4 and
    /// the first IPv6 address; its cluster table is the one in `state_dir`.
    #[must_use]
    pub fn of_pod(&self, addresses: &[IpAddr], state_dir: &Path) -> Capture {
        let first = |is_v4| addresses.iter().copied().find(|address| address.is_ipv4() == is_v4);
        Capture {
            ranges: self.ranges.clone(),
            services: self.services.clone(),
            sources: [true, false].into_iter().filter_map(first).collect(),
            clear: self.clear,
            table: state_dir.join(CLUSTER_FOLDER).join("table"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::launch::CLUSTER_TABLE;
    use crate::settings::STATE_DIR;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn capture_is_off_on_or_with_ranges() {
        let overlay = nets(&["10.244.0.0/16"]);
        assert_eq!(Capturing::read(&json!(false), &overlay).unwrap(), None);
        let plain = Capturing::read(&json!(true), &overlay).unwrap().unwrap();
        assert_eq!((plain.ranges, plain.services, plain.exclude), (overlay.clone(), vec![], vec![]));
        let all = json!({"ranges": ["10.1.2.3/8"], "services": ["10.96.0.0/12"], "exclude": ["10.9.0.0/16"],
            "clear": "deny"});
        let all = Capturing::read(&all, &overlay).unwrap().unwrap();
        assert_eq!((all.ranges, all.clear), (nets(&["10.0.0.0/8"]), Clear::Deny));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_do() {
        let overlay = nets(&["10.244.0.0/16"]);
        for (value, text) in [
            (json!("yes"), "capture"),
            (json!({"range": []}), "capture.range"),
            (json!({"services": ["10.96.0.0"]}), "capture.services"),
            (json!({"clear": "drop"}), "capture.clear"),
            (json!({"clear": 7}), "capture.clear"),
            (json!({"unknown": "clear"}), "capture.unknown"),
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
    fn a_pod_has_one_source_of_each_family() {
        let capturing = Capturing::read(&json!(true), &nets(&["10.244.0.0/16"])).unwrap().unwrap();
        let addresses = ["10.244.1.7", "fd00::7", "10.9.9.9"].map(|text| text.parse().unwrap());
        let capture = capturing.of_pod(&addresses, Path::new(STATE_DIR));
        assert_eq!(capture.sources, addresses[..2]);
        assert_eq!(capture.table, Path::new(CLUSTER_TABLE));
    }
}
