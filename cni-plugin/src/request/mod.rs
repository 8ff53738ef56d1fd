//! The request of the runtime: CNI_* variables and stdin, checked and typed before anything is changed.

pub mod checked;
pub mod prev_result;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::reply::{self, Error, code};
use crate::request::prev_result::PrevResult;

/// Environment variables.
pub type Env = BTreeMap<OsString, OsString>;

/// What the runtime asks for.
#[derive(Debug)]
pub enum Request {
    /// Gives a pod its tunnel.
    Add(Attach),
    /// Checks that the tunnel is still as ADD made it.
    Check(Attach),
    /// Removes the tunnel.
    Del(Detach),
    /// Removes attachments that the runtime no longer knows.
    Gc(Collect),
    /// Asks whether an ADD could succeed.
    Status(NetworkConfig),
    /// Asks for the supported versions. Holds the version that the runtime named, if any.
    Version(Option<String>),
}

/// Identifies one attachment: a container's interface in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Network name.
    pub network: String,
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
}

/// Parameters of ADD and CHECK.
#[derive(Debug)]
pub struct Attach {
    /// Which attachment.
    pub key: Key,
    /// CNI_NETNS.
    pub netns: PathBuf,
    /// Whether the namespace may be the caller's own (CNI_NETNS_OVERRIDE).
    pub own_netns_allowed: bool,
    /// CNI_ARGS.
    pub args: Args,
    /// Stdin.
    pub config: NetworkConfig,
}

/// Parameters of DEL. It does not need the namespace, because our record says what to undo.
#[derive(Debug)]
pub struct Detach {
    /// Which attachment.
    pub key: Key,
    /// Stdin.
    pub config: NetworkConfig,
}

/// Parameters of GC.
#[derive(Debug)]
pub struct Collect {
    /// Attachments that the runtime knows, as (container id, interface); `None` if it sent no list.
    pub valid: Option<Vec<(String, String)>>,
    /// Stdin.
    pub config: NetworkConfig,
}

/// CNI_ARGS as pairs. A key given twice with different values is refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args(BTreeMap<String, String>);

impl Args {
    /// The value of `key`; an empty one counts as absent.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn parse(text: &str) -> Result<Self, Error> {
        let mut pairs = BTreeMap::new();
        for pair in text.split(';').filter(|pair| !pair.is_empty()) {
            let (key, value) =
                pair.split_once('=').ok_or_else(|| bad_env("CNI_ARGS", pair, "pairs KEY=VALUE joined by ';'"))?;
            if pairs.insert(key.to_owned(), value.to_owned()).is_some_and(|before| before != value) {
                return Err(bad_env("CNI_ARGS", pair, "each key once"));
            }
        }
        Ok(Self(pairs))
    }
}

/// The object on stdin. Values are decoded only when they are used, so that keys we do not know pass through unchanged.
#[derive(Debug)]
pub struct NetworkConfig {
    /// Its cniVersion; "0.1.0" if absent.
    pub version: String,
    /// Network name, checked by [`is_name`].
    pub name: String,
    fields: BTreeMap<String, Box<RawValue>>,
}

impl NetworkConfig {
    /// All of its keys, those of the list and those of the runtime among them.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.fields.keys().map(String::as_str)
    }

    /// The value of a key, decoded; `null` counts as absent.
    ///
    /// # Errors
    /// Code 6 if the value is nested too deeply to decode.
    pub fn value(&self, key: &str) -> Result<Option<Value>, Error> {
        let Some(raw) = self.fields.get(key) else { return Ok(None) };
        let value = serde_json::from_str(raw.get())
            .map_err(|e| Error::new(code::CONTENT, format!("network configuration: cannot decode key {key:?}: {e}")))?;
        Ok(if value == Value::Null { None } else { Some(value) })
    }

    /// All of it, as a delegated plugin gets it.
    pub(crate) fn to_json(&self) -> String {
        // Raw values and names can always be written.
        serde_json::to_string(&self.fields).unwrap_or_default()
    }

    /// The result of the previous plugin in the chain.
    ///
    /// # Errors
    /// Code 6 if it is not a JSON object.
    pub fn prev_result(&self) -> Result<Option<PrevResult>, Error> {
        match self.fields.get("prevResult") {
            Some(raw) if raw.get() != "null" => PrevResult::parse(raw).map(Some),
            _ => Ok(None),
        }
    }
}

