//! Reading and writing files and `-`, with private modes and without accidental overwrites.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};
use zeroize::Zeroizing;

/// Reads the input file of a flag; `-` is standard input.
pub(crate) fn read(flag: &str, path: &str) -> anyhow::Result<Zeroizing<Vec<u8>>> {
    read_or(&format!("error while reading {flag}:"), path)
}

/// Like [`read`], with another error message.
pub(crate) fn read_or(complaint: &str, path: &str) -> anyhow::Result<Zeroizing<Vec<u8>>> {
    let mut contents = Zeroizing::new(Vec::new());
    let result = match path {
        STDIO => std::io::stdin().take(LIMIT).read_to_end(&mut contents),
        path => File::open(path).and_then(|file| file.take(LIMIT).read_to_end(&mut contents)),
    };
    result.with_context(|| format!("{complaint} {path}"))?;
    Ok(contents)
}

/// Fails early if a file exists that must not be overwritten.
pub(crate) fn must_not_exist(what: &str, path: &str) -> anyhow::Result<()> {
    if path != STDIO && Path::new(path).exists() {
        bail!("refusing to overwrite existing {what}: {path}");
    }
    Ok(())
}

/// Creates a new file that only its owner can read; `-` is standard output.
pub(crate) fn write_new(flag: &str, path: &str, contents: &str) -> anyhow::Result<()> {
    let result = match path {
        STDIO => std::io::stdout().write_all(contents.as_bytes()),
        path => OpenOptions::new().write(true).create_new(true).mode(PRIVATE).open(path).and_then(|mut file| {
            // A partial file would block the next attempt.
            file.write_all(contents.as_bytes()).inspect_err(|_| drop(std::fs::remove_file(path)))
        }),
    };
    result.with_context(|| format!("error while writing {flag}: {path}"))
}

/// As [`write_new`], but an existing file is replaced and keeps its mode.
pub(crate) fn write_over(flag: &str, path: &str, contents: &[u8]) -> anyhow::Result<()> {
    over(path, contents, |_| Ok(())).with_context(|| format!("error while writing {flag}: {path}"))
}

/// As [`write_over`], of a secret: a file that others could read becomes private first, which is said on standard
/// error.
pub(crate) fn write_secret_over(flag: &str, path: &str, contents: &[u8]) -> anyhow::Result<()> {
    let make_private = |file: &File| {
        let metadata = file.metadata()?;
        let mode = metadata.permissions().mode() & 0o777;
        if metadata.is_file() && mode & 0o077 != 0 {
            file.set_permissions(Permissions::from_mode(PRIVATE))?;
            eprintln!(
                "{flag}: the mode of {path} was {mode:04o}; it is {PRIVATE:04o} now, because the file has a private key"
            );
        }
        Ok(())
    };
    over(path, contents, make_private).with_context(|| format!("error while writing {flag}: {path}"))
}

fn over(path: &str, contents: &[u8], prepare: impl FnOnce(&File) -> std::io::Result<()>) -> std::io::Result<()> {
    if path == STDIO {
        return std::io::stdout().write_all(contents);
    }
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(PRIVATE).open(path)?;
    prepare(&file)?;
    file.write_all(contents)
}

/// Replaces a file atomically, so that nobody ever reads a partial one; `-` is standard output.
pub(crate) fn replace(flag: &str, path: &str, contents: &str) -> anyhow::Result<()> {
    if is_stdio(path) {
        return write_over(flag, path, contents.as_bytes());
    }
    let temporary = format!("{path}.{}.new", std::process::id());
    write_new(flag, &temporary, contents)?;
    std::fs::rename(&temporary, path)
        .inspect_err(|_| drop(std::fs::remove_file(&temporary)))
        .with_context(|| format!("error while writing {flag}: {path}"))
}

/// Writes an image if there is one; overwrites an existing file.
pub(crate) fn write_image(flag: &str, path: &str, image: Option<&[u8]>) -> anyhow::Result<()> {
    image.map_or(Ok(()), |image| write_over(flag, path, image))
}

/// Whether a path stands for standard input or output.
pub(crate) fn is_stdio(path: &str) -> bool {
    path == STDIO
}

/// Checks that at most one flag reads from standard input.
pub(crate) fn check_inputs(paths: &[(&str, &str)]) -> anyhow::Result<()> {
    one_dash(paths, "only one input may read from stdin")
}

/// Checks that at most one flag writes to standard output.
pub(crate) fn check_outputs(paths: &[(&str, &str)]) -> anyhow::Result<()> {
    one_dash(paths, "only one output may write to stdout")
}

fn one_dash(paths: &[(&str, &str)], rule: &str) -> anyhow::Result<()> {
    let dashes: Vec<_> = paths.iter().filter(|(_, path)| *path == STDIO).collect();
    match dashes[..] {
        [(first, _), (second, _), ..] => bail!("-{first} and -{second} both set to \"-\", {rule}"),
        _ => Ok(()),
    }
}

const STDIO: &str = "-";
const PRIVATE: u32 = 0o600;
// One byte more than the PEM reader accepts, so that it reports files that are too long.
const LIMIT: u64 = (4 << 20) + 1;
