//! The command line.

use std::path::PathBuf;

use clap_complete::Shell;
use nebula_cni_contract::flow_records::{Conditions, Filter};
use nebula_linux::clock::since_epoch;
use serde_json::{Value, json};

use crate::kept;

/// Asks a running nebula, and tells it what to do.
#[derive(clap::Parser)]
#[command(name = "nebula-ctl", bin_name = "nebula ctl", version, after_help = AFTER)]
pub(crate) struct Arguments {
    /// Control socket of the daemon; needed only if several run [env: NEBULA_SOCKET].
    #[arg(short, long, global = true, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    pub(crate) socket: Option<PathBuf>,
    /// Print the answer as JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(clap::Subcommand)]
pub(crate) enum Command {
    /// Show what runs, since when, and how it is; exit code 1 if something is wrong.
    Status,
    /// Find out what is wrong with this host and with the peers that it lost, and say what to do.
    Doctor,
    /// Find out why a peer cannot be reached: calls it, asks the lighthouses, and probes its endpoints.
    Why {
        /// Overlay address, or name of a peer with a tunnel.
        peer: String,
    },
    /// List the peers with a tunnel.
    Peers,
    /// List the gateways of unsafe routes: which of them take flows, and how many.
    Gateways,
    /// Look up the identity of an overlay address: name, groups and issuer of its host's certificate.
    Whois {
        /// `ADDRESS[:PORT]`, as programs print the other end of a connection.
        address: String,
    },
    /// Show the tunnels with a peer, its certificate, and what is known about where it is.
    Tunnel {
        /// Overlay address, or name of a peer with a tunnel.
        peer: String,
    },
    /// Close the tunnels with a peer; the next packet makes a new one.
    Close {
        /// Overlay address, or name of a peer with a tunnel.
        peer: String,
        /// Do not tell the peer.
        #[arg(long)]
        quietly: bool,
    },
    /// Ask the lighthouses where a peer is.
    Query {
        /// Overlay address, or name of a peer with a tunnel.
        peer: String,
    },
    /// Read the configuration again, as SIGHUP does, and say what became of it.
    Reload,
    /// Replace the running daemon by another program; connections through the tunnels go on.
    Upgrade {
        /// Absolute path of the program; by default where the running one was started from.
        #[arg(value_hint = clap::ValueHint::FilePath)]
        program: Option<PathBuf>,
        /// Refuse a program with another SHA-256 than this one.
        #[arg(long, value_name = "DIGEST")]
        sha256: Option<String>,
        /// Also if systemd does not supervise the daemon; whoever does instead sees it end.
        #[arg(long)]
        unsupervised: bool,
    },
    /// Show the certificates of this host and of the CAs that it trusts.
    Cert,
    /// Show the level of the log, or change it until the next reload.
    LogLevel {
        /// What is printed from now on.
        #[arg(value_parser = ["trace", "debug", "info", "warn", "error"])]
        level: Option<String>,
    },
    /// Say which way a packet would go, through which tunnel, and by which rule; exit code 1 unless it passes.
    Trace {
        /// tcp, udp, icmp, or the number of a protocol.
        protocol: String,
        /// `ADDRESS[:PORT]` of the destination; or of the source, if a destination follows.
        #[arg(value_name = "[SOURCE] DESTINATION", num_args = 1..=2, required = true)]
        ends: Vec<String>,
    },
    /// Show who spoke to whom, how much, and who was refused by which rule: what is left of it in memory, the newest
    /// last. With --json one object a line.
    Flows {
        /// Read what `keep-flows` has on disk instead; needs no daemon.
        #[arg(long, value_name = "FOLDER", num_args = 0..=1, default_missing_value = kept::FOLDER,
            value_hint = clap::ValueHint::DirPath)]
        kept: Option<PathBuf>,
        #[command(flatten)]
        wanted: Conditions,
    },
    /// Keep records of flows on disk: asks the daemon every two seconds, and runs until a signal ends it.
    KeepFlows {
        /// Where to.
        #[arg(long, default_value = kept::FOLDER, value_hint = clap::ValueHint::DirPath)]
        folder: PathBuf,
        /// How much at most, in MiB.
        #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=4096))]
        max_mib: u64,
        /// How old records become; whole files are removed, so some go earlier.
        #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u64).range(1..=720))]
        hours: u64,
    },
    /// Print the script that completes words for a shell.
    Completion {
        /// Which shell.
        shell: Shell,
    },
}

