//! `nebula-cni-agent`: reads the command line, calls the library, prints.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use nebula_agent::cluster::taint::KEY as TAINT;
use nebula_agent::cluster::{api, taint_keeper};
use nebula_agent::config::{CONFIG_FILE, Config, ConfigError, STATE_DIR};
use nebula_agent::credentials::Volumes;
use nebula_agent::flows::command as flows;
use nebula_agent::host_root::HostRoot;
use nebula_agent::node::Node;
use nebula_agent::places::Places;
use nebula_agent::policy::asked::{self, AskError};
use nebula_agent::policy::suggest::{self, SuggestError};
use nebula_agent::readiness::verdict;
use nebula_agent::reconcile::command::Keep;
use nebula_agent::rollout::command as upgrade_command;
use nebula_agent::rollout::plan::Request;
use nebula_agent::run::{self, Options};
use nebula_agent::runtime::Client;
use nebula_agent::runtime::loaded::Directories;
use nebula_agent::uninstall::{self, Attached, Left};
use nebula_agent::why::command as why;
use nebula_agent::{on_host, pod_status, process, status};
use nebula_cert::{VisibleLines, json_line, visible};
use nebula_cni_contract::agent_api::change_texts;
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::policy_test::{Destination, End};
use nebula_cni_contract::seen::Seen;
use nebula_cni_policy::suggest::Suggestion;
use nebula_linux::memory;
use nix::sys::signal::{SigSet, Signal};

/// Prepares a Kubernetes node for Nebula, and keeps its pods protected.
#[derive(Parser)]
#[command(name = "nebula-cni-agent", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Run(Run),
    Status(Status),
    Pods(Pods),
    Flows(flows::Options),
    Upgrade(Upgrade),
    Policy(Policy),
    Why(why::Options),
    Uninstall(Uninstall),
    Check(ConfigFile),
    /// Only keep the pods of this node protected, with a chain that somebody else installed
    Keep(Keep),
    /// Changes the root directory and becomes another program
    #[command(name = process::IN_ROOT, hide = true)]
    InRoot {
        root: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        program: Vec<OsString>,
    },
}

