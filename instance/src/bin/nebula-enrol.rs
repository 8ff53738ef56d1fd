//! Gets a host's certificate from the CA service with a one-time token, and renews it. `nebula` runs it for `nebula up`
//! and for `pki.enrolment`; hosts with Go's daemon run it from a timer.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{BUILD_NOTE, Curve, UnixTime, visible};
use nebula_cni_contract::launch::CaAccess;
use nebula_config::go::flags::{self, Flag, Parsed};
use nebula_enrolment::enrol::kubernetes::{Role, service_url};
use nebula_enrolment::enrol::limits::Limits;
use nebula_enrolment::enrol::{self, Files, Renewal, follow, up};
use nebula_linux::used_networks::used_networks;
use nebula_linux::{clock, memory, signals};

fn main() -> ExitCode {
    // Before anything else: a join token among the words can be read by others until it is taken off.
    let up = up::words::take();
    memory::share_one_heap();
    // It may wait for minutes in an init container, whose pod somebody deletes meanwhile.
    if let Err(error) = signals::end_even_first_process() {
        eprintln!("nebula-enrol: cannot handle signals: {error}");
        return ExitCode::FAILURE;
    }
    if let Some(words) = up {
        return up::main(words);
    }
    let flags = match flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(flags) => flags,
        Err(flags::Error::Help) => {
            eprint!("{ABOUT}\n{}", flags::usage("nebula-enrol", FLAGS));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n{}", flags::usage("nebula-enrol", FLAGS));
            return ExitCode::from(2);
        }
    };
    if flags.is_set("version") {
        print(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n"));
        print(BUILD_NOTE);
        return ExitCode::SUCCESS;
    }
    let blocklist_dir = match flags.value("blocklist-dir").map(std::path::absolute).transpose() {
        Ok(Some(folder)) if !folder.is_dir() => {
            eprintln!("nebula-enrol: -blocklist-dir {} is no folder", folder.display());
            return ExitCode::from(2);
        }
        Ok(folder) => folder,
        Err(error) => {
            eprintln!("nebula-enrol: -blocklist-dir: {error}");
            return ExitCode::from(2);
        }
    };
    let files = Files::new(Path::new(flags.value("out-dir").unwrap_or("."))).with_blocklist_dir(blocklist_dir);
    if flags.is_set("follow") {
        return follow::run(files);
    }
    let now = clock::unix_now();
    if flags.is_set("due") {
        return due(&files, now);
    }
    let renew = flags.is_set("renew") || flags.is_set("renew-now");
    let token = match flags.value("token-file") {
        Some(token) => token,
        None if renew => "",
        None => {
            eprintln!("nebula-enrol: -token-file is required, or -renew; see nebula-enrol -help");
            return ExitCode::from(2);
        }
    };
    let access = match (flags.value("ca-url"), flags.value("tls-ca")) {
        (Some(url), Some(tls_ca)) => Some(CaAccess {
            url: service_url(url),
            tls_ca_file: tls_ca.into(),
            token_file: token.into(),
            server_name: flags.value("tls-name").map(str::to_owned),
        }),
        // Renewal uses the saved service.
        (None, None) if renew => None,
        _ => {
            eprintln!("nebula-enrol: -ca-url and -tls-ca are required; see nebula-enrol -help");
            return ExitCode::from(2);
        }
    };
    let curve = match flags.value("curve") {
        None => Curve::USUAL,
        Some("25519") => Curve::Curve25519,
        Some("P256") => Curve::P256,
        Some(other) => {
            eprintln!("nebula-enrol: invalid curve: {other}; it is 25519 or P256");
            return ExitCode::from(2);
        }
    };
    let port = match flags.value("listen-port").map(str::parse) {
        None => None,
        Some(Ok(port)) => Some(port),
        Some(Err(_)) => {
            eprintln!("nebula-enrol: -listen-port must be 1 to 65535");
            return ExitCode::from(2);
        }
    };
    let done = match access {
        Some(access) if flags.is_set("kubernetes") && !renew => {
            let on_retry =
                |error: &enrol::Error| eprintln!("nebula-enrol: {}; trying again", visible(&error.to_string()));
            let role = if flags.is_set("gateway") { Role::Gateway } else { Role::Lighthouse { port } };
            enrol::kubernetes::enrol(&access, &files, role, KUBERNETES_WITHIN, on_retry).map(Renewal::Certificate)
        }
        Some(access) if !renew => match limits(&flags) {
            Ok(limits) => enrol::enrol(&access, &files, curve, &limits, now).map(Renewal::Certificate),
            Err((code, message)) => {
                eprintln!("nebula-enrol: {message}");
                return ExitCode::from(code);
            }
        },
        access => enrol::renew(access, &files, flags.is_set("renew-now"), now),
    };
    let done = match done {
        Ok(done) => done,
        Err(error) => return failed(&error),
    };
    if let Some(file) = flags.value("wait-for").map(Path::new)
        && !appears(file)
    {
        eprintln!("nebula-enrol: {} is not there after {} s", file.display(), KUBERNETES_WITHIN.as_secs());
        return ExitCode::FAILURE;
    }
    match &done {
        Renewal::Nothing => print("more than a third of the certificate's life is left, nothing to do\n"),
        Renewal::Trust => {
            print("more than a third of the certificate's life is left; wrote whom the CA trusts and blocks by now\n");
        }
        Renewal::Certificate(done) => {
            print(&format!("{done}\n"));
            done.moved().iter().for_each(|moved| print(&format!("{moved}\n")));
            print(&format!("wrote host.key, host.crt and ca.crt to {}\n", done.folder.display()));
        }
    }
    match files.share_blocklist() {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(path)) => {
            print(&format!("wrote whom the CA blocks to {}\n", path.display()));
            ExitCode::SUCCESS
        }
        // A unit that fails does not tell the daemon of its new certificate. The next run fails, as it has nothing else
        // to do.
        Err(error) if matches!(done, Renewal::Certificate(_)) => {
            failed(&error);
            ExitCode::SUCCESS
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &enrol::Error) -> ExitCode {
    eprintln!("nebula-enrol: {}", visible(&error.to_string()));
    ExitCode::FAILURE
}

/// What the certificate may have; otherwise exit code and message.
fn limits(flags: &Parsed) -> Result<Limits, (u8, String)> {
    let networks = flags.values("accept-networks").flat_map(|value| value.split(','));
    let parsed = |network: &str| network.trim().parse().map_err(|_| (2, format!("{network:?} is no network")));
    let accepted = networks.map(parsed).collect::<Result<Vec<IpNet>, _>>()?;
    let used = used_networks(flags.value("device").unwrap_or("nebula1"))
        .map_err(|error| (1, format!("cannot see which networks this host uses already: {error}")))?;
    Ok(Limits { overlay: Vec::new(), accepted, used })
}

/// Longer than the CA's own pod takes to start on another node; Kubernetes runs an init container again.
const KUBERNETES_WITHIN: Duration = Duration::from_secs(300);

/// Waits until there is a file.
fn appears(file: &Path) -> bool {
    let until = clock::now() + KUBERNETES_WITHIN;
    while !file.exists() {
        if clock::now() >= until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    true
}

/// For a systemd ExecCondition=: success means that a renewal is due, or that the CA trusts or blocks others by now.
fn due(files: &Files, now: UnixTime) -> ExitCode {
    match enrol::is_due(files, now) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) if files.shared_blocklist_differs() => ExitCode::SUCCESS,
        Ok(false) => match enrol::trust_differs(files) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            // A service that is away for a while is no failure of the unit.
            Err(error) => failed(&error),
        },
        Err(error) => {
            failed(&error);
            // systemd treats exit code 255 as a failure of the unit.
            ExitCode::from(255)
        }
    }
}

