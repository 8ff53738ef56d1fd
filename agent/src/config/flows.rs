//! The key `flows`: how much of the flow records of pods is kept on the node, and where they are exported to.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::ConfigError;
use super::keys::{Keys, absolute, object, only, refused};
use crate::flows::FLOWS_DIR;
use crate::flows::export::{Export, FileExport, OtlpExport};
use crate::flows::store::Bound;

impl Keys<'_> {
    pub(super) fn flows(&self) -> Result<(Option<Bound>, Export), ConfigError> {
        const EXPECTED: &str = "{\"keep\": BOOLEAN, \"maxMiB\": N, \"hours\": N, \"export\": {..}}";
        let Some(value) = self.0.get("flows") else { return Ok((None, Export::default())) };
        let keys = Keys(object("flows", value, EXPECTED)?);
        only("flows", keys.0, &["keep", "maxMiB", "hours", "export"])?;
        let bytes = u64::from(keys.number_in("flows", "maxMiB", 16..=4096, 64)?) << 20;
        let age = Duration::from_secs(u64::from(keys.number_in("flows", "hours", 1..=720, 24)?) * 3600);
        let bound = keys.boolean_in("flows", "keep", true)?.then_some(Bound { bytes, age });
        let export = keys.0.get("export").map_or_else(|| Ok(Export::default()), export)?;
        match keys.0.get("export") {
            // Exporters read what is kept.
            Some(value) if bound.is_none() && !export.targets().is_empty() => {
                Err(refused("flows.export", value, "nothing here, or \"flows.keep\" true"))
            }
            _ => Ok((bound, export)),
        }
    }
}

fn export(value: &Value) -> Result<Export, ConfigError> {
    let keys = object("flows.export", value, "{\"file\": {..}, \"otlp\": {..}}")?;
    only("flows.export", keys, &["file", "otlp"])?;
    Ok(Export { file: keys.get("file").map(file).transpose()?, otlp: keys.get("otlp").map(otlp).transpose()? })
}

fn file(value: &Value) -> Result<FileExport, ConfigError> {
    const SECTION: &str = "flows.export.file";
    let keys = Keys(object(SECTION, value, "{\"path\": \"/PATH\", \"maxMiB\": N}")?);
    only(SECTION, keys.0, &["path", "maxMiB"])?;
    let path = path_of(&keys, SECTION, "path", "the absolute path of a file on the node, which others do not need")?;
    let is_ours =
        |path: &PathBuf| !UNFIT.iter().any(|folder| path.starts_with(folder)) && path.parent() != Some(Path::new("/"));
    let path = path.filter(is_ours).ok_or_else(|| {
        let expected = format!("the absolute path of a file on the node, not below {}", UNFIT.join(", "));
        refused("flows.export.file.path", keys.0.get("path").unwrap_or(&Value::Null), &expected)
    })?;
    Ok(FileExport { path, bytes: u64::from(keys.number_in(SECTION, "maxMiB", 8..=65_536, 64)?) << 20 })
}

fn otlp(value: &Value) -> Result<OtlpExport, ConfigError> {
    const SECTION: &str = "flows.export.otlp";
    let keys =
        Keys(object(SECTION, value, "{\"endpoint\": \"URL\", \"headersFile\": \"/PATH\", \"caFile\": \"/PATH\"}")?);
    only(SECTION, keys.0, &["endpoint", "headersFile", "caFile"])?;
    let endpoint = keys.0.get("endpoint").unwrap_or(&Value::Null);
    // It is logged: no user, password or query.
    let is_plain = |url: &&str| {
        let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        let is_allowed = |c: char| c.is_ascii_graphic() && !"@?#\"\\<>`{}|^".contains(c);
        rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['/', ':']) && rest.chars().all(is_allowed))
            && url.len() <= MAX_URL
            && url.parse::<ureq::http::Uri>().is_ok()
    };
    let url = endpoint.as_str().filter(is_plain).ok_or_else(|| {
        let expected = "http://HOST:PORT or https://HOST:PORT, and a path before /v1/logs if there is one; secrets go into \"headersFile\"";
        refused("flows.export.otlp.endpoint", endpoint, expected)
    })?;
    let of = |key| path_of(&keys, SECTION, key, "an absolute path, as the agent sees it");
    Ok(OtlpExport { endpoint: url.to_owned(), headers: of("headersFile")?, roots: of("caFile")? })
}