/// Reads a request. The returned string is the version of the reply: that of the configuration on stdin, or
/// [`reply::NEWEST`] if none was read.
///
/// Without CNI_COMMAND the request is `None`: somebody runs the plugin by hand.
pub fn read(env: &Env, stdin: impl Read) -> (String, Result<Option<Request>, Error>) {
    let mut version = reply::NEWEST.to_owned();
    let request = read_into(&mut version, env, stdin);
    (version, request)
}

fn read_into(version: &mut String, env: &Env, stdin: impl Read) -> Result<Option<Request>, Error> {
    let Some(command) = optional(env, "CNI_COMMAND")? else { return Ok(None) };
    if !["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"].contains(&command) {
        return Err(bad_env("CNI_COMMAND", command, "ADD, DEL, CHECK, GC, STATUS or VERSION"));
    }
    let fields = decode(&read_bounded(stdin)?, command == "VERSION")?;
    let asked = text(&fields, "cniVersion")?.filter(|v| !v.is_empty());
    if command == "VERSION" {
        return Ok(Some(Request::Version(asked)));
    }
    let config_version = asked.unwrap_or_else(|| "0.1.0".to_owned());
    version.clone_from(&config_version);
    let name = text(&fields, "name")?.unwrap_or_default();
    let config = NetworkConfig { version: config_version, name, fields };
    request_of(command, env, config).map(Some)
}

fn request_of(command: &str, env: &Env, config: NetworkConfig) -> Result<Request, Error> {
    let least = match command {
        "CHECK" => "0.4.0",
        "GC" | "STATUS" => "1.1.0",
        _ => reply::SUPPORTED[0],
    };
    // DEL must work even if the configuration has become invalid since ADD.
    if command != "DEL" && !reply::speaks(&config.version, least) {
        let msg =
            format!("incompatible cniVersion {:?} for {command}: this plugin needs {least} or newer", config.version);
        return Err(Error::new(code::VERSION, msg)
            .details(format!("set cniVersion of the network list to one of {}", reply::SUPPORTED.join(", "))));
    }
    if config.name.is_empty() {
        return Err(Error::new(code::CONFIG, "network configuration: key \"name\" is missing"));
    }
    if !is_name(&config.name) {
        let msg = format!("network configuration: name {:?} must match {NAME_PATTERN}", shown(&config.name));
        return Err(Error::new(code::CONFIG, msg));
    }
    match command {
        "GC" => {
            required(env, "CNI_PATH")?;
            return Ok(Request::Gc(Collect { valid: valid_attachments(&config)?, config }));
        }
        "STATUS" => return Ok(Request::Status(config)),
        _ => {}
    }
    let key = key(env, &config.name)?;
    if command == "DEL" {
        return Ok(Request::Del(Detach { key, config }));
    }
    let attach = Attach {
        key,
        netns: PathBuf::from(required(env, "CNI_NETNS")?),
        own_netns_allowed: optional(env, "CNI_NETNS_OVERRIDE")?.is_some_and(|v| ["1", "true", "TRUE"].contains(&v)),
        args: Args::parse(optional(env, "CNI_ARGS")?.unwrap_or_default())?,
        config,
    };
    Ok(if command == "ADD" { Request::Add(attach) } else { Request::Check(attach) })
}

