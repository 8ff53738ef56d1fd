//! `nebula ctl` beside daemons of other releases: their answers are those of `tests/documents`.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;

use serde_json::{Value, json};

/// Runs `nebula ctl` with a daemon that gives this answer to everything.
fn ctl(arguments: &[&str], answer: &Value) -> (i32, String, String) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("daemon.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let answer = answer.to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            BufReader::new(&stream).read_line(&mut String::new()).unwrap();
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let program = env!("CARGO_BIN_EXE_nebula-ctl");
    let Output { status, stdout, stderr } =
        Command::new(program).arg("--socket").arg(socket).args(arguments).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// The answer, as a later release may give it: each object has one key more.
fn extend(document: &mut Value) {
    match document {
        Value::Object(values) => {
            // Its keys are addresses.
            let are_named = |(key, value)| (key != "gateway_states").then_some(value);
            values.iter_mut().filter_map(are_named).for_each(extend);
            values.insert("of_next_year".to_owned(), json!({"moon": [1]}));
        }
        Value::Array(values) => values.iter_mut().for_each(extend),
        _ => {}
    }
}

/// Commands with the answer that was recorded for each.
const COMMANDS: [(&[&str], &str); 8] = [
    (&["status"], "status.json"),
    (&["peers"], "peers.json"),
    (&["gateways"], "gateways.json"),
    (&["tunnel", "10.42.0.9"], "tunnel.json"),
    (&["query", "10.42.0.9"], "query.json"),
    (&["cert"], "cert.json"),
    (&["whois", "10.42.0.9"], "whois.json"),
    (&["why", "10.42.0.9"], "why.json"),
];

#[test]
fn answers_of_an_earlier_and_of_a_later_daemon_are_shown() {
    for (arguments, file) in COMMANDS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents").join(file);
        let earlier: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut later = earlier.clone();
        extend(&mut later);
        let shown = ctl(arguments, &json!({"result": earlier}));
        assert!(shown.0 == 0 || arguments[0] == "why", "{arguments:?}: {shown:?}");
        assert!(!shown.1.is_empty() && shown.2.is_empty(), "{arguments:?}: {shown:?}");
        assert_eq!(ctl(arguments, &json!({"result": later})), shown, "{arguments:?}");
    }
}

#[test]
fn a_command_that_an_earlier_daemon_does_not_know_is_an_error_with_its_sentence() {
    let refusal = "there is no command whois in nebula 0.0.9; a newer `nebula ctl` needs a newer daemon";
    let (code, stdout, stderr) = ctl(&["whois", "10.42.0.9"], &json!({"error": refusal}));
    assert!(code != 0 && stdout.is_empty() && stderr.contains(refusal), "{code} {stdout} {stderr}");
}
