//! The plugin's binary: reads a request, answers it and prints the reply. Stdout carries the CNI protocol and nothing
//! else.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use nebula_cni_contract::clock::SystemClock;
use nebula_cni_contract::labels::Program;
use nebula_cni_contract::netns::SystemNamespaces;
use nebula_cni_plugin::attachment::files::Files;
use nebula_cni_plugin::host::Host;
use nebula_cni_plugin::link::capture::SystemCaptures;
use nebula_cni_plugin::link::guard::SystemGuards;
use nebula_cni_plugin::link::host_route::SystemRoutes;
use nebula_cni_plugin::link::pod_link::SystemLinks;
use nebula_cni_plugin::reply::{self, Error, code};
use nebula_cni_plugin::request::{self, Env, Key, Request, is_ifname, is_name};
use nebula_cni_plugin::settings::{STATE_DIR, Settings};
use nebula_cni_plugin::supervisor::{Direct, Systemd, heir, launcher};
use nebula_cni_plugin::verb::attach::{self, Outcome};
use nebula_cni_plugin::verb::present::{self, Tokens};
use nebula_cni_plugin::verb::reconcile::{self, Depth};
use nebula_cni_plugin::verb::upgrade::Target;
use nebula_cni_plugin::verb::{self, add, refresh, table, upgrade};

fn main() -> ExitCode {
    close_inherited_files();
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    if let Some((verb, rest)) = arguments.split_first() {
        return match verb.to_str() {
            Some(launcher::VERB) => launch(rest),
            Some(heir::VERB) => {
                heir::run();
                ExitCode::SUCCESS
            }
            Some("attach") => attach(rest.first().is_some_and(|word| word == "--afresh")),
            Some("present") => present(rest),
            Some("refresh") => refresh(),
            Some("upgrade") => upgrade(rest),
            Some("table") => table(rest),
            Some("reconcile") => reconcile(rest.first().map_or_else(|| Path::new(STATE_DIR), Path::new)),
            _ => about(),
        };
    }
    let env: Env = env::vars_os().collect();
    let (version, request) = request::read(&env, io::stdin().lock());
    let direct = Direct::new();
    let host = this_host(&direct);
    match request {
        Ok(None) => about(),
        Ok(Some(request)) => match verb::answer(&request, &host) {
            Ok(text) => finish(&request, &host, &text),
            Err(error) => {
                let told = refuse(&error, &version);
                // CHECK may have found a dead instance, and its error message promises a restart.
                if matches!(request, Request::Check(_)) {
                    look_around(&request, &host);
                }
                told
            }
        },
        Err(error) => refuse(&error, &version),
    }
}

fn this_host(direct: &Direct) -> Host<'_> {
    Host {
        clock: &SystemClock,
        namespaces: &SystemNamespaces,
        direct,
        systemd: &Systemd,
        routes: &SystemRoutes,
        links: &SystemLinks,
        guards: &SystemGuards,
        captures: &SystemCaptures,
        labels: &Program,
        plugin_dir: env::current_exe().ok().and_then(|exe| exe.parent().map(Into::into)),
    }
}

