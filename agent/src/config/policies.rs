//! The key `policy`: whether network policies are enforced in the tunnels of captured pods.

use serde_json::Value;

use super::keys::{Keys, is_label, object, only, refused};
use super::{Config, ConfigError, Unprotected};

/// What the operator says of network policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policies {
    /// Whether the agent watches them and compiles programs for the captured pods of its node.
    pub enabled: bool,
    /// `NAMESPACE/NAME` of the Service of the cluster's DNS: all that a pod reaches whose policies are not known yet.
    pub dns: String,
    /// Whether a pod that a policy selects must have it enforced by us, in its tunnel and in clear.
    pub required: bool,
    /// Whether the node, and each ClusterNetworkPolicy, has a condition that says whether policies are enforced.
    pub condition: bool,
}

impl Default for Policies {
    fn default() -> Self {
        Self { enabled: false, dns: DNS.to_owned(), required: false, condition: false }
    }
}

impl Keys<'_> {
    pub(super) fn policies(&self) -> Result<Policies, ConfigError> {
        const EXPECTED: &str =
            "{\"enabled\": BOOLEAN, \"dns\": \"NAMESPACE/NAME\", \"required\": BOOLEAN, \"condition\": BOOLEAN}";
        let Some(value) = self.0.get("policy") else { return Ok(Policies::default()) };
        let keys = Keys(object("policy", value, EXPECTED)?);
        only("policy", keys.0, &["enabled", "dns", "required", "condition"])?;
        let boolean = |key: &str| match keys.0.get(key) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or_else(|| refused(&format!("policy.{key}"), value, "true or false")),
        };
        let dns = match keys.0.get("dns") {
            None => DNS,
            Some(value) => value
                .as_str()
                .filter(|text| text.split_once('/').is_some_and(|(space, name)| is_label(space) && is_label(name)))
                .ok_or_else(|| {
                    refused("policy.dns", value, "\"NAMESPACE/NAME\" of the Service of the cluster's DNS")
                })?,
        };
        let (enabled, required) = (boolean("enabled")?, boolean("required")?);
        Ok(Policies { enabled, dns: dns.to_owned(), required, condition: boolean("condition")? })
    }
}

impl Config {
    /// Whether the chain entry has instances judge flows by programs.
    #[must_use]
    pub fn instances_ask_for_programs(&self) -> bool {
        let policy = self.entry.get("capture").and_then(|capture| capture.get("policy"));
        policy.is_some_and(|policy| *policy != Value::Bool(false))
    }

    /// Whether the chain entry has policies enforced on packets in clear, too.
    fn enforces_in_clear(&self) -> bool {
        let policy = self.entry.get("capture").and_then(|capture| capture.get("policy"));
        policy.and_then(|policy| policy.get("clear")).is_some_and(|clear| clear == "enforce")
    }

    pub(super) fn check_policies(&self) -> Result<(), ConfigError> {
        if self.instances_ask_for_programs() && !self.policies.enabled {
            return Err(ConfigError::ClosedByPolicy);
        }
        // A pod without a tunnel has no policies either.
        if self.policies.required && matches!(self.unprotected, Unprotected::Label | Unprotected::Report) {
            let expected = "\"attach\" or \"evict\", since \"policy.required\" is true";
            return Err(refused("unprotected", &format!("{:?}", self.unprotected).to_lowercase().into(), expected));
        }
        // Every pod that is made by such an entry has its policies enforced, so ADD need not ask which pods have some.
        match self.policies.required && !(self.policies.enabled && self.enforces_in_clear()) {
            true => Err(ConfigError::PolicyNotEnforced),
            false => Ok(()),
        }
    }
}

/// Where almost every cluster has it.
const DNS: &str = "kube-system/kube-dns";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(policy: Value, in_entry: impl Into<Value>) -> Result<Config, ConfigError> {
        let entry = json!({"overlay": ["10.244.0.0/16"], "capture": {"policy": in_entry.into()}, "enrol": {"namespaces": ["a"]}});
        let ca = json!({"service": "nebula-system/nebula-ca"});
        Config::parse(&json!({"ca": ca, "entry": entry, "policy": policy}).to_string())
    }

    #[test]
    fn programs_are_asked_for_only_where_somebody_compiles_them() {
        let config = parse(json!({"enabled": true}), true).unwrap();
        assert!(config.instances_ask_for_programs() && config.policies.enabled);
        assert_eq!(config.policies.dns, "kube-system/kube-dns");
        assert!(!parse(json!({"enabled": true}), false).unwrap().instances_ask_for_programs());
        let in_clear = || json!({"clear": "enforce"});
        assert!(parse(json!({"enabled": true}), in_clear()).unwrap().instances_ask_for_programs());
        assert!(matches!(parse(json!({}), in_clear()), Err(ConfigError::ClosedByPolicy)));
        for off in [json!({}), json!({"enabled": false})] {
            assert!(matches!(parse(off.clone(), true), Err(ConfigError::ClosedByPolicy)), "{off}");
            assert!(!parse(off, false).unwrap().policies.enabled);
        }
    }

    #[test]
    fn policies_are_required_only_where_they_are_enforced_in_tunnels_and_in_clear() {
        let required = || json!({"enabled": true, "required": true});
        let policies = parse(required(), json!({"clear": "enforce"})).unwrap().policies;
        assert!(policies.required && !policies.condition);
        for (policy, in_entry) in [
            (required(), json!(true)),
            (required(), json!(false)),
            (required(), json!({"clear": "primary"})),
            (json!({"required": true}), json!(false)),
        ] {
            let error = parse(policy, in_entry).unwrap_err();
            assert!(matches!(error, ConfigError::PolicyNotEnforced), "{error}");
        }
        let entry = json!({"overlay": ["10.244.0.0/16"], "capture": {"policy": {"clear": "enforce"}}});
        for (unprotected, is_enough) in [("attach", true), ("evict", true), ("label", false), ("report", false)] {
            let text =
                json!({"ca": {"service": "a/b"}, "policy": required(), "entry": entry, "unprotected": unprotected});
            let error = Config::parse(&text.to_string()).err().map(|error| error.to_string());
            assert!(error.as_ref().map_or(is_enough, |error| error.contains("key \"unprotected\"")), "{error:?}");
            assert_eq!(error.is_none(), is_enough, "{unprotected}");
        }
        // Without capture at all.
        let text = json!({"ca": {"service": "a/b"}, "policy": required(), "entry": {"isolate": true}});
        assert!(matches!(Config::parse(&text.to_string()), Err(ConfigError::PolicyNotEnforced)));
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        assert_eq!(parse(json!({"dns": "dns/resolver"}), false).unwrap().policies.dns, "dns/resolver");
        for (wrong, key) in [
            (json!({"dns": "kube-dns"}), "policy.dns"),
            (json!({"dns": "a/b/c"}), "policy.dns"),
            (json!({"enabled": "yes"}), "policy.enabled"),
            (json!({"required": 1}), "policy.required"),
            (json!({"condition": "no"}), "policy.condition"),
            (json!({"enable": true}), "policy.enable"),
            (json!(true), "policy"),
        ] {
            let error = parse(wrong.clone(), false).unwrap_err().to_string();
            assert!(error.contains(&format!("{key:?}")), "{wrong}: {error}");
        }
    }
}
