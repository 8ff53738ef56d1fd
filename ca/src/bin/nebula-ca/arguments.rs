//! The command line.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use nebula_ca::{Directory, parse_duration};

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
pub(super) struct Cli {
    #[command(subcommand)]
    pub(super) verb: Verb,
}

#[derive(Subcommand)]
pub(super) enum Verb {
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
}

#[derive(Subcommand)]
pub(super) enum CertificateVerb {
    /// List certificates
    List(Listing),
    Show(Show),
    Revoke(Revoke),
    Readmit(Readmit),
}

#[derive(Subcommand)]
pub(super) enum AddressVerb {
    /// List names, their addresses, and whether a pod has them now
    List(Listing),
    Release(ReleaseAddress),
}

/// Keep the addresses of a name no longer
///
/// A pod that has them now keeps them until its last certificate is given back, blocked or expired.
#[derive(Args)]
pub(super) struct ReleaseAddress {
    #[command(flatten)]
    pub(super) listing: Listing,
    /// The pod (NAMESPACE/NAME), or "host NAME"
    #[arg(value_name = "NAME")]
    pub(super) name: String,
}

#[derive(Subcommand)]
pub(super) enum RolloverVerb {
    /// Show which CA signs, and which are trusted besides
    Status(Listing),
    /// Make the next CA and let everybody trust it; the present one goes on signing
    Prepare(Listing),
    Switch(Switch),
    /// Trust retired CAs no more, once no certificate of theirs is valid
    Finish(Listing),
}

#[derive(Subcommand)]
pub(super) enum PolicyVerb {
    Check(PolicyCheck),
}

/// Read a policy as the service would, and change nothing
///
/// Exits with 1 and names every mistake if the service would refuse it. Needs no service and none of its files.
#[derive(Args)]
pub(super) struct PolicyCheck {
    /// The policy, before it replaces policy.jsonc
    #[arg(value_name = "FILE")]
    pub(super) policy: PathBuf,
    /// Certificate of the CA: also check that it allows what the policy wants to sign
    #[arg(long, value_name = "FILE")]
    pub(super) ca: Option<PathBuf>,
}

#[derive(Subcommand)]
pub(super) enum TlsVerb {
    /// Show the names and the fingerprint of the key (SHA-256 of the SubjectPublicKeyInfo)
    Show(Listing),
    AddName(AddName),
}

/// Make a TLS certificate with more names, of the same key
///
/// A running service uses it at once. Clients that have a copy of the former tls.crt, or the fingerprint of its key,
/// need nothing new.
#[derive(Args)]
pub(super) struct AddName {
    #[command(flatten)]
    pub(super) listing: Listing,
    /// Host names or IP addresses
    #[arg(value_name = "NAME", required = true)]
    pub(super) names: Vec<String>,
}

/// Let the next CA sign
///
/// Refused for a day after `prepare`: a host that was away would get certificates of a CA it does not know.
#[derive(Args)]
pub(super) struct Switch {
    #[command(flatten)]
    pub(super) listing: Listing,
    /// Do not wait for hosts that were away
    #[arg(long)]
    pub(super) at_once: bool,
}

/// Show one certificate, with its PEM
#[derive(Args)]
pub(super) struct Show {
    #[command(flatten)]
    pub(super) listing: Listing,
    /// Fingerprint, the beginning of one, or a name; of several with that name the newest
    #[arg(value_name = "FINGERPRINT|NAME")]
    pub(super) which: String,
}

/// Write a copy of everything that the service needs into one file, while it runs or not
///
/// Keys and certificates, TLS files, node token, policy and ledger; audit.log is not in it. Whoever has the file has
/// the CA. A ledger in PostgreSQL is not in it: copy that with pg_dump.
#[derive(Args)]
pub(super) struct BackUp {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// The copy, which does not exist yet
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,
}

