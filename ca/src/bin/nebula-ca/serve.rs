//! Making a CA, and serving it.

use std::io;
use std::time::Duration;

use anyhow::{Context, bail};
use ipnet::IpNet;
use nebula_ca::{NewCa, PASSPHRASE, Server, ServerSettings, TlsIdentity, default_tls_names, now, time_left};
use nebula_cert::{Curve, Version, VisibleLines};
use tracing_subscriber::EnvFilter;
use zeroize::Zeroizing;

use super::arguments::{CurveName, Init, Serve};
use super::print::print;

impl Init {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let directory = self.dir.open();
        // The policy is what a new CA writes last.
        if self.unless_there && directory.has("policy.jsonc") {
            return print(&format!("there is a CA in {}\n", directory.path().display()));
        }
        let overlay = match (self.overlay.is_empty(), self.networks.is_empty()) {
            (false, _) => self.overlay,
            (true, false) => self.networks.clone(),
            (true, true) => vec![IpNet::new([10, 42, 0, 0].into(), 16)?],
        };
        let shown: Vec<String> = overlay.iter().map(|prefix| prefix.trunc().to_string()).collect();
        let new = NewCa {
            name: self.name,
            version: if self.version == 1 { Version::V1 } else { Version::V2 },
            curve: match self.curve {
                CurveName::Curve25519 => Curve::Curve25519,
                CurveName::P256 => Curve::P256,
            },
            life: self.duration,
            networks: self.networks,
            overlay,
            tls_names: if self.tls_names.is_empty() { default_tls_names() } else { self.tls_names },
        };
        let at = now();
        let ca = new.make(&directory, at)?;
        let path = directory.path().display();
        print(&format!(
            "made CA {:?} in {path}: valid for {}, pods get addresses of {}\n\
             clients need {path}/tls.crt, nodes also {path}/node.token; {path}/ca.key must never leave this host\n\
             clients reach it as {}; for more names: nebula-ca tls add-name\n\
             next: nebula-ca serve --dir {path} --listen 0.0.0.0:8443\n",
            ca.name(),
            time_left(ca.not_after() - at),
            shown.join(", "),
            TlsIdentity::read(&directory)?.names.join(", "),
        ))
    }
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(|| VisibleLines(io::stderr()))
            .with_ansi(false)
            .init();
        if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
            bail!("another TLS provider is installed already");
        }
        let passphrase = std::env::var(PASSPHRASE).ok().map(Zeroizing::new);
        let (directory, listen, status_listen) = (self.dir.open(), self.listen, self.status_listen);
        let path = directory.path().display().to_string();
        let (tls_names, new_ledger) = (self.tls_names, self.new_ledger);
        let settings = ServerSettings { directory, listen, status_listen, tls_names, new_ledger, passphrase };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            // They wait for one disk, or for the API server.
            .max_blocking_threads(48)
            .build()
            .context("cannot start")?;
        let served = runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let mut terminate = signal(SignalKind::terminate()).context("cannot watch for SIGTERM")?;
            let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch for SIGINT")?;
            let mut hangup = signal(SignalKind::hangup()).context("cannot watch for SIGHUP")?;
            let server = tokio::select! {
                opened = Server::open(settings) => opened?,
                // A database or a disk that does not answer must not keep it from ending.
                _ = terminate.recv() => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
            };
            let status = server.status_address().map(|address| format!("http://{address}/"));
            tracing::info!(address = %server.address()?, dir = path, status, "listening");
            if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
                tracing::error!(%error, "cannot tell systemd that the service is ready");
            }
            // One that is under way sees all that was written before it began, so one more is enough.
            let (reload, reloads) = tokio::sync::mpsc::channel(1);
            let stop = async move {
                loop {
                    tokio::select! {
                        _ = terminate.recv() => return,
                        _ = interrupt.recv() => return,
                        _ = hangup.recv() => drop(reload.try_send(())),
                    }
                }
            };
            server.run(stop, reloads).await;
            anyhow::Ok(())
        });
        // What is left waits for the API server or a database, and nobody waits for it any more.
        runtime.shutdown_timeout(LAST_WORK);
        served
    }
}

/// How long the last requests to the API server and the database may take once nothing is served any more.
const LAST_WORK: Duration = Duration::from_secs(5);