impl Command {
    /// What the daemon is sent.
    pub(crate) fn request(&self) -> Value {
        match self {
            Self::Status => json!({"command": "status"}),
            Self::Doctor => json!({"command": "doctor"}),
            Self::Why { peer } => json!({"command": "why", "peer": peer}),
            Self::Peers => json!({"command": "peers"}),
            Self::Gateways => json!({"command": "gateways"}),
            Self::Whois { address } => json!({"command": "whois", "address": address}),
            Self::Tunnel { peer } => json!({"command": "tunnel", "peer": peer}),
            Self::Close { peer, quietly } => json!({"command": "close", "peer": peer, "quietly": quietly}),
            Self::Query { peer } => json!({"command": "query", "peer": peer}),
            Self::Reload => json!({"command": "reload"}),
            Self::Upgrade { program, sha256, unsupervised } => json!({
                "command": "upgrade",
                "program": program,
                "sha256": sha256,
                "unsupervised": unsupervised,
            }),
            Self::Cert => json!({"command": "cert"}),
            Self::LogLevel { level } => json!({"command": "log-level", "level": level}),
            Self::Trace { protocol, ends } => {
                let (destination, source) = (ends.last(), ends.first().filter(|_| ends.len() > 1));
                json!({"command": "trace", "protocol": protocol, "source": source, "destination": destination})
            }
            Self::Flows { .. } => {
                let mut request = json!(self.filter());
                request["command"] = "flows".into();
                request
            }
            Self::KeepFlows { .. } | Self::Completion { .. } => Value::Null,
        }
    }

    /// Which flows are asked for.
    pub(crate) fn filter(&self) -> Filter {
        match self {
            Self::Flows { wanted, kept: _ } => wanted.filter(unix_ms()),
            _ => Filter::default(),
        }
    }
}

/// Milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    u64::try_from(since_epoch().as_millis()).unwrap_or(u64::MAX)
}

/// What makes the completion of `nebula-ctl` that of `nebula ctl`, too.
pub(crate) fn for_nebula(shell: Shell) -> &'static str {
    match shell {
        Shell::Bash => BASH,
        Shell::Zsh => ZSH,
        Shell::Fish => {
            "complete -c nebula -n '__fish_use_subcommand' -a ctl -d 'Ask a running nebula'\n\
             complete -c nebula -n '__fish_seen_subcommand_from ctl' -w nebula-ctl\n"
        }
        _ => "",
    }
}

const BASH: &str = r#"
_nebula_with_ctl() {
    if [[ ${COMP_WORDS[1]} == ctl && $COMP_CWORD -gt 1 ]]; then
        COMP_WORDS=(nebula-ctl "${COMP_WORDS[@]:2}")
        COMP_CWORD=$((COMP_CWORD - 1))
        _nebula-ctl nebula-ctl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    elif [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "ctl -config -test -strict -version -help" -- "${COMP_WORDS[1]}"))
    else
        COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
    fi
}
complete -F _nebula_with_ctl -o bashdefault -o default nebula
"#;

const ZSH: &str = r#"
_nebula_with_ctl() {
    if [[ ${words[2]} == ctl ]] && (( CURRENT > 2 )); then
        words=(nebula-ctl "${words[@]:2}")
        (( CURRENT-- ))
        _nebula-ctl
    elif (( CURRENT == 2 )); then
        compadd -- ctl -config -test -strict -version -help
    else
        _files
    fi
}
compdef _nebula_with_ctl nebula
"#;

const AFTER: &str = "\
Exit codes: 0 done and well; 1 the daemon refused, a traced packet would not pass, status or doctor found an error (not a
warning), or the peer of why cannot be reached; 2 wrong usage; 3 no daemon answers.";