fn key(env: &Env, network: &str) -> Result<Key, Error> {
    let container_id = required(env, "CNI_CONTAINERID")?;
    // The longest file name derived from it must not exceed 255 bytes.
    if !is_name(container_id) || container_id.len() > 200 {
        return Err(bad_env("CNI_CONTAINERID", container_id, &format!("at most 200 bytes of {NAME_PATTERN}")));
    }
    let ifname = required(env, "CNI_IFNAME")?;
    if !is_ifname(ifname) {
        return Err(bad_env("CNI_IFNAME", ifname, IFNAME_PATTERN));
    }
    Ok(Key { network: network.to_owned(), container_id: container_id.to_owned(), ifname: ifname.to_owned() })
}

fn valid_attachments(config: &NetworkConfig) -> Result<Option<Vec<(String, String)>>, Error> {
    const KEYS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];
    let mut found = None;
    for key in KEYS {
        let Some(value) = config.value(key)? else { continue };
        let wrong = || {
            let msg = format!("network configuration: {key} must be a list of {{\"containerID\",\"ifname\"}}");
            Error::new(code::CONTENT, msg)
        };
        let list = found.get_or_insert_with(Vec::new);
        for entry in value.as_array().ok_or_else(wrong)? {
            let part = |name: &str| entry.get(name).and_then(Value::as_str).map(str::to_owned).ok_or_else(wrong);
            list.push((part("containerID")?, part("ifname")?));
        }
    }
    Ok(found)
}

fn read_bounded(stdin: impl Read) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    stdin
        .take(MAX_STDIN + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| Error::new(code::IO, format!("cannot read the network configuration on stdin: {e}")))?;
    if bytes.len() as u64 > MAX_STDIN {
        return Err(Error::new(code::CONTENT, format!("network configuration on stdin exceeds {MAX_STDIN} bytes")));
    }
    Ok(bytes)
}

fn decode(bytes: &[u8], may_be_empty: bool) -> Result<BTreeMap<String, Box<RawValue>>, Error> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        let empty = Error::new(code::CONTENT, "stdin is empty: expected the network configuration as a JSON object");
        return if may_be_empty { Ok(BTreeMap::new()) } else { Err(empty) };
    }
    serde_json::from_slice(bytes)
        .map_err(|e| Error::new(code::CONTENT, format!("network configuration on stdin is not a JSON object: {e}")))
}

fn text(fields: &BTreeMap<String, Box<RawValue>>, key: &str) -> Result<Option<String>, Error> {
    let Some(raw) = fields.get(key) else { return Ok(None) };
    serde_json::from_str(raw.get()).map_err(|_| {
        Error::new(code::CONFIG, format!("network configuration: {key} {} must be a string", shown(raw.get())))
    })
}

fn required<'a>(env: &'a Env, name: &str) -> Result<&'a str, Error> {
    optional(env, name)?
        .ok_or_else(|| Error::new(code::ENVIRONMENT, format!("required environment variable {name} is missing")))
}

fn optional<'a>(env: &'a Env, name: &str) -> Result<Option<&'a str>, Error> {
    let Some(value) = env.get(&OsString::from(name)) else { return Ok(None) };
    let value = value.to_str().ok_or_else(|| bad_env(name, &value.to_string_lossy(), "UTF-8"))?;
    if value.contains('\0') {
        return Err(bad_env(name, value, "no NUL"));
    }
    Ok(Some(value).filter(|v| !v.is_empty()))
}

fn bad_env(name: &str, value: &str, expected: &str) -> Error {
    Error::new(code::ENVIRONMENT, format!("{name} {:?} is malformed: expected {expected}", shown(value)))
}

/// Truncates a value to fit into one line of an error message.
pub(crate) fn shown(value: &str) -> String {
    let mut short: String = value.chars().take(80).collect();
    if short.len() < value.len() {
        short.push_str("...");
    }
    short
}

/// Whether `name` is valid as a network name or container id, and therefore safe as part of a file name.
#[must_use]
pub fn is_name(name: &str) -> bool {
    name.len() <= 255
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "_.-".contains(c))
}

