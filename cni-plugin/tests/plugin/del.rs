//! DEL succeeds whatever is missing, and leaves nothing behind.

use std::fs;
use std::io::{IoSlice, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

use crate::harness::{Node, PLUGIN, PREV};

#[test]
fn del_leaves_nothing_whatever_is_missing() {
    let states = ["present", "absent", "torn", "garbage", "record only"];
    let prevs = [Some(PREV), None, Some("\"garbage\""), Some(r#"{"cniVersion":"0.2.0","ip4":{}}"#)];
    for (i, netns) in [Some(crate::harness::NETNS), Some("/nonexistent/netns"), Some(""), None].into_iter().enumerate()
    {
        for (j, state) in states.iter().enumerate() {
            let mut node = Node::new();
            node.call("ADD").expect_ok();
            let process = node.process();
            let record = node.files().record();
            match *state {
                "absent" => fs::remove_dir_all(node.files().dir()).unwrap(),
                "torn" => fs::write(&record, &fs::read(&record).unwrap()[..40]).unwrap(),
                "garbage" => fs::write(&record, b"\xff\x00{{{").unwrap(),
                "record only" => {
                    fs::remove_file(node.files().launch()).unwrap();
                    fs::remove_file(node.files().lock()).unwrap();
                }
                _ => {}
            }
            match netns {
                Some(netns) => node.set("CNI_NETNS", netns),
                None => drop(node.env.remove("CNI_NETNS")),
            }
            node.prev_result = prevs[(i + j) % prevs.len()].map(str::to_owned);
            for time in 1..=4 {
                assert_eq!(node.call("DEL").expect_ok(), "", "{netns:?} {state} call {time}");
                assert!(!process.is_alive(), "{netns:?} {state} call {time}");
                assert_eq!(node.residue(), Vec::<String>::new(), "{netns:?} {state} call {time}");
            }
        }
    }
}

#[test]
fn del_of_what_was_never_added_creates_nothing() {
    let mut node = Node::new();
    for prev in [Some(PREV), None, Some("7")] {
        node.prev_result = prev.map(str::to_owned);
        assert_eq!(node.call("DEL").expect_ok(), "");
        assert!(!node.root().join("state").exists());
    }
}

#[test]
fn del_works_after_the_configuration_went_bad() {
    let mut node = Node::new();
    node.call("ADD").expect_ok();
    node.entry["mode"] = "eager".into();
    node.entry["ca"] = serde_json::Value::Null;
    node.entry["cniVersion"] = "0.1.0".into();
    node.call("DEL").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn del_works_after_the_instance_died() {
    let node = Node::new();
    node.call("ADD").expect_ok();
    node.process().stop(&nebula_cni_contract::clock::SystemClock).unwrap();
    node.call("DEL").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn del_does_not_touch_a_process_that_only_has_the_number_of_the_instance() {
    let node = Node::new();
    node.call("ADD").expect_ok();
    let process = node.process();
    let mut record = node.record().unwrap();
    record.process.as_mut().unwrap().start_time -= 1;
    record.save(&node.files()).unwrap();
    node.call("DEL").expect_ok();
    assert!(process.is_alive());
    process.stop(&nebula_cni_contract::clock::SystemClock).unwrap();
}

#[test]
fn names_that_share_a_file_do_not_share_an_attachment() {
    let mut node = Node::new();
    node.set("CNI_CONTAINERID", "a-b");
    node.set("CNI_IFNAME", "c");
    node.prev_result = Some(PREV.replace("eth0", "c"));
    node.call("ADD").expect_ok();
    let process = node.process();
    let mut other = Node::new();
    other.entry["stateDir"] = node.entry["stateDir"].clone();
    other.set("CNI_CONTAINERID", "a");
    other.set("CNI_IFNAME", "b-c");
    other.set("CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=other;K8S_POD_UID=u2");
    other.prev_result = Some(PREV.replace("eth0", "b-c"));
    assert_eq!(other.call("ADD").code(), 7);
    other.call("DEL").expect_ok();
    assert!(process.is_alive() && node.record().is_some());
    node.call("DEL").expect_ok();
    assert_eq!(node.residue(), Vec::<String>::new());
}

#[test]
fn an_heir_closes_what_it_is_given_and_ends() {
    let (instance, socket) = UnixDatagram::pair().unwrap();
    let mut heir = Command::new(PLUGIN).arg("close-device").stdin(OwnedFd::from(socket)).spawn().unwrap();
    let (mut witness, device) = UnixStream::pair().unwrap();
    witness.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let files = [device.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(instance.as_raw_fd(), &[IoSlice::new(&[0])], &message, MsgFlags::empty(), None).unwrap();
    drop(device);
    assert_eq!(witness.read(&mut [0]).unwrap(), 0, "nobody holds the other end");
    assert!(heir.wait().unwrap().success());
}
