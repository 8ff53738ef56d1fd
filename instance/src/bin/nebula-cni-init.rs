//! First init container of an enrolled pod: would hand the pod's token over and receive its certificate.

use std::io::Write;
use std::process::ExitCode;

const HELP: &str = "\
nebula-cni-init - receives a pod's Nebula certificate in an init container

Usage: nebula-cni-init [--help | --version]

This release issues certificates without an init container: the instance on the node asks the CA for the pod.
Handing the pod's own token to the instance is not available in this release, so this program refuses to run.
Remove the init container from the pod; its tunnel works without it.
";

fn main() -> ExitCode {
    let text = match std::env::args().nth(1).as_deref() {
        Some("--help" | "-help" | "-h") => HELP,
        Some("--version" | "-version") => concat!("nebula-cni-init ", env!("CARGO_PKG_VERSION"), "\n"),
        _ => {
            eprintln!(
                "nebula-cni-init: not available in this release: certificates are issued without an init container; \
                 remove this container from the pod (see --help)"
            );
            return ExitCode::from(69);
        }
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    ExitCode::SUCCESS
}
