//! Meta plugins, which runtimes call for each pod and which call the cluster's network in turn: Multus. It takes the
//! first file of the folder that is not its own, so our chain comes after its file and before that of the cluster's
//! network.

use std::path::Path;

use super::primary::{Primary, own_file_network};
use crate::config::PLUGIN;

/// The configuration of a meta plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Name of its file.
    pub file: String,
    /// Name of its network.
    pub network: String,
    /// What it calls for the first interface of a pod.
    pub delegate: Delegate,
}

/// What a meta plugin calls for the cluster's network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Delegate {
    /// The file of this name in the same folder.
    File(String),
    /// A copy of a chain in its own file, as Multus' thin variant makes one when it starts.
    Copy {
        /// Whether our entry is the last one in it.
        ends_with_us: bool,
    },
    /// It does not say.
    Unknown,
}

impl Meta {
    /// `None` if the configuration is that of a plugin that gives pods their interface itself.
    #[must_use]
    pub(crate) fn of(configuration: &Primary) -> Option<Self> {
        if !configuration.plugins().any(|kind| KINDS.contains(&kind)) {
            return None;
        }
        let plugins = configuration.list["plugins"].as_array().into_iter().flatten();
        let mut delegates = plugins.filter_map(|plugin| match (&plugin["clusterNetwork"], &plugin["delegates"][0]) {
            (serde_json::Value::String(network), _) => Some(Delegate::File(file_name(network))),
            (_, serde_json::Value::Object(copy)) => {
                let last = copy.get("plugins").and_then(|plugins| plugins.as_array()?.last());
                Some(Delegate::Copy { ends_with_us: last.is_some_and(|last| last["type"] == PLUGIN) })
            }
            _ => None,
        });
        let delegate = delegates.next().unwrap_or(Delegate::Unknown);
        Some(Self { file: configuration.file.clone(), network: configuration.network.clone(), delegate })
    }

    /// Whether it calls this file, or our chain for this network.
    pub(super) fn delegates_to(&self, file: &str, network: &str) -> bool {
        matches!(&self.delegate, Delegate::File(delegate)
            if delegate == file || own_file_network(delegate) == Some(network))
    }

    /// Why pods do not get our chain, `own`, by way of this one.
    #[must_use]
    pub(crate) fn problem(&self, own: &Path) -> Option<String> {
        let file = &self.file;
        match &self.delegate {
            Delegate::File(delegate) if Path::new(delegate) == own => None,
            Delegate::File(delegate) => Some(format!("{file} delegates to {delegate} and not to {}", own.display())),
            Delegate::Copy { ends_with_us: true } => None,
            Delegate::Copy { .. } => Some(format!("{file} delegates to a copy of a chain without {PLUGIN}")),
            Delegate::Unknown => Some(format!("{file} does not say what it delegates to")),
        }
    }
}

/// Multus sees the folder under another path.
fn file_name(network: &str) -> String {
    Path::new(network).file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What ends most of these problems.
pub(crate) const ADVICE: &str = "restart the DaemonSet of Multus: it takes the first file of the folder when it starts";
/// The client of its thick variant, and its thin variant.
const KINDS: [&str; 2] = ["multus-shim", "multus"];

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn meta(configuration: Value) -> Option<Meta> {
        Meta::of(&Primary::parse("00-multus.conf", configuration.to_string().as_bytes()).unwrap())
    }

    #[test]
    fn what_it_delegates_to_is_read_from_both_variants() {
        let own = Path::new("00-nebula-cbr0.conflist");
        let of = |more: Value| {
            let mut configuration = json!({"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus-shim"});
            configuration.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            meta(configuration).unwrap()
        };
        let ours = of(json!({"clusterNetwork": "/host/etc/cni/net.d/00-nebula-cbr0.conflist"}));
        assert_eq!((ours.delegate.clone(), ours.problem(own)), (Delegate::File(own.display().to_string()), None));
        let other = of(json!({"clusterNetwork": "/host/etc/cni/net.d/10-flannel.conflist"}));
        assert!(other.problem(own).unwrap().contains("10-flannel.conflist"));
        let copy = |last: &str| {
            of(
                json!({"type": "multus", "delegates": [{"name": "cbr0", "plugins": [{"type": "flannel"}, {"type": last}]}]}),
            )
        };
        assert_eq!(copy(PLUGIN).problem(own), None);
        assert!(copy("portmap").problem(own).unwrap().contains("copy"));
        assert!(of(json!({})).problem(own).is_some());
        assert_eq!(meta(json!({"name": "cbr0", "type": "bridge"})), None);
    }
}
