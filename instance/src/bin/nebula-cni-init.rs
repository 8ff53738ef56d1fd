//! First init container of an enrolled pod: hands the pod's token to the instance on the node and receives its
//! certificate.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use nebula_config::go::flags::{self, Flag};
use nebula_instance::init;
use nebula_linux::signals;

fn main() -> ExitCode {
    // It waits for the pod's certificate, and the pod may be deleted meanwhile.
    if let Err(error) = signals::end_even_first_process() {
        eprintln!("nebula-cni-init: cannot handle signals: {error}");
        return ExitCode::FAILURE;
    }
    let flags = match flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(flags) => flags,
        Err(flags::Error::Help) => {
            print(&format!("{ABOUT}\n{}", flags::usage("nebula-cni-init", FLAGS)));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n{}", flags::usage("nebula-cni-init", FLAGS));
            return ExitCode::from(2);
        }
    };
    if flags.is_set("version") {
        print(concat!("nebula-cni-init ", env!("CARGO_PKG_VERSION"), "\n"));
        return ExitCode::SUCCESS;
    }
    let deadline = flags.value("deadline").map_or(Ok(DEFAULT_DEADLINE_SECONDS), str::parse);
    let Ok(deadline @ 1..) = deadline else {
        eprintln!("nebula-cni-init: -deadline takes a number above 0; see -help");
        return ExitCode::from(2);
    };
    let settings = init::Settings {
        token_file: flags.value("token-file").unwrap_or(TOKEN_FILE).into(),
        out_dir: flags.value("out-dir").unwrap_or(OUT_DIR).into(),
        deadline: Duration::from_secs(deadline),
    };
    match init::run(&settings) {
        Ok(name) => {
            print(&format!("certificate of {name} in {}\n", settings.out_dir.display()));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("nebula-cni-init: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const TOKEN_FILE: &str = "/var/run/secrets/nebula/token";
const OUT_DIR: &str = "/var/run/nebula";
// In seconds.
const DEFAULT_DEADLINE_SECONDS: u64 = 300;

const ABOUT: &str = "\
Receives a pod's Nebula certificate in the pod's first init container: shows the pod's service-account token to the pod's
instance, which listens on a unix socket in the pod's network namespace, writes what comes back (host.crt and ca.crt) and
ends. The containers after it start with the overlay up.
";

const FLAGS: &[Flag] = &[
    Flag {
        name: "token-file",
        takes_value: true,
        help: "The pod's token for the CA service (default /var/run/secrets/nebula/token)",
    },
    Flag { name: "out-dir", takes_value: true, help: "Folder for the files (default /var/run/nebula)" },
    Flag { name: "deadline", takes_value: true, help: "Seconds to wait for the certificate (default 300)" },
    Flag { name: "version", takes_value: false, help: "Print version" },
];
