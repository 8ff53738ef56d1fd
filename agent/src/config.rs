//! The agent's configuration (`agent.json`), checked as a whole before anything on the node is changed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cni_plugin::request::checked::hint;
use nebula_cni_plugin::request::{self, Env, Request, is_name};
use nebula_cni_plugin::settings::Settings;
use serde_json::{Map, Value, json};

use crate::durable;
use crate::host_root::HostRoot;
use crate::rollout::plan::Policy;

/// Where `agent.json` lies in the agent's container.
pub const CONFIG_FILE: &str = "/etc/nebula-cni-agent/agent.json";

/// What the operator configured.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the primary's network; `None` for the first valid one of the node.
    pub network: Option<String>,
    /// How our entry gets into the chain.
    pub strategy: Strategy,
    /// Directories with network configurations, as the node names them; empty: ask the runtime.
    pub conf_dirs: Vec<PathBuf>,
    /// Directories with CNI plugins, as the node names them; empty: ask the runtime.
    pub bin_dirs: Vec<PathBuf>,
    /// The node's root directory as the agent sees it.
    pub host_root: HostRoot,
    /// Socket of the container runtime, as the node names it; `None`: try the usual ones.
    pub runtime_endpoint: Option<PathBuf>,
    /// Where the CA is.
    pub ca: Ca,
    /// Keys of our chain entry, without `type`, `ca` and `stateDir`.
    pub entry: Map<String, Value>,
    /// What to do with enrolled pods that run without a tunnel.
    pub unprotected: Unprotected,
    /// How running instances get a new program.
    pub upgrade: Policy,
    /// Whether the ranges that the API server shows for nodes are those of their pods.
    pub node_ranges: bool,
    /// Whether nodes carry a taint until their agent is ready.
    pub taint: bool,
    /// Whether the metrics have series for each pod.
    pub pod_metrics: bool,
    /// Address of the listener for metrics and health.
    pub listen: SocketAddr,
}

/// How our entry gets into the chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// A copy of the primary's list with our entry last, in a file that sorts before it.
    File,
    /// A file in the primary's drop-in directory. Needs a runtime that loads it.
    DropIn,
}

/// Where the CA is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ca {
    /// A Service of the cluster.
    Service {
        /// Namespace of the Service.
        namespace: String,
        /// Name of the Service.
        name: String,
        /// Its port.
        port: u16,
    },
    /// A fixed URL.
    Url {
        /// `https://host:port`.
        url: String,
        /// The name in its TLS certificate, if not the URL's host.
        server_name: Option<String>,
    },
}

