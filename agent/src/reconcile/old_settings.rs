//! Pods of this node that go on with other settings than those of the chain entry.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use nebula_cni_contract::instance_status::Status;
use nebula_cni_plugin::verb::refresh::Refreshed;

use super::plan::Stand;

/// What the last comparison of running pods with the chain entry found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OldSettings {
    /// Keys of the entry by pod (`namespace/name`): their changes hold for the pod when it is made again.
    outdated: BTreeMap<String, Vec<String>>,
    /// Why pods go on as before although they need not.
    refused: BTreeMap<String, String>,
}

impl OldSettings {
    /// What the plugin found.
    #[must_use]
    pub fn found(refreshed: Refreshed) -> Self {
        Self {
            outdated: refreshed.outdated.into_iter().map(|one| (one.pod, one.keys)).collect(),
            refused: refreshed.failed.into_iter().map(|one| (one.pod, one.why)).collect(),
        }
    }

    /// Those of the pods that are there, with what their instances say themselves, in `answers` by container.
    #[must_use]
    pub fn of_pods(&self, pods: &[Stand], answers: &HashMap<String, Arc<Status>>) -> Self {
        let mut now = Self::default();
        for stand in pods {
            let pod = format!("{}/{}", stand.pod.namespace, stand.pod.name);
            let mut keys = self.outdated.get(&pod).cloned().unwrap_or_default();
            let settings = answers.get(&stand.sandbox).and_then(|status| status.settings.as_ref());
            let waiting = settings.map(|settings| settings.at_the_next_start.as_slice()).unwrap_or_default();
            keys.extend(waiting.iter().take(MOST_KEYS).map(|key| format!("nebula.{key}")));
            if let Some(why) = self.refused.get(&pod) {
                now.refused.insert(pod.clone(), why.clone());
            }
            if !keys.is_empty() {
                now.outdated.insert(pod, keys);
            }
        }
        now
    }

    /// How many pods there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.outdated.len() + self.refused.keys().filter(|pod| !self.outdated.contains_key(*pod)).count()
    }

    /// What is old in a pod, for people; `None` if nothing is.
    #[must_use]
    pub fn of(&self, namespace: &str, name: &str) -> Option<String> {
        let pod = format!("{namespace}/{name}");
        let outdated = self.outdated.get(&pod).map(|keys| format!("changed since: {}", keys.join(", ")));
        let refused = self.refused.get(&pod).map(|why| format!("not handed over: {why}"));
        let all: Vec<String> = outdated.into_iter().chain(refused).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// One line about all of them, with some names; `None` if there are none.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        let pods: Vec<&String> =
            self.outdated.keys().chain(self.refused.keys().filter(|pod| !self.outdated.contains_key(*pod))).collect();
        let first = pods.first()?;
        let (namespace, name) = first.split_once('/')?;
        let example = self.of(namespace, name)?;
        let more = if pods.len() > 1 { ", and others" } else { "" };
        Some(format!("{} pod(s) run with old settings ({first}: {example}{more})", pods.len()))
    }
}

/// What to do about them.
pub const ADVICE: &str =
    "make these pods again, as with kubectl rollout restart: then they have the settings of the chart";
/// Keys that an instance may name.
const MOST_KEYS: usize = 20;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::Pod;
    use nebula_cni_plugin::verb::refresh::{Failure, Outdated};

    use super::super::plan::Protection;
    use super::*;

    fn stand(name: &str) -> Stand {
        let pod = Pod { namespace: "shop".into(), name: name.into(), uid: name.into() };
        Stand { sandbox: name.into(), pod, protection: Protection::Protected }
    }

    #[test]
    fn pods_that_go_on_with_old_settings_are_counted_and_named_as_long_as_they_are_there() {
        let found = OldSettings::found(Refreshed {
            refreshed: vec!["shop/web".into()],
            outdated: vec![Outdated { pod: "shop/old".into(), keys: vec!["capture".into()] }],
            failed: vec![Failure { pod: "shop/stubborn".into(), why: "no answer".into() }],
        });
        let waiting = r#"{"settings": {"contract": "x", "at_the_next_start": ["cipher"]}}"#;
        let answers: HashMap<_, _> =
            [("waits".to_owned(), Arc::new(serde_json::from_str::<Status>(waiting).unwrap()))].into();
        let pods = ["web", "old", "stubborn", "waits"].map(stand);
        let now = found.of_pods(&pods, &answers);
        assert_eq!(now.count(), 3);
        assert_eq!(now.of("shop", "web"), None);
        assert_eq!(now.of("shop", "old").unwrap(), "changed since: capture");
        assert_eq!(now.of("shop", "waits").unwrap(), "changed since: nebula.cipher");
        assert_eq!(now.of("shop", "stubborn").unwrap(), "not handed over: no answer");
        let line = now.line().unwrap();
        assert!(
            line.starts_with("3 pod(s)") && line.contains("shop/old: changed since: capture, and others"),
            "{line}"
        );
        assert_eq!(found.of_pods(&pods[..1], &answers), OldSettings::default());
        assert_eq!(OldSettings::default().line(), None);
    }
}
