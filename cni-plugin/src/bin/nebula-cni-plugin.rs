//! The plugin's binary: reads a request, answers it and prints the reply. Stdout carries the CNI protocol and nothing
//! else.

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use nebula_cni_plugin::clock::SystemClock;
use nebula_cni_plugin::enrolment::labels::Program;
use nebula_cni_plugin::host::Host;
use nebula_cni_plugin::link::guard::SystemGuards;
use nebula_cni_plugin::link::host_route::SystemRoutes;
use nebula_cni_plugin::link::pod_link::SystemLinks;
use nebula_cni_plugin::netns::SystemNamespaces;
use nebula_cni_plugin::reply::{self, Error, code};
use nebula_cni_plugin::request::{self, Env, Request};
use nebula_cni_plugin::settings::{STATE_DIR, Settings};
use nebula_cni_plugin::supervisor::{Direct, Systemd, heir, launcher};
use nebula_cni_plugin::verb::attach::{self, Outcome};
use nebula_cni_plugin::verb::reconcile::{self, Depth};
use nebula_cni_plugin::verb::{self, add};

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
    eprintln!("Put it into a network configuration list behind the plugin that gives pods their address.");
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