/// What to do with enrolled pods that run without a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Unprotected {
    /// Give them a tunnel without a restart.
    Attach,
    /// Evict them.
    Evict,
    /// Label them.
    Label,
    /// Only count and report them.
    Report,
}

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path}: {source}; the chart mounts the ConfigMap nebula-cni-agent there")]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not JSON.
    #[error("agent.json is not valid JSON: {0}")]
    Syntax(#[source] serde_json::Error),
    /// A key has a value that is not allowed, or is not known.
    #[error("agent.json: key {key:?} has value {value}: expected {expected}")]
    Refused {
        /// Which key.
        key: String,
        /// Its value, shortened.
        value: String,
        /// What is allowed.
        expected: String,
    },
    /// A key that must be there is missing.
    #[error("agent.json: key {key:?} is missing: expected {expected}")]
    Missing {
        /// Which key.
        key: &'static str,
        /// What is allowed.
        expected: &'static str,
    },
    /// The plugin would refuse the chain entry.
    #[error("agent.json: the chain entry in \"entry\" is refused: {0}")]
    Entry(nebula_cni_plugin::reply::Error),
    /// Pods would lose the cluster's Services.
    #[error(
        "agent.json: key \"entry.overlay\" has {overlay}, which contains {service}, the address of the Service kubernetes: what \
         pods send to Services would go into their tunnels; choose an overlay outside of the Services' range (network.overlay \
         in the chart)"
    )]
    Services {
        /// The prefix.
        overlay: IpNet,
        /// The API server's Service.
        service: IpAddr,
    },
}

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// Returns the first thing that is wrong.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let bytes = durable::read_bounded(path, MAX_BYTES).map_err(unreadable)?;
        let text = nebula_cert::text::decode(bytes).map_err(|why| unreadable(io::Error::other(why)))?;
        Self::parse(&text)
    }

    /// Checks the text of a configuration.
    ///
    /// # Errors
    /// Returns the first thing that is wrong.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(ConfigError::Syntax)?;
        let keys = Keys(object("", &value, "an object")?);
        only("", keys.0, &KEYS)?;
        let config = Self {
            network: keys.network()?,
            strategy: keys.one_of("strategy", &[("file", Strategy::File), ("drop-in", Strategy::DropIn)])?,
            conf_dirs: keys.directories("confDirs")?,
            bin_dirs: keys.directories("binDirs")?,
            host_root: HostRoot::new(keys.text("hostRoot")?.map_or(Ok(None), host_root)?),
            runtime_endpoint: keys.text("runtimeEndpoint")?.map(endpoint).transpose()?,
            ca: keys.ca()?,
            entry: keys.entry()?,
            unprotected: keys.one_of(
                "unprotected",
                &[
                    ("attach", Unprotected::Attach),
                    ("evict", Unprotected::Evict),
                    ("label", Unprotected::Label),
                    ("report", Unprotected::Report),
                ],
            )?,
            upgrade: keys.upgrade()?,
            node_ranges: keys.boolean("nodeRanges", true)?,
            taint: keys.boolean("taint", false)?,
            pod_metrics: keys.boolean("podMetrics", true)?,
            listen: keys.listen()?,
        };
        config.check_entry()?;
        Ok(config)
    }

    /// For an uninstallation whose ConfigMap is gone: the runtime says where the folders are.
    ///
    /// # Errors
    /// Refuses a relative path.
    pub fn of_bare_node(host_root: &Path) -> Result<Self, ConfigError> {
        Self::parse(&json!({"ca": {"service": "none/none"}, "hostRoot": host_root}).to_string())
    }

    /// Refuses an overlay that contains `service`, the address by which pods reach the API server: Kubernetes gives
    /// it the first of the Services' range.
    ///
    /// # Errors
    /// Names both.
    pub fn check_services(&self, service: IpAddr) -> Result<(), ConfigError> {
        let overlay = self.entry.get("overlay").and_then(Value::as_array).into_iter().flatten();
        let mut overlay = overlay.filter_map(|prefix| prefix.as_str()?.parse::<IpNet>().ok());
        match overlay.find(|overlay| overlay.contains(&service)) {
            Some(overlay) => Err(ConfigError::Services { overlay, service }),
            None => Ok(()),
        }
    }

    /// The chain entry with the CA at `url`.
    #[must_use]
    pub fn chain_entry(&self, url: &str, server_name: Option<&str>) -> Map<String, Value> {
        let mut ca = json!({"url": url, "tlsCaFile": TLS_CA_FILE, "tokenFile": TOKEN_FILE});
        if let Some(name) = server_name {
            ca["serverName"] = name.into();
        }
        let fixed = [("type", PLUGIN.into()), ("stateDir", STATE_DIR.into()), ("ca", ca)];
        let mut entry: Map<String, Value> = fixed.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
        entry.extend(self.entry.clone());
        entry
    }

    /// Lets the plugin itself read the entry that it will get.
    fn check_entry(&self) -> Result<(), ConfigError> {
        let mut stdin = json!({"cniVersion": "1.1.0", "name": "check"});
        if let Some(object) = stdin.as_object_mut() {
            object.extend(self.chain_entry("https://ca.invalid", None));
        }
        let env: Env = [("CNI_COMMAND".into(), "STATUS".into())].into();
        match request::read(&env, stdin.to_string().as_bytes()).1 {
            Ok(Some(Request::Status(config))) => Settings::read(&config).map(drop),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
        .map_err(ConfigError::Entry)
    }
}

