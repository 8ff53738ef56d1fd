//! The primary's network configuration, and what makes a file one.

use nebula_cni_plugin::request::is_name;
use serde_json::{Map, Value, json};

use crate::config::PLUGIN;
use crate::network;

/// A valid network configuration list of somebody else.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Primary {
    /// Name of its file.
    pub file: String,
    /// Name of the network.
    pub network: String,
    /// The list, with a single configuration wrapped into one, and without any entry of ours.
    pub list: Map<String, Value>,
}

/// Whether runtimes take a file of this name for a network configuration. They do not exempt hidden ones.
#[must_use]
pub(crate) fn is_loadable(name: &str) -> bool {
    [".conf", ".conflist", ".json"].iter().any(|extension| name.ends_with(extension))
}

/// Whether a file is the agent's chain file.
#[must_use]
pub(crate) fn is_own(name: &str) -> bool {
    own_file_network(name).is_some()
}

/// The network of a chain file of ours.
#[must_use]
pub(crate) fn own_file_network(name: &str) -> Option<&str> {
    OWN_PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?.strip_suffix(".conflist")
}

/// The name of the chain file for a network: one that sorts before all `others` of the directory, if there is one.
#[must_use]
pub(crate) fn own_name<'a>(network: &str, others: impl Iterator<Item = &'a str> + Clone) -> String {
    let named = |prefix: &str| format!("{prefix}{network}.conflist");
    let is_first = |name: &String| others.clone().all(|other| name.as_bytes() < other.as_bytes());
    OWN_PREFIXES.iter().map(|prefix| named(prefix)).find(is_first).unwrap_or_else(|| named(OWN_PREFIXES[0]))
}

impl Primary {
    /// Reads a file.
    ///
    /// # Errors
    /// Returns why it is no valid network configuration.
    pub(crate) fn parse(file: &str, bytes: &[u8]) -> Result<Self, String> {
        let value: Value =
            serde_json::from_slice(bytes).map_err(|error| match nebula_cert::text::decode(bytes.to_vec()) {
                Ok(text) if text.as_bytes() == bytes => format!("not valid JSON: {error}"),
                Ok(_) => {
                    "it begins with a byte order mark, which runtimes refuse: save it as UTF-8 without one".to_owned()
                }
                Err(why) => why,
            })?;
        let Value::Object(object) = value else { return Err("not a JSON object".to_owned()) };
        let network = match object.get("name") {
            Some(Value::String(name)) if is_name(name) => name.clone(),
            Some(_) => return Err("\"name\" is not the name of a network".to_owned()),
            None => return Err("\"name\" is missing".to_owned()),
        };
        match object.get("cniVersion") {
            None | Some(Value::String(_)) => {}
            Some(_) => return Err("\"cniVersion\" is not a string".to_owned()),
        }
        let mut list = if file.ends_with(".conflist") { object } else { wrapped(object) };
        let Some(Value::Array(plugins)) = list.get_mut("plugins") else {
            return Err("\"plugins\" is not a list".to_owned());
        };
        for plugin in plugins.iter() {
            match plugin.get("type") {
                Some(Value::String(kind)) if !kind.is_empty() && !kind.contains('/') => {}
                _ => return Err("a plugin without \"type\"".to_owned()),
            }
        }
        plugins.retain(|plugin| plugin["type"] != PLUGIN);
        if plugins.is_empty() {
            return Err(format!("no plugin in it but {PLUGIN}"));
        }
        Ok(Self { file: file.to_owned(), network, list })
    }

    /// The list of a network that our plugin makes itself, with those plugins behind it of [`BEHIND`] that `installed`
    /// has.
    pub(crate) fn own(network: &str, installed: impl Fn(&str) -> bool) -> Self {
        let behind = BEHIND.iter().filter(|(kind, _)| installed(kind));
        let plugins: Vec<Value> =
            behind.map(|(kind, capability)| json!({"type": kind, "capabilities": {*capability: true}})).collect();
        let list = [("cniVersion", json!(VERSION)), ("name", json!(network)), ("plugins", json!(plugins))];
        let list = list.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
        Self { file: String::new(), network: network.to_owned(), list }
    }

    /// Types of its plugins.
    pub(crate) fn plugins(&self) -> impl Iterator<Item = &str> {
        self.list["plugins"].as_array().into_iter().flatten().filter_map(|plugin| plugin["type"].as_str())
    }

