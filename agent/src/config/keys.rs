//! Reads the values of keys, and says of each that is not allowed what is.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use nebula_cni_plugin::request::checked::hint;
use nebula_cni_plugin::request::is_name;
use serde_json::{Map, Value};

use super::{Ca, ConfigError};
use crate::rollout::plan::Policy;

/// The keys of one object.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(refused(key, other, "a string")),
        }
    }

    pub(super) fn network(&self) -> Result<Option<String>, ConfigError> {
        let Some(name) = self.text("network")? else { return Ok(None) };
        if is_name(name) {
            return Ok(Some(name.to_owned()));
        }
        Err(refused("network", &name.into(), "the \"name\" of a network configuration: letters, digits, '_', '.', '-'"))
    }

    /// The value of a key among fixed words; the first one is the default.
    pub(super) fn one_of<T: Copy>(&self, key: &str, words: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text(key)?.unwrap_or(words[0].0);
        let found = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
        found.ok_or_else(|| {
            let words: Vec<String> = words.iter().map(|(word, _)| format!("{word:?}")).collect();
            refused(key, &text.into(), &format!("one of {}", words.join(", ")))
        })
    }

    pub(super) fn directories(&self, key: &str) -> Result<Vec<PathBuf>, ConfigError> {
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

    pub(super) fn ca(&self) -> Result<Ca, ConfigError> {
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

    pub(super) fn entry(&self) -> Result<Map<String, Value>, ConfigError> {
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

    /// What the agent writes for the gateway's daemon, which reads it with the routes to other nodes.
    pub(super) fn gateway(&self) -> Result<Option<Map<String, Value>>, ConfigError> {
        let Some(value) = self.0.get("gateway") else { return Ok(None) };
        let keys = object("gateway", value, "an object with keys of Nebula's configuration")?;
        match keys.get("tun") {
            Some(tun) if !tun.is_object() => Err(refused("gateway.tun", tun, "an object")),
            _ => Ok(Some(keys.clone())),
        }
    }

    /// Labels that an object must have.
    pub(super) fn labels(&self, key: &str) -> Result<BTreeMap<String, String>, ConfigError> {
        const EXPECTED: &str = "an object with at most 16 labels and their values";
        let Some(value) = self.0.get(key) else { return Ok(BTreeMap::new()) };
        let labels = object(key, value, EXPECTED)?;
        let text = |(name, value): (&String, &Value)| Some((name.clone(), value.as_str()?.to_owned()));
        let all: Option<BTreeMap<String, String>> = labels.iter().map(text).collect();
        all.filter(|all| all.len() <= MAX_LABELS).ok_or_else(|| refused(key, value, EXPECTED))
    }

    pub(super) fn upgrade(&self) -> Result<Policy, ConfigError> {
        const EXPECTED: &str = "{\"canary\": N, \"parallel\": N, \"pauseOnFailure\": BOOLEAN, \"watchSeconds\": N}";
        let Some(value) = self.0.get("upgrade") else { return Ok(Policy::DEFAULT) };
        let keys = Keys(object("upgrade", value, EXPECTED)?);
        only("upgrade", keys.0, &["canary", "parallel", "pauseOnFailure", "watchSeconds"])?;
        let (default, most) = (Policy::DEFAULT, Policy::MOST);
        Ok(Policy {
            canary: keys.number_in("upgrade", "canary", 0..=most.canary, default.canary)?,
            parallel: keys.number_in("upgrade", "parallel", 0..=most.parallel, default.parallel)?,
            pause_on_failure: keys.boolean_in("upgrade", "pauseOnFailure", default.pause_on_failure)?,
            watch_seconds: keys.number_in("upgrade", "watchSeconds", 1..=most.watch_seconds, default.watch_seconds)?,
        })
    }

    /// A number of a section.
    pub(super) fn number_in(
        &self,
        section: &str,
        key: &str,
        range: RangeInclusive<u32>,
        default: u32,
    ) -> Result<u32, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(default) };
        let number =
            value.as_u64().and_then(|number| u32::try_from(number).ok()).filter(|number| range.contains(number));
        let expected = format!("a number from {} to {}", range.start(), range.end());
        number.ok_or_else(|| refused(&format!("{section}.{key}"), value, &expected))
    }

    pub(super) fn boolean_in(&self, section: &str, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.0.get(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(refused(&format!("{section}.{key}"), other, "true or false")),
        }
    }

    pub(super) fn boolean(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        let Some(value) = self.0.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| refused(key, value, "true or false"))
    }

    pub(super) fn api(&self) -> Result<Option<SocketAddr>, ConfigError> {
        const EXPECTED: &str = "{\"listen\": \"IP:PORT\"}";
        let Some(value) = self.0.get("api") else { return Ok(None) };
        let keys = Keys(object("api", value, EXPECTED)?);
        only("api", keys.0, &["listen"])?;
        let Some(listen) = keys.0.get("listen") else { return Ok(None) };
        let address = listen.as_str().and_then(|text| text.parse::<SocketAddr>().ok());
        let address = address.filter(|address| address.port() != 0);
        address.map(Some).ok_or_else(|| refused("api.listen", listen, "IP:PORT, for example \"[::]:9478\""))
    }

    pub(super) fn listen(&self) -> Result<SocketAddr, ConfigError> {
        let text = self.text("listen")?.unwrap_or(DEFAULT_LISTEN);
        text.parse().map_err(|_| refused("listen", &text.into(), "IP:PORT, for example \"0.0.0.0:9476\""))
    }
}

