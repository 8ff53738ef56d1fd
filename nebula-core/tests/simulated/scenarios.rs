//! Checks the table of behaviours in `README.md` beside this file, and the tests that `SECURITY.md` names.
//!
//! `UPDATE_SCENARIOS=1 cargo test -p nebula-core --features simulator --test simulated scenarios` regenerates the
//! table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Files that do not show how nodes behave on a network.
const NO_SCENARIOS: [&str; 2] = ["main", "scenarios"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulated")
}

/// For each file, the first line of its documentation and the names of its tests.
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
        files.insert(name, (about, tests(&text).map(str::to_owned).collect()));
    }
    files
}

/// Names of the tests in a source file.
fn tests(text: &str) -> impl Iterator<Item = &str> {
    // Those of tokio may say how many threads they need.
    let after = |end| text.split(end).skip(1);
    let all = after("test]\n").chain(after("worker_threads = 2)]\n")).chain(after("\"multi_thread\")]\n"));
    all.filter_map(|test| Some(test.split_once("fn ")?.1.split_once('(')?.0))
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

/// Every test of the programs and libraries, with its file.
fn all_tests(root: &Path) -> Vec<(PathBuf, String)> {
    let packages = std::fs::read_dir(root).expect("the repository").map(|entry| entry.expect("an entry").path());
    let mut folders: Vec<_> = packages
        .filter(|package| package.join("Cargo.toml").is_file())
        .flat_map(|package| ["src", "tests", "programs"].map(|folder| package.join(folder)))
        .collect();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("a readable file");
                found.extend(tests(&text).map(|test| (path.clone(), test.to_owned())));
            }
        }
    }
    found
}

/// Whether `path` (`module::tests::name`, with an optional `*` at the end of the name) refers to one of these tests.
fn is_there(path: &str, all: &[(PathBuf, String)]) -> bool {
    let mut modules: Vec<_> = path.split("::").filter(|module| *module != "tests").collect();
    let name = modules.pop().expect("a path has a name");
    all.iter().any(|(file, test)| {
        let in_module = |module: &&str| file.with_extension("").iter().any(|part| part == *module);
        name.strip_suffix('*').map_or(test == name, |start| test.starts_with(start)) && modules.iter().all(in_module)
    })
}

#[test]
fn every_claim_in_security_md_names_tests_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let all = all_tests(&root);
    let text = std::fs::read_to_string(root.join("SECURITY.md")).expect("SECURITY.md");
    let (mut claims, mut named, mut in_table) = (0, 0, false);
    for line in text.lines() {
        let cells: Vec<_> = line.split(" | ").collect();
        in_table = line.starts_with('|') && (in_table || line.ends_with("| Held by |"));
        if !in_table || line.ends_with("| Held by |") || line.starts_with("| ---") {
            continue;
        }
        let held_by = cells.last().expect("a row has cells");
        // A package or a folder may stand before the names of its tests.
        let is_test = |name: &&str| name.contains('_') || name.contains("::");
        let tests: Vec<_> = held_by.split('`').skip(1).step_by(2).filter(is_test).collect();
        assert!(!tests.is_empty() || held_by.starts_with("the same"), "nothing holds this: {line}");
        for test in tests {
            assert!(is_there(test, &all), "SECURITY.md names {test}, which is not there");
            named += 1;
        }
        claims += 1;
    }
    assert!(claims >= 20 && named >= claims, "{claims} claims, {named} tests");
    for (path, there) in [("chaos::*", true), ("chaos::no_such_test", false), ("no_such_file::*", false)] {
        assert_eq!(is_there(path, &all), there, "{path}");
    }
}
