//! `nebula-ca`: reads the command line, calls the library, prints.

use std::{
    fs::File,
    io::{self, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use nebula_ca::{
    Command, CommandOutcome, Directory, ENROLMENT_PREFIX, Hears, ListedAddress, ListedCertificate, ListedHolder,
    ListedPod, ListedToken, NewCa, NewToken, PASSPHRASE, Policy, Rollover, Server, ServerSettings, TlsIdentity,
    TokenHash, Unaware, back_up, ca_curve, call, default_tls_names, generate, now, parse_duration, restore, time_left,
};
use nebula_cert::{Curve, HostKey, JoinToken, Version, VisibleLines, visible, visible_json};
use tracing_subscriber::EnvFilter;
use zeroize::Zeroizing;

/// Certificate service for Nebula: signs for hosts with a one-time token and for pods their node vouches for.
///
/// A service lives in one directory. Start with:
///
///   nebula-ca init --dir /var/lib/nebula-ca --overlay 10.42.0.0/16
///
///   nebula-ca serve --dir /var/lib/nebula-ca --listen 0.0.0.0:8443
///
///   nebula-ca token create --dir /var/lib/nebula-ca --name lighthouse --network 10.42.0.1/16 --join
#[derive(Parser)]
#[command(name = "nebula-ca", version, verbatim_doc_comment)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Init(Init),
    Serve(Serve),
    /// One-time enrolment tokens for hosts
    #[command(subcommand)]
    Token(Token),
    /// Issued certificates
    #[command(subcommand)]
    Certificate(CertificateVerb),
    /// Overlay addresses that are kept for the names of StatefulSet pods (pods.stable in policy.jsonc) and of hosts
    /// (hosts.renewal_grace)
    #[command(subcommand)]
    Address(AddressVerb),
    /// Replace the CA while everything runs: prepare, wait until all have heard of it, switch, wait, finish
    #[command(subcommand)]
    Rollover(RolloverVerb),
    /// Names by which clients reach the service, in its TLS certificate
    #[command(subcommand)]
    Tls(TlsVerb),
    Reload(Reload),
    Backup(BackUp),
    Restore(Restore),
    /// What the CA signs, for whom and how
    #[command(subcommand)]
    Policy(PolicyVerb),
    /// Short for `certificate list`
    #[command(hide = true)]
    List(Listing),
    /// Short for `certificate revoke`
    #[command(hide = true)]
    Revoke(Revoke),
}

#[derive(Subcommand)]
enum CertificateVerb {
    /// List certificates
    List(Listing),
    Show(Show),
    Revoke(Revoke),
    Readmit(Readmit),
}

#[derive(Subcommand)]
enum AddressVerb {
    /// List names, their addresses, and whether a pod has them now
    List(Listing),
    Release(ReleaseAddress),
}

/// Keep the addresses of a name no longer
///
/// A pod that has them now keeps them until its last certificate is given back, blocked or expired.
#[derive(Args)]
struct ReleaseAddress {
    #[command(flatten)]
    listing: Listing,
    /// The pod (NAMESPACE/NAME), or "host NAME"
    #[arg(value_name = "NAME")]
    name: String,
}

#[derive(Subcommand)]
enum RolloverVerb {
    /// Show which CA signs, and which are trusted besides
    Status(Listing),
    /// Make the next CA and let everybody trust it; the present one goes on signing
    Prepare(Listing),
    Switch(Switch),
    /// Trust retired CAs no more, once no certificate of theirs is valid
    Finish(Listing),
}

#[derive(Subcommand)]
enum PolicyVerb {
    Check(PolicyCheck),
}

/// Read a policy as the service would, and change nothing
///
/// Exits with 1 and names every mistake if the service would refuse it. Needs no service and none of its files.
#[derive(Args)]
struct PolicyCheck {
    /// The policy, before it replaces policy.jsonc
    #[arg(value_name = "FILE")]
    policy: PathBuf,
    /// Certificate of the CA: also check that it allows what the policy wants to sign
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
}

#[derive(Subcommand)]
enum TlsVerb {
    /// Show the names and the fingerprint of the key (SHA-256 of the SubjectPublicKeyInfo)
    Show(Listing),
    AddName(AddName),
}

/// Make a TLS certificate with more names, of the same key
///
/// A running service uses it at once. Clients that have a copy of the former tls.crt, or the fingerprint of its key,
/// need nothing new.
#[derive(Args)]
struct AddName {
    #[command(flatten)]
    listing: Listing,
    /// Host names or IP addresses
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
}

/// Let the next CA sign
///
/// Refused for a day after `prepare`: a host that was away would get certificates of a CA it does not know.
#[derive(Args)]
struct Switch {
    #[command(flatten)]
    listing: Listing,
    /// Do not wait for hosts that were away
    #[arg(long)]
    at_once: bool,
}

/// Show one certificate, with its PEM
#[derive(Args)]
struct Show {
    #[command(flatten)]
    listing: Listing,
    /// Fingerprint, the beginning of one, or a name; of several with that name the newest
    #[arg(value_name = "FINGERPRINT|NAME")]
    which: String,
}

/// Write a copy of everything that the service needs into one file, while it runs or not
///
/// Keys and certificates, TLS files, node token, policy and ledger; audit.log is not in it. Whoever has the file has
/// the CA. A ledger in PostgreSQL is not in it: copy that with pg_dump.
#[derive(Args)]
struct BackUp {
    #[command(flatten)]
    dir: Dir,
    /// The copy, which does not exist yet
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Make the directory of a service from a file that `backup` wrote
///
/// Nothing that exists is overwritten. The other service must have ended for good.
#[derive(Args)]
struct Restore {
    #[command(flatten)]
    dir: Dir,
    /// The copy
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Let the running service read policy.jsonc, ca.crt, ca.key and its TLS files again
///
/// SIGHUP does the same. A mistake in any of these files changes nothing and is named.
#[derive(Args)]
struct Reload {
    #[command(flatten)]
    dir: Dir,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Make a new CA: its key and certificate, TLS identity, node token and policy
///
/// Nothing that exists is overwritten. ca.crt and ca.key are ordinary Nebula files. They are no backup: `nebula-ca
/// backup` makes one, with the ledger that says who is revoked and who has which address.
#[derive(Args)]
struct Init {
    #[command(flatten)]
    dir: Dir,
    /// Name of the CA certificate
    #[arg(long, default_value = "nebula-ca")]
    name: String,
    /// Certificate version: 1 for peers older than Nebula 1.10, IPv4 only
    #[arg(long = "version", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    version: u8,
    /// Curve of all keys
    #[arg(long, value_enum, default_value_t = CurveName::Curve25519)]
    curve: CurveName,
    /// Life of the CA
    #[arg(long, default_value = "3650d", value_parser = duration)]
    duration: i64,
    /// Networks the CA may ever sign for; without this it may sign for any
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    networks: Vec<IpNet>,
    /// Prefixes that pods get overlay addresses from [default: --networks, or 10.42.0.0/16]
    #[arg(long, value_delimiter = ',', value_name = "PREFIX")]
    overlay: Vec<IpNet>,
    /// Host name or IP address under which clients reach the service; repeat for more [default: name and addresses of
    /// this machine, localhost, 127.0.0.1, ::1]
    #[arg(long = "tls-name", value_name = "NAME")]
    tls_names: Vec<String>,
    /// Succeed and change nothing where a complete CA is already, as an init container should
    #[arg(long)]
    unless_there: bool,
}

/// Run the service until SIGTERM or SIGINT
///
/// SIGHUP reads the policy, the CA and the TLS files again.
///
/// An encrypted ca.key is opened with the passphrase in the environment variable NEBULA_CA_PASSPHRASE. In a build with
/// the feature pkcs11, ca.key may be the PKCS#11 URI of a key in a token instead. What is logged is set by RUST_LOG
/// (default: info). Each decision is also a JSON line in audit.log.
#[derive(Args)]
struct Serve {
    #[command(flatten)]
    dir: Dir,
    /// Address and port to listen on; port 0 takes a free one and logs it
    #[arg(long, default_value = "127.0.0.1:8443")]
    listen: SocketAddr,
    /// Address and port for a page of all identities (/), metrics for Prometheus (/metrics), /healthz and /readyz, in
    /// plain HTTP: keep it to those who may see names and addresses [default: none]
    #[arg(long, value_name = "ADDRESS")]
    status_listen: Option<SocketAddr>,
    /// Host name or IP address that the TLS certificate must have; repeat for more. Those that are missing are added at
    /// the start, to a certificate of the same key
    #[arg(long = "tls-name", value_name = "NAME")]
    tls_names: Vec<String>,
    /// Begin an empty ledger for a CA that is older than an hour and has none: certificates that were revoked are good
    /// again, and addresses that hosts have are given away
    #[arg(long)]
    new_ledger: bool,
}

#[derive(Subcommand)]
enum Token {
    Create(CreateToken),
    /// List tokens and what became of them
    List(Listing),
    Revoke(RevokeToken),
}

/// Make a token worthless that was not used yet
#[derive(Args)]
struct RevokeToken {
    #[command(flatten)]
    listing: Listing,
    /// Its short name, from `token list`
    #[arg(value_name = "TOKEN")]
    id: String,
}

/// Make a one-time token and print it; it cannot be shown again
///
/// Works while the service runs and while it does not. The first key the token is used with is the only one it is ever
/// good for; with --key it is good for that one only, so that whoever else reads it gets nothing.
#[derive(Args)]
struct CreateToken {
    #[command(flatten)]
    dir: Dir,
    /// Name of the certificate
    #[arg(long)]
    name: String,
    /// Overlay address of the host with the length of the overlay prefix, for example 10.42.0.1/16 [default: a free one
    /// of the pool in policy.jsonc (hosts.pool)]
    #[arg(long = "network", visible_alias = "networks", value_delimiter = ',', value_name = "ADDRESS/LENGTH")]
    networks: Vec<IpNet>,
    /// Groups for firewall rules
    #[arg(long, value_delimiter = ',')]
    groups: Vec<String>,
    /// Networks behind the host that it may route
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    unsafe_networks: Vec<IpNet>,
    /// How long the token is accepted, at most 30d
    #[arg(long, default_value = "1h", value_parser = duration)]
    ttl: i64,
    /// Life of the certificate, at most hosts.longest_life of policy.jsonc. The host renews it after two thirds
    #[arg(long, default_value = "7d", value_parser = duration)]
    life: i64,
    /// Print the string for `nebula up` instead: address of this service, fingerprint of its TLS key, the overlay
    /// network of the host, and the token
    #[arg(long)]
    join: bool,
    /// Bind the token to the key that `nebula up -prepare` printed on the host: it is worth nothing with another one.
    /// Without this it is good for whoever uses it first
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// Address of this service in that string, as hosts reach it [default: the first full host name in its TLS
    /// certificate, else the first address, port 8443]
    #[arg(long, requires = "join", value_name = "https://HOST:PORT")]
    url: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Listing {
    #[command(flatten)]
    dir: Dir,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Block a certificate until it expires
///
/// Pods and hosts that follow the service drop tunnels to it within seconds; the answer names those that do not, and
/// when they hear of it. A pod that its node still vouches for gets a new certificate within seconds, unless it is kept
/// out.
#[derive(Args)]
struct Revoke {
    #[command(flatten)]
    dir: Dir,
    /// Fingerprint, or the name of all certificates to block, or the UID or NAMESPACE/NAME of the pod that they are of
    #[arg(value_name = "FINGERPRINT|NAME|UID|POD")]
    which: String,
    /// Also refuse every further certificate to the pods, by their UIDs, until `certificate readmit`; pods that replace
    /// them are not affected
    #[arg(long)]
    keep_out: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Let a pod in again that `certificate revoke --keep-out` keeps out
///
/// It gets its next certificate when it asks again: within a minute.
#[derive(Args)]
struct Readmit {
    #[command(flatten)]
    dir: Dir,
    /// What `certificate revoke` was told, or the UID, NAMESPACE/NAME or name of the pod
    #[arg(value_name = "FINGERPRINT|NAME|UID|POD")]
    pod: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct Dir {
    /// Directory of the service
    #[arg(long = "dir", value_name = "DIR")]
    path: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum CurveName {
    #[value(name = "25519", alias = "X25519", alias = "Curve25519", alias = "CURVE25519")]
    Curve25519,
    #[value(name = "P256", alias = "p256")]
    P256,
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line with every cause; a broken stderr leaves nobody to tell.
            let _ = writeln!(io::stderr(), "nebula-ca: {}", visible(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Init(init) => init.run(),
        Verb::Serve(serve) => serve.run(),
        Verb::Token(Token::Create(create)) => create.run(),
        Verb::Token(Token::List(listing)) => list_tokens(&listing),
        Verb::Token(Token::Revoke(revoke)) => revoke.run(),
        Verb::Certificate(CertificateVerb::List(listing)) | Verb::List(listing) => list_issued(&listing),
        Verb::Certificate(CertificateVerb::Show(show)) => show.run(),
        Verb::Certificate(CertificateVerb::Revoke(revoke)) | Verb::Revoke(revoke) => revoke.run(),
        Verb::Certificate(CertificateVerb::Readmit(readmit)) => readmit.run(),
        Verb::Address(AddressVerb::List(listing)) => list_addresses(&listing),
        Verb::Address(AddressVerb::Release(release)) => release.run(),
        Verb::Rollover(verb) => verb.run(),
        Verb::Tls(verb) => verb.run(),
        Verb::Reload(reload) => reload.run(),
        Verb::Backup(backup) => backup.run(),
        Verb::Restore(restore) => restore.run(),
        Verb::Policy(PolicyVerb::Check(check)) => check.run(),
    }
}

impl Init {
    fn run(self) -> anyhow::Result<()> {
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
    fn run(self) -> anyhow::Result<()> {
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

impl CreateToken {
    fn run(self) -> anyhow::Result<()> {
        let secret = match generate(ENROLMENT_PREFIX) {
            Ok(secret) => secret,
            Err(error) => bail!("the system has no randomness: {error}"),
        };
        // Before there is a token that nobody could use.
        let door = self.join.then(|| Door::read(&self.dir.open(), self.url.as_deref())).transpose()?;
        let key: Option<HostKey> = self.key.as_deref().map(str::parse).transpose()?;
        let command = Command::CreateToken(NewToken {
            hash: TokenHash::of(&secret).to_hex(),
            name: self.name,
            networks: self.networks,
            unsafe_networks: self.unsafe_networks,
            groups: self.groups.into_iter().filter(|group| !group.is_empty()).collect(),
            ttl: self.ttl,
            life: self.life,
            key: key.as_ref().map(ToString::to_string),
        });
        let CommandOutcome::TokenCreated(created) = ask(&self.dir, &command)? else { bail!(UNEXPECTED) };
        let join = door.map(|door| door.join_token(&secret, &created.token.networks, key.as_ref())).transpose()?;
        if self.json {
            let mut shown = serde_json::to_value(&created)?;
            shown["token"] = secret.as_str().into();
            if let Some(join) = join {
                shown["join"] = join.as_str().into();
            }
            print_json(&shown)
        } else {
            print(&format!("{}\n", *join.unwrap_or(secret)))
        }
    }
}

/// Where hosts reach this service, and by what they recognise it.
struct Door {
    url: String,
    fingerprint: [u8; 32],
    curve: Curve,
}

impl Door {
    fn read(directory: &Directory, url: Option<&str>) -> anyhow::Result<Self> {
        let identity = TlsIdentity::read(directory)?;
        let url = match (url, identity.best_name()) {
            (Some(url), _) => url.to_owned(),
            (None, Some(name)) if name.parse::<Ipv6Addr>().is_ok() => format!("https://[{name}]:8443"),
            (None, Some(name)) => format!("https://{name}:8443"),
            (None, None) => {
                bail!("tls.crt has no name by which another machine reaches this service: nebula-ca tls add-name")
            }
        };
        let url = url.trim_end_matches('/').to_owned();
        let door = Self { url, fingerprint: identity.fingerprint, curve: ca_curve(directory)? };
        // Whether a join token can have that address.
        door.join_token("-", &[IpNet::from(IpAddr::from([0; 4]))], None)?;
        let authority = door.url.trim_start_matches("https://");
        let host = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, _)) => host,
            None => authority.split(':').next().unwrap_or_default(),
        };
        if !identity.has(host) {
            bail!("tls.crt is not for {host}, so hosts would refuse this service: nebula-ca tls add-name {host}");
        }
        Ok(door)
    }

    /// What a host needs to enrol here with `secret`, which gives it addresses of `networks`.
    fn join_token(&self, secret: &str, networks: &[IpNet], key: Option<&HostKey>) -> anyhow::Result<Zeroizing<String>> {
        let join = JoinToken::new(&self.url, self.fingerprint, secret, networks)?.with_curve(self.curve);
        let join = match key {
            Some(key) => join.bound_to(key),
            None => join,
        };
        Ok(join.to_text())
    }
}

impl Revoke {
    fn run(self) -> anyhow::Result<()> {
        let command = Command::Revoke { which: self.which, keep_out: self.keep_out };
        let outcome = ask(&self.dir, &command)?;
        let CommandOutcome::Revoked { fingerprints, is_foreign, kept_out, ends, unaware } = outcome else {
            bail!(UNEXPECTED)
        };
        if self.json {
            let shown = serde_json::json!({
                "fingerprints": fingerprints, "is_foreign": is_foreign, "kept_out": kept_out, "ends": ends,
                "unaware": unaware,
            });
            return print_json(&shown);
        }
        kept_out.iter().try_for_each(|pod| say(&format!("keeps out {}", shown(pod))))?;
        let note = if is_foreign { " (not issued here; blocked for good)" } else { "" };
        fingerprints.iter().try_for_each(|fingerprint| say(&format!("revoked {fingerprint}{note}")))?;
        match unaware {
            Some(unaware) => print(&unheard(&unaware, ends, now())),
            None => say("no service runs here: nobody hears of it before one does"),
        }
    }
}

/// Who does not hear of a revocation at once, for people.
fn unheard(unaware: &Unaware, ends: Option<i64>, at: i64) -> String {
    let Unaware { holders, more, of, since, is_partial } = unaware;
    let count = holders.len() + more;
    let mut text = match (count, of) {
        (_, 0) => return String::new(),
        (0, of) => {
            return format!("all {of} other holders of certificates follow the service: they hear of it at once\n");
        }
        (count, of) => {
            format!(
                "{} of {of} other holders hear of it at once. Until they hear of it, these accept it:\n",
                of - count
            )
        }
    };
    let row = |holder: &ListedHolder| {
        let asked = match holder.last_asked {
            Some(when) => format!("{} ago", time_left((at - when).max(1))),
            None => "-".to_owned(),
        };
        let left = time_left(holder.hears_by + 1 - at);
        let hears = match holder.hears {
            Hears::WhenItAsks => format!("in {left}, when it asks again"),
            Hears::WhenItRenews => format!("in {left}, when it renews"),
            Hears::Never => format!("it is late; its own certificate ends in {left}"),
        };
        [holder.name.clone(), join(&holder.networks), asked, hears]
    };
    text.push_str(&table(["NAME", "NETWORKS", "ASKED", "HEARS OF IT"], holders.iter().map(row)));
    let mut note = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    if *more > 0 {
        note(format!("and {more} more"));
    }
    if let Some(left) = ends.map(|ends| ends + 1 - at).filter(|left| *left > 0) {
        note(format!("what is revoked ends by itself in {}", time_left(left)));
    }
    if at - since < SETTLED_AFTER {
        note(format!(
            "the service began {} ago: who followed it before may not be back yet",
            time_left((at - since).max(1))
        ));
    }
    if *is_partial {
        note("replicas have callers of their own, which this one counts among those that do not hear of it".to_owned());
    }
    text
}

impl Readmit {
    fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Readmitted { pods } = ask(&self.dir, &Command::Readmit { pod: self.pod })? else {
            bail!(UNEXPECTED)
        };
        if self.json {
            return print_json(&serde_json::json!({"pods": pods}));
        }
        pods.iter().try_for_each(|pod| say(&format!("readmitted {}", shown(pod))))
    }
}

fn shown(pod: &ListedPod) -> String {
    format!("pod {}/{} (uid {})", pod.namespace, pod.name, pod.uid)
}

impl ReleaseAddress {
    fn run(self) -> anyhow::Result<()> {
        let command = Command::ReleaseAddress { name: self.name };
        let CommandOutcome::AddressReleased(released) = ask(&self.listing.dir, &command)? else { bail!(UNEXPECTED) };
        if self.listing.json {
            return print_json(&serde_json::to_value(&released)?);
        }
        let note = if released.in_use { " once the pod that has it is gone" } else { "" };
        say(&format!("{} of {} is free{note}", join(&released.kept.networks), released.name))
    }
}

impl RevokeToken {
    fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::TokenRevoked(token) = ask(&self.listing.dir, &Command::RevokeToken { id: self.id })? else {
            bail!(UNEXPECTED)
        };
        if self.listing.json {
            return print_json(&serde_json::to_value(&token)?);
        }
        say(&format!("revoked token {} for {}", token.id, token.token.name))
    }
}

impl Show {
    fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Issued { certificates } = ask(&self.listing.dir, &Command::ListIssued)? else {
            bail!(UNEXPECTED)
        };
        let is_meant = |listed: &ListedCertificate| {
            let is_beginning = self.which.len() >= 8 && listed.fingerprint.starts_with(&self.which.to_lowercase());
            is_beginning || listed.issued.name == self.which
        };
        let Some(listed) = certificates.iter().rfind(|listed| is_meant(listed)) else {
            bail!("no certificate has the name or fingerprint {:?}; see `nebula-ca certificate list`", self.which);
        };
        if self.listing.json {
            return print_json(&serde_json::to_value(listed)?);
        }
        let (issued, at) = (&listed.issued, now());
        let state = match issued.revoked {
            Some(when) => format!("revoked at {}", nebula_cert::rfc3339(when)),
            None => format!("{} left", time_left(issued.not_after + 1 - at)),
        };
        let rows = [
            ["name".to_owned(), issued.name.clone()],
            ["subject".to_owned(), issued.subject.to_string()],
            ["networks".to_owned(), join(&issued.networks)],
            ["groups".to_owned(), join(&issued.groups)],
            ["issued".to_owned(), nebula_cert::rfc3339(issued.issued)],
            ["valid until".to_owned(), format!("{} ({state})", nebula_cert::rfc3339(issued.not_after))],
        ];
        let head = ["fingerprint", listed.fingerprint.as_str()];
        print(&format!("{}{}", table(head, rows.into_iter()), issued.pem))
    }
}

impl RolloverVerb {
    fn run(self) -> anyhow::Result<()> {
        let passphrase = std::env::var(PASSPHRASE).ok().map(Zeroizing::new);
        let passphrase = passphrase.as_ref().map(|passphrase| passphrase.as_str());
        let (listing, is_change) = match &self {
            Self::Status(listing) => (listing, false),
            Self::Prepare(listing) | Self::Finish(listing) | Self::Switch(Switch { listing, .. }) => (listing, true),
        };
        let directory = listing.dir.open();
        let rollover = match &self {
            Self::Status(_) => Rollover::read(&directory, passphrase)?,
            Self::Prepare(_) => Rollover::prepare(&directory, passphrase, now())?,
            Self::Switch(switch) => Rollover::switch(&directory, passphrase, switch.at_once, now())?,
            Self::Finish(_) => {
                let CommandOutcome::Issued { certificates } = ask(&listing.dir, &Command::ListIssued)? else {
                    bail!(UNEXPECTED)
                };
                Rollover::finish(&directory, passphrase, &certificates, now())?
            }
        };
        // Where no service runs, there is nothing to tell.
        if is_change && let Ok(CommandOutcome::Reloaded) = call(&directory, &Command::Reload) {
            writeln!(io::stderr(), "the running service uses the change").context("cannot write to standard error")?;
        }
        let role = |role: &str, ca: &nebula_cert::Certificate| {
            [role.to_owned(), ca.name().to_owned(), nebula_cert::rfc3339(ca.not_after()), ca.fingerprint().to_string()]
        };
        let signing = [role("signs", &rollover.signing)];
        let next = rollover.next.iter().map(|ca| role("next", ca));
        let rows: Vec<_> =
            signing.into_iter().chain(next).chain(rollover.retired.iter().map(|ca| role("retired", ca))).collect();
        if listing.json {
            let json = |[role, name, until, fingerprint]: [String; 4]| serde_json::json!({"role": role, "name": name, "not_after": until, "fingerprint": fingerprint});
            let shown: Vec<_> = rows.into_iter().map(json).collect();
            return print_json(&serde_json::to_value(&shown)?);
        }
        print(&table(["ROLE", "NAME", "VALID UNTIL", "FINGERPRINT"], rows.into_iter()))
    }
}

impl TlsVerb {
    fn run(self) -> anyhow::Result<()> {
        let listing = match &self {
            Self::Show(listing) | Self::AddName(AddName { listing, .. }) => listing,
        };
        let directory = listing.dir.open();
        let mut identity = TlsIdentity::read(&directory)?;
        if let Self::AddName(AddName { names, .. }) = &self
            && identity.add_names(names, &directory, now())?
            // Where no service runs, there is nothing to tell.
            && let Ok(CommandOutcome::Reloaded) = call(&directory, &Command::Reload)
        {
            writeln!(io::stderr(), "the running service uses the new certificate")
                .context("cannot write to standard error")?;
        }
        let fingerprint = nebula_cert::hex::encode(&identity.fingerprint);
        if listing.json {
            let shown = serde_json::json!({"names": identity.names, "fingerprint": fingerprint});
            return print_json(&shown);
        }
        say(&format!("names        {}", identity.names.join(", ")))?;
        say(&format!("fingerprint  {fingerprint}"))
    }
}

impl PolicyCheck {
    fn run(self) -> anyhow::Result<()> {
        let read = |path: &Path| {
            let mut text = String::new();
            let file = File::open(path).and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text));
            file.with_context(|| format!("cannot read {}", path.display())).map(|_| text)
        };
        let name = self.policy.display();
        let policy = Policy::parse(&read(&self.policy)?).with_context(|| format!("{name} is refused"))?;
        if let Some(path) = &self.ca {
            let ca = nebula_cert::Certificate::from_pem(read(path)?.as_bytes())
                .with_context(|| format!("{} holds no certificate", path.display()))?;
            policy.check_against(&ca).with_context(|| format!("{name} is refused"))?;
        }
        print(&format!("{name} is valid\n"))
    }
}

impl BackUp {
    fn run(self) -> anyhow::Result<()> {
        let made = back_up(&self.dir.open(), &self.file, now())
            .with_context(|| format!("no backup was written to {}", self.file.display()))?;
        say(&format!("{} has {}", self.file.display(), made.files.join(", ")))?;
        match made.records {
            Some(records) => say(&format!("and the ledger: {records} records")),
            None => say(
                "The ledger is in the database that database.url names, and NOT in this file. Copy it now, and with each \
                 backup: pg_dump --format=custom --table=nebula_ca --file=ledger.dump DATABASE",
            ),
        }?;
        if made.key_is_elsewhere {
            say("The key of the CA is in the token that ca.key names, and NOT in this file.")?;
        }
        say("Whoever has this file has the CA.")
    }
}

impl Restore {
    fn run(self) -> anyhow::Result<()> {
        let directory = self.dir.open();
        let made =
            restore(&directory, &self.file).with_context(|| format!("{} was not restored", self.file.display()))?;
        let path = directory.path().display();
        say(&format!("{path} has the CA of {}: {}", made.made, made.files.join(", ")))?;
        match made.records {
            Some(records) => say(&format!(
                "and its ledger: {records} records. What was issued or revoked since is unknown to it: revoke again, and \
                 enrol anew who is refused"
            )),
            None => say(
                "The ledger is in the database that database.url names: restore that with pg_restore before the service \
                 starts",
            ),
        }?;
        if made.key_is_elsewhere {
            say("The key of the CA is in the token that ca.key names.")?;
        }
        Ok(())
    }
}

impl Reload {
    fn run(self) -> anyhow::Result<()> {
        let CommandOutcome::Reloaded = ask(&self.dir, &Command::Reload)? else { bail!(UNEXPECTED) };
        print(if self.json { "{\"reloaded\": true}\n" } else { "policy, CA and TLS files are in use\n" })
    }
}

fn list_tokens(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Tokens { tokens } = ask(&listing.dir, &Command::ListTokens)? else { bail!(UNEXPECTED) };
    if listing.json {
        return print_json(&serde_json::to_value(&tokens)?);
    }
    let at = now();
    let row = |listed: &ListedToken| {
        let token = &listed.token;
        let state = match (&token.used, token.expires < at) {
            (Some(_), _) => "used".to_owned(),
            (None, true) => "expired".to_owned(),
            (None, false) => {
                let bound = if token.key.is_some() { ", to one key" } else { "" };
                format!("open for {}{bound}", time_left(token.expires + 1 - at))
            }
        };
        [listed.id.clone(), token.name.clone(), join(&token.networks), join(&token.groups), state]
    };
    print(&table(["TOKEN", "NAME", "NETWORKS", "GROUPS", "STATE"], tokens.iter().map(row)))
}

fn list_issued(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Issued { certificates } = ask(&listing.dir, &Command::ListIssued)? else { bail!(UNEXPECTED) };
    if listing.json {
        return print_json(&serde_json::to_value(&certificates)?);
    }
    let at = now();
    let row = |listed: &ListedCertificate| {
        let issued = &listed.issued;
        let left = match issued.revoked {
            Some(_) => "revoked".to_owned(),
            None => time_left(issued.not_after + 1 - at),
        };
        [issued.name.clone(), join(&issued.networks), join(&issued.groups), left, listed.fingerprint.clone()]
    };
    print(&table(["NAME", "NETWORKS", "GROUPS", "LEFT", "FINGERPRINT"], certificates.iter().map(row)))
}

fn list_addresses(listing: &Listing) -> anyhow::Result<()> {
    let CommandOutcome::Addresses { addresses } = ask(&listing.dir, &Command::ListAddresses)? else {
        bail!(UNEXPECTED)
    };
    if listing.json {
        return print_json(&serde_json::to_value(&addresses)?);
    }
    let at = now();
    let row = |listed: &ListedAddress| {
        let kept = &listed.kept;
        let state = if listed.in_use { "in use" } else { "nobody has them now" };
        let left = time_left(kept.until + 1 - at);
        [listed.name.clone(), join(&kept.networks), state.to_owned(), format!("{left} more at least")]
    };
    print(&table(["NAME", "NETWORKS", "STATE", "KEPT"], addresses.iter().map(row)))
}

fn ask(dir: &Dir, command: &Command) -> anyhow::Result<CommandOutcome> {
    match call(&dir.open(), command)? {
        CommandOutcome::Failed { message } => bail!(message),
        answer => Ok(answer),
    }
}

impl Dir {
    fn open(&self) -> Directory {
        Directory::new(&self.path)
    }
}

fn duration(text: &str) -> Result<i64, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

fn join<T: ToString>(items: &[T]) -> String {
    if items.is_empty() { "-".to_owned() } else { items.iter().map(T::to_string).collect::<Vec<_>>().join(",") }
}

/// Columns as wide as their widest cell, the last one ragged.
fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows = rows.map(|row| row.map(|cell| visible(&cell).into_owned()));
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let line: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Prints one line, whatever the names in it are.
fn say(line: &str) -> anyhow::Result<()> {
    print(&format!("{}\n", visible(line)))
}

fn print_json(document: &serde_json::Value) -> anyhow::Result<()> {
    print(&format!("{}\n", visible_json(&format!("{document:#}"))))
}

/// Writes to standard output; a closed pipe is an error like any other.
fn print(text: &str) -> anyhow::Result<()> {
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
}

/// Whoever follows a service that began is back by then.
const SETTLED_AFTER: i64 = 120;
/// How long the last requests to the API server and the database may take once nothing is served any more.
const LAST_WORK: Duration = Duration::from_secs(5);
/// Longer policies and certificates than any that the service reads are cut, and then refused.
const MAX_FILE_BYTES: u64 = 4 << 20;
const UNEXPECTED: &str = "the running nebula-ca gave the answer to another question; is it of another version?";