/// Whether Linux and CNI allow `name` for an interface.
#[must_use]
pub fn is_ifname(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
}

const NAME_PATTERN: &str = "[A-Za-z0-9][A-Za-z0-9_.-]*";
pub(crate) const IFNAME_PATTERN: &str = "1 to 15 bytes without '/', ':' and white space";
const MAX_STDIN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Env {
        pairs.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))).collect()
    }

    const ADD: [(&str, &str); 4] =
        [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_NETNS", "/run/netns/x"), ("CNI_IFNAME", "eth0")];

    fn code_of(env_pairs: &[(&str, &str)], stdin: &str) -> u32 {
        read(&env(env_pairs), stdin.as_bytes()).1.unwrap_err().code
    }

    fn add_with(name: &'static str, value: &'static str) -> Vec<(&'static str, &'static str)> {
        ADD.iter().copied().filter(|(n, _)| *n != name).chain([(name, value)]).collect()
    }

    #[test]
    fn each_bad_variable_is_refused_by_name() {
        let good = r#"{"cniVersion":"1.0.0","name":"n"}"#;
        for (name, value) in [
            ("CNI_COMMAND", "add"),
            ("CNI_CONTAINERID", ""),
            ("CNI_CONTAINERID", "../x"),
            ("CNI_CONTAINERID", "-x"),
            ("CNI_CONTAINERID", "ä"),
            ("CNI_NETNS", ""),
            ("CNI_IFNAME", ""),
            ("CNI_IFNAME", "."),
            ("CNI_IFNAME", ".."),
            ("CNI_IFNAME", "a/b"),
            ("CNI_IFNAME", "a:b"),
            ("CNI_IFNAME", "a b"),
            ("CNI_IFNAME", "sixteen-bytes-xx"),
            ("CNI_ARGS", "K8S_POD_NAME"),
            ("CNI_ARGS", "A=1;A=2"),
        ] {
            let error = read(&env(&add_with(name, value)), good.as_bytes()).1.unwrap_err();
            assert_eq!(error.code, 4, "{name}={value}");
            assert!(error.msg.contains(name), "{}", error.msg);
        }
    }

    #[test]
    fn each_bad_stdin_has_its_code() {
        for (stdin, expected) in [
            ("", 6),
            ("   ", 6),
            ("{", 6),
            ("[]", 6),
            ("{} x", 6),
            ("{\"cniVersion\":\"1.0.0\"}", 7),
            ("{\"cniVersion\":\"1.0.0\",\"name\":\"../x\"}", 7),
            ("{\"cniVersion\":\"1.0.0\",\"name\":7}", 7),
            ("{\"cniVersion\":1,\"name\":\"n\"}", 7),
            ("{\"cniVersion\":\"0.0.9\",\"name\":\"n\"}", 1),
            ("{\"cniVersion\":\"1.2.0\",\"name\":\"n\"}", 1),
        ] {
            assert_eq!(code_of(&ADD, stdin), expected, "{stdin}");
        }
        let huge = format!("{{\"cniVersion\":\"1.0.0\",\"name\":\"n\",\"x\":\"{}\"}}", "y".repeat(1 << 20));
        assert_eq!(code_of(&ADD, &huge), 6);
    }

    #[test]
    fn verbs_of_newer_specifications_need_their_version() {
        let stdin = |version: &str| format!(r#"{{"cniVersion":"{version}","name":"n"}}"#);
        assert_eq!(code_of(&add_with("CNI_COMMAND", "CHECK"), &stdin("0.3.1")), 1);
        assert_eq!(code_of(&[("CNI_COMMAND", "GC"), ("CNI_PATH", "/x")], &stdin("1.0.0")), 1);
        assert_eq!(code_of(&[("CNI_COMMAND", "STATUS")], &stdin("1.0.0")), 1);
        assert_eq!(code_of(&[("CNI_COMMAND", "GC")], &stdin("1.1.0")), 4);
    }

    #[test]
    fn del_is_accepted_bare_and_in_any_version() {
        let bare = env(&[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0"), ("CNI_NETNS", "")]);
        for stdin in [r#"{"name":"n"}"#, r#"{"cniVersion":"9.0.0","name":"n","prevResult":[[[]]]}"#] {
            let request = read(&bare, stdin.as_bytes()).1.unwrap();
            assert!(matches!(request, Some(Request::Del(del)) if del.key.container_id == "c1"));
        }
    }

    #[test]
    fn without_a_command_nobody_asked_for_anything() {
        assert!(read(&Env::new(), &b""[..]).1.unwrap().is_none());
    }

    #[test]
    fn gc_tells_an_absent_list_from_an_empty_one_and_reads_both_spellings() {
        let env = env(&[("CNI_COMMAND", "GC"), ("CNI_PATH", "/opt/cni/bin")]);
        let valid = |rest: &str| {
            let stdin = format!(r#"{{"cniVersion":"1.1.0","name":"n"{rest}}}"#);
            match read(&env, stdin.as_bytes()).1.unwrap() {
                Some(Request::Gc(collect)) => collect.valid,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(valid(""), None);
        assert_eq!(valid(r#","cni.dev/valid-attachments":[]"#), Some(vec![]));
        let one = Some(vec![("a".to_owned(), "eth0".to_owned())]);
        assert_eq!(valid(r#","cni.dev/attachments":[{"containerID":"a","ifname":"eth0"}]"#), one);
        assert_eq!(valid(r#","cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]"#), one);
    }

    #[test]
    fn arguments_come_in_any_order_and_split_at_the_first_equals_sign() {
        let args = Args::parse("B=x=y;IgnoreUnknown=1;A=;;K8S_POD_NAME=web").unwrap();
        assert_eq!((args.get("B"), args.get("A"), args.get("K8S_POD_NAME")), (Some("x=y"), None, Some("web")));
    }

    proptest! {
        #[test]
        fn random_stdin_and_environment_give_a_request_or_an_error(
            command in "ADD|DEL|CHECK|GC|STATUS|VERSION|\\PC{0,8}",
            id in "\\PC{0,20}", ifname in "\\PC{0,20}", netns in "\\PC{0,20}", args in "([A-Z;=]|\\PC){0,30}",
            stdin in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let env = env(&[("CNI_COMMAND", &command), ("CNI_CONTAINERID", &id), ("CNI_IFNAME", &ifname),
                ("CNI_NETNS", &netns), ("CNI_ARGS", &args), ("CNI_PATH", "/x")]);
            let _ = read(&env, &stdin[..]);
        }

        #[test]
        fn mutilated_configurations_never_panic(cut in 0usize..400, flip in 0usize..400, bit in 0u8..8) {
            let mut stdin = br#"{"cniVersion":"1.1.0","name":"n","type":"nebula-cni-plugin","prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"address":"10.0.0.1/24","interface":0}]},"cni.dev/valid-attachments":[{"containerID":"a","ifname":"b"}]}"#.to_vec();
            stdin.truncate(cut);
            if let Some(byte) = stdin.get_mut(flip) { *byte ^= 1 << bit; }
            for command in ["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION"] {
                let mut pairs = add_with("CNI_COMMAND", "x");
                pairs.retain(|(n, _)| *n != "CNI_COMMAND");
                pairs.extend([("CNI_COMMAND", command), ("CNI_PATH", "/x")]);
                if let (_, Ok(Some(Request::Add(attach)))) = read(&env(&pairs), &stdin[..])
                    && let Ok(Some(prev)) = attach.config.prev_result() {
                    let _ = prev.pod_address("eth0");
                    let _ = prev.as_output("1.1.0");
                }
            }
        }
    }
}
