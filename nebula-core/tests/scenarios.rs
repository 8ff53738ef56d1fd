//! The table of behaviours in `README.md` beside this file.
//!
//! `UPDATE_SCENARIOS=1 cargo test -p nebula-core --features simulator --test scenarios` writes it anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Files that show something else than how nodes behave on a network.
const NO_SCENARIOS: [&str; 2] = ["driver", "scenarios"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

/// What each file is about, and the names of its tests.
fn scenarios() -> BTreeMap<String, (String, Vec<String>)> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder()).expect("the folder of the scenarios") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if path.extension().is_none_or(|extension| extension != "rs") || NO_SCENARIOS.contains(&name.as_str()) {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("a readable file");
        let about = text.lines().next().and_then(|line| line.strip_prefix("//! ")).unwrap_or(&name).to_owned();
        let tests = text.split("#[test]\n").skip(1).filter_map(|test| test.split_once("fn ")?.1.split_once('('));
        files.insert(name, (about, tests.map(|(test, _)| test.to_owned()).collect()));
    }
    files
}

fn table(files: &BTreeMap<String, (String, Vec<String>)>) -> String {
    let count: usize = files.values().map(|(_, tests)| tests.len()).sum();
    let mut text = format!(
        "# Scenarios on the simulated network

{count} behaviours, each shown by the test of that name, with `_` for spaces:
`cargo test -p nebula-core --features simulator TEST`. A failure prints the seed and the packet flow.
`random_operations.rs` does everything at once, at random. `UPDATE_SCENARIOS=1` makes the test `scenarios` write this table;
without it, that test fails if the table is stale.
"
    );
    for (file, (about, tests)) in files {
        let _ = write!(text, "\n## {about}\n`{file}.rs`\n\n");
        for test in tests {
            let sentence = test.replace('_', " ");
            let _ = writeln!(text, "- [{sentence}]({file}.rs)");
        }
    }
    text
}

#[test]
fn the_table_names_every_scenario_and_no_other() {
    let files = scenarios();
    let path = folder().join("README.md");
    let wanted = table(&files);
    if std::env::var_os("UPDATE_SCENARIOS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap();
    let stale = written.lines().zip(wanted.lines()).find(|(written, wanted)| written != wanted);
    assert_eq!(written, wanted, "stale from {stale:?}: run this test with UPDATE_SCENARIOS=1");
    let scenarios: usize = files.values().map(|(_, tests)| tests.len()).sum();
    assert!(scenarios >= 60, "{scenarios} scenarios");
}
