//! Our chain behind the primaries that clusters have, whose own files are in `cni-plugin/tests/primaries`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::folder::{Folder, Outcome, Wish};
use crate::config::Strategy;
use crate::host_root::HostRoot;

/// The folders, and the chain file that each of them leads to.
const PRIMARIES: [(&str, &str); 15] = [
    ("aws-branch-eni", "00-nebula-aws-cni.conflist"),
    ("aws-network-policy", "00-nebula-aws-cni.conflist"),
    ("aws-vpc-cni", "00-nebula-aws-cni.conflist"),
    ("azure", "00-nebula-azure.conflist"),
    ("calico", "00-nebula-k8s-pod-network.conflist"),
    ("calico-ebpf", "00-nebula-k8s-pod-network.conflist"),
    ("cilium", "00-nebula-cilium.conflist"),
    ("cilium-clsact", "00-nebula-cilium.conflist"),
    ("cilium-netkit", "00-nebula-cilium.conflist"),
    ("flannel", "00-nebula-cbr0.conflist"),
    ("gke-dataplane-v2", "00-nebula-gke-pod-network.conflist"),
    ("kind", "00-nebula-kindnet.conflist"),
    ("kindnet", "00-nebula-kindnet.conflist"),
    ("kube-router", "00-nebula-mynet.conflist"),
    ("ovn-kubernetes", "00-nebula-ovn-kubernetes.conflist"),
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cni-plugin/tests/primaries")
}

/// The primary's own file: its name and its text.
fn own_file(primary: &str) -> (String, Vec<u8>) {
    let files = fs::read_dir(fixtures().join(primary)).unwrap().map(|entry| entry.unwrap().path());
    let is_conf = |path: &PathBuf| path.extension().is_some_and(|kind| kind.to_string_lossy().starts_with("conf"));
    let files: Vec<PathBuf> = files.filter(is_conf).collect();
    let [file] = &files[..] else { panic!("{primary} has one file: {files:?}") };
    (file.file_name().unwrap().to_string_lossy().into_owned(), fs::read(file).unwrap())
}

fn entry() -> Map<String, Value> {
    json!({"type": "nebula-cni-plugin", "mode": "strict"}).as_object().unwrap().clone()
}

/// Keeps a folder that has this file; returns the folder with what was written, and the name of our file.
fn kept(file: &str, text: &[u8], strategy: Strategy) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(file), text).unwrap();
    let (entry, host) = (entry(), HostRoot::default());
    let wish = Wish { entry: &entry, network: None, strategy, bin: &[], host: &host };
    match Folder::new(dir.path().to_owned()).keep(wish, Instant::now()) {
        Outcome::InPlace(placed) => {
            assert_eq!(fs::read(dir.path().join(&placed.file)).unwrap(), placed.bytes);
            (dir, placed.file.display().to_string())
        }
        other => panic!("{file}: {other:?}"),
    }
}

#[test]
fn each_folder_is_in_the_table() {
    let mut folders: Vec<String> =
        fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    folders.sort();
    assert_eq!(folders, PRIMARIES.map(|(primary, _)| primary));
}

#[test]
fn our_entry_comes_last_in_a_file_that_runtimes_take_before_the_primarys_own() {
    for (primary, expected) in PRIMARIES {
        let (file, text) = own_file(primary);
        let (dir, ours) = kept(&file, &text, Strategy::File);
        assert_eq!(ours, expected, "{primary}");
        assert!(ours < file, "{primary}: runtimes take the first");
        assert_eq!(fs::read(dir.path().join(&file)).unwrap(), text, "{primary}: its own file stays as it is");
        let own: Value = serde_json::from_slice(&text).unwrap();
        let chain: Value = serde_json::from_slice(&fs::read(dir.path().join(&ours)).unwrap()).unwrap();
        for key in ["name", "cniVersion", "disableCheck"] {
            assert_eq!(chain.get(key), own.get(key), "{primary}: {key}");
        }
        // A single configuration is a list of one.
        let plugins = own.get("plugins").and_then(Value::as_array).cloned().unwrap_or_else(|| vec![own.clone()]);
        let with_ours = [plugins, vec![Value::Object(entry())]].concat();
        assert_eq!(chain["plugins"], Value::from(with_ours), "{primary}");
    }
}

#[test]
fn a_drop_in_lies_in_the_folder_of_the_primarys_network() {
    for (primary, _) in PRIMARIES {
        let (file, text) = own_file(primary);
        let (dir, ours) = kept(&file, &text, Strategy::DropIn);
        let own: Value = serde_json::from_slice(&text).unwrap();
        let network = own["name"].as_str().unwrap();
        assert!(ours.starts_with(&format!("{network}/")), "{primary}: {ours}");
        let written: Value = serde_json::from_slice(&fs::read(dir.path().join(&ours)).unwrap()).unwrap();
        assert_eq!(written, Value::Object(entry()), "{primary}");
    }
}