    /// The same list with our entry last, or first if it makes the network. All else is kept: unknown keys, the name
    /// (the primary's state is named after it), and the version. A runtime does not tell which versions its CNI
    /// library knows, and a newer version than the primary's would be passed to plugins that may not know it.
    #[must_use]
    pub(crate) fn with_entry(&self, entry: &Map<String, Value>) -> Vec<u8> {
        let mut list = self.list.clone();
        if let Some(Value::Array(plugins)) = list.get_mut("plugins") {
            let place = if network::is_primary(entry) { 0 } else { plugins.len() };
            plugins.insert(place, Value::Object(entry.clone()));
        }
        let mut bytes = serde_json::to_vec_pretty(&list).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

/// A single configuration as a list of one, as runtimes themselves wrap it.
fn wrapped(conf: Map<String, Value>) -> Map<String, Value> {
    let shared = ["cniVersion", "name"].into_iter().filter_map(|key| Some((key.to_owned(), conf.get(key)?.clone())));
    let mut list: Map<String, Value> = shared.collect();
    list.insert("plugins".to_owned(), json!([conf]));
    list
}

/// The name of a network that our plugin makes itself, if the operator gives it none.
pub(crate) const OWN_NETWORK: &str = "nebula";
/// Known to the runtimes of every Kubernetes that is in use, and to the plugins behind us.
const VERSION: &str = "1.0.0";
/// Plugins that work behind ours, each with the capability by which the runtime tells it what a pod wants.
const BEHIND: [(&str, &str); 2] = [("portmap", "portMappings"), ("bandwidth", "bandwidth")];
// The second sorts before files such as 00-calico.conf.
const OWN_PREFIXES: [&str; 2] = ["00-nebula-", "0-nebula-"];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::choice::choose;
    use super::*;

    fn entry() -> Map<String, Value> {
        json!({"type": PLUGIN, "mode": "strict"}).as_object().unwrap().clone()
    }

    fn parsed(bytes: &[u8]) -> Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn our_entry_comes_last_and_all_else_is_kept() {
        let list = json!({"cniVersion": "0.3.1", "name": "cbr0", "disableCheck": true, "x-vendor": {"a": [1, null]},
            "plugins": [{"type": "flannel", "delegate": {"hairpinMode": true}},
                {"type": PLUGIN, "mode": "lazy"}, {"type": "portmap", "capabilities": {"portMappings": true}}]});
        let primary = Primary::parse("10-flannel.conflist", list.to_string().as_bytes()).unwrap();
        let derived = parsed(&primary.with_entry(&entry()));
        let mut expected = list;
        expected["plugins"].as_array_mut().unwrap().remove(1);
        expected["plugins"].as_array_mut().unwrap().push(json!({"type": PLUGIN, "mode": "strict"}));
        assert_eq!(derived, expected);
        let keys: Vec<_> = derived.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["cniVersion", "name", "disableCheck", "x-vendor", "plugins"], "the order is the primary's");
    }

    #[test]
    fn a_file_that_runtimes_cannot_decode_is_named_by_how_it_was_saved() {
        let text = json!({"name": "mynet", "plugins": [{"type": "bridge"}]}).to_string();
        let marked = format!("\u{feff}{text}");
        let wide: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
        for bytes in [marked.as_bytes(), &wide] {
            let why = Primary::parse("10-a.conflist", bytes).unwrap_err();
            assert!(why.contains("byte order mark") && why.contains("save it as UTF-8"), "{why}");
        }
        let why = Primary::parse("10-a.conflist", &wide[2..]).unwrap_err();
        assert!(why.contains("looks like UTF-16"), "{why}");
        let why = Primary::parse("10-a.conflist", b"{").unwrap_err();
        assert!(why.contains("not valid JSON"), "{why}");
    }

    #[test]
    fn a_single_configuration_is_wrapped() {
        for (file, version) in [("10-kuberouter.conf", Some("0.4.0")), ("x.json", None)] {
            let mut conf = json!({"name": "mynet", "type": "bridge", "ipam": {"type": "host-local"}});
            if let Some(version) = version {
                conf["cniVersion"] = version.into();
            }
            let derived = parsed(&Primary::parse(file, conf.to_string().as_bytes()).unwrap().with_entry(&entry()));
            assert_eq!(derived["name"], "mynet");
            assert_eq!(derived.get("cniVersion").and_then(Value::as_str), version);
            assert_eq!(derived["plugins"][0], conf);
            assert_eq!(derived["plugins"][1]["type"], PLUGIN);
        }
    }

