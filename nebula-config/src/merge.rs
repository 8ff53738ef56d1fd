//! Reads one file or a directory of files into one tree, merged as Go Nebula merges them.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Error, Remark, Value, yaml};

/// Reads `path`. Returns the tree, and remarks about values that failed to override those of earlier files.
///
/// # Errors
/// Returns an error if there is nothing to read, a file is unreadable or not YAML, or a key is a list in one file and a
/// map in another.
pub(super) fn read(path: &Path) -> Result<(Value, Vec<Remark>), Error> {
    let files = find(path).unwrap_or_default();
    if files.is_empty() {
        return Err(Error::NoFiles(path.to_owned()));
    }
    let mut remarks = Vec::new();
    let mut tree = Value::empty();
    for file in files {
        let unreadable = |source| Error::Unreadable { path: file.clone(), source };
        let text = read_bounded(&file).map_err(unreadable)?;
        let parsed =
            yaml::parse(&text).map_err(|error| Error::InFile { path: file.clone(), source: Box::new(error) })?;
        tree = merge(tree, parsed, &file, String::new(), &mut remarks)?;
    }
    Ok((tree, remarks))
}

/// Reads a text file; fails if it is longer than a configuration file may be.
pub(super) fn read_bounded(path: &Path) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(yaml::MAX_TEXT as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > yaml::MAX_TEXT {
        return Err(std::io::Error::other(format!("file is longer than {} MiB", yaml::MAX_TEXT >> 20)));
    }
    nebula_cert::text::decode(bytes).map_err(|why| std::io::Error::new(std::io::ErrorKind::InvalidData, why))
}

pub(super) fn find(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let path = std::path::absolute(path)?;
    if !std::fs::metadata(&path)?.is_dir() {
        return Ok(vec![path]);
    }
    let mut files = Vec::new();
    walk(&path, 0, &mut files)?;
    // Sorted by the bytes of the whole path, so `sub/50.yml` comes after `99.yaml`.
    files.sort_by(|a, b| a.as_os_str().cmp(b.as_os_str()));
    Ok(files)
}

fn walk(directory: &Path, depth: usize, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let Ok(metadata) = std::fs::metadata(&path) else { continue };
        if metadata.is_dir() {
            if depth < MAX_DEPTH {
                walk(&path, depth + 1, files)?;
            }
        } else if path.extension().is_some_and(|e| e == "yml" || e == "yaml") && files.len() < MAX_FILES {
            files.push(path);
        }
    }
    Ok(())
}

/// Merges `newer`, the later file, into `older`: its scalars win unless they are zero values, and its list items come
/// first.
fn merge(older: Value, newer: Value, file: &Path, path: String, remarks: &mut Vec<Remark>) -> Result<Value, Error> {
    let at = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match (older, newer) {
        (Value::Map(mut older), Value::Map(newer)) => {
            for (key, value) in newer {
                let merged = match older.remove(&key) {
                    Some(previous) => merge(previous, value, file, at(&key), remarks)?,
                    None => value,
                };
                older.insert(key, merged);
            }
            Ok(Value::Map(older))
        }
        (Value::List(older), Value::List(mut newer)) => {
            newer.extend(older);
            Ok(Value::List(newer))
        }
        (Value::Map(_), Value::List(_)) | (Value::List(_), Value::Map(_)) => {
            Err(Error::MergeKinds { path: file.to_owned(), key: path })
        }
        (older, newer) if newer.is_zero() && !older.is_zero() => {
            if !matches!(newer, Value::Null) {
                let text = format!(
                    "{path} in {} does not override an earlier file because it is empty, zero or false; \
                     remove the earlier setting instead",
                    file.display()
                );
                remarks.push(Remark { key: path, text });
            }
            Ok(older)
        }
        (_, newer) => Ok(newer),
    }
}

const MAX_DEPTH: usize = 32;
const MAX_FILES: usize = 4096;