/// Works until it is ended; ending it removes nothing from the node
#[derive(Args)]
struct Run {
    #[command(flatten)]
    config: ConfigFile,
    /// Name of this node in Kubernetes; default: the environment variable NODE_NAME
    #[arg(long)]
    node: Option<String>,
    /// The agent's own token, as Kubernetes projects it
    #[arg(long, default_value = Volumes::TOKEN)]
    token_file: PathBuf,
    /// TLS roots of the CA service, from the ConfigMap nebula-trust
    #[arg(long, default_value = Volumes::TLS_CA)]
    trust_file: PathBuf,
    /// Directory with the programs to install; default: the one of this program
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Shows what the agent of this node knows; exits with 1 unless the node is ready
#[derive(Args)]
struct Status {
    #[command(flatten)]
    config: ConfigFile,
    /// Print JSON; that of a pod is the status document of its instance
    #[arg(long)]
    json: bool,
    /// Only this pod: how it stands, and what network policies said about its flows
    #[arg(value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
}

/// Shows the pods of this node that have a tunnel, or all that the instance of one pod says
#[derive(Args)]
struct Pods {
    #[command(flatten)]
    config: ConfigFile,
    /// Print JSON; that of one pod is the status document of its instance
    #[arg(long)]
    json: bool,
    /// Only this pod, with everything that its instance says: state, certificate, tunnels, lost peers, dropped packets
    #[arg(value_name = "NAMESPACE/NAME")]
    pod: Option<String>,
}

/// Shows how far the installed program has reached the instances of this node; pauses and resumes that
#[derive(Args)]
struct Upgrade {
    #[command(subcommand)]
    verb: UpgradeVerb,
}

#[derive(Subcommand)]
enum UpgradeVerb {
    /// Show how many instances have the installed program, and which did not keep it
    Status {
        #[command(flatten)]
        config: ConfigFile,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Upgrade no further instance of this node, also of later releases, until it is resumed
    Pause {
        #[command(flatten)]
        config: ConfigFile,
    },
    /// Go on; instances that did not keep the program get it again, beginning with a canary
    Resume {
        #[command(flatten)]
        config: ConfigFile,
    },
}

/// Asks the network policies of this node
#[derive(Args)]
struct Policy {
    #[command(subcommand)]
    verb: PolicyVerb,
}

#[derive(Subcommand)]
enum PolicyVerb {
    /// Show whether network policies allow a flow at both ends, and by which rule; no packet is sent
    ///
    /// Exits with 0 if both ends allow it, 3 if one refuses it, and 4 if this node has no program of one of them.
    Test(PolicyTest),
    /// Print network policies that allow what the pods of a namespace were seen to do in their tunnels
    ///
    /// Each node knows the flows of its own pods: give the answers of the others, printed with --json, to the last one.
    Suggest(PolicySuggest),
}

#[derive(Args)]
struct PolicySuggest {
    #[command(flatten)]
    config: ConfigFile,
    /// Namespace of the pods
    #[arg(short, long)]
    namespace: String,
    /// Only flows that began within this time, such as 24h
    #[arg(long)]
    since: Option<String>,
    /// Also what was printed with --json on another node; - is stdin
    #[arg(long, value_name = "FILE")]
    with: Vec<PathBuf>,
    /// Print JSON: what was seen, and the policies
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct PolicyTest {
    #[command(flatten)]
    config: ConfigFile,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Source: POD.NAMESPACE or NAMESPACE/POD, or an address
    from: String,
    /// Destination, and its port: POD.NAMESPACE:5432, 10.244.1.7:53/udp; an ICMP message without a port
    #[arg(value_name = "TO[:PORT[/PROTOCOL]]")]
    to: String,
}

/// Removes Nebula from this node: chain, then tunnels, then programs. Can be repeated.
#[derive(Args)]
struct Uninstall {
    #[command(flatten)]
    config: ConfigFile,
    /// Remove the tunnels of running pods instead of waiting for the pods to end
    #[arg(long)]
    force: bool,
}

/// Reads the configuration as `run` would, with the chain entry in it, and changes nothing; exits with 1 if it is
/// refused
#[derive(Args)]
struct ConfigFile {
    /// Configuration of the agent
    #[arg(long = "config", default_value = CONFIG_FILE)]
    path: PathBuf,
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|verb| verb == on_host::VERB) {
        // Before any thread is started: one of several cannot change its mount namespace.
        eprintln!("nebula-cni-agent: {}", on_host::run(&arguments.collect::<Vec<_>>()));
        return ExitCode::FAILURE;
    }
    let done = match Cli::parse().verb {
        Verb::Run(options) => run(options),
        Verb::Status(options) => status(&options),
        Verb::Pods(options) => pods(&options),
        Verb::Flows(options) => options.run(&mut io::stdout()).map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Verb::Upgrade(options) => upgrade(&options),
        Verb::Why(options) => explain(&options),
        Verb::Policy(Policy { verb: PolicyVerb::Test(options) }) => policy_test(&options),
        Verb::Policy(Policy { verb: PolicyVerb::Suggest(options) }) => policy_suggest(&options),
        Verb::Uninstall(options) => uninstall(&options),
        Verb::Check(file) => check(&file),
        Verb::Keep(options) => keep(options),
        Verb::InRoot { root, program } => in_root(&root, &program),
    };
    done.unwrap_or_else(|error| {
        eprintln!("nebula-cni-agent: {}", visible(&error.to_string()));
        ExitCode::FAILURE
    })
}

fn run(options: Run) -> Result<ExitCode, Box<dyn Error>> {
    prepare();
    let config = configuration(&options.config)?;
    let programs = match options.programs {
        Some(directory) => directory,
        None => std::env::current_exe()?.parent().map(Path::to_owned).ok_or("this program has no directory")?,
    };
    let volumes = Volumes { token: options.token_file, tls_ca: options.trust_file };
    let options = Options { volumes, programs, node: options.node.or_else(|| std::env::var("NODE_NAME").ok()) };
    let runtime = runtime()?;
    let ended = runtime.block_on(run::run(Node::new(config), options));
    // The plugin may be at work for minutes. What it leaves unfinished is finished by the next agent.
    runtime.shutdown_timeout(LAST_WORK);
    ended?;
    tracing::info!("ended; everything on the node stays as it is");
    Ok(ExitCode::SUCCESS)
}

/// Reads what the operator configured, and compares it with what Kubernetes tells each of its pods about the cluster.
fn configuration(file: &ConfigFile) -> Result<Config, ConfigError> {
    let config = Config::read(&file.path)?;
    let service = std::env::var("KUBERNETES_SERVICE_HOST").ok().and_then(|address| address.parse().ok());
    service.map_or(Ok(()), |service| config.check_services(service))?;
    Ok(config)
}

fn check(file: &ConfigFile) -> Result<ExitCode, Box<dyn Error>> {
    let config = configuration(file)?;
    let keys = config.entry.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let path = file.path.display().to_string();
    writeln!(io::stdout(), "{} is valid; keys of the chain entry: {keys}", visible(&path))?;
    Ok(ExitCode::SUCCESS)
}

fn keep(options: Keep) -> Result<ExitCode, Box<dyn Error>> {
    prepare();
    runtime()?.block_on(options.run())?;
    Ok(ExitCode::SUCCESS)
}

/// Logging, and the TLS library for its several users in this process.
fn prepare() {
    memory::share_one_heap();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| VisibleLines(io::stderr()))
        .with_ansi(false)
        .init();
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
}

fn status(options: &Status) -> Result<ExitCode, Box<dyn Error>> {
    let config = Config::read(&options.config.path)?;
    if let Some(name) = &options.pod {
        let pods = pod_status::of_node(&config.host_root, Path::new(STATE_DIR))?;
        let text = match options.json {
            true => pod_status::document(&pods, name)?,
            false => pod_status::described(&pods, name, SystemClock.unix_seconds())?,
        };
        io::stdout().write_all(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let standings = status::ask(config.listen)?;
    let text = match options.json {
        true => json_line(serde_json::to_string_pretty(&standings)?),
        false => status::table(&standings),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(if verdict(&standings).is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn pods(options: &Pods) -> Result<ExitCode, Box<dyn Error>> {
    let config = Config::read(&options.config.path)?;
    let pods = pod_status::of_node(&config.host_root, Path::new(STATE_DIR))?;
    let text = match (&options.pod, options.json) {
        (Some(name), _) => pod_status::document(&pods, name)?,
        (None, true) => json_line(serde_json::to_string_pretty(&pods)?),
        (None, false) => pod_status::table(&pods, SystemClock.unix_seconds()),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn upgrade(options: &Upgrade) -> Result<ExitCode, Box<dyn Error>> {
    let (file, request) = match &options.verb {
        UpgradeVerb::Status { config, json } => return upgrade_status(&Config::read(&config.path)?, *json),
        UpgradeVerb::Pause { config } => (config, Request::Pause),
        UpgradeVerb::Resume { config } => (config, Request::Resume),
    };
    let config = Config::read(&file.path)?;
    let text = match upgrade_command::ask(&config.host_root, request, &SystemClock) {
        Ok(true) => "the agent has noted it",
        Ok(false) => "noted; no agent has taken it yet, which it does as soon as it looks after the pods of this node",
        Err(error) => return Err(format!("cannot tell the agent of this node, is there one? {error}").into()),
    };
    writeln!(io::stdout(), "{text}")?;
    Ok(ExitCode::SUCCESS)
}

fn explain(options: &why::Options) -> Result<ExitCode, Box<dyn Error>> {
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    Ok(options.run(&runtime()?, &mut io::stdout())?)
}

fn policy_test(options: &PolicyTest) -> Result<ExitCode, Box<dyn Error>> {
    let config = Config::read(&options.config.path)?;
    let (from, to) = (End::parse(&options.from)?, Destination::parse(&options.to)?);
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let (source, destination) = runtime()?.block_on(async {
        let client = || api::open(None);
        Ok::<_, AskError>((asked::address(&from, client).await?, asked::address(&to.end, client).await?))
    })?;
    let answer = asked::answer(&config.host_root, source, destination, to.protocol, to.port)?;
    let code = answer.outcome().code();
    let text = match options.json {
        true => json_line(serde_json::to_string_pretty(&answer.without_sentences())?),
        false => change_texts(&answer, &mut |text| visible(text).into_owned())?.text(&from, &to.end),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::from(code))
}

fn policy_suggest(options: &PolicySuggest) -> Result<ExitCode, Box<dyn Error>> {
    let config = Config::read(&options.config.path)?;
    let since = options.since.as_deref().map(suggest::seconds).transpose()?;
    let mut others = Vec::new();
    for path in &options.with {
        let name = path.display().to_string();
        let text = suggest::read_answer(path).map_err(|error| format!("cannot read {name}: {error}"))?;
        others.push(Seen::read(&text, &name, &options.namespace)?);
    }
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut seen = runtime()?.block_on(async {
        let client = api::open(None).await.map_err(SuggestError::from)?;
        let host = (&config.host_root, Path::new(STATE_DIR));
        suggest::seen_by_node(host, &client, &options.namespace, &config.policies.dns).await
    })?;
    others.into_iter().for_each(|other| seen.add(other));
    let now = u64::try_from(SystemClock.unix_seconds()).unwrap_or_default();
    let suggestion = Suggestion::of(&seen, since.map_or(0, |since| now.saturating_sub(since)));
    let text = match options.json {
        true => json_line(format!("{:#}", suggestion.document(&seen))),
        false => suggestion.text(&seen),
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn upgrade_status(config: &Config, json: bool) -> Result<ExitCode, Box<dyn Error>> {
    let now = SystemClock.unix_seconds();
    let state = upgrade_command::status(&config.host_root, now);
    let text = match json {
        true => {
            let document = upgrade_command::document(&state, config.upgrade, now);
            json_line(serde_json::to_string_pretty(&document)?)
        }
        false => upgrade_command::table(&state, config.upgrade, now),
    };
    io::stdout().write_all(text.as_bytes())?;
    if status::ask(config.listen).is_err() {
        eprintln!("nebula-cni-agent: no agent answers on this node; this is what the last one noted");
    }
    Ok(ExitCode::SUCCESS)
}

fn uninstall(options: &Uninstall) -> Result<ExitCode, Box<dyn Error>> {
    let mut config = if options.config.path.exists() {
        Config::read(&options.config.path)?
    } else {
        let path = options.config.path.display();
        eprintln!("nebula-cni-agent: there is no {path}; the container runtime says where the folders are");
        let mounted = Path::new(NODE_ROOT);
        Config::of_bare_node(if mounted.is_dir() { mounted } else { Path::new("/") })?
    };
    if config.taint {
        // Before the node's root is entered, which has no credentials for the API server.
        runtime()?.block_on(remove_taint());
    }
    if let Some(root) = config.host_root.path() {
        // Records name network namespaces and processes as the node does.
        process::enter_root(root)?;
        config.host_root = HostRoot::default();
    }
    let named = runtime()?.block_on(async {
        let client = Client::find(config.runtime_endpoint.as_deref(), &config.host_root)?;
        client.status().await
    });
    let named = match named {
        Ok(status) => Directories::read(&status),
        Err(error) if Places::are_configured(&config) => {
            eprintln!("nebula-cni-agent: {error}; goes on with the configured directories");
            Directories::default()
        }
        // Another directory than the one that was installed into would be left as it is.
        Err(error) => return Err(error.into()),
    };
    let places = Places::choose(&config, &named);
    let attached = if options.force { Attached::Detach } else { Attached::Wait };
    let is_ended = end_on_signal()?;
    let tell = &mut |line: &str| eprintln!("nebula-cni-agent: {line}");
    let left = uninstall::run(&places, &config.host_root, attached, &is_ended, tell)?;
    if let Left::Plugin { .. } = left {
        eprintln!(
            "nebula-cni-agent: run this again once these pods are gone; delete the file of a pod that the runtime no \
             longer knows"
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Set by SIGTERM and SIGINT from now on. The first process of a container does not end by itself when it gets them.
fn end_on_signal() -> io::Result<Arc<AtomicBool>> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    signals.thread_block()?;
    let is_ended = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&is_ended);
    thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.wait().is_ok() {
            ended.store(true, Ordering::Relaxed);
        }
    })?;
    Ok(is_ended)
}

/// Removes the agent's taint from all nodes that it may change. If that fails the node is cleaned all the same.
async fn remove_taint() {
    let own = std::env::var("NODE_NAME").ok();
    let outcome = match api::open(None).await {
        Ok(client) => taint_keeper::remove_for_good(&client, client.default_namespace(), own.as_deref()).await,
        Err(error) => Err(error),
    };
    match outcome {
        Ok(0) => {}
        Ok(count) => eprintln!("nebula-cni-agent: removed the taint {TAINT} from {count} nodes"),
        Err(error) => eprintln!(
            "nebula-cni-agent: cannot remove the taint {TAINT}: {error}; kubectl taint nodes --all {TAINT}- removes it"
        ),
    }
}

fn in_root(root: &Path, program: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    use std::os::unix::process::CommandExt;
    let (program, arguments) = program.split_first().ok_or("no program")?;
    process::enter_root(root)?;
    Err(Command::new(program).args(arguments).exec().into())
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    let failed = |what: &'static str| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
    // Without one for blocking work, the runtime panics later.
    let thread = thread::Builder::new().spawn(|| ());
    let thread =
        thread.map_err(failed("cannot start a thread (clone3(2) must be allowed, or answered with ENOSYS)"))?;
    let _ = thread.join();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed("cannot wait for events (epoll and eventfd must be allowed)"))
}

/// Where the chart mounts the node's root.
const NODE_ROOT: &str = "/host";
/// How long a program that the agent runs may go on after SIGTERM.
const LAST_WORK: Duration = Duration::from_secs(5);
