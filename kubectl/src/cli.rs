//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use nebula_cni_contract::flow_records::{ConditionsOfPods, Filter};

use crate::identity::{Account, Role};

/// Show how Nebula stands in this cluster
///
/// Exits with 0 if all is well, 79 if something is not as it should be, 1 if not everything could be asked, and 64 if
/// the command line cannot be understood.
#[derive(Debug, Parser)]
#[command(name = "kubectl-nebula", bin_name = "kubectl nebula", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Where to look.
    #[command(flatten)]
    pub place: Place,
    /// How to print: a table with further columns, JSON (one object a line), or YAML
    #[arg(short, long, global = true, value_name = "FORM")]
    pub output: Option<Form>,
}

/// Which cluster and namespace, and as whom.
#[derive(Debug, Args)]
pub struct Place {
    /// Namespace; default: that of the context
    #[arg(short, long, global = true)]
    pub namespace: Option<String>,
    /// All namespaces
    #[arg(short = 'A', long, global = true, conflicts_with = "namespace")]
    pub all_namespaces: bool,
    /// Context of the kubeconfig
    #[arg(long, global = true)]
    pub context: Option<String>,
    /// File with the credentials; default: that of kubectl
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of Nebula itself
    #[arg(long, global = true, value_name = "NAMESPACE", default_value = "nebula-system")]
    pub system_namespace: String,
    /// ServiceAccount as which agents and the CA are asked; default: nebula-viewer of the namespace, or of Nebula's own
    /// for what concerns the whole cluster (nebula-operator to change something)
    #[arg(long, global = true, value_name = "NAMESPACE/NAME")]
    pub service_account: Option<Account>,
}

/// How an answer is printed, if not as a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Form {
    /// A table with further columns.
    Wide,
    /// One object a line.
    Json,
    /// Documents.
    Yaml,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show nodes, agents, pods without protection, certificates that expire, and upgrades
    Status(Status),
    /// Show the pods that have a tunnel, or should have one
    Pods,
    /// Show who spoke to whom and who was refused, as the nodes recorded it; the newest last
    Flows(Flows),
    /// Show why a pod does not reach what it sends to: each link between both, up to the first broken one
    Why(Why),
    /// Ask the network policies of pods: what they say of a flow, and which ones would allow what was seen
    Policy(Policy),
    /// Show how far the installed program has reached the pods' instances; pause and resume that
    Upgrade(Upgrade),
    /// Look for what is wrong and say what to do
    Check(Check),
    /// Serve a page for a browser on this machine: who speaks to whom, flows, nodes, certificates, upgrades
    Page(Page),
    /// Find what is wrong on the nodes and in the instances of pods, with cause and remedy
    Doctor(OfPod),
    /// Show the certificates of pods, the first to expire above: what they grant, when they end, how they are renewed
    Cert(OfPod),
    /// Write an archive for support: states, findings, configuration, events and logs of Nebula, without secrets
    Bundle(Bundle),
    /// Revoke the certificates of pods or of a host; shows them and asks first
    Revoke(Revoke),
}

/// Of `revoke`.
#[derive(Debug, Args)]
pub struct Revoke {
    /// Pods whose certificates to revoke: NAMESPACE/NAME, or NAME
    #[arg(value_name = "POD", required_unless_present_any = ["fingerprint", "host"], conflicts_with_all = ["fingerprint", "host"])]
    pub pods: Vec<String>,
    /// The certificate with this fingerprint, if it is of a pod of the namespace; with -A, whoever it is of
    #[arg(long, value_name = "HEX", conflicts_with = "host")]
    pub fingerprint: Option<String>,
    /// The certificates of the host with this name
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Why, for the audit log of the CA: up to 200 characters
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Also refuse the pods every further certificate; those that replace them get theirs
    #[arg(long, conflicts_with = "host")]
    pub keep_out: bool,
    /// Only show what would be revoked
    #[arg(long)]
    pub dry_run: bool,
    /// Revoke without a question
    #[arg(long, conflicts_with = "dry_run")]
    pub yes: bool,
}

/// Of `bundle`.
#[derive(Debug, Args)]
pub struct Bundle {
    /// The archive, which must not be there yet; default: nebula-bundle-TIME.tar.gz in this folder
    #[arg(short, long)]
    pub file: Option<PathBuf>,
    /// Seconds after which what has not been read is left out
    #[arg(long, value_name = "SECONDS", default_value_t = 180, value_parser = clap::value_parser!(u32).range(5..=3600))]
    pub within: u32,
}

/// Of `doctor` and `cert`.
#[derive(Debug, Args)]
pub struct OfPod {
    /// Only this pod: NAMESPACE/NAME, or NAME
    pub pod: Option<String>,
}

/// Of `status`.
#[derive(Debug, Args)]
pub struct Status {
    /// Show it again and again
    #[arg(short, long)]
    pub watch: bool,
    /// Seconds between two looks
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub interval: u32,
}

