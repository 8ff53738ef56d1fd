//! The plugin's entry in the network configuration list, checked as a whole before anything is changed. A wrong value
//! is refused with an error that names key and value, and so is a key that neither we nor the CNI specification know:
//! it is a typing error, and what it was meant to switch on would silently be off.

pub mod capturing;
pub mod isolation;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use nebula_cni_contract::launch::{CaAccess, Flow, Mode, Underlay};
use serde_json::{Map, Value};

use crate::attachment::room::Users;
use crate::enrolment::Enrolment;
use crate::primary::{self, settings::Primary};
use crate::programs::INSTANCE;
use crate::reply::{Error, code};
use crate::request::checked::{boolean, hint, prefixes, refuse_other_keys, refused};
use crate::request::{self, NetworkConfig};
use crate::settings::capturing::Capturing;
use crate::settings::isolation::Isolation;
use crate::supervisor::kind::Kind;

/// What the operator configured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The supervisor of instances; `None` for systemd if it answers, else direct.
    pub supervisor: Option<Kind>,
    /// Path of the instance binary; `None` to look in the default places.
    pub instance: Option<PathBuf>,
    /// Name of the tun device in the pod.
    pub device: String,
    /// Whose token obtains the certificate.
    pub flow: Flow,
    /// Whether a pod has a provisional certificate until its init container presents its token.
    pub provisional: bool,
    /// Whether ADD waits for the certificate.
    pub mode: Mode,
    /// Network namespace of the UDP socket.
    pub underlay: Underlay,
    /// What a pod may reach besides the overlay; `None` if pods are not isolated.
    pub isolate: Option<Isolation>,
    /// Which traffic goes through the tunnel although programs use addresses of the primary network; `None` if none
    /// does.
    pub capture: Option<Capturing>,
    /// Whether the result of ADD reports the overlay address as the pod's.
    pub renumber: bool,
    /// Overlay prefixes, traffic for which must not leave in the clear before there is a certificate.
    pub overlay: Vec<IpNet>,
    /// Range of UDP ports that instances may use, inclusive.
    pub port_range: (u16, u16),
    /// Directory of the records.
    pub state_dir: PathBuf,
    /// Time limit of ADD.
    pub timeout: Duration,
    /// Range of user ids that instances run as.
    pub users: Users,
    /// Memory limit of an instance in bytes; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// Where certificates come from.
    pub ca: CaAccess,
    /// Which pods are enrolled.
    pub enrolment: Enrolment,
    /// The tunnel's configuration, passed on to the instance.
    pub nebula: Value,
}

impl Settings {
    /// Reads and checks all of our keys.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(config: &NetworkConfig) -> Result<Self, Error> {
        let keys = Keys { config };
        keys.are_known()?;
        Primary::read(config)?;
        let overlay = keys.overlay()?;
        let settings = Self {
            supervisor: keys.supervisor()?,
            instance: keys.path("instance")?,
            device: keys.device()?,
            flow: keys.flow()?,
            provisional: keys.of_flow_init("provisional")?,
            mode: keys.mode()?,
            underlay: keys.underlay()?,
            isolate: keys.config.value("isolate")?.map_or(Ok(None), |value| Isolation::read(&value))?,
            capture: keys.config.value("capture")?.map_or(Ok(None), |value| Capturing::read(&value, &overlay))?,
            renumber: keys.renumber()?,
            overlay,
            port_range: keys.port_range()?,
            state_dir: keys.state_dir()?,
            timeout: keys.timeout()?,
            users: keys.users()?,
            memory_limit: keys.memory_limit()?,
            ca: keys.ca()?,
            enrolment: Enrolment::read(config)?,
            nebula: keys.nebula()?,
        };
        Capturing::check(&settings)?;
        Ok(settings)
    }

    /// Only the state directory, regardless of errors in other keys. DEL and GC need nothing else.
    #[must_use]
    pub fn state_dir(config: &NetworkConfig) -> PathBuf {
        Keys { config }.state_dir().unwrap_or_else(|_| PathBuf::from(STATE_DIR))
    }

    /// The instance binary: the configured one, else the one next to the plugin, else the one in the usual directory.
    ///
    /// # Errors
    /// Code 7 if there is none.
    pub fn instance_binary(&self, plugin_dir: Option<&Path>) -> Result<PathBuf, Error> {
        let places = match &self.instance {
            Some(configured) => vec![configured.clone()],
            None => plugin_dir.into_iter().chain([Path::new(BIN_DIR)]).map(|dir| dir.join(INSTANCE)).collect(),
        };
        places.iter().find(|place| is_executable(place)).cloned().ok_or_else(|| {
            let tried = places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
            Error::new(code::CONFIG, format!("no executable nebula-cni-instance at {tried}"))
                .details("install it there, or name its path with the key \"instance\"")
        })
    }
}