/// Make the directory of a service from a file that `backup` wrote
///
/// Nothing that exists is overwritten. The other service must have ended for good.
#[derive(Args)]
pub(super) struct Restore {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// The copy
    #[arg(value_name = "FILE")]
    pub(super) file: PathBuf,
}

/// Let the running service read policy.jsonc, ca.crt, ca.key and its TLS files again
///
/// SIGHUP does the same. A mistake in any of these files changes nothing and is named.
#[derive(Args)]
pub(super) struct Reload {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Make a new CA: its key and certificate, TLS identity, node token and policy
///
/// Nothing that exists is overwritten. ca.crt and ca.key are ordinary Nebula files. They are no backup, because they
/// lack the ledger of revocations and addresses; `nebula-ca backup` makes one.
#[derive(Args)]
pub(super) struct Init {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Name of the CA certificate
    #[arg(long, default_value = "nebula-ca")]
    pub(super) name: String,
    /// Certificate version: 1 for peers older than Nebula 1.10, IPv4 only
    #[arg(long = "version", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(super) version: u8,
    /// Curve of all keys
    #[arg(long, value_enum, default_value_t = CurveName::USUAL)]
    pub(super) curve: CurveName,
    /// Life of the CA
    #[arg(long, default_value = "3650d", value_parser = duration)]
    pub(super) duration: i64,
    /// Networks the CA may ever sign for; without this it may sign for any
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    pub(super) networks: Vec<IpNet>,
    /// Prefixes that pods get overlay addresses from [default: --networks, or 10.42.0.0/16]
    #[arg(long, value_delimiter = ',', value_name = "PREFIX")]
    pub(super) overlay: Vec<IpNet>,
    /// Host name or IP address under which clients reach the service; repeat for more [default: name and addresses of
    /// this machine, localhost, 127.0.0.1, ::1]
    #[arg(long = "tls-name", value_name = "NAME")]
    pub(super) tls_names: Vec<String>,
    /// Succeed and change nothing where a complete CA is already, as an init container should
    #[arg(long)]
    pub(super) unless_there: bool,
}

/// Run the service until SIGTERM or SIGINT
///
/// SIGHUP reads the policy, the CA and the TLS files again.
///
/// An encrypted ca.key is opened with the passphrase in the environment variable NEBULA_CA_PASSPHRASE. In a build with
/// the feature pkcs11, ca.key may be the PKCS#11 URI of a key in a token instead. What is logged is set by RUST_LOG
/// (default: info). Each decision is also a JSON line in audit.log.
#[derive(Args)]
pub(super) struct Serve {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Address and port to listen on; port 0 takes a free one and logs it
    #[arg(long, default_value = "127.0.0.1:8443")]
    pub(super) listen: SocketAddr,
    /// Address and port for a page of all identities (/), metrics for Prometheus (/metrics), /healthz and /readyz, in
    /// plain HTTP: keep it to those who may see names and addresses [default: none]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) status_listen: Option<SocketAddr>,
    /// Host name or IP address that the TLS certificate must have; repeat for more. Those that are missing are added at
    /// the start, to a certificate of the same key
    #[arg(long = "tls-name", value_name = "NAME")]
    pub(super) tls_names: Vec<String>,
    /// Begin an empty ledger for a CA that is older than an hour and has none: certificates that were revoked are good
    /// again, and addresses that hosts have are given away
    #[arg(long)]
    pub(super) new_ledger: bool,
}

#[derive(Subcommand)]
pub(super) enum Token {
    Create(CreateToken),
    /// List tokens and what became of them
    List(Listing),
    Revoke(RevokeToken),
}

/// Make a token worthless that was not used yet
#[derive(Args)]
pub(super) struct RevokeToken {
    #[command(flatten)]
    pub(super) listing: Listing,
    /// Its short name, from `token list`
    #[arg(value_name = "TOKEN")]
    pub(super) id: String,
}

/// Make a one-time token and print it; it cannot be shown again
///
/// Works while the service runs and while it does not. The first key the token is used with is the only one it is ever
/// good for; with --key it is good for that one only, so that whoever else reads it gets nothing.
#[derive(Args)]
pub(super) struct CreateToken {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Name of the certificate
    #[arg(long)]
    pub(super) name: String,
    /// Overlay address of the host with the length of the overlay prefix, for example 10.42.0.1/16 [default: a free one
    /// of the pool in policy.jsonc (hosts.pool)]
    #[arg(long = "network", visible_alias = "networks", value_delimiter = ',', value_name = "ADDRESS/LENGTH")]
    pub(super) networks: Vec<IpNet>,
    /// Groups for firewall rules
    #[arg(long, value_delimiter = ',')]
    pub(super) groups: Vec<String>,
    /// Networks behind the host that it may route
    #[arg(long, value_delimiter = ',', value_name = "NETWORK")]
    pub(super) unsafe_networks: Vec<IpNet>,
    /// How long the token is accepted, at most 30d
    #[arg(long, default_value = "1h", value_parser = duration)]
    pub(super) ttl: i64,
    /// Life of the certificate, at most hosts.longest_life of policy.jsonc. The host renews it after two thirds
    #[arg(long, default_value = "7d", value_parser = duration)]
    pub(super) life: i64,
    /// Print the string for `nebula up` instead: address of this service, fingerprint of its TLS key, the overlay
    /// network of the host, and the token
    #[arg(long)]
    pub(super) join: bool,
    /// Bind the token to the key that `nebula up -prepare` printed on the host: it is worth nothing with another one.
    /// Without this it is good for whoever uses it first
    #[arg(long, value_name = "KEY")]
    pub(super) key: Option<String>,
    /// Address of this service in that string, as hosts reach it [default: the first full host name in its TLS
    /// certificate, else the first address, port 8443]
    #[arg(long, requires = "join", value_name = "https://HOST:PORT")]
    pub(super) url: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Args)]
