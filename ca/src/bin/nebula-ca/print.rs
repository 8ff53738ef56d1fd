//! What is printed, for people and for programs.

use std::io::{self, Write};

use anyhow::Context;
use nebula_cert::{json_line, visible};

pub(super) fn join<T: ToString>(items: &[T]) -> String {
    if items.is_empty() { "-".to_owned() } else { items.iter().map(T::to_string).collect::<Vec<_>>().join(",") }
}

/// Columns as wide as their widest cell, the last one ragged.
pub(super) fn table<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows = rows.map(|row| row.map(|cell| visible(&cell).into_owned()));
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..N).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let line: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Prints one line, whatever the names in it are.
pub(super) fn say(line: &str) -> anyhow::Result<()> {
    print(&format!("{}\n", visible(line)))
}

pub(super) fn print_json(document: &serde_json::Value) -> anyhow::Result<()> {
    print(&json_line(format!("{document:#}")))
}

/// Writes to standard output; a closed pipe is an error like any other.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")
}