fn path_of(keys: &Keys<'_>, section: &str, key: &str, expected: &str) -> Result<Option<PathBuf>, ConfigError> {
    let Some(value) = keys.0.get(key) else { return Ok(None) };
    let path = value.as_str().and_then(absolute).filter(|path| path.file_name().is_some());
    path.map(Some).ok_or_else(|| refused(&format!("{section}.{key}"), value, expected))
}

/// Where a file of ours would be in the way, or gone with the next start of the node.
const UNFIT: [&str; 7] = ["/proc", "/sys", "/dev", "/run", "/boot", "/etc", FLOWS_DIR];
const MAX_URL: usize = 1024;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    fn parse(flows: Value) -> Result<Config, ConfigError> {
        Config::parse(&json!({"ca": {"service": "a/b"}, "flows": flows}).to_string())
    }

    #[test]
    fn nothing_is_exported_unless_it_is_asked_for() {
        assert_eq!(parse(json!({})).unwrap().flow_export.targets(), []);
        let all = json!({"export": {
            "file": {"path": "/var/log/nebula-cni/flows.jsonl"},
            "otlp": {"endpoint": "https://otel.example:4318/x", "headersFile": "/etc/h", "caFile": "/etc/ca"},
        }});
        let export = parse(all).unwrap().flow_export;
        let file = FileExport { path: "/var/log/nebula-cni/flows.jsonl".into(), bytes: 64 << 20 };
        assert_eq!(export.file, Some(file));
        let otlp = export.otlp.unwrap();
        assert_eq!(otlp.endpoint, "https://otel.example:4318/x");
        assert_eq!((otlp.headers, otlp.roots), (Some("/etc/h".into()), Some("/etc/ca".into())));
    }

    #[test]
    fn what_cannot_work_is_refused_by_name() {
        let file = |path: &str| json!({"export": {"file": {"path": path}}});
        let otlp = |endpoint: &str| json!({"export": {"otlp": {"endpoint": endpoint}}});
        for (flows, key) in [
            (json!({"export": true}), "flows.export"),
            (json!({"export": {"kafka": {}}}), "flows.export.kafka"),
            (json!({"export": {"file": {}}}), "flows.export.file.path"),
            (json!({"export": {"file": {"path": "/var/log/x", "maxMiB": 7}}}), "flows.export.file.maxMiB"),
            (json!({"export": {"file": {"path": "/var/log/x", "max": 8}}}), "flows.export.file.max"),
            (file("flows.jsonl"), "flows.export.file.path"),
            (file("/"), "flows.export.file.path"),
            (file("/flows"), "flows.export.file.path"),
            (file("/var/../etc/passwd"), "flows.export.file.path"),
            (file("/etc/shadow"), "flows.export.file.path"),
            (file("/var/lib/nebula-cni/flows/flows.db"), "flows.export.file.path"),
            (json!({"export": {"otlp": {}}}), "flows.export.otlp.endpoint"),
            (otlp("otel:4318"), "flows.export.otlp.endpoint"),
            (otlp("ftp://otel"), "flows.export.otlp.endpoint"),
            (otlp("https://user:password@otel"), "flows.export.otlp.endpoint"),
            (otlp("https://otel/?token=x"), "flows.export.otlp.endpoint"),
            (otlp("http://"), "flows.export.otlp.endpoint"),
            (otlp("http://a b"), "flows.export.otlp.endpoint"),
            (
                json!({"export": {"otlp": {"endpoint": "http://a", "headersFile": "h"}}}),
                "flows.export.otlp.headersFile",
            ),
            (json!({"keep": false, "export": {"otlp": {"endpoint": "http://a"}}}), "flows.export"),
        ] {
            let error = parse(flows.clone()).expect_err(&flows.to_string()).to_string();
            assert!(error.contains(&format!("key {key:?}")), "{flows}: {error}");
        }
        assert!(parse(json!({"keep": false, "export": {}})).unwrap().flows.is_none());
    }
}
