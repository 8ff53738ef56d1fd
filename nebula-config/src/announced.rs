//! What a CA service announces to a host that enrolled with it: part of the configuration (`pki.enrolment`).

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cert::issuance::Lighthouses;
use serde::{Deserialize, Serialize};

use super::{Error, Value, merge};

/// Contents of [`ANNOUNCED`], as the host wrote it after the CA's last answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announced {
    /// Blocked fingerprints, lower-case hex.
    #[serde(default)]
    pub blocklist: Vec<String>,
    /// Lighthouses of the network.
    #[serde(default)]
    pub lighthouses: Lighthouses,
}

impl Announced {
    /// Reads the file's text. A text without the key `version` is of the first format.
    ///
    /// # Errors
    /// Refuses a newer format: what it says about blocked peers may be elsewhere in it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Format { version } = serde_json::from_str(text).map_err(|error| error.to_string())?;
        match version {
            Some(found) if found > FORMAT => Err(format!(
                "it was written by a newer program (format {found}, this one knows {FORMAT}): install that release again, or \
                 enrol again with this one"
            )),
            _ => serde_json::from_str(text).map_err(|error| error.to_string()),
        }
    }
}

#[derive(Deserialize)]
struct Format {
    #[serde(default)]
    version: Option<u64>,
}

/// The folder of the files that the host enrolled with; `None`: the configuration names none.
#[must_use]
pub fn enrolment_folder(tree: &Value) -> Option<PathBuf> {
    let path = tree.at("pki.enrolment")?.text().filter(|path| !path.is_empty())?;
    Some(folder_of(Path::new(&*path)))
}

/// The folder that a file is in.
pub(super) fn folder_of(file: &Path) -> PathBuf {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or_else(|| Path::new(".")).to_owned()
}

/// Adds what the CA announced to what the configuration says, which has the last word. A blocklist that cannot be read
/// is an error: without it a blocked peer would get in.
pub(super) fn add_to(tree: &mut Value) -> Result<(), Error> {
    let Some(folder) = enrolment_folder(tree) else { return Ok(()) };
    let path = folder.join(ANNOUNCED);
    let text = match merge::read_bounded(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::from("{}"),
        Err(source) => return Err(Error::Unreadable { path, source }),
    };
    let announced = Announced::parse(&text).map_err(|why| {
        let why = io::Error::new(io::ErrorKind::InvalidData, why);
        Error::Unreadable { path, source: why }
    })?;
    let is_lighthouse = tree.at("lighthouse.am_lighthouse").and_then(Value::boolean).unwrap_or(false);
    let Value::Map(root) = tree else { return Ok(()) };
    if let Some(pki) = section(root, "pki") {
        for (key, file) in [("ca", "ca.crt"), ("cert", "host.crt"), ("key", "host.key")] {
            let path = || Value::String(folder.join(file).display().to_string());
            pki.entry(key.to_owned()).or_insert_with(path);
        }
        append(pki, "blocklist", announced.blocklist);
    }
    if is_lighthouse {
        return Ok(());
    }
    let mut known = Vec::new();
    if let Some(hosts) = section(root, "static_host_map") {
        let named: Vec<IpAddr> = hosts.keys().filter_map(|key| key.parse().ok()).collect();
        for (address, endpoints) in announced.lighthouses {
            if !named.contains(&address) {
                let endpoints = endpoints.into_iter().map(Value::String).collect();
                hosts.insert(address.to_string(), Value::List(endpoints));
            }
            known.push(address.to_string());
        }
    }
    if !known.is_empty()
        && let Some(lighthouse) = section(root, "lighthouse")
    {
        append(lighthouse, "hosts", known);
    }
    Ok(())
}

/// A section, made if there is none; `None`: something else is there, which is reported elsewhere.
fn section<'a>(root: &'a mut BTreeMap<String, Value>, key: &str) -> Option<&'a mut BTreeMap<String, Value>> {
    let value = root.entry(key.to_owned()).or_insert_with(Value::empty);
    if *value == Value::Null {
        *value = Value::empty();
    }
    match value {
        Value::Map(map) => Some(map),
        _ => None,
    }
}

/// Adds items to a list that does not have them.
fn append(section: &mut BTreeMap<String, Value>, key: &str, items: Vec<String>) {
    let present = section.entry(key.to_owned()).or_insert(Value::Null);
    let mut all = match std::mem::replace(present, Value::Null) {
        Value::Null => Vec::new(),
        Value::List(all) => all,
        single => vec![single],
    };
    for item in items {
        if !all.iter().any(|known| known.text().is_some_and(|known| known == item)) {
            all.push(Value::String(item));
        }
    }
    if !all.is_empty() {
        *present = Value::List(all);
    }
}

/// Keeps the lighthouses that a configuration may name: a single invalid one would make the whole configuration
/// unusable. `own` are the networks of this host's or pod's certificate.
pub fn usable(lighthouses: Lighthouses, own: &[IpNet]) -> Lighthouses {
    let is_endpoint = |endpoint: &String| {
        let name = |(host, port): (&str, &str)| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
            (1..=253).contains(&host.len()) && host.bytes().all(is_plain) && port.parse::<u16>().is_ok_and(|n| n > 0)
        };
        endpoint.parse::<SocketAddr>().is_ok_and(|endpoint| endpoint.port() > 0)
            || endpoint.rsplit_once(':').is_some_and(name)
    };
    let of = |(address, mut endpoints): (IpAddr, Vec<String>)| {
        endpoints.retain(is_endpoint);
        endpoints.truncate(MAX_ENDPOINTS);
        let is_ours = own.iter().any(|network| network.contains(&address));
        (is_ours && !endpoints.is_empty()).then_some((address, endpoints))
    };
    lighthouses.into_iter().filter_map(of).take(MAX_LIGHTHOUSES).collect()
}

