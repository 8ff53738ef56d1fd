//! `nebula-cni-plugin table`: shows the cluster table to people, and writes one where no node agent does.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nebula_cni_contract::cluster_table::contents::Contents;
use nebula_cni_contract::cluster_table::{self, Layout, MAX_BYTES};
use nebula_cni_contract::launch::CLUSTER_TABLE;

use crate::attachment::files::replace_durably;

/// How it is called.
pub const USAGE: &str = "table show [--json] [FILE], or table write FILE with JSON as show prints it on standard input";

/// Why there is nothing to show or nothing was written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Unknown words on the command line.
    #[error("usage: nebula-cni-plugin {USAGE}")]
    Usage,
    /// The file cannot be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file is no table.
    #[error("{}: {source}", .path.display())]
    Table {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        source: cluster_table::Error,
    },
    /// More than [`MAX_BYTES`].
    #[error("{what} has more than {} MiB", MAX_BYTES >> 20)]
    TooLong {
        /// The file, or the input.
        what: String,
    },
    /// The input is not what `table show --json` prints.
    #[error("standard input: {0}")]
    Input(#[from] serde_json::Error),
    /// Instances would not use it.
    #[error("version {version} is not above that of {} ({present}): instances would ignore it; leave \"version\" out", .path.display())]
    OldVersion {
        /// The table that is there.
        path: PathBuf,
        /// Its version.
        present: u64,
        /// The version of the input.
        version: u64,
    },
}

/// Carries out the command in `arguments` and returns what it says. `input` is read only to write a table.
///
/// # Errors
/// Returns what is wrong with the arguments, the file or the input.
pub fn run(arguments: &[&str], input: impl Read) -> Result<String, Error> {
    match arguments {
        ["show"] => show(CLUSTER_TABLE.as_ref(), false),
        ["show", "--json"] => show(CLUSTER_TABLE.as_ref(), true),
        ["show", "--json", file] | ["show", file, "--json"] => show(file.as_ref(), true),
        ["show", file] if !file.starts_with('-') => show(file.as_ref(), false),
        ["write", file] if !file.starts_with('-') => write(file.as_ref(), input),
        _ => Err(Error::Usage),
    }
}

fn show(path: &Path, as_json: bool) -> Result<String, Error> {
    let contents = read(path)?;
    if !as_json {
        return Ok(contents.to_string());
    }
    let mut text = serde_json::to_string_pretty(&contents)?;
    text.push('\n');
    Ok(text)
}

fn read(path: &Path) -> Result<Contents, Error> {
    let bytes = File::open(path)
        .and_then(|file| all_of(file, MAX_BYTES))
        .map_err(|source| Error::File { path: path.to_owned(), source })?;
    let bytes = bytes.ok_or_else(|| Error::TooLong { what: path.display().to_string() })?;
    let wrong = |source| Error::Table { path: path.to_owned(), source };
    let layout = Layout::read(&bytes).map_err(wrong)?;
    Ok(Contents::of(&layout.table(&bytes)))
}

/// Replaces the table, so that a reader sees the one before or this one.
fn write(path: &Path, input: impl Read) -> Result<String, Error> {
    let failed = |source| Error::File { path: path.to_owned(), source };
    let text = all_of(input, MAX_BYTES).map_err(failed)?;
    let text = text.ok_or_else(|| Error::TooLong { what: "standard input".to_owned() })?;
    let mut contents: Contents = serde_json::from_slice(&text)?;
    let present = match read(path) {
        Ok(present) => present.version,
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => 0,
        Err(other) => return Err(other),
    };
    if contents.version == 0 {
        contents.version = present.saturating_add(1);
    } else if contents.version <= present {
        return Err(Error::OldVersion { path: path.to_owned(), present, version: contents.version });
    }
    // Instances read it as users of their own.
    replace_durably(path, &contents.to_table(), 0o644).map_err(failed)?;
    Ok(format!("{}: version {}\n", path.display(), contents.version))
}

/// `None`: there are more than `limit` bytes.
fn all_of(input: impl Read, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    input.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const INPUT: &str = r#"{"enrolled": [{"address": "10.42.1.2", "incarnation": "1"}], "clear": ["10.42.1.4/32"]}"#;

    #[test]
    fn a_table_that_was_written_is_shown_and_written_again_with_a_higher_version() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let file = path.to_str().unwrap();
        assert!(matches!(run(&["show", file], io::empty()), Err(Error::File { .. })));
        run(&["write", file], INPUT.as_bytes()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let shown = run(&["show", file], io::empty()).unwrap();
        assert!(shown.starts_with("version 1\n") && shown.contains("10.42.1.2"), "{shown}");
        assert!(run(&["write", file], INPUT.as_bytes()).unwrap().contains("version 2"));
        let json = run(&["show", "--json", file], io::empty()).unwrap();
        let refused = run(&["write", file], json.as_bytes()).unwrap_err().to_string();
        assert!(refused.contains("version 2 is not above"), "{refused}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn nothing_that_is_no_table_is_shown_or_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        let file = path.to_str().unwrap();
        fs::write(&path, "nonsense").unwrap();
        for arguments in [&["show", file][..], &["write", file]] {
            let error = run(arguments, INPUT.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("not a cluster table"), "{error}");
        }
        assert!(matches!(run(&["write", file], &b"{\"pods\": []}"[..]), Err(Error::Input(_))));
        assert_eq!(fs::read(&path).unwrap(), b"nonsense");
        assert_eq!(all_of(&b"12345"[..], 4).unwrap(), None);
    }

    #[test]
    fn unknown_words_are_answered_with_the_usage() {
        for words in [&[][..], &["list"], &["show", "--yaml"], &["write"], &["show", "a", "b"]] {
            assert!(run(words, io::empty()).unwrap_err().to_string().contains("table show [--json]"), "{words:?}");
        }
    }
}