struct Keys<'a>(&'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(refused(key, other, "a string")),
        }
    }

    fn network(&self) -> Result<Option<String>, ConfigError> {
        let Some(name) = self.text("network")? else { return Ok(None) };
        if is_name(name) {
            return Ok(Some(name.to_owned()));
        }
        Err(refused("network", &name.into(), "the \"name\" of a network configuration: letters, digits, '_', '.', '-'"))
    }

    /// The value of a key among fixed words; the first one is the default.
    fn one_of<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text(key)?.unwrap_or(words[0].0);
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let words: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            refused(key, &text.into(), &format!("one of {}", words.join(", ")))
        })
    }

    fn directories(&self, key: &str) -> Result<Vec<PathBuf>, ConfigError> {
        const EXPECTED: &str = "a list of at most 16 absolute paths on the node";
        let Some(value) = self.0.get(key) else { return Ok(Vec::new()) };
        let list = value
            .as_array()
            .filter(|list| list.len() <= MAX_DIRECTORIES)
            .ok_or_else(|| refused(key, value, EXPECTED))?;
        let path = |item: &Value| {
            item.as_str().and_then(absolute).ok_or_else(|| refused(key, item, "an absolute path on the node"))
        };
        list.iter().map(path).collect()
    }

    fn ca(&self) -> Result<Ca, ConfigError> {
        const EXPECTED: &str = "{\"service\": \"NAMESPACE/NAME\", \"port\": PORT} or {\"url\": \"https://HOST:PORT\"}";
        let value = self.0.get("ca").ok_or(ConfigError::Missing { key: "ca", expected: EXPECTED })?;
        let keys = Keys(object("ca", value, EXPECTED)?);
        only("ca", keys.0, &["service", "port", "url", "serverName"])?;
        match (keys.0.get("service"), keys.0.get("url")) {
            (Some(service), None) => {
                only("ca", keys.0, &["service", "port"])?;
                let name = service.as_str().and_then(|text| text.split_once('/'));
                let (namespace, name) = name
                    .filter(|(namespace, name)| is_label(namespace) && is_label(name))
                    .ok_or_else(|| refused("ca.service", service, "\"NAMESPACE/NAME\" of a Service"))?;
                let port = match keys.0.get("port") {
                    None => DEFAULT_CA_PORT,
                    Some(port) => port
                        .as_u64()
                        .and_then(|port| u16::try_from(port).ok())
                        .filter(|port| *port > 0)
                        .ok_or_else(|| refused("ca.port", port, "a port from 1 to 65535"))?,
                };
                Ok(Ca::Service { namespace: namespace.to_owned(), name: name.to_owned(), port })
            }
            (None, Some(url)) => {
                only("ca", keys.0, &["url", "serverName"])?;
                let is_good = |url: &&str| {
                    url.strip_prefix("https://")
                        .is_some_and(|rest| !rest.is_empty() && !rest.contains(|c: char| c.is_whitespace() || c == '/'))
                };
                let url =
                    url.as_str().filter(is_good).ok_or_else(|| refused("ca.url", url, "https://HOST:PORT"))?.to_owned();
                let server_name = match keys.0.get("serverName") {
                    None => None,
                    Some(name) => Some(
                        name.as_str()
                            .filter(|name| !name.is_empty() && name.len() < 254 && name.split('.').all(is_label))
                            .ok_or_else(|| refused("ca.serverName", name, "the DNS name in the CA's TLS certificate"))?
                            .to_owned(),
                    ),
                };
                Ok(Ca::Url { url, server_name })
            }
            _ => Err(refused("ca", value, EXPECTED)),
        }
    }

    fn entry(&self) -> Result<Map<String, Value>, ConfigError> {
        let Some(value) = self.0.get("entry") else { return Ok(Map::new()) };
        let entry = object("entry", value, "an object with keys of the chain entry")?;
        // Their values follow from where the agent puts its files, and from "ca".
        let ours =
            entry.iter().find(|(key, _)| ["type", "ca", "stateDir", "name", "cniVersion"].contains(&key.as_str()));
        match ours {
            Some((key, value)) => Err(refused(&format!("entry.{key}"), value, "nothing here: the agent sets this key")),
            None => Ok(entry.clone()),
        }
    }

    fn upgrade(&self) -> Result<Policy, ConfigError> {
        const EXPECTED: &str = "{\"canary\": N, \"parallel\": N, \"pauseOnFailure\": BOOLEAN, \"watchSeconds\": N}";
        let Some(value) = self.0.get("upgrade") else { return Ok(Policy::DEFAULT) };
        let keys = Keys(object("upgrade", value, EXPECTED)?);
        only("upgrade", keys.0, &["canary", "parallel", "pauseOnFailure", "watchSeconds"])?;
        let (default, most) = (Policy::DEFAULT, Policy::MOST);
        let number = |key: &str, range: RangeInclusive<u32>, default| {
            let Some(value) = keys.0.get(key) else { return Ok(default) };
            let number =
                value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| range.contains(number));
            let expected = format!("a number from {} to {}", range.start(), range.end());
            number.ok_or_else(|| refused(&format!("upgrade.{key}"), value, &expected))
        };
        let pause_on_failure = match keys.0.get("pauseOnFailure") {
            None => default.pause_on_failure,
            Some(Value::Bool(pauses)) => *pauses,
            Some(other) => return Err(refused("upgrade.pauseOnFailure", other, "true or false")),
        };
        Ok(Policy {
            canary: number("canary", 0..=most.canary, default.canary)?,
            parallel: number("parallel", 0..=most.parallel, default.parallel)?,
            pause_on_failure,
            watch_seconds: number("watchSeconds", 1..=most.watch_seconds, default.watch_seconds)?,
        })
    }

    fn boolean(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| refused(key, value, "true or false"))
    }

    fn listen(&self) -> Result<SocketAddr, ConfigError> {
        let text = self.text("listen")?.unwrap_or(DEFAULT_LISTEN);
        text.parse().map_err(|_| refused("listen", &text.into(), "IP:PORT, for example \"0.0.0.0:9476\""))
    }
}

