//! `kubectl nebula bundle`: one archive for support that shows the state of Nebula. It is bounded in size and time, it
//! lists what could not be read, and it has no secrets.
//!
//! | file | what |
//! | --- | --- |
//! | `contents.rs` | the files, what is missing, and their bounds |
//! | `of_agents.rs` | what agents say |
//! | `of_cluster.rs` | what the API server says: workloads, configuration, events, logs |
//! | `scrub.rs` | takes secrets out of texts |
//! | `archive.rs` | writes the files as tar.gz |

mod archive;
mod contents;
mod of_agents;
mod of_cluster;
mod scrub;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::columns::bytes;
use serde::Serialize;
use serde_json::json;

use self::contents::Contents;
use crate::agents::Agents;
use crate::cli::{Bundle, Place};
use crate::cluster::Cluster;
use crate::identity::Role;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

/// What was written.
#[derive(Debug, Serialize)]
struct Written<'a> {
    file: &'a str,
    bytes: usize,
    files: usize,
    missing: &'a [String],
}

pub(crate) async fn run(
    cluster: &Cluster,
    place: &Place,
    options: &Bundle,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let now = SystemClock.unix_seconds();
    let path = options.file.clone().unwrap_or_else(|| PathBuf::from(format!("nebula-bundle-{now}.tar.gz")));
    if path.exists() {
        return Err(exists(&path).into());
    }
    let mut contents = Contents::new(SystemClock.now() + within(options));
    let about = json!({"kubectl_nebula": env!("CARGO_PKG_VERSION"), "time": now, "namespace": place.namespace,
        "system_namespace": place.system_namespace});
    contents.document("about.json", &about);
    of_cluster::collect(cluster, &place.system_namespace, &mut contents, printer).await?;
    let role = if place.namespace.is_some() { Role::Viewer } else { Role::ClusterViewer };
    match contents.in_time(Agents::find(cluster, place, role)).await {
        Some(Ok(agents)) => of_agents::collect(&agents, place, &mut contents, printer).await?,
        Some(Err(error)) => contents.missing("agents", &error.to_string()),
        None => {}
    }
    let archive = archive::pack(contents.finish(), now)?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(|error| if error.kind() == std::io::ErrorKind::AlreadyExists { exists(&path) } else { error })?;
    file.write_all(&archive)?;
    file.sync_all()?;
    let shown = path.display().to_string();
    let missing = contents.all_missing();
    let written = Written { file: &shown, bytes: archive.len(), files: contents.count(), missing };
    if printer.is_table() {
        let size = bytes(u64::try_from(archive.len()).unwrap_or(u64::MAX));
        let visible = nebula_cert::visible(&shown).into_owned();
        printer.text(&format!("{visible}: {} files, {size}. Look into it before you send it.\n", written.files))?;
    } else {
        printer.documents(&[&written])?;
    }
    for line in missing {
        printer.note(&format!("missing: {line}"))?;
    }
    Ok(if missing.is_empty() { Outcome::Fine } else { Outcome::Failed })
}

fn within(options: &Bundle) -> Duration {
    Duration::from_secs(options.within.into())
}

fn exists(path: &std::path::Path) -> std::io::Error {
    std::io::Error::other(format!("{} is there already, and is not overwritten", path.display()))
}
