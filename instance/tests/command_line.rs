//! The programs as seen from a shell: flags, exit codes, and which text goes to which stream. Nothing here uses the
//! network.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

#[path = "../../system-tests/programs/world/loopback.rs"]
mod loopback;

use std::process::{Command, Output};

use loopback::Network;

const HOST: &[&str] = &["10.42.0.7/16"];

fn run(program: &str, arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(program).args(arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn nebula(arguments: &[&str]) -> (i32, String, String) {
    run(env!("CARGO_BIN_EXE_nebula"), arguments)
}

fn test_config(more: &str) -> (i32, String, String) {
    let network = Network::new();
    nebula(&["-test", "-config", network.configure("config", HOST, more).to_str().unwrap()])
}

#[test]
fn version_is_printed_on_stdout() {
    for flag in ["-version", "--version", "-version=true"] {
        let (code, stdout, stderr) = nebula(&[flag]);
        assert_eq!((code, stderr.as_str()), (0, ""));
        assert!(stdout.starts_with("Version: ") && stdout.ends_with("\nCompatible with: Go Nebula 1.11\n"), "{stdout}");
    }
}

#[test]
fn help_is_printed_on_stderr() {
    for flag in ["-help", "-h"] {
        let (code, stdout, stderr) = nebula(&[flag]);
        assert_eq!((code, stdout.as_str()), (0, ""));
        assert!(stderr.contains("-config"), "{stderr}");
    }
}

#[test]
fn help_of_the_init_container_has_the_paths_that_a_pod_mounts() {
    let (code, stdout, stderr) = run(env!("CARGO_BIN_EXE_nebula-cni-init"), &["-help"]);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let example =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes/pod.yaml")).unwrap();
    for path in ["/var/run/secrets/nebula", "/var/run/nebula"] {
        assert!(stdout.contains(path), "{stdout}");
        assert!(example.contains(&format!("mountPath: {path}\n")), "{example}");
    }
    assert!(stdout.contains("300"), "{stdout}");
}

#[test]
fn an_unknown_flag_ends_with_code_2() {
    let (code, _, stderr) = nebula(&["-nope"]);
    assert_eq!(code, 2);
    assert!(stderr.starts_with("flag provided but not defined: -nope\n"), "{stderr}");
    assert_eq!(nebula(&["-config"]).0, 2);
}

#[test]
fn without_a_configuration_it_says_where_it_looked() {
    let (code, stdout, _) = nebula(&[]);
    assert_eq!(code, 1);
    assert!(stdout.starts_with("no default config found at ") && stdout.contains("config.yml"), "{stdout}");
}

#[test]
fn a_path_without_configuration_is_reported_without_log_formatting() {
    let (code, stdout, _) = nebula(&["-config", "/nonexistent/config.yml"]);
    assert_eq!(code, 1);
    assert_eq!(stdout, "failed to load config: no config files found at /nonexistent/config.yml");
}

#[test]
fn a_wrong_log_level_is_reported_without_log_formatting() {
    let (code, stdout, _) = test_config("logging: {level: loud}");
    assert_eq!(code, 1);
    assert!(stdout.starts_with("failed to apply logging config: "), "{stdout}");
}

#[test]
fn a_good_configuration_is_printed_and_passes() {
    let (code, stdout, stderr) =
        test_config("tun: {dev: neb1}\nfirewall: {inbound: [{port: any, proto: icmp, host: any}]}");
    assert_eq!(code, 0, "{stdout}{stderr}");
    let first = stdout.lines().next().unwrap();
    assert!(first.starts_with("time=20") && first.contains(" level=INFO msg=\"firewall:\\n"), "{first}");
    assert!(first.contains("dev: neb1"), "{first}");
}

#[test]
fn a_bad_rule_fails_the_test_with_its_place() {
    let (code, stdout, _) = test_config("firewall: {inbound: [{port: 1-, proto: tcp, host: any}]}");
    assert_eq!(code, 1);
    let [last, reason] = stdout.lines().rev().take(2).collect::<Vec<_>>()[..] else { panic!("{stdout}") };
    assert!(last.contains("level=ERROR msg=\"") && last.contains("is refused: 1 error(s), see above"), "{last}");
    let place = "level=ERROR msg=\"Error while loading firewall rules\" error=\"firewall.inbound rule #0; ";
    assert!(reason.contains(place), "{reason}");
}

#[test]
fn json_logs_are_objects_and_levels_filter() {
    let (code, stdout, _) = test_config("logging: {format: json, disable_timestamp: true, level: warn}\nnonsense: 1");
    assert_eq!(code, 0);
    let lines: Vec<serde_json::Value> = stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(!lines.is_empty());
    for line in &lines {
        assert_eq!(line["level"], "WARN");
        assert_eq!(line.get("time"), None);
    }
    assert!(lines.iter().any(|line| line["msg"] == "unknown key nonsense is ignored"), "{stdout}");
}

#[test]
fn the_init_program_names_the_token_that_it_misses() {
    let program = env!("CARGO_BIN_EXE_nebula-cni-init");
    assert_eq!(run(program, &["--version"]).0, 0);
    assert!(run(program, &["--help"]).1.contains("-token-file"));
    let (code, _, stderr) = run(program, &["-token-file", "/nonexistent/token"]);
    assert_ne!(code, 0);
    assert!(stderr.contains("token file /nonexistent/token: no such file or directory"), "{stderr}");
}

#[test]
fn an_instance_without_a_usable_launch_file_says_so() {
    let program = env!("CARGO_BIN_EXE_nebula-cni-instance");
    assert_eq!(run(program, &["--version"]).0, 0);
    assert_eq!(run(program, &[]).0, 2);
    assert_eq!(run(program, &["--nope"]).0, 2);
    let (code, stdout, stderr) = run(program, &["--launch", "/nonexistent/x.launch"]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("launch file /nonexistent/x.launch: no such file or directory"), "{stderr}");
}

#[test]
fn a_test_reports_every_finding_with_file_line_and_key() {
    let (code, stdout, _) = test_config(
        "cipher: des\nfirewall:\n  inbound:\n  - {port: any, proto: any, host: any}\n  - {port: x, proto: tcp, host: any}\n\
         tun: {routes: 5}\nlisten:\n  prot: 4242\n",
    );
    assert_eq!(code, 1);
    for (level, key, line, text) in [
        ("ERROR", "cipher", 2, "it must be aes or chachapoly"),
        ("ERROR", "firewall.inbound.1", 6, "port was not a number; `x`"),
        ("WARN", "tun", 7, "the node would not start"),
        ("WARN", "listen.prot", 9, "did you mean listen.port?"),
    ] {
        let reported = |found: &&str| {
            found.contains(&format!("level={level} "))
                && found.contains(&format!(" key={key} "))
                && found.contains(text)
        };
        let found = stdout.lines().find(reported).unwrap_or_else(|| panic!("nothing on {key} in {stdout}"));
        assert!(found.contains("config.yml") && found.ends_with(&format!(" line={line}")), "{found}");
    }
}

#[test]
fn a_strict_test_refuses_what_a_test_only_remarks() {
    let network = Network::new();
    let config = network.configure("config", HOST, "listen: {prot: 4242}");
    let config = config.to_str().unwrap();
    assert_eq!(nebula(&["-test", "-config", config]).0, 0);
    let (code, stdout, _) = nebula(&["-test", "-strict", "-config", config]);
    assert_eq!(code, 1);
    assert!(stdout.contains("level=ERROR msg=\"unknown key listen.prot"), "{stdout}");
}