fn host_root(text: &str) -> Result<Option<PathBuf>, ConfigError> {
    match text {
        "" | "/" => Ok(None),
        path => absolute(path)
            .map(Some)
            .ok_or_else(|| refused("hostRoot", &path.into(), "the absolute path at which the node's root is mounted")),
    }
}

fn endpoint(text: &str) -> Result<PathBuf, ConfigError> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    // Longer paths do not fit into a socket address.
    absolute(path)
        .filter(|_| path.len() < 100)
        .ok_or_else(|| refused("runtimeEndpoint", &text.into(), "unix:///PATH of the runtime's socket"))
}

fn absolute(text: &str) -> Option<PathBuf> {
    let path = Path::new(text);
    let is_plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    (text.starts_with('/') && !text.contains('\0') && is_plain).then(|| path.to_owned())
}

/// A DNS label (RFC 1123), as Kubernetes names Services and namespaces.
fn is_label(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-') && !text.ends_with('-')
}

fn object<'a>(key: &str, value: &'a Value, expected: &str) -> Result<&'a Map<String, Value>, ConfigError> {
    value.as_object().ok_or_else(|| refused(key, value, expected))
}

/// Refuses unknown keys, which would otherwise silently have no effect.
fn only(section: &str, object: &Map<String, Value>, known: &[&str]) -> Result<(), ConfigError> {
    let Some((key, value)) = object.iter().find(|(key, _)| !known.contains(&key.as_str())) else { return Ok(()) };
    let key = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
    let hint = key.rsplit('.').next().map_or_else(String::new, |key| hint(key, known));
    Err(refused(&key, value, &format!("{hint}only the keys {}", known.join(", "))))
}

fn refused(key: &str, value: &Value, expected: &str) -> ConfigError {
    let value: String = value.to_string().chars().take(MAX_SHOWN).collect();
    ConfigError::Refused { key: key.to_owned(), value, expected: expected.to_owned() }
}

/// Name of the plugin's program, and the `type` of our chain entry.
pub const PLUGIN: &str = "nebula-cni-plugin";
/// Name of the instance's program.
pub const INSTANCE: &str = "nebula-cni-instance";
/// State of plugin and agent on the node.
pub const STATE_DIR: &str = nebula_cni_plugin::settings::STATE_DIR;
/// The agent's files, in a directory that no network can be named like: networks have directories beside it.
pub const AGENT_DIR: &str = "/run/nebula-cni/agent";
/// Copy of the agent's token, for instances.
pub const TOKEN_FILE: &str = "/run/nebula-cni/agent/token";
/// What instances show the CA while the agent is away, see `CaAccess::credential_beside`.
pub const NODE_CREDENTIAL_FILE: &str = "/run/nebula-cni/agent/node-credential";
/// Copy of the TLS roots of the CA, for instances.
pub const TLS_CA_FILE: &str = "/run/nebula-cni/agent/tls.crt";

