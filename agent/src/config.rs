//! The agent's configuration (`agent.json`), checked as a whole before anything on the node is changed.

mod flows;
mod keys;
mod policies;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cni_plugin::primary::settings::Primary;
use nebula_cni_plugin::request::{self, Env, Request};
use nebula_cni_plugin::settings::Settings;
use serde_json::{Map, Value, json};

pub(crate) use self::keys::is_label;
use self::keys::{Keys, endpoint, host_root, object, only};
pub use self::policies::Policies;
use crate::durable;
use crate::flows::export::Export;
use crate::flows::store::Bound;
use crate::host_root::HostRoot;
use crate::network::{self, Network};
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
    /// Keys of Nebula's configuration for the gateway of this node; `None`: there is none.
    pub gateway: Option<Map<String, Value>>,
    /// Labels of the nodes on which our plugin makes the pods' network, if the entry says so; empty: all nodes.
    pub primary_nodes: BTreeMap<String, String>,
    /// What to do with enrolled pods that run without a tunnel.
    pub unprotected: Unprotected,
    /// How running instances get a new program.
    pub upgrade: Policy,
    /// Whether the ranges that the API server shows for nodes are those of their pods.
    pub node_ranges: bool,
    /// Network policies.
    pub policies: Policies,
    /// How much of the flow records of pods is kept; `None`: nothing.
    pub flows: Option<Bound>,
    /// Where flow records are exported to.
    pub flow_export: Export,
    /// Whether nodes carry a taint until their agent is ready.
    pub taint: bool,
    /// Whether the metrics have series for each pod.
    pub pod_metrics: bool,
    /// Address of the listener for metrics and health.
    pub listen: SocketAddr,
    /// Address of the API for kubectl's plugin; `None`: there is none.
    pub api: Option<SocketAddr>,
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
    /// Pods would stay closed.
    #[error(
        "agent.json: \"entry.capture.policy\" is true, but \"policy.enabled\" is not: nobody would tell instances what \
         network policies say, and captured pods would be closed; set both or none (policy.enabled in the chart sets both)"
    )]
    ClosedByPolicy,
    /// A required policy would not be enforced.
    #[error(
        "agent.json: \"policy.required\" is true, but pods of this chain entry would not have their network policies enforced: \
         set \"policy.enabled\" to true and \"entry.capture.policy\" to {{\"clear\": \"enforce\"}} (capture.enabled, policy.enabled \
         and policy.clear in the chart), or \"policy.required\" to false"
    )]
    PolicyNotEnforced,
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
        let (flows, flow_export) = keys.flows()?;
        let config = Self {
            network: keys.network()?,
            strategy: keys.one_of("strategy", &[("file", Strategy::File), ("drop-in", Strategy::DropIn)])?,
            conf_dirs: keys.directories("confDirs")?,
            bin_dirs: keys.directories("binDirs")?,
            host_root: HostRoot::new(keys.text("hostRoot")?.map_or(Ok(None), host_root)?),
            runtime_endpoint: keys.text("runtimeEndpoint")?.map(endpoint).transpose()?,
            ca: keys.ca()?,
            entry: keys.entry()?,
            gateway: keys.gateway()?,
            primary_nodes: keys.labels("primaryNodes")?,
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
            policies: keys.policies()?,
            flows,
            flow_export,
            taint: keys.boolean("taint", false)?,
            pod_metrics: keys.boolean("podMetrics", true)?,
            listen: keys.listen()?,
            api: keys.api()?,
        };
        config.check_entry()?;
        config.check_policies()?;
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
            let entry = self.chain_entry("https://ca.invalid", None);
            // Any range will do where the node's own come later.
            let any = match network::needs_ranges(&entry) {
                true => Network::Own(vec![IpNet::from(IpAddr::from([192, 0, 2, 0]))]),
                false => Network::AsWritten,
            };
            object.extend(network::complete(entry, &any));
        }
        let env: Env = [("CNI_COMMAND".into(), "STATUS".into())].into();
        match request::read(&env, stdin.to_string().as_bytes()).1 {
            Ok(Some(Request::Status(config))) => Primary::read(&config).and_then(|_| Settings::read(&config)).map(drop),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
        .map_err(ConfigError::Entry)
    }
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

const KEYS: [&str; 19] = [
    "network",
    "strategy",
    "confDirs",
    "binDirs",
    "hostRoot",
    "runtimeEndpoint",
    "ca",
    "entry",
    "gateway",
    "primaryNodes",
    "unprotected",
    "upgrade",
    "nodeRanges",
    "policy",
    "flows",
    "taint",
    "podMetrics",
    "listen",
    "api",
];
const MAX_BYTES: u64 = 1 << 20;

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
        assert_eq!((config.listen.to_string().as_str(), config.api), ("127.0.0.1:9476", None));
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
            "upgrade": {"canary": 2, "parallel": 0, "pauseOnFailure": false, "watchSeconds": 30}, "api": {"listen": "[::]:9478"},
        });
        let config = Config::parse(&text.to_string()).unwrap();
        assert_eq!((config.strategy, config.unprotected, config.taint), (Strategy::DropIn, Unprotected::Report, true));
        assert_eq!(config.runtime_endpoint.as_deref(), Some(Path::new("/run/crio/crio.sock")));
        assert_eq!((config.bin_dirs.len(), config.node_ranges), (2, false));
        assert_eq!(config.api, Some("[::]:9478".parse().unwrap()));
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
            ("gateway", json!([])),
            ("gateway.tun", json!({"tun": []})),
            ("primaryNodes", json!(["nebula"])),
            ("primaryNodes", json!({"nebula": true})),
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
            ("flows", json!(true)),
            ("flows.keep", json!({"keep": 1})),
            ("flows.maxMiB", json!({"maxMiB": 15})),
            ("flows.maxMiB", json!({"maxMiB": 4097})),
            ("flows.hours", json!({"hours": 0})),
            ("flows.hours", json!({"hours": 721})),
            ("flows.days", json!({"days": 1})),
            ("taint", json!("yes")),
            ("listen", json!("9476")),
            ("listen", json!("localhost:9476")),
            ("api", json!("[::]:9478")),
            ("api.listen", json!({"listen": "9478"})),
            ("api.listen", json!({"listen": "[::]:0"})),
            ("api.port", json!({"port": 9478})),
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
