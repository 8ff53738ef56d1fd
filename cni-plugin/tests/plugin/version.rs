//! VERSION, and the replies in each version of the specification.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::{Node, PLUGIN, spawn, wait};

#[test]
fn version_needs_nothing_but_its_own_name() {
    let list = r#""supportedVersions":["0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0"]"#;
    for (stdin, expected) in [
        ("", format!(r#"{{"cniVersion":"1.1.0",{list}}}"#)),
        ("{}", format!(r#"{{"cniVersion":"1.1.0",{list}}}"#)),
        (r#"{"cniVersion":"0.4.0"}"#, format!(r#"{{"cniVersion":"0.4.0",{list}}}"#)),
        (r#"{"cniVersion":"0.1.0"}"#, format!(r#"{{"cniVersion":"0.1.0",{list}}}"#)),
    ] {
        let answer = wait(spawn(Command::new(PLUGIN).env_clear().env("CNI_COMMAND", "VERSION"), stdin.as_bytes()));
        assert_eq!(answer.expect_ok(), expected);
    }
    let garbage = wait(spawn(Command::new(PLUGIN).env_clear().env("CNI_COMMAND", "VERSION"), b"garbage"));
    assert_eq!(garbage.code(), 6);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures a process")]
fn version_answers_in_milliseconds() {
    let run = || {
        let start = Instant::now();
        wait(spawn(Command::new(PLUGIN).env_clear().env("CNI_COMMAND", "VERSION"), b"")).expect_ok();
        start.elapsed()
    };
    // Takes the best of many runs, because the machine may be busy.
    let best = (0..50).map(|_| run()).min().unwrap();
    assert!(best < Duration::from_millis(5), "{best:?}");
}

#[test]
fn called_by_hand_it_says_what_it_is_on_stderr() {
    let answer = wait(spawn(Command::new(PLUGIN).env_clear(), b""));
    assert!(answer.ok && answer.stdout.is_empty());
    assert!(
        answer.stderr.contains("CNI versions: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"),
        "{}",
        answer.stderr
    );
}

#[test]
fn every_version_gets_its_prev_result_back_byte_for_byte() {
    let with_version = r#"{ "ips":[{"version":"4","interface":0,"address":"10.4.0.7/24","x-new":[1.50]}] , "cniVersion" :"VERSION","interfaces":[{"name":"eth0","sandbox":"/n","mtu":1450}], "dns":{}, "vendor":{"z":1,"a":"\u00e9\/"} }"#;
    let newer = r#"{"cniVersion":"VERSION","interfaces":[{"name":"eth0","sandbox":"/n"}],"ips":[{"interface":0,"address":"fd00::7/64"}],"routes":[{"dst":"::/0","table":7}]}"#;
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        for shape in [with_version, newer] {
            let prev = shape.replace("VERSION", version);
            let mut node = Node::new();
            node.entry["cniVersion"] = version.into();
            node.prev_result = Some(prev.clone());
            assert_eq!(node.call("ADD").expect_ok(), prev);
            if version < "0.4.0" {
                node.prev_result = None;
            }
            assert_eq!(node.call("DEL").expect_ok(), "");
            assert_eq!(node.residue(), Vec::<String>::new());
        }
    }
}

#[test]
fn versions_we_do_not_speak_are_refused_in_a_version_we_do() {
    for version in ["0.0.9", "1.2.0", "2", "1"] {
        let mut node = Node::new();
        node.entry["cniVersion"] = version.into();
        let error = node.call("ADD").error();
        assert_eq!((error["code"].as_u64(), error["cniVersion"].as_str()), (Some(1), Some("1.1.0")), "{error}");
    }
}

#[test]
fn verbs_exist_from_their_version_on() {
    for (verb, least) in [("CHECK", "0.4.0"), ("GC", "1.1.0"), ("STATUS", "1.1.0")] {
        for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
            let mut node = Node::new();
            node.entry["cniVersion"] = version.into();
            let answer = node.call(verb);
            let refused = !answer.ok && answer.code() == 1;
            assert_eq!(refused, version < least, "{verb} {version}: {}", answer.stdout);
        }
    }
}