fn print(text: &str) {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const ABOUT: &str = "\
Gets this host's certificate from a nebula-ca service with a one-time token (nebula-ca token create). The key is made here
and never leaves; host.key, host.crt and ca.crt are written for the pki section of the configuration.
With -renew the certificate in the folder is the proof, and its successor has a new key: run it from a timer
(nebula-enrol.timer). It needs no other flags, as the service is remembered in enrolment.json. With pki.enrolment in its
configuration nebula renews the certificate by itself. `nebula up` does all of this with one string.
";

const FLAGS: &[Flag] = &[
    Flag {
        name: "ca-url",
        takes_value: true,
        help: "Address of the CA service: https://HOST:PORT, or tcp://ADDRESS:PORT as Kubernetes has it in a pod's environment",
    },
    Flag {
        name: "tls-ca",
        takes_value: true,
        help: "PEM file with the TLS certificate of the CA service (its tls.crt)",
    },
    Flag {
        name: "token-file",
        takes_value: true,
        help: "File with the one-time token, or with -kubernetes the pod's service-account token",
    },
    Flag {
        name: "kubernetes",
        takes_value: false,
        help: "This is a lighthouse pod of a StatefulSet: its token is the proof, here and for each renewal",
    },
    Flag {
        name: "gateway",
        takes_value: false,
        help: "With -kubernetes: this is a pod of the gateways' DaemonSet, for its node, and no lighthouse",
    },
    Flag {
        name: "wait-for",
        takes_value: true,
        help: "With -kubernetes: end only when this file is there, such as the configuration that somebody else writes",
    },
    Flag {
        name: "tls-name",
        takes_value: true,
        help: "With -kubernetes: name in the TLS certificate of the CA service, where -ca-url has its address",
    },
    Flag {
        name: "listen-port",
        takes_value: true,
        help: "With -kubernetes: UDP port of the lighthouse (default: as in the CA's policy)",
    },
    Flag {
        name: "accept-networks",
        takes_value: true,
        help: "Networks, with commas, that the first certificate may have although they are public, special or in use here, \
               or that other hosts may reach through this one",
    },
    Flag {
        name: "device",
        takes_value: true,
        help: "The device of the overlay, whose networks do not count as in use (default nebula1)",
    },
    Flag { name: "out-dir", takes_value: true, help: "Folder for the files (default: the current one)" },
    Flag {
        name: "blocklist-dir",
        takes_value: true,
        help: "Folder of configurations of a daemon that follows no CA (Go's: nebula -config FOLDER): whom the CA blocks is \
               kept in nebula-enrol.yml there. Remembered for -renew",
    },
    Flag {
        name: "renew",
        takes_value: false,
        help: "Renew the certificate in the folder if a third of its life or less is left, and write whom the CA trusts and \
               blocks; for a timer",
    },
    Flag { name: "renew-now", takes_value: false, help: "Renew it whatever is left" },
    Flag {
        name: "due",
        takes_value: false,
        help: "Only tell whether -renew would change anything: exit code 0, or 1 if not",
    },
    Flag {
        name: "follow",
        takes_value: false,
        help: "For nebula itself, which runs this beside its tunnels (pki.enrolment): renew, and follow what the CA announces",
    },
    Flag { name: "curve", takes_value: true, help: "25519 or P256, as the CA (default 25519)" },
    Flag { name: "version", takes_value: false, help: "Print version" },
];
