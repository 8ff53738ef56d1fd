//! The node's directories for network configurations and plugins: configured, else named by the runtime, else the
//! usual.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::Config;
use crate::runtime::Client;
use crate::runtime::loaded::Directories;

/// Directories, as the node names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// Directories with network configurations.
    pub conf: Vec<PathBuf>,
    /// Directories with plugins.
    pub bin: Vec<PathBuf>,
}

impl Places {
    /// The directories to use, given what the runtime named.
    #[must_use]
    pub fn choose(config: &Config, named: &Directories) -> Self {
        let first = |lists: [&[PathBuf]; 2], usual: &str| {
            let known = lists.into_iter().find(|list| !list.is_empty());
            known.map_or_else(|| vec![PathBuf::from(usual)], <[_]>::to_vec)
        };
        Self {
            conf: first([&config.conf_dirs, &named.conf], USUAL_CONF_DIR),
            bin: first([&config.bin_dirs, &named.bin], USUAL_BIN_DIR),
        }
    }

    /// Whether the configuration says it all.
    #[must_use]
    pub fn are_configured(config: &Config) -> bool {
        !config.conf_dirs.is_empty() && !config.bin_dirs.is_empty()
    }
}

/// Asks the runtime until it answers, and again from time to time. A runtime that stays away for a while leaves the
/// usual directories.
pub async fn follow(config: &Config, places: watch::Sender<Option<Places>>) {
    let publish = |named: &Directories| {
        let chosen = Some(Places::choose(config, named));
        places.send_if_modified(|known| {
            let is_new = *known != chosen;
            if is_new {
                *known = chosen;
            }
            is_new
        });
    };
    if Places::are_configured(config) {
        publish(&Directories::default());
        return;
    }
    let began = Instant::now();
    loop {
        let status = match Client::find(config.runtime_endpoint.as_deref(), &config.host_root) {
            Ok(client) => client.status().await,
            Err(error) => Err(error),
        };
        match status {
            Ok(status) => {
                publish(&Directories::read(&status));
                tokio::time::sleep(ASK_AGAIN).await;
            }
            Err(error) => {
                tracing::debug!(%error, "cannot ask the runtime for its directories");
                if began.elapsed() > PATIENCE && places.borrow().is_none() {
                    publish(&Directories::default());
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

const USUAL_CONF_DIR: &str = "/etc/cni/net.d";
const USUAL_BIN_DIR: &str = "/opt/cni/bin";
const RETRY: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_wins_over_the_runtime_and_that_over_the_usual() {
        let mut config = Config::parse(r#"{"ca": {"url": "https://ca"}}"#).unwrap();
        let named = Directories { conf: vec!["/c".into()], bin: Vec::new() };
        let places = Places::choose(&config, &named);
        assert_eq!((places.conf, places.bin), (vec!["/c".into()], vec!["/opt/cni/bin".into()]));
        config.conf_dirs = vec!["/mine".into()];
        assert_eq!(Places::choose(&config, &named).conf, [PathBuf::from("/mine")]);
    }
}