pub(super) struct Listing {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Block a certificate until it expires
///
/// Pods and hosts that follow the service drop tunnels to it within seconds; the answer names those that do not, and
/// when they hear of it. A pod that its node still vouches for gets a new certificate within seconds, unless it is
/// kept out.
#[derive(Args)]
pub(super) struct Revoke {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// Fingerprint, or the name of all certificates to block, or the UID or NAMESPACE/NAME of the pod that they are of
    #[arg(value_name = "FINGERPRINT|NAME|UID|POD")]
    pub(super) which: String,
    /// Also refuse every further certificate to the pods, by their UIDs, until `certificate readmit`; pods that replace
    /// them are not affected
    #[arg(long)]
    pub(super) keep_out: bool,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Let a pod in again that `certificate revoke --keep-out` keeps out
///
/// It gets its next certificate when it asks again: within a minute.
#[derive(Args)]
pub(super) struct Readmit {
    #[command(flatten)]
    pub(super) dir: Dir,
    /// What `certificate revoke` was told, or the UID, NAMESPACE/NAME or name of the pod
    #[arg(value_name = "FINGERPRINT|NAME|UID|POD")]
    pub(super) pod: String,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Args)]
pub(super) struct Dir {
    /// Directory of the service
    #[arg(long = "dir", value_name = "DIR")]
    pub(super) path: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum CurveName {
    #[value(name = "25519", alias = "X25519", alias = "Curve25519", alias = "CURVE25519")]
    Curve25519,
    #[value(name = "P256", alias = "p256")]
    P256,
}

impl CurveName {
    const USUAL: Self = match nebula_cert::Curve::USUAL {
        nebula_cert::Curve::Curve25519 => Self::Curve25519,
        nebula_cert::Curve::P256 => Self::P256,
    };
}

impl Dir {
    pub(super) fn open(&self) -> Directory {
        Directory::new(&self.path)
    }
}

fn duration(text: &str) -> Result<i64, String> {
    parse_duration(text).map_err(|error| error.to_string())
}