const KEYS: [&str; 14] = [
    "network",
    "strategy",
    "confDirs",
    "binDirs",
    "hostRoot",
    "runtimeEndpoint",
    "ca",
    "entry",
    "unprotected",
    "upgrade",
    "nodeRanges",
    "taint",
    "podMetrics",
    "listen",
];
const DEFAULT_LISTEN: &str = "127.0.0.1:9476";
const DEFAULT_CA_PORT: u16 = 8443;
const MAX_BYTES: u64 = 1 << 20;
const MAX_DIRECTORIES: usize = 16;
const MAX_SHOWN: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Value {
        json!({"ca": {"service": "nebula-system/nebula-ca"}})
    }

    #[test]
    fn little_is_required_and_the_rest_has_defaults() {
        let config = Config::parse(&good().to_string()).unwrap();
        assert_eq!(config.ca, Ca::Service { namespace: "nebula-system".into(), name: "nebula-ca".into(), port: 8443 });
        assert_eq!((config.strategy, config.unprotected, config.taint), (Strategy::File, Unprotected::Attach, false));
        assert_eq!((config.network, config.runtime_endpoint), (None, None));
        assert_eq!(config.upgrade, Policy::DEFAULT);
        assert_eq!(config.listen.to_string(), "127.0.0.1:9476");
        assert_eq!(config.host_root.resolve(Path::new("/etc")), Path::new("/etc"));
    }

    #[test]
    fn everything_can_be_set() {
        let text = json!({
            "network": "cbr0", "strategy": "drop-in", "confDirs": ["/etc/cni/net.d"], "binDirs": ["/opt/cni/bin", "/x"],
            "hostRoot": "/host", "runtimeEndpoint": "unix:///run/crio/crio.sock",
            "ca": {"url": "https://ca.example:8443", "serverName": "nebula-ca.nebula-system.svc"},
            "entry": {"enrol": {"namespaces": ["shop"]}, "mode": "strict"},
            "unprotected": "report", "taint": true, "listen": "0.0.0.0:9476", "nodeRanges": false,
            "upgrade": {"canary": 2, "parallel": 0, "pauseOnFailure": false, "watchSeconds": 30},
        });
        let config = Config::parse(&text.to_string()).unwrap();
        assert_eq!((config.strategy, config.unprotected, config.taint), (Strategy::DropIn, Unprotected::Report, true));
        assert_eq!(config.runtime_endpoint.as_deref(), Some(Path::new("/run/crio/crio.sock")));
        assert_eq!((config.bin_dirs.len(), config.node_ranges), (2, false));
        let upgrade = Policy { canary: 2, parallel: 0, pause_on_failure: false, watch_seconds: 30 };
        assert_eq!(config.upgrade, upgrade);
        let entry = config.chain_entry("https://10.96.0.7:8443", Some("nebula-ca.nebula-system.svc"));
        assert_eq!(entry["type"], "nebula-cni-plugin");
        assert_eq!(entry["ca"]["tokenFile"], "/run/nebula-cni/agent/token");
        assert_eq!(entry["ca"]["serverName"], "nebula-ca.nebula-system.svc");
        assert_eq!(entry["enrol"], json!({"namespaces": ["shop"]}));
    }

    #[test]
    fn each_wrong_value_is_refused_by_key_and_value() {
        for (key, value) in [
            ("network", json!("no spaces")),
            ("network", json!(7)),
            ("strategy", json!("edit")),
            ("strategy", json!(true)),
            ("nodeRanges", json!("no")),
            ("confDirs", json!("/etc/cni/net.d")),
            ("confDirs", json!(["relative"])),
            ("confDirs", json!(["/etc/../root"])),
            ("binDirs", json!([7])),
            ("binDirs", json!(vec!["/x"; 17])),
            ("hostRoot", json!("host")),
            ("runtimeEndpoint", json!("tcp://10.0.0.1:1")),
            ("runtimeEndpoint", json!(format!("/{}", "x".repeat(120)))),
            ("ca", json!({})),
            ("ca", json!("https://ca")),
            ("ca", json!({"service": "a/b", "url": "https://x"})),
            ("ca.service", json!({"service": "nebula-ca"})),
            ("ca.service", json!({"service": "a/b/c"})),
            ("ca.service", json!({"service": "A/b"})),
            ("ca.port", json!({"service": "a/b", "port": 0})),
            ("ca.port", json!({"service": "a/b", "port": "8443"})),
            ("ca.url", json!({"url": "http://ca"})),
            ("ca.url", json!({"url": "https://ca/path"})),
            ("ca.serverName", json!({"url": "https://ca", "serverName": "a b"})),
            ("ca.serverName", json!({"service": "a/b", "serverName": "c"})),
            ("ca.tokenFile", json!({"url": "https://ca", "tokenFile": "/x"})),
            ("entry", json!([])),
            ("entry.stateDir", json!({"stateDir": "/x"})),
            ("entry.type", json!({"type": "x"})),
            ("unprotected", json!("kill")),
            ("upgrade", json!(true)),
            ("upgrade.canary", json!({"canary": -1})),
            ("upgrade.canary", json!({"canary": 101})),
            ("upgrade.parallel", json!({"parallel": "4"})),
            ("upgrade.parallel", json!({"parallel": 65})),
            ("upgrade.pauseOnFailure", json!({"pauseOnFailure": 1})),
            ("upgrade.watchSeconds", json!({"watchSeconds": 0})),
            ("upgrade.watchSeconds", json!({"watchSeconds": 1.5})),
            ("upgrade.watch", json!({"watch": 1})),
            ("taint", json!("yes")),
            ("listen", json!("9476")),
            ("listen", json!("localhost:9476")),
            ("confDir", json!(["/etc/cni/net.d"])),
        ] {
            let mut config = good();
            config[key.split('.').next().unwrap()] = value.clone();
            let error = Config::parse(&config.to_string()).expect_err(&format!("{key}: {value}")).to_string();
            assert!(error.contains(&format!("{key:?}")), "{key}: {error}");
        }
        assert!(matches!(Config::parse("{}"), Err(ConfigError::Missing { key: "ca", .. })));
        assert!(matches!(Config::parse("{"), Err(ConfigError::Syntax(_))));
        assert!(Config::parse("[]").is_err());
    }

    #[test]
    fn the_plugin_checks_the_entry_before_a_chain_names_it() {
        for entry in [json!({"mode": "eager"}), json!({"mode": "lazy"}), json!({"nebula": {"pki": {}}})] {
            let mut config = good();
            config["entry"] = entry;
            assert!(matches!(Config::parse(&config.to_string()), Err(ConfigError::Entry(_))));
        }
    }

    #[test]
    fn misspelt_keys_are_refused_and_the_nearest_one_is_named() {
        for (config, named) in [
            (json!({"ca": {"service": "a/b"}, "unprotect": "report"}), "\"unprotected\"?"),
            (json!({"ca": {"servce": "a/b"}}), "\"service\"?"),
            (json!({"ca": {"service": "a/b"}, "entry": {"isolat": true}}), "\"isolate\"?"),
        ] {
            let error = Config::parse(&config.to_string()).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn an_overlay_that_contains_the_services_is_refused() {
        let mut config = good();
        config["entry"] = json!({"overlay": ["10.77.0.0/16", "10.96.0.0/12"]});
        let config = Config::parse(&config.to_string()).unwrap();
        let error = config.check_services("10.96.0.1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("10.96.0.0/12") && error.contains("10.96.0.1"), "{error}");
        assert!(config.check_services("10.43.0.1".parse().unwrap()).is_ok());
    }

    #[test]
    fn an_uninstallation_needs_no_configuration() {
        assert!(Config::of_bare_node(Path::new("/")).unwrap().host_root.path().is_none());
        let host_root = Config::of_bare_node(Path::new("/host")).unwrap().host_root;
        assert_eq!(host_root.path(), Some(Path::new("/host")));
    }

    #[test]
    fn a_huge_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.json");
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        assert!(Config::read(&path).unwrap_err().to_string().contains("larger"));
        assert!(Config::read(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn a_file_that_was_saved_as_utf_16_is_read_and_other_bytes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.json");
        let marked = format!("\u{feff}{}", good());
        let wide: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
        for bytes in [marked.into_bytes(), wide] {
            std::fs::write(&path, bytes).unwrap();
            let read = format!("{:?}", Config::read(&path).unwrap());
            assert_eq!(read, format!("{:?}", Config::parse(&good().to_string()).unwrap()));
        }
        std::fs::write(&path, b"{\"x\": \"Gr\xf6\xdfe\"}").unwrap();
        let error = Config::read(&path).unwrap_err().to_string();
        assert!(error.contains("agent.json") && error.contains("(byte 10): save it as UTF-8"), "{error}");
    }
}