/// Attaches a running pod, whose request is given as for ADD. Prints whether it has a tunnel now.
fn attach(afresh: bool) -> ExitCode {
    let env: Env = env::vars_os().collect();
    let (version, request) = request::read(&env, io::stdin().lock());
    let direct = Direct::new();
    let attached = match request {
        Ok(Some(Request::Add(request))) => attach::run(&request, afresh, &this_host(&direct)),
        Ok(_) => Err(Error::new(code::ENVIRONMENT, "attach needs CNI_COMMAND ADD")),
        Err(error) => Err(error),
    };
    match attached {
        Ok(outcome) => match print(&format!(r#"{{"attached":{}}}"#, outcome == Outcome::Attached)) {
            Ok(()) => ExitCode::SUCCESS,
            // The pod keeps its tunnel: it has been running all along, and whoever asked will look again.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => refuse(&error, &version),
    }
}

/// The attachment that the first four arguments name, and the other arguments.
fn attachment_of(arguments: &[OsString]) -> Option<(Files, Vec<&str>)> {
    let words: Option<Vec<&str>> = arguments.iter().map(|word| word.to_str()).collect();
    match words?.as_slice() {
        [state_dir, network, container_id, ifname, rest @ ..]
            if is_name(network) && is_name(container_id) && is_ifname(ifname) =>
        {
            let [network, container_id, ifname] = [network, container_id, ifname].map(|word| (*word).to_owned());
            let key = Key { network, container_id, ifname };
            Some((Files::new(Path::new(*state_dir), &key), rest.to_vec()))
        }
        _ => None,
    }
}

/// Shows an instance its pod's token.
fn present(arguments: &[OsString]) -> ExitCode {
    let Some((files, rest)) = attachment_of(arguments).filter(|(_, rest)| rest.len() <= 2) else {
        let usage = "present needs STATE_DIR NETWORK CONTAINER_ID IFNAME [KUBELET_DIR [AUDIENCE]]";
        return refuse(&Error::new(code::ENVIRONMENT, usage), reply::NEWEST);
    };
    let usual = KUBELET_DIRS.map(Path::new);
    let named = rest.first().map(|kubelet| [Path::new(*kubelet)]);
    let tokens = Tokens {
        kubelet: named.as_ref().map_or(&usual, |named| named.as_slice()),
        finds_kubelet: named.is_none(),
        audience: rest.get(1).copied().unwrap_or(AUDIENCE),
    };
    let direct = Direct::new();
    match present::run(&files, tokens, &this_host(&direct)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => refuse(&error, reply::NEWEST),
    }
}

/// Has another program take over from the instance of a pod.
fn upgrade(arguments: &[OsString]) -> ExitCode {
    let attachment = attachment_of(arguments);
    let (files, target) = match attachment.as_ref().map(|(files, rest)| (files, rest.as_slice())) {
        Some((files, [])) => (files, Target::Installed),
        Some((files, ["--previous"])) => (files, Target::Previous),
        _ => {
            let usage = "upgrade needs STATE_DIR NETWORK CONTAINER_ID IFNAME [--previous]";
            return refuse(&Error::new(code::ENVIRONMENT, usage), reply::NEWEST);
        }
    };
    let direct = Direct::new();
    match upgrade::run(files, target, &this_host(&direct)) {
        Ok(upgraded) => match print(&serde_json::to_string(&upgraded).unwrap_or_default()) {
            Ok(()) => ExitCode::SUCCESS,
            // What is done is done, and the next call says so.
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => refuse(&error, reply::NEWEST),
    }
}

/// Hands the settings of the entry, which is given as for ADD, to the instances of pods that run.
fn refresh() -> ExitCode {
    let env: Env = env::vars_os().collect();
    let (version, request) = request::read(&env, io::stdin().lock());
    let direct = Direct::new();
    let refreshed = match request {
        Ok(Some(Request::Add(request))) => Settings::read(&request.config)
            .and_then(|settings| refresh::run(&settings, &request.config.name, &this_host(&direct))),
        Ok(_) => Err(Error::new(code::ENVIRONMENT, "refresh needs CNI_COMMAND ADD")),
        Err(error) => Err(error),
    };
    match refreshed {
        Ok(refreshed) => match print(&serde_json::to_string(&refreshed).unwrap_or_default()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => refuse(&error, &version),
    }
}

fn reconcile(state_dir: &Path) -> ExitCode {
    let direct = Direct::new();
    match reconcile::all(state_dir, &this_host(&direct)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problems) => {
            problems.iter().for_each(|problem| eprintln!("nebula-cni-plugin: {problem}"));
            ExitCode::FAILURE
        }
    }
}

/// Shows or writes a cluster table.
fn table(arguments: &[OsString]) -> ExitCode {
    let words: Option<Vec<&str>> = arguments.iter().map(|word| word.to_str()).collect();
    let done = words.ok_or(table::Error::Usage).and_then(|words| table::run(&words, io::stdin().lock()));
    match done {
        Ok(text) => match print(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Err(error) => {
            eprintln!("nebula-cni-plugin: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Repairs other attachments once the request is answered, because the runtime never calls a verb for that.
fn look_around(request: &Request, host: &Host<'_>) {
    let config = match request {
        Request::Add(attach) | Request::Check(attach) => &attach.config,
        Request::Gc(collect) => &collect.config,
        Request::Status(config) => config,
        Request::Del(_) | Request::Version(_) => return,
    };
    let state_dir = Settings::state_dir(config);
    if let Err(problems) = reconcile::network(&state_dir, &config.name, Depth::Quick, host) {
        problems.iter().for_each(|problem| eprintln!("nebula-cni-plugin: {problem}"));
    }
}

// For ADD, printing is the commit point: an attachment whose result nobody received is undone.
fn finish(request: &Request, host: &Host<'_>, text: &str) -> ExitCode {
    let Err(e) = print(text) else {
        look_around(request, host);
        return ExitCode::SUCCESS;
    };
    let mut error = Error::new(code::IO, format!("cannot print the result: {e}"));
    if let Request::Add(add) = request
        && let Err(undo) = add::undo(add, host)
    {
        error = error.details(format!("and undoing it failed: {undo}"));
    }
    eprintln!("nebula-cni-plugin: {error}");
    ExitCode::FAILURE
}

fn refuse(error: &Error, version: &str) -> ExitCode {
    eprintln!("nebula-cni-plugin: {error}");
    // If this fails, only the exit code can report it.
    let _ = print(&error.to_json(version));
    ExitCode::FAILURE
}

fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn launch(arguments: &[OsString]) -> ExitCode {
    match launcher::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn about() -> ExitCode {
    eprintln!("nebula-cni-plugin {}: a CNI plugin, called by container runtimes.", env!("CARGO_PKG_VERSION"));
    eprintln!("\"nebula-cni-plugin reconcile [STATE_DIR]\" starts instances that died and forgets pods that are gone.");
    eprintln!("\"nebula-cni-plugin attach\" gives a running pod what ADD would have given it, and is asked like ADD;");
    eprintln!("with --afresh also one whose attachment looks complete.");
    eprintln!(
        "\"nebula-cni-plugin refresh\" hands the settings of the entry to pods that run, and is asked like ADD, for any pod."
    );
    eprintln!(
        "\"nebula-cni-plugin present STATE_DIR NETWORK CONTAINER_ID IFNAME [KUBELET_DIR [AUDIENCE]]\" shows a pod's"
    );
    eprintln!("instance the pod's own token, when the init container that did so has ended.");
    eprintln!(
        "\"nebula-cni-plugin upgrade STATE_DIR NETWORK CONTAINER_ID IFNAME [--previous]\" has the installed program, or the"
    );
    eprintln!("one before, take over from a pod's instance, while its connections go on.");
    eprintln!(
        "\"nebula-cni-plugin table show [--json] [FILE]\" shows what the instances of captured pods know of the cluster;"
    );
    eprintln!("\"table write FILE\" makes such a file from JSON on standard input, where no node agent writes it.");
    eprintln!(
        "Put it into a network configuration list behind the plugin that gives pods their address, or first with \"primary\": true."
    );
    eprintln!("CNI versions: {}", reply::SUPPORTED.join(", "));
    ExitCode::SUCCESS
}

// Runtimes leak open files into plugins; the instance would keep them open for the lifetime of the pod.
fn close_inherited_files() {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    for file in open.into_iter().filter(|number| *number > 2) {
        // The descriptor of the directory just read is closed already.
        let _ = nix::unistd::close(file);
    }
}

/// Where kubelets keep the volumes of pods: by default, k0s, MicroK8s. Others are found by their mounts.
const KUBELET_DIRS: [&str; 3] =
    ["/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"];
/// The audience that the CA expects, unless its policy names another.
const AUDIENCE: &str = "nebula-ca";
