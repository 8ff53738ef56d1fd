//! What a runtime says it has loaded: containerd shows its parsed network configuration in the verbose status. A file
//! on disk proves nothing, because the runtime may have missed it, refused it, or prefer another one.

use std::path::PathBuf;

use serde_json::Value;

use super::Status;

/// The network configuration that a runtime works with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Name of the default network; `None` if none is loaded.
    pub network: Option<String>,
    /// Types of its plugins, in order.
    pub plugins: Vec<String>,
    /// The text of the list, as the runtime read it.
    pub source: String,
    /// Why the last load failed, if it did.
    pub error: Option<String>,
}

/// The directories that a runtime names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Directories {
    /// Directories with network configurations.
    pub conf: Vec<PathBuf>,
    /// Directories with plugins.
    pub bin: Vec<PathBuf>,
}

impl Loaded {
    /// Reads a verbose status; `None` if this runtime does not tell (CRI-O).
    #[must_use]
    pub fn read(status: &Status) -> Option<Self> {
        let error = status.info.get("lastCNILoadStatus").filter(|text| text.as_str() != "OK" && !text.is_empty());
        let config: Value = match status.info.get("cniconfig") {
            Some(text) => serde_json::from_str(text).ok()?,
            None => return error.map(|error| Self { error: Some(error.clone()), ..Self::nothing() }),
        };
        let networks = config["Networks"].as_array().map(Vec::as_slice).unwrap_or_default();
        // The first one is containerd's own for the loopback device; the default network is the first other.
        let network = networks.iter().map(|network| &network["Config"]).find(|config| !is_loopback(config));
        let mut loaded = Self { error: error.cloned(), ..Self::nothing() };
        if let Some(config) = network {
            loaded.network = config["Name"].as_str().map(str::to_owned);
            let plugins = config["Plugins"].as_array().map(Vec::as_slice).unwrap_or_default();
            let kind = |plugin: &Value| plugin["Network"]["type"].as_str().unwrap_or_default().to_owned();
            loaded.plugins = plugins.iter().map(kind).collect();
            loaded.source = config["Source"].as_str().unwrap_or_default().to_owned();
        }
        Some(loaded)
    }

    fn nothing() -> Self {
        Self { network: None, plugins: Vec::new(), source: String::new(), error: None }
    }
}

impl Directories {
    /// Reads a verbose status; empty if this runtime does not tell.
    #[must_use]
    pub fn read(status: &Status) -> Self {
        let parse = |key: &str| status.info.get(key).and_then(|text| serde_json::from_str::<Value>(text).ok());
        let config = parse("config").unwrap_or_default();
        let cniconfig = parse("cniconfig").unwrap_or_default();
        let cni = &config["cni"];
        let mut found = Self::default();
        let add = |list: &mut Vec<PathBuf>, value: &Value| {
            let values = value.as_array().map_or_else(|| std::slice::from_ref(value), Vec::as_slice);
            for path in values.iter().filter_map(Value::as_str).filter(|path| path.starts_with('/')).map(PathBuf::from)
            {
                if !list.contains(&path) && list.len() < MAX_DIRECTORIES {
                    list.push(path);
                }
            }
        };
        // containerd 1.x has binDir, 2.1 and newer also binDirs.
        for value in [&cni["binDirs"], &cni["binDir"], &cniconfig["PluginDirs"]] {
            add(&mut found.bin, value);
        }
        for value in [&cni["confDir"], &cniconfig["PluginConfDir"]] {
            add(&mut found.conf, value);
        }
        found
    }
}

fn is_loopback(config: &Value) -> bool {
    config["Name"] == "cni-loopback"
        || config["Plugins"].as_array().is_some_and(|plugins| {
            plugins.len() == 1 && plugins.iter().all(|plugin| plugin["Network"]["type"] == "loopback")
        })
}

const MAX_DIRECTORIES: usize = 16;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(info: &[(&str, String)]) -> Status {
        let info = info.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        Status { network_problem: None, info }
    }

    fn cniconfig() -> String {
        let plugin = |kind: &str| json!({"Network": {"type": kind, "ipam": {}}, "Source": "{}"});
        json!({"PluginDirs": ["/opt/cni/bin"], "PluginConfDir": "/etc/cni/net.d", "Prefix": "eth", "Networks": [
            {"IFName": "lo", "Config": {"Name": "cni-loopback", "Plugins": [plugin("loopback")], "Source": "{}"}},
            {"IFName": "eth0", "Config": {"Name": "cbr0", "Plugins": [plugin("bridge"), plugin("nebula-cni-plugin")],
                "Source": "{\"name\":\"cbr0\"}"}}]})
        .to_string()
    }

    #[test]
    fn the_default_network_of_containerd_is_found() {
        let status = status(&[("cniconfig", cniconfig()), ("lastCNILoadStatus", "OK".to_owned())]);
        let loaded = Loaded::read(&status).unwrap();
        assert_eq!(loaded.network.as_deref(), Some("cbr0"));
        assert_eq!(loaded.plugins, ["bridge", "nebula-cni-plugin"]);
        assert_eq!((loaded.source.as_str(), loaded.error), ("{\"name\":\"cbr0\"}", None));
    }

    #[test]
    fn a_failed_load_is_told() {
        let failure = "cni config load failed: no network config found in /etc/cni/net.d".to_owned();
        let loaded = Loaded::read(&status(&[("lastCNILoadStatus", failure.clone())])).unwrap();
        assert_eq!((loaded.network, loaded.error), (None, Some(failure)));
    }

    #[test]
    fn another_runtime_does_not_tell() {
        assert_eq!(Loaded::read(&status(&[("config", "[crio]".to_owned())])), None);
        assert_eq!(Directories::read(&status(&[("config", "[crio]".to_owned())])), Directories::default());
    }

    #[test]
    fn the_directories_of_old_and_new_containerd_are_found() {
        let old = json!({"cni": {"binDir": "/a", "confDir": "/c"}}).to_string();
        let found = Directories::read(&status(&[("config", old), ("cniconfig", cniconfig())]));
        assert_eq!(found.bin, ["/a", "/opt/cni/bin"].map(PathBuf::from));
        assert_eq!(found.conf, ["/c", "/etc/cni/net.d"].map(PathBuf::from));
        let new = json!({"cni": {"binDir": "", "binDirs": ["/a", "/b", "x"], "confDir": "/c"}}).to_string();
        assert_eq!(Directories::read(&status(&[("config", new)])).bin, ["/a", "/b"].map(PathBuf::from));
    }

    #[test]
    fn hostile_details_are_no_panic() {
        for text in ["", "[]", "7", "{\"Networks\":{}}", "{\"Networks\":[7,{\"Config\":{\"Plugins\":[{}]}}]}"] {
            let status = status(&[("cniconfig", text.to_owned()), ("config", text.to_owned())]);
            let _ = (Loaded::read(&status), Directories::read(&status));
        }
    }
}