const FORMAT: u64 = 1;
const MAX_LIGHTHOUSES: usize = 64;
const MAX_ENDPOINTS: usize = 64;

/// Name of the file, beside the host's certificate.
pub const ANNOUNCED: &str = "announced.json";

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(announced: &str, config: &str) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(ANNOUNCED), announced).unwrap();
        let place = folder.path().display().to_string();
        let mut tree = super::super::parse(&config.replace("FOLDER", &place)).unwrap();
        add_to(&mut tree).map_err(|error| error.to_string())?;
        Ok(tree.to_yaml().replace(&place, "FOLDER"))
    }

    fn same(announced: &str, config: &str, expected: &str) {
        let expected = super::super::parse(expected).unwrap().to_yaml();
        assert_eq!(loaded(announced, config).unwrap(), expected, "{config}");
    }

    const BOTH: &str = r#"{"blocklist": ["aa", "bb"], "lighthouses": {"10.42.0.1": ["192.0.2.1:4242"]}}"#;

    #[test]
    fn what_the_ca_announces_is_added_and_the_configuration_has_the_last_word() {
        let files = "ca: FOLDER/ca.crt, cert: FOLDER/host.crt, key: FOLDER/host.key";
        same(
            BOTH,
            "pki: {enrolment: FOLDER/enrolment.json}",
            &format!(
                "pki: {{enrolment: FOLDER/enrolment.json, {files}, blocklist: [aa, bb]}}
static_host_map: {{10.42.0.1: ['192.0.2.1:4242']}}
lighthouse: {{hosts: [10.42.0.1]}}"
            ),
        );
        same(
            BOTH,
            "pki: {enrolment: FOLDER/enrolment.json, cert: /mine, ca: /b, key: /c, blocklist: [bb, cc]}
static_host_map: {10.42.0.1: ['198.51.100.1:1'], 10.42.0.2: ['198.51.100.2:2']}
lighthouse: {hosts: [10.42.0.2, 10.42.0.1]}",
            "pki: {enrolment: FOLDER/enrolment.json, cert: /mine, ca: /b, key: /c, blocklist: [bb, cc, aa]}
static_host_map: {10.42.0.1: ['198.51.100.1:1'], 10.42.0.2: ['198.51.100.2:2']}
lighthouse: {hosts: [10.42.0.2, 10.42.0.1]}",
        );
    }

    #[test]
    fn a_lighthouse_asks_no_other_and_a_host_that_did_not_enrol_hears_nothing() {
        let lighthouse = loaded(BOTH, "pki: {enrolment: FOLDER/x}\nlighthouse: {am_lighthouse: true}").unwrap();
        assert!(!lighthouse.contains("10.42.0.1") && lighthouse.contains("aa"), "{lighthouse}");
        same(BOTH, "pki: {ca: x}", "pki: {ca: x}");
    }

    #[test]
    fn a_lighthouse_elsewhere_or_without_an_endpoint_is_left_out() {
        let lighthouses = |list: &[(&str, &[&str])]| -> Lighthouses {
            let of = |(address, endpoints): &(&str, &[&str])| {
                (address.parse().unwrap(), endpoints.iter().map(ToString::to_string).collect())
            };
            list.iter().map(of).collect()
        };
        let given = lighthouses(&[
            ("10.42.0.1", &["192.0.2.1:4242", "no port", "192.0.2.1:0", "lighthouse.example:1", "[2001:db8::1]:9"]),
            ("10.42.0.2", &["bad: value"]),
            ("10.99.0.1", &["192.0.2.1:4242"]),
        ]);
        let kept = lighthouses(&[("10.42.0.1", &["192.0.2.1:4242", "lighthouse.example:1", "[2001:db8::1]:9"])]);
        assert_eq!(usable(given, &["10.42.7.7/16".parse().unwrap()]), kept);
    }

    #[test]
    fn a_blocklist_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let refused = loaded("{\"blocklist\": [", "pki: {enrolment: FOLDER/enrolment.json}").unwrap_err();
        assert!(refused.contains(ANNOUNCED), "{refused}");
        let newer = r#"{"version": 2, "blocked": {"certificates": ["aa"]}}"#;
        let refused = loaded(newer, "pki: {enrolment: FOLDER/enrolment.json}").unwrap_err();
        assert!(refused.contains(ANNOUNCED) && refused.contains("(format 2, this one knows 1)"), "{refused}");
    }

    #[test]
    fn what_a_later_release_adds_to_the_announcement_is_skipped() {
        let config = "pki: {enrolment: FOLDER/enrolment.json}";
        let later = BOTH.replacen('{', r#"{"version": 1, "relays": ["10.42.0.1"], "#, 1);
        assert_eq!(loaded(&later, config), loaded(BOTH, config));
    }
}