struct Keys<'a> {
    config: &'a NetworkConfig,
}

impl Keys<'_> {
    fn are_known(&self) -> Result<(), Error> {
        let is_known = |key: &&str| {
            OURS.contains(key) || primary::settings::KEYS.contains(key) || OF_CNI.contains(key) || is_of_somebody(key)
        };
        let Some(key) = self.config.keys().find(|key| !is_known(key)) else { return Ok(()) };
        let value = self.config.value(key)?.unwrap_or_default();
        let expected = format!("{}only the keys {} in the entry", hint(key, &OURS), OURS.join(", "));
        Err(refused(key, &value, &expected))
    }

    fn text(&self, key: &str) -> Result<Option<String>, Error> {
        match self.config.value(key)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(refused(key, &other, "a string")),
        }
    }

    fn path(&self, key: &str) -> Result<Option<PathBuf>, Error> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        absolute(key, &text).map(Some)
    }

    fn device(&self) -> Result<String, Error> {
        let device = self.text("device")?.unwrap_or_else(|| DEFAULT_DEVICE.to_owned());
        // A '%' would make the kernel pick a number.
        if !request::is_ifname(&device) || device == "lo" || device.contains('%') || !device.is_ascii() {
            return Err(refused("device", &Value::from(device), request::IFNAME_PATTERN));
        }
        Ok(device)
    }

    fn mode(&self) -> Result<Mode, Error> {
        match self.text("mode")?.as_deref() {
            None | Some("strict") => Ok(Mode::Strict),
            Some("lazy") => Ok(Mode::Lazy),
            Some(other) => Err(refused("mode", &Value::from(other), "\"strict\" or \"lazy\"")),
        }
    }

    fn supervisor(&self) -> Result<Option<Kind>, Error> {
        match self.text("supervisor")?.as_deref() {
            None | Some("auto") => Ok(None),
            Some("systemd") => Ok(Some(Kind::Systemd)),
            Some("direct") => Ok(Some(Kind::Direct)),
            Some(other) => Err(refused("supervisor", &Value::from(other), "\"auto\", \"systemd\" or \"direct\"")),
        }
    }

    fn flow(&self) -> Result<Flow, Error> {
        match self.text("flow")?.as_deref() {
            None | Some("node") => Ok(Flow::Node),
            Some("init") => Ok(Flow::Init),
            Some(other) => Err(refused("flow", &Value::from(other), "\"node\" or \"init\"")),
        }
    }

    /// Reads a boolean key that is only valid in flow "init".
    fn of_flow_init(&self, key: &str) -> Result<bool, Error> {
        let is_on = boolean(self.config, key, false)?;
        if is_on && self.flow()? != Flow::Init {
            return Err(Error::new(code::CONFIG, format!("network configuration: {key:?} needs flow \"init\""))
                .details("in flow \"node\" no init container of the pod asks for anything"));
        }
        Ok(is_on)
    }

    fn underlay(&self) -> Result<Underlay, Error> {
        match self.text("underlay")?.as_deref() {
            None | Some("host") => Ok(Underlay::Host),
            Some("pod") => Ok(Underlay::Pod),
            Some(other) => Err(refused("underlay", &Value::from(other), "\"host\" or \"pod\"")),
        }
    }

    /// The result of ADD can only report an address that is known when ADD returns.
    fn renumber(&self) -> Result<bool, Error> {
        let renumber = boolean(self.config, "renumber", false)?;
        if renumber && (self.mode()? == Mode::Lazy || self.flow()? == Flow::Init) {
            return Err(Error::new(
                code::CONFIG,
                "network configuration: \"renumber\" needs mode \"strict\" and flow \"node\"",
            )
            .details("the pod's IP must be known when ADD returns, and comes with the certificate"));
        }
        Ok(renumber)
    }

    fn overlay(&self) -> Result<Vec<IpNet>, Error> {
        let value = self.config.value("overlay")?.unwrap_or_else(|| Value::Array(Vec::new()));
        let prefixes = prefixes("overlay", &value)?;
        // What is captured is closed without this key.
        let is_captured = self.config.value("capture")?.is_some_and(|value| value != Value::Bool(false));
        if prefixes.is_empty() && !is_captured && (self.mode()? == Mode::Lazy || self.flow()? == Flow::Init) {
            let msg = "network configuration: mode \"lazy\" and flow \"init\" need the key \"overlay\"";
            return Err(Error::new(code::CONFIG, msg).details(
                "list the overlay's prefixes: until the pod has its certificate, they are routed to its closed device, so that \
                 nothing for them leaves in clear",
            ));
        }
        Ok(prefixes)
    }

    fn port_range(&self) -> Result<(u16, u16), Error> {
        let Some(value) = self.config.value("portRange")? else {
            return Ok(match self.underlay()? {
                Underlay::Host => PORT_RANGE,
                Underlay::Pod => (POD_PORT, POD_PORT),
            });
        };
        let port = |v: &Value| v.as_u64().and_then(|p| u16::try_from(p).ok()).filter(|p| *p > 0);
        if let Some([low, high]) = value.as_array().map(Vec::as_slice)
            && let (Some(low), Some(high)) = (port(low), port(high))
            && low <= high
        {
            return Ok((low, high));
        }
        Err(refused("portRange", &value, "[LOWEST, HIGHEST] within 1 to 65535"))
    }

    fn state_dir(&self) -> Result<PathBuf, Error> {
        let dir = self.path("stateDir")?.unwrap_or_else(|| PathBuf::from(STATE_DIR));
        // The paths of the sockets in it must fit into a socket address.
        if dir.as_os_str().len() > 70 {
            return Err(refused("stateDir", &Value::from(dir.display().to_string()), "at most 70 bytes"));
        }
        Ok(dir)
    }

    fn timeout(&self) -> Result<Duration, Error> {
        let Some(value) = self.config.value("timeoutSeconds")? else { return Ok(DEFAULT_TIMEOUT) };
        let seconds = value.as_u64().filter(|s| (1..=MAX_TIMEOUT.as_secs()).contains(s));
        seconds.map(Duration::from_secs).ok_or_else(|| refused("timeoutSeconds", &value, "a whole number from 1 to 60"))
    }

    fn users(&self) -> Result<Users, Error> {
        let Some(value) = self.config.value("users")? else { return Ok(Users::DEFAULT) };
        // Root is excluded, and to the kernel the greatest number means "unchanged".
        let user = |v: &Value| v.as_u64().and_then(|u| u32::try_from(u).ok()).filter(|u| (1..u32::MAX).contains(u));
        if let Some([low, high]) = value.as_array().map(Vec::as_slice)
            && let (Some(low), Some(high)) = (user(low), user(high))
            && low <= high
        {
            return Ok(Users { low, high });
        }
        Err(refused("users", &value, "[LOWEST, HIGHEST] within 1 to 4294967294"))
    }

    fn memory_limit(&self) -> Result<Option<u64>, Error> {
        let Some(value) = self.config.value("memoryLimitMiB")? else { return Ok(Some(MEMORY_LIMIT_MIB << 20)) };
        match value.as_u64() {
            Some(0) => Ok(None),
            Some(mib @ MIN_MEMORY_LIMIT_MIB..=MAX_MEMORY_LIMIT_MIB) => Ok(Some(mib << 20)),
            _ => Err(refused("memoryLimitMiB", &value, "a whole number from 16 to 65536, or 0 for no limit")),
        }
    }

    fn ca(&self) -> Result<CaAccess, Error> {
        const EXPECTED: &str = "an object with \"url\", \"tlsCaFile\" and \"tokenFile\", and if needed \"serverName\"";
        let Some(value) = self.config.value("ca")? else {
            return Err(Error::new(
                code::CONFIG,
                format!("network configuration: key \"ca\" is missing: expected {EXPECTED}"),
            ));
        };
        let object = value.as_object().ok_or_else(|| refused("ca", &value, EXPECTED))?;
        refuse_other_keys("ca", object, &["url", "tlsCaFile", "tokenFile", "serverName"])?;
        let text = |key: &str| match object.get(key) {
            Some(Value::String(text)) => Ok(text.as_str()),
            Some(other) => Err(refused(&format!("ca.{key}"), other, "a string")),
            None => Err(refused("ca", &value, EXPECTED)),
        };
        let url = text("url")?;
        if url.strip_prefix("https://").is_none_or(|rest| rest.is_empty() || rest.contains(char::is_whitespace)) {
            return Err(refused("ca.url", &Value::from(url), "https://HOST:PORT"));
        }
        let server_name = object.get("serverName").map(|_| text("serverName")).transpose()?;
        if let Some(name) = server_name.filter(|name| !is_server_name(name)) {
            return Err(refused("ca.serverName", &Value::from(name), "a DNS name or an IP address"));
        }
        Ok(CaAccess {
            url: url.to_owned(),
            tls_ca_file: absolute("ca.tlsCaFile", text("tlsCaFile")?)?,
            token_file: absolute("ca.tokenFile", text("tokenFile")?)?,
            server_name: server_name.map(str::to_owned),
        })
    }

    fn nebula(&self) -> Result<Value, Error> {
        let value = self.config.value("nebula")?.unwrap_or_else(|| Value::Object(Map::new()));
        let object =
            value.as_object().ok_or_else(|| refused("nebula", &value, "an object with the keys of config.yml"))?;
        // If both were allowed, one of the two values would silently be ignored.
        for (section, key, instead) in [
            ("pki", None, "the key \"ca\": the instance gets its certificate from there"),
            ("tun", Some("dev"), "the key \"device\""),
            ("listen", Some("port"), "the key \"portRange\""),
        ] {
            let found = object.get(section).and_then(|section| match key {
                None => Some(section).filter(|section| !is_post_quantum(section)),
                Some(key) => section.get(key),
            });
            if let Some(found) = found {
                let name = key.map_or_else(|| format!("nebula.{section}"), |key| format!("nebula.{section}.{key}"));
                return Err(refused(&name, found, &format!("nothing here, but {instead}")));
            }
        }
        // The instance ignores keys of rules that it does not know, as Go does, so a rule would mean something else.
        for (direction, rule) in ["outbound", "inbound"].into_iter().flat_map(|direction| {
            let rules = value.pointer(&format!("/firewall/{direction}")).and_then(Value::as_array);
            rules.into_iter().flatten().map(move |rule| (direction, rule))
        }) {
            if let Some(rule) = rule.as_object() {
                refuse_other_keys(&format!("nebula.firewall.{direction}"), rule, &OF_RULES)?;
            }
        }
        Ok(value)
    }
}