/// Of `flows`.
#[derive(Debug, Args)]
pub struct Flows {
    /// Go on with what is recorded from now on
    #[arg(short, long)]
    pub follow: bool,
    /// Which records.
    #[command(flatten)]
    pub wanted: ConditionsOfPods,
    /// Show at most this number of records, the newest
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
}

/// Of `why`.
#[derive(Debug, Args)]
pub struct Why {
    /// The pod that sends
    #[arg(value_name = "NAMESPACE/POD", value_parser = crate::why::source)]
    pub from: String,
    /// What it sends to, and the port (without one: a ping): pay/db:5432, pod/pay/db-0:5432, db.pay.svc:53/udp
    #[arg(value_name = "NAMESPACE/NAME[:PORT[/PROTOCOL]]", value_parser = crate::why::target)]
    pub to: String,
}

impl Why {
    /// The namespace of the pod that sends.
    #[must_use]
    pub fn namespace(&self) -> &str {
        self.from.split('/').next().unwrap_or_default()
    }
}

/// Of `policy`.
#[derive(Debug, Args)]
pub struct Policy {
    /// What to do.
    #[command(subcommand)]
    pub verb: PolicyVerb,
}

/// What to ask about network policies.
#[derive(Debug, Subcommand)]
pub enum PolicyVerb {
    /// Show whether network policies allow a flow at both ends, and by which rule; no packet is sent
    ///
    /// Exits with 0 if both ends allow it, 79 if one refuses it, and 1 if it is not known of an end.
    Test(PolicyTest),
    /// Print network policies that allow what the pods of a namespace were seen to do in their tunnels
    Suggest(PolicySuggest),
}

/// Of `policy test`.
#[derive(Debug, Args)]
pub struct PolicyTest {
    /// Source: a pod, or an address
    #[arg(value_name = "NAMESPACE/POD", value_parser = crate::policy::test::source)]
    pub from: String,
    /// Destination, and its port (an ICMP message without one): pay/db:5432, db.pay.svc:53/udp, 10.244.1.7:443
    #[arg(value_name = "NAMESPACE/NAME[:PORT[/PROTOCOL]]", value_parser = crate::policy::test::target)]
    pub to: String,
}

/// Of `policy suggest`.
#[derive(Debug, Args)]
pub struct PolicySuggest {
    /// Only flows that began within this time, such as 24h
    #[arg(long, value_name = "TIME", value_parser = Filter::span_ms)]
    pub since: Option<u64>,
    /// Also what `nebula-cni-agent policy suggest --json` printed on a node; - is stdin
    #[arg(long, value_name = "FILE")]
    pub with: Vec<PathBuf>,
}

/// Of `upgrade`.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// What to do.
    #[command(subcommand)]
    pub verb: UpgradeVerb,
}

/// What to do about upgrades.
#[derive(Debug, Subcommand)]
pub enum UpgradeVerb {
    /// Show how far each node is
    Status {
        /// Only these nodes
        nodes: Vec<String>,
    },
    /// Upgrade no further instance, also of later releases, until it is resumed
    Pause {
        /// Only of these nodes; default: all
        nodes: Vec<String>,
    },
    /// Go on; instances that did not keep the program get it again, beginning with a canary
    Resume {
        /// Only of these nodes; default: all
        nodes: Vec<String>,
    },
}

impl Upgrade {
    /// Who may do it.
    #[must_use]
    pub fn role(&self) -> Role {
        if matches!(self.verb, UpgradeVerb::Status { .. }) { Role::ClusterViewer } else { Role::Operator }
    }
}

/// Of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// Look whether Nebula can be installed
    #[arg(long)]
    pub pre: bool,
    /// Only these categories
    #[arg(long, value_name = "CATEGORY", value_delimiter = ',')]
    pub only: Vec<crate::check::Category>,
}

/// Of `page`.
#[derive(Debug, Args)]
pub struct Page {
    /// Port on 127.0.0.1; default: a free one
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub port: u16,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_options_may_stand_behind_the_command() {
        Cli::command().debug_assert();
        let cli = Cli::try_parse_from(["x", "flows", "-n", "shop", "-o", "json", "--since", "15m"]).unwrap();
        assert_eq!((cli.place.namespace.as_deref(), cli.output), (Some("shop"), Some(Form::Json)));
        for bad in [
            &["flows", "-n", "a", "-A"][..],
            &["flows", "--limit", "0"],
            &["check", "--only", "weather"],
            &["why", "web", "pay/db"],
            &["why", "shop/web", "pay/db:0"],
            &["revoke", "web"],
            &["revoke", "--reason", "x"],
            &["revoke", "web", "--host", "edge", "--reason", "x"],
            &["revoke", "--host", "edge", "--keep-out", "--reason", "x"],
            &["revoke", "web", "--reason", "x", "--yes", "--dry-run"],
            &["policy", "test", "web", "pay/db"],
            &["policy", "test", "shop/web", "pay/db:0"],
            &["policy", "suggest", "--since", "1y"],
            &[],
        ] {
            assert!(Cli::try_parse_from([&["x"], bad].concat()).unwrap_err().use_stderr(), "{bad:?}");
        }
    }
}
