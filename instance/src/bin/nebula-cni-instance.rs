//! The tunnel of one pod: started by the CNI plugin with a launch file, stopped by a signal or with the pod.

use std::io::{Read, Write};
use std::path::Path;
use std::process::ExitCode;

use nebula_cert::BUILD_NOTE;
use nebula_config::go::flags::{self, Flag};
use nebula_instance::pod::kube_labels;
use nebula_instance::pod::launch_file;
use nebula_instance::pod::status_socket;
use nebula_instance::pod::tunnel;
use nebula_linux::{memory, notify};

fn main() -> ExitCode {
    memory::share_one_heap();
    nebula_core::io::register_barriers();
    let flags = match flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(flags) => flags,
        Err(flags::Error::Help) => {
            print(&format!("{ABOUT}\n{}", flags::usage("nebula-cni-instance", FLAGS)));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n{}", flags::usage("nebula-cni-instance", FLAGS));
            return ExitCode::from(2);
        }
    };
    if flags.is_set("version") {
        print(concat!("nebula-cni-instance ", env!("CARGO_PKG_VERSION"), "\n"));
        print(BUILD_NOTE);
        return ExitCode::SUCCESS;
    }
    if flags.is_set("labels") {
        return labels();
    }
    if let Some(launch) = flags.value("status") {
        let spec = match launch_file::read(Path::new(launch)) {
            Ok(spec) => spec,
            Err(error) => {
                eprintln!("nebula-cni-instance: {error}");
                return ExitCode::FAILURE;
            }
        };
        return match status_socket::ask(&spec.status_socket) {
            Ok(document) => {
                print(&document);
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("nebula-cni-instance: no answer at {}: {error}", spec.status_socket.display());
                ExitCode::FAILURE
            }
        };
    }
    let Some(launch) = flags.value("launch") else {
        eprintln!(
            "nebula-cni-instance: --launch FILE is missing; the CNI plugin writes the file and starts this program"
        );
        return ExitCode::from(2);
    };
    let predecessor = match flags.value("take-over").map(str::parse) {
        None => None,
        Some(Ok(pid)) if pid > 0 => Some(pid),
        Some(_) => {
            eprintln!("nebula-cni-instance: --take-over needs the number of a process");
            return ExitCode::from(2);
        }
    };
    match tunnel::serve(Path::new(launch), predecessor) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            notify::start_error(&error.to_start_error());
            eprintln!("nebula-cni-instance: {error}");
            ExitCode::FAILURE
        }
    }
}

fn labels() -> ExitCode {
    let mut text = Vec::new();
    let question = std::io::stdin().take(MAX_QUESTION_BYTES).read_to_end(&mut text).map_err(serde_json::Error::io);
    match question.and_then(|_| serde_json::from_slice(&text)) {
        Ok(question) => {
            print(&serde_json::to_string(&kube_labels::answer(&question)).unwrap_or_default());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("nebula-cni-instance: standard input holds no question of the plugin: {error}");
            ExitCode::from(2)
        }
    }
}

fn print(text: &str) {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const MAX_QUESTION_BYTES: u64 = 64 << 10;

const ABOUT: &str = "\
Gives one pod its Nebula tunnel: makes the device in the pod's network namespace, asks the CA service for a
certificate, and moves packets until the pod is gone or SIGTERM arrives. Logs to standard error.
";

const FLAGS: &[Flag] = &[
    Flag { name: "launch", takes_value: true, help: "Launch file that the CNI plugin wrote" },
    Flag {
        name: "take-over",
        takes_value: true,
        help: "Take over from this process, the running instance with the same launch file, if it still runs",
    },
    Flag { name: "status", takes_value: true, help: "Print the status (JSON) of the instance with this launch file" },
    Flag {
        name: "labels",
        takes_value: false,
        help: "Answer the plugin's question on standard input for labels of a pod",
    },
    Flag { name: "version", takes_value: false, help: "Print version" },
];