/// Whether a `pki` says nothing but how keys of tunnels are agreed on.
fn is_post_quantum(pki: &Value) -> bool {
    pki.as_object().is_some_and(|pki| pki.len() == 1 && pki.contains_key("post_quantum"))
}

/// Keys of others that an entry may carry: names with a domain (`cni.dev/valid-attachments`), and comments.
fn is_of_somebody(key: &str) -> bool {
    key.contains(['/', '.']) || key.starts_with(['_', '#'])
}

fn is_server_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    name.parse::<IpAddr>().is_ok() || (1..=253).contains(&name.len()) && name.bytes().all(allowed)
}

fn absolute(key: &str, text: &str) -> Result<PathBuf, Error> {
    if text.starts_with('/') && !text.contains('\0') {
        Ok(PathBuf::from(text))
    } else {
        Err(refused(key, &Value::from(text), "an absolute path"))
    }
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

const OURS: [&str; 20] = [
    "supervisor",
    "instance",
    "device",
    "flow",
    "provisional",
    "mode",
    "underlay",
    "isolate",
    "capture",
    "renumber",
    "overlay",
    "timeoutSeconds",
    "portRange",
    "users",
    "memoryLimitMiB",
    "stateDir",
    "enrol",
    "kubeconfig",
    "ca",
    "nebula",
];
/// Keys that the CNI specification (1.1, section 1) defines for any plugin or list, and those that runtimes and
/// Multus add.
const OF_CNI: [&str; 15] = [
    "cniVersion",
    "cniVersions",
    "name",
    "type",
    "capabilities",
    "runtimeConfig",
    "prevResult",
    "args",
    "ipam",
    "ipMasq",
    "dns",
    "disableCheck",
    "disableGC",
    "deviceID",
    "pciBusID",
];
/// Keys of firewall rules (Go Nebula's `firewall.go`).
const OF_RULES: [&str; 10] =
    ["port", "code", "proto", "host", "group", "groups", "cidr", "local_cidr", "ca_name", "ca_sha"];
const BIN_DIR: &str = "/opt/cni/bin";
/// Default of the key `stateDir`.
pub const STATE_DIR: &str = "/run/nebula-cni";
const DEFAULT_DEVICE: &str = "nebula0";
// Above the default range of ephemeral ports on Linux (32768 to 60999).
const PORT_RANGE: (u16, u16) = (61000, 65535);
// Nebula's default port; in the pod's namespace nobody else uses it.
const POD_PORT: u16 = 4242;
// Twice the limit that the instance sets for its own tables.
const MEMORY_LIMIT_MIB: u64 = 32;
// Enough for an instance to start, and for some flows.
const MIN_MEMORY_LIMIT_MIB: u64 = 16;
const MAX_MEMORY_LIMIT_MIB: u64 = 64 << 10;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(20);
// A kubelet gives up after four minutes and may then never free the sandbox's name.
const MAX_TIMEOUT: Duration = Duration::from_secs(60);

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::json;

    use super::*;
    use crate::request::{Env, Request};

    pub(crate) fn config(entry: &Value) -> NetworkConfig {
        let mut all = json!({"cniVersion": "1.1.0", "name": "n", "type": "nebula-cni-plugin"});
        all.as_object_mut().unwrap().extend(entry.as_object().unwrap().clone());
        let env: Env = [("CNI_COMMAND", "STATUS")].map(|(k, v)| (k.into(), v.into())).into();
        match request::read(&env, all.to_string().as_bytes()).1.unwrap() {
            Some(Request::Status(config)) => config,
            other => panic!("{other:?}"),
        }
    }

    fn good() -> Value {
        json!({"ca": {"url": "https://ca:8443", "tlsCaFile": "/etc/ca.pem", "tokenFile": "/run/token"}})
    }

    #[test]
    fn little_is_required_and_the_rest_has_defaults() {
        let settings = Settings::read(&config(&good())).unwrap();
        assert_eq!(settings.device, "nebula0");
        assert_eq!(settings.mode, Mode::Strict);
        assert_eq!(settings.timeout, Duration::from_secs(20));
        assert_eq!(settings.state_dir, Path::new("/run/nebula-cni"));
        assert_eq!(settings.nebula, json!({}));
        assert_eq!((settings.users, settings.memory_limit), (Users::DEFAULT, Some(32 << 20)));
        let mut entry = good();
        assert_eq!(settings.ca.server_name, None);
        for name in ["nebula-ca.nebula-system.svc", "10.96.0.7", "fd00::7"] {
            entry["ca"]["serverName"] = name.into();
            assert_eq!(Settings::read(&config(&entry)).unwrap().ca.server_name.as_deref(), Some(name));
        }
        entry["memoryLimitMiB"] = json!(0);
        assert_eq!(Settings::read(&config(&entry)).unwrap().memory_limit, None);
    }

    #[test]
    fn the_example_of_a_chain_is_accepted_and_has_the_keys_of_this_table() {
        let text = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/10-nebula.conflist");
        let chain: Value = serde_json::from_str(&std::fs::read_to_string(text).unwrap()).unwrap();
        let older = std::fs::read_to_string(text.replace("10-nebula", "10-nebula-1.0")).unwrap();
        assert_eq!(older.replace("\"1.0.0\"", "\"1.1.0\""), std::fs::read_to_string(text).unwrap());
        let entry = chain["plugins"].as_array().unwrap().last().unwrap();
        let settings = Settings::read(&config(entry)).unwrap();
        assert_eq!((settings.flow, settings.mode), (Flow::Node, Mode::Strict));
        for key in OURS.iter().filter(|key| !["instance", "kubeconfig"].contains(key)) {
            assert!(!entry[key].is_null(), "{key} is missing");
        }
    }

    #[test]
    fn keys_of_others_are_tolerated() {
        let mut entry = good();
        entry["vendor.example/key"] = json!({"x": [1]});
        entry["_comment"] = json!("who to ask");
        for key in OF_CNI.iter().filter(|key| !["cniVersion", "name"].contains(key)) {
            entry[key] = json!({"x": true});
        }
        assert!(Settings::read(&config(&entry)).is_ok());
    }

    #[test]
    fn misspelt_keys_are_refused_and_the_nearest_one_is_named() {
        for (key, nearest) in [("isolat", "isolate"), ("Capture", "capture"), ("timeoutSecond", "timeoutSeconds")] {
            let mut entry = good();
            entry[key] = json!(true);
            let error = Settings::read(&config(&entry)).unwrap_err();
            assert_eq!(error.code, 7);
            assert!(error.msg.contains(key) && error.msg.contains(&format!("{nearest:?}?")), "{error}");
        }
        for direction in ["inbound", "outbound"] {
            let mut entry = good();
            entry["nebula"] = json!({"firewall": {direction: [{"port": "any", "proto": "any", "hosts": "any"}]}});
            let error = Settings::read(&config(&entry)).unwrap_err();
            let named = format!("nebula.firewall.{direction}.hosts");
            assert!(error.msg.contains(&named) && error.msg.contains("\"host\"?"), "{error}");
        }
    }

    #[test]
    fn each_wrong_value_of_ours_is_refused_by_key_and_value() {
        for (key, value) in [
            ("instance", json!("relative/path")),
            ("instance", json!(7)),
            ("device", json!("")),
            ("device", json!("lo")),
            ("device", json!("neb%d")),
            ("device", json!("sixteen-bytes-xx")),
            ("mode", json!("eager")),
            ("overlay", json!("10.42.0.0/16")),
            ("overlay", json!(["10.42.0.0"])),
            ("overlay", json!(["010.42.0.0/16"])),
            ("overlay", json!(["10.42.0.0/016"])),
            ("overlay", json!(["10.42.0.0/+16"])),
            ("overlay", json!(["10.42.0.0/33"])),
            ("overlay", json!(["10.42.7.7/16"])),
            ("overlay", json!(["fd42::1/64"])),
            ("supervisor", json!("runit")),
            ("flow", json!("pod")),
            ("underlay", json!("node")),
            ("renumber", json!("yes")),
            ("provisional", json!("yes")),
            ("capture", json!("yes")),
            ("capture", json!({"ranges": ["10.244.0.0"]})),
            ("isolate", json!("yes")),
            ("isolate", json!({"range": []})),
            ("isolate", json!({"ranges": ["10.0.0.1"]})),
            ("isolate", json!({"dns": ["ns.example"]})),
            ("isolate", json!({"probes": [7]})),
            ("mode", json!(true)),
            ("users", json!([5, 4])),
            ("users", json!([0, 4])),
            ("users", json!([1, 4_294_967_295_u32])),
            ("users", json!(7)),
            ("memoryLimitMiB", json!(15)),
            ("memoryLimitMiB", json!("32M")),
            ("memoryLimitMiB", json!(-1)),
            ("portRange", json!([5, 4])),
            ("portRange", json!([0, 4])),
            ("portRange", json!([1, 65536])),
            ("portRange", json!([1])),
            ("portRange", json!("1-2")),
            ("stateDir", json!("run")),
            ("stateDir", json!("/x".repeat(60))),
            ("timeoutSeconds", json!(0)),
            ("timeoutSeconds", json!(61)),
            ("timeoutSeconds", json!(1.5)),
            ("timeoutSeconds", json!("20")),
            ("ca", json!("https://ca")),
            ("ca", json!({"url": "https://ca"})),
            ("ca", json!({"url": "http://ca", "tlsCaFile": "/a", "tokenFile": "/b"})),
            ("ca", json!({"url": "https://ca", "tlsCaFile": "a", "tokenFile": "/b"})),
            ("ca", json!({"url": "https://ca", "tlsCaFile": "/a", "tokenFile": "/b", "token": "x"})),
            ("ca", json!({"url": "https://ca", "tlsCaFile": "/a", "tokenFile": "/b", "serverName": 7})),
            ("ca", json!({"url": "https://ca", "tlsCaFile": "/a", "tokenFile": "/b", "serverName": "a/b"})),
            ("ca", json!({"url": "https://ca", "tlsCaFile": "/a", "tokenFile": "/b", "serverName": ""})),
            ("nebula", json!([])),
            ("nebula", json!({"pki": {}})),
            ("nebula", json!({"pki": {"post_quantum": "require", "key": "x"}})),
            ("nebula", json!({"tun": {"dev": "x"}})),
            ("nebula", json!({"listen": {"port": 1}})),
            ("enrol", json!({"namespace": ["a"]})),
        ] {
            let mut entry = good();
            entry[key] = value.clone();
            let error = Settings::read(&config(&entry)).expect_err(&format!("{key}: {value}"));
            assert_eq!(error.code, 7);
            assert!(error.msg.contains(key), "{}", error.msg);
        }
        assert_eq!(Settings::read(&config(&json!({}))).unwrap_err().code, 7);
    }

    #[test]
    fn a_wrong_key_does_not_hide_the_state_directory_from_del() {
        let mut entry = good();
        entry["mode"] = json!("eager");
        entry["stateDir"] = json!("/run/other");
        assert_eq!(Settings::state_dir(&config(&entry)), Path::new("/run/other"));
    }

    #[test]
    fn a_missing_instance_binary_names_the_places() {
        let mut settings = Settings::read(&config(&good())).unwrap();
        settings.instance = Some(PathBuf::from("/nonexistent/instance"));
        let error = settings.instance_binary(None).unwrap_err();
        assert!(error.msg.contains("/nonexistent/instance"), "{error}");
        settings.instance = Some(PathBuf::from("/bin/sh"));
        assert_eq!(settings.instance_binary(None).unwrap(), Path::new("/bin/sh"));
    }

    #[test]
    fn a_pod_whose_socket_is_its_own_gets_the_usual_port() {
        let mut entry = good();
        entry["underlay"] = json!("pod");
        assert_eq!(Settings::read(&config(&entry)).unwrap().port_range, (4242, 4242));
        entry["portRange"] = json!([7, 9]);
        assert_eq!(Settings::read(&config(&entry)).unwrap().port_range, (7, 9));
    }

    #[test]
    fn renumbering_needs_the_address_before_add_returns() {
        for (key, value) in [("mode", "lazy"), ("flow", "init")] {
            let mut entry = good();
            entry["overlay"] = json!(["10.42.0.0/16"]);
            entry["renumber"] = json!(true);
            assert!(Settings::read(&config(&entry)).unwrap().renumber);
            entry[key] = json!(value);
            assert!(Settings::read(&config(&entry)).unwrap_err().msg.contains("renumber"));
        }
    }

    #[test]
    fn capture_goes_together_with_neither_of_its_alternatives() {
        let mut entry = good();
        entry["overlay"] = json!(["10.244.0.0/16"]);
        entry["capture"] = json!({"services": ["10.96.0.0/12"]});
        assert_eq!(Settings::read(&config(&entry)).unwrap().capture.unwrap().terms.ranges.len(), 1);
        for (key, value) in [("renumber", json!(true)), ("underlay", json!("pod")), ("isolate", json!(true))] {
            let mut entry = entry.clone();
            entry[key] = value;
            let error = Settings::read(&config(&entry)).unwrap_err();
            assert!(error.code == 7 && error.msg.contains(key) && error.details.contains("leave"), "{error}");
        }
        entry["capture"] = json!({"ranges": ["10.0.0.0/10"]});
        assert!(Settings::read(&config(&entry)).unwrap_err().msg.contains("\"overlay\""));
        entry["overlay"] = json!([]);
        entry["mode"] = json!("lazy");
        assert!(Settings::read(&config(&entry)).is_ok(), "what is captured is closed until there is a certificate");
    }

    #[test]
    fn what_is_about_the_init_container_needs_one() {
        let mut entry = good();
        entry["overlay"] = json!(["10.42.0.0/16"]);
        entry["provisional"] = json!(true);
        let error = Settings::read(&config(&entry)).unwrap_err();
        assert!(error.msg.contains("provisional") && error.msg.contains("flow \"init\""), "{error:?}");
        entry["flow"] = json!("init");
        assert!(Settings::read(&config(&entry)).unwrap().provisional);
    }

    #[test]
    fn lazy_pods_need_to_know_what_must_not_leave_in_clear() {
        let mut entry = good();
        entry["mode"] = json!("lazy");
        entry["overlay"] = json!([]);
        let error = Settings::read(&config(&entry)).unwrap_err();
        assert!(error.msg.contains("\"overlay\""), "{error:?}");
        entry["overlay"] = json!(["10.42.0.0/16", "fd42::/64"]);
        let overlay = Settings::read(&config(&entry)).unwrap().overlay;
        assert_eq!(overlay, ["10.42.0.0/16", "fd42::/64"].map(|net| net.parse::<IpNet>().unwrap()));
    }
}
