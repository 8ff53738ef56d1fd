//! Addresses from another plugin (CNI specification, section 4: delegation). It sees the same environment and
//! configuration as we do.

use std::env;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ipnet::IpNet;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::reply::{Error, code};
use crate::request::NetworkConfig;
use crate::request::prev_result::PrevResult;

/// What the plugin gives a pod.
#[derive(Debug)]
pub(super) struct Given {
    /// Networks of the addresses, as it sees them.
    pub(super) networks: Vec<IpNet>,
    /// At least one address.
    pub(super) addresses: Vec<IpAddr>,
    /// Its `dns`, if it says anything of that.
    pub(super) dns: Option<Value>,
}

/// Asks the plugin for the addresses of a pod.
///
/// # Errors
/// The plugin's own error; code 7 if there is no such plugin, code 6 if its result cannot be read or has no address.
pub(super) fn add(plugin: &str, config: &NetworkConfig, ifname: &str) -> Result<Given, Error> {
    let text = run(plugin, "ADD", config)?;
    let wrong = |why: &str| Error::new(code::CONTENT, format!("the result of the plugin {plugin:?} {why}"));
    let raw: Box<RawValue> =
        serde_json::from_str(&text).map_err(|error| wrong(&format!("cannot be decoded: {error}")))?;
    let addresses = PrevResult::parse(&raw).map_err(|error| wrong(&error.msg))?.addresses(ifname);
    if addresses.is_empty() {
        return Err(wrong("has no address"));
    }
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    let listed = value["ips"].as_array().into_iter().flatten().map(|ip| &ip["address"]);
    let networks = listed.chain([&value["ip4"]["ip"], &value["ip6"]["ip"]]);
    let networks = networks.filter_map(|network| network.as_str()?.parse::<IpNet>().ok());
    let mut networks: Vec<IpNet> = networks.map(|network| network.trunc()).collect();
    networks.sort();
    networks.dedup();
    let dns = value.get("dns").filter(|dns| dns.as_object().is_some_and(|dns| !dns.is_empty())).cloned();
    Ok(Given { networks, addresses, dns })
}

/// Passes another verb on: DEL, CHECK, GC or STATUS.
///
/// # Errors
/// The plugin's own error; code 7 if there is no such plugin.
pub(super) fn pass_on(plugin: &str, verb: &str, config: &NetworkConfig) -> Result<(), Error> {
    run(plugin, verb, config).map(drop)
}

fn run(plugin: &str, verb: &str, config: &NetworkConfig) -> Result<String, Error> {
    let path = env::var_os("CNI_PATH").unwrap_or_default();
    let program = env::split_paths(&path).map(|dir| dir.join(plugin)).find(|program| program.is_file());
    let program = program.ok_or_else(|| {
        let places: Vec<String> = env::split_paths(&path).map(|dir| dir.display().to_string()).collect();
        Error::new(code::CONFIG, format!("there is no plugin {plugin:?} in CNI_PATH ({})", places.join(", ")))
            .details("install it there, or leave \"ipam\" out and list \"subnets\"")
    })?;
    ask(&program, verb, config)
}

fn ask(program: &PathBuf, verb: &str, config: &NetworkConfig) -> Result<String, Error> {
    let name = program.display();
    let failed = |error: std::io::Error| Error::new(code::IO, format!("cannot run {name}: {error}"));
    let mut command = Command::new(program);
    command.env("CNI_COMMAND", verb).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    // A plugin that ends without reading everything says why.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(config.to_json().as_bytes()));
    let mut bytes = Vec::new();
    let read = child.stdout.take().map(|stdout| stdout.take(MAX_OUTPUT).read_to_end(&mut bytes));
    let status = child.wait().map_err(failed)?;
    read.transpose().map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if status.success() {
        return Ok(text);
    }
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    let said = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let code = value.get("code").and_then(Value::as_u64).and_then(|code| u32::try_from(code).ok()).unwrap_or(code::IO);
    let why = if said("msg").is_empty() { status.to_string() } else { said("msg").to_owned() };
    Err(Error::new(code, format!("{name} fails: {why}")).details(said("details")))
}

const MAX_OUTPUT: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;
    use crate::settings::tests::config;

    fn plugin(dir: &tempfile::TempDir, script: &str) -> PathBuf {
        let path = dir.path().join("plugin");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_plugin_gets_verb_and_configuration_and_its_output_is_returned() {
        let dir = tempfile::tempdir().unwrap();
        let echo = plugin(&dir, "printf '%s ' \"$CNI_COMMAND\"; cat");
        let config = config(&json!({"primary": true, "ipam": {"type": "echo", "x": [1.50]}}));
        let text = ask(&echo, "STATUS", &config).unwrap();
        let (verb, stdin) = text.split_once(' ').unwrap();
        assert_eq!(verb, "STATUS");
        let stdin: Value = serde_json::from_str(stdin).unwrap();
        assert_eq!((&stdin["name"], &stdin["ipam"]), (&json!("n"), &json!({"type": "echo", "x": [1.5]})));
    }

    #[test]
    fn its_errors_are_passed_on_with_their_code() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(&json!({}));
        let full =
            plugin(&dir, r#"echo '{"cniVersion":"1.0.0","code":11,"msg":"all taken","details":"wait"}'; exit 1"#);
        let error = ask(&full, "ADD", &config).unwrap_err();
        assert_eq!((error.code, error.details.as_str()), (11, "wait"));
        assert!(error.msg.ends_with("all taken"), "{error}");
        let silent = plugin(&dir, "exit 3");
        let error = ask(&silent, "ADD", &config).unwrap_err();
        assert!(error.code == code::IO && error.msg.contains("exit status: 3"), "{error}");
    }
}
