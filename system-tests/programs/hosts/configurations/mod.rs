//! The same configurations checked by Go Nebula 1.11.0 and by ours with `-test`: both must return the same exit code
//! and name the same key. For each deliberate difference `docs/migration.md` has a row, whose name is in the table
//! here.

#![allow(clippy::unwrap_used, reason = "a test ends at the first surprise")]

mod bench;
mod credentials;
mod discovery;
mod documents;
mod examples;
mod files;
mod firewall;
mod forms;
mod generated;
mod listen;
mod operation;
mod tun;
mod yaml;

use std::collections::BTreeSet;

use bench::{Bench, Case, Expected};

fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let topics = [
        credentials::CASES,
        discovery::CASES,
        files::CASES,
        firewall::CASES,
        listen::CASES,
        operation::CASES,
        tun::CASES,
        yaml::CASES,
    ];
    topics.iter().for_each(|topic| cases.extend_from_slice(topic));
    cases
}

#[test]
fn the_table_has_at_least_150_configurations_and_every_name_once() {
    let cases = all();
    let names: BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len(), "two cases of one name");
    assert!(cases.len() >= 150, "{} configurations", cases.len());
}

#[test]
fn every_deviation_is_documented_and_every_documented_one_has_a_case() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/migration.md");
    let document = std::fs::read_to_string(document).unwrap();
    let documented: BTreeSet<&str> = document
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("deviation-"))
        .collect();
    let cases = all();
    let shown: BTreeSet<&str> = cases
        .iter()
        .filter_map(|case| match case.expected {
            Expected::Deviates { row, .. } => Some(row),
            _ => None,
        })
        .collect();
    assert_eq!(documented, shown);
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn go_and_ours_agree_on_every_configuration() {
    let bench = Bench::new();
    let mut failures = Vec::new();
    for case in all() {
        if let Err(text) = bench.compare(&case) {
            failures.push(format!("{}: {text}", case.name));
        }
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}