    #[test]
    fn the_first_valid_file_wins_and_ours_and_hidden_ones_are_none() {
        let list = |name: &str| json!({"name": name, "plugins": [{"type": "bridge"}]}).to_string().into_bytes();
        let only_ours = json!({"name": "old", "plugins": [{"type": PLUGIN}]}).to_string().into_bytes();
        let files = [
            ("20-b.conflist", list("b")),
            ("10-a.conflist", list("a")),
            ("05-broken.conf", b"{".to_vec()),
            ("04-ours.conflist", only_ours),
            ("03-readme.txt", list("txt")),
            (".02-hidden.conflist", list("hidden")),
            ("00-nebula-a.conflist", list("own")),
            ("0-nebula-a.conflist", list("own")),
            ("01-c.conflist.cilium_bak", list("bak")),
        ];
        let all = || files.iter().map(|(name, bytes)| (*name, bytes.as_slice()));
        let choice = choose(all(), None);
        assert_eq!(choice.primary.unwrap().file, "10-a.conflist");
        let refused: Vec<_> = choice.refused.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(refused, ["04-ours.conflist", "05-broken.conf"]);
        assert_eq!(choose(all(), Some("b")).primary.unwrap().network, "b");
        assert_eq!(choose(all(), Some("z")).primary, None);
    }

    #[test]
    fn our_file_sorts_before_the_others_where_that_is_possible() {
        let name = |others: &[&str]| own_name("cbr0", others.iter().copied());
        assert_eq!(name(&["10-flannel.conflist"]), "00-nebula-cbr0.conflist");
        assert_eq!(name(&["00-calico.conf", "10-x.conf"]), "0-nebula-cbr0.conflist");
        assert_eq!(name(&[".hidden.conf"]), "00-nebula-cbr0.conflist");
        assert!(is_own(&name(&[])) && is_own(&name(&["00-calico.conf"])) && !is_own("10-nebula.conflist"));
    }

    #[test]
    fn what_a_runtime_could_not_use_is_refused_with_the_reason() {
        for (file, text) in [
            ("a.conflist", "{"),
            ("a.conflist", "[]"),
            ("a.conflist", r#"{"plugins": [{"type": "x"}]}"#),
            ("a.conflist", r#"{"name": "../x", "plugins": [{"type": "x"}]}"#),
            ("a.conflist", r#"{"name": "x"}"#),
            ("a.conflist", r#"{"name": "x", "plugins": []}"#),
            ("a.conflist", r#"{"name": "x", "plugins": [{}]}"#),
            ("a.conflist", r#"{"name": "x", "plugins": [7]}"#),
            ("a.conflist", r#"{"name": "x", "plugins": [{"type": "a/b"}]}"#),
            ("a.conflist", r#"{"name": "x", "cniVersion": 1, "plugins": [{"type": "a"}]}"#),
            ("a.conf", r#"{"name": "x", "plugins": [{"type": "a"}]}"#),
        ] {
            assert!(Primary::parse(file, text.as_bytes()).is_err(), "{file}: {text}");
        }
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            ".{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(".{0,8}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    fn plugin() -> impl Strategy<Value = Value> {
        let kind = prop_oneof![3 => "[a-z-]{1,12}".prop_map(Value::from), 1 => Just(Value::from(PLUGIN))];
        (prop::collection::btree_map("[a-zA-Z.-]{1,10}", json_value(), 0..4), kind).prop_map(|(keys, kind)| {
            let mut plugin: Map<String, Value> = keys.into_iter().collect();
            plugin.insert("type".to_owned(), kind);
            Value::Object(plugin)
        })
    }

    proptest! {
        #[test]
        fn every_list_keeps_all_but_our_entry(
            others in prop::collection::btree_map("[a-zA-Z.-]{1,10}", json_value(), 0..5),
            plugins in prop::collection::vec(plugin(), 1..6),
            version in prop::option::of("[0-9.]{1,6}"),
        ) {
            let mut list: Map<String, Value> = others.into_iter().collect();
            list.insert("name".to_owned(), "net".into());
            list.remove("cniVersion");
            list.extend(version.map(|version| ("cniVersion".to_owned(), version.into())));
            list.insert("plugins".to_owned(), plugins.clone().into());
            let kept: Vec<Value> = plugins.into_iter().filter(|plugin| plugin["type"] != PLUGIN).collect();
            let text = serde_json::to_vec(&list).unwrap();
            let primary = Primary::parse("x.conflist", &text);
            prop_assert_eq!(primary.is_ok(), !kept.is_empty());
            if let Ok(primary) = primary {
                let bytes = primary.with_entry(&entry());
                let mut expected = list;
                let all: Vec<Value> = kept.into_iter().chain([Value::Object(entry())]).collect();
                expected.insert("plugins".to_owned(), all.into());
                prop_assert_eq!(parsed(&bytes), Value::Object(expected));
                // Deriving again from what was derived changes nothing.
                let again = Primary::parse("x.conflist", &bytes).unwrap();
                prop_assert_eq!(again.with_entry(&entry()), bytes);
            }
        }

        #[test]
        fn no_bytes_are_a_panic(file in "[a-z.]{0,12}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = choose([(file.as_str(), bytes.as_slice())], None);
            let _ = Primary::parse(&file, &bytes);
        }
    }
}