pub(super) fn host_root(text: &str) -> Result<Option<PathBuf>, ConfigError> {
    match text {
        "" | "/" => Ok(None),
        path => absolute(path)
            .map(Some)
            .ok_or_else(|| refused("hostRoot", &path.into(), "the absolute path at which the node's root is mounted")),
    }
}

pub(super) fn endpoint(text: &str) -> Result<PathBuf, ConfigError> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    // Longer paths do not fit into a socket address.
    absolute(path)
        .filter(|_| path.len() < 100)
        .ok_or_else(|| refused("runtimeEndpoint", &text.into(), "unix:///PATH of the runtime's socket"))
}

pub(super) fn absolute(text: &str) -> Option<PathBuf> {
    let path = Path::new(text);
    let is_plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    (text.starts_with('/') && !text.contains('\0') && is_plain).then(|| path.to_owned())
}

/// A DNS label (RFC 1123), as Kubernetes names Services and namespaces.
pub(crate) fn is_label(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-') && !text.ends_with('-')
}

pub(super) fn object<'a>(key: &str, value: &'a Value, expected: &str) -> Result<&'a Map<String, Value>, ConfigError> {
    value.as_object().ok_or_else(|| refused(key, value, expected))
}

/// Refuses unknown keys, which would otherwise silently have no effect.
pub(super) fn only(section: &str, object: &Map<String, Value>, known: &[&str]) -> Result<(), ConfigError> {
    let Some((key, value)) = object.iter().find(|(key, _)| !known.contains(&key.as_str())) else { return Ok(()) };
    let key = if section.is_empty() { key.clone() } else { format!("{section}.{key}") };
    let hint = key.rsplit('.').next().map_or_else(String::new, |key| hint(key, known));
    Err(refused(&key, value, &format!("{hint}only the keys {}", known.join(", "))))
}

pub(super) fn refused(key: &str, value: &Value, expected: &str) -> ConfigError {
    let value: String = value.to_string().chars().take(MAX_SHOWN).collect();
    ConfigError::Refused { key: key.to_owned(), value, expected: expected.to_owned() }
}

const DEFAULT_LISTEN: &str = "127.0.0.1:9476";
const DEFAULT_CA_PORT: u16 = 8443;
const MAX_DIRECTORIES: usize = 16;
const MAX_LABELS: usize = 16;
const MAX_SHOWN: usize = 100;
