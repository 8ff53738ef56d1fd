//! Users and passwords that clients of the proxy may have.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use subtle::{Choice, ConstantTimeEq};
use zeroize::{Zeroize, Zeroizing};

/// Who may use the proxy.
pub(crate) struct Credentials {
    users: Vec<User>,
}

struct User {
    name: String,
    password: Zeroizing<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("users", &self.users.len()).finish_non_exhaustive()
    }
}

/// Why a file of credentials cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    #[error("it is longer than {MAX_FILE} bytes")]
    TooLong,
    #[error("line {0} is not USER:PASSWORD with 1 to 255 bytes on either side")]
    Line(usize),
    #[error("it names no user; each line is USER:PASSWORD")]
    Empty,
}

/// Of the file, in bytes.
const MAX_FILE: usize = 64 << 10;
/// Of a user's name and of a password, in bytes (RFC 1929).
const MAX_FIELD: usize = 255;

impl Credentials {
    /// Reads a file with a line `USER:PASSWORD` for each user. Empty lines and those that begin with `#` are skipped.
    pub(crate) fn read(path: &Path) -> Result<Self, Error> {
        let mut file = File::open(path)?;
        if file.metadata()?.permissions().mode() & 0o007 != 0 {
            tracing::warn!(file = %path.display(), "Everybody on this host can read the passwords: chmod o= this file");
        }
        // Allocated at once: a buffer that grows leaves copies behind.
        let mut text = Zeroizing::new(Vec::with_capacity(MAX_FILE + 1));
        Read::by_ref(&mut file).take(MAX_FILE as u64 + 1).read_to_end(&mut text)?;
        if text.len() > MAX_FILE {
            return Err(Error::TooLong);
        }
        Self::parse(&text)
    }

    pub(crate) fn parse(text: &[u8]) -> Result<Self, Error> {
        let mut users = Vec::new();
        for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
            let line = std::str::from_utf8(line).map_err(|_| Error::Line(number))?;
            let line = line.strip_suffix('\r').unwrap_or(line);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, password) = line.split_once(':').ok_or(Error::Line(number))?;
            if ![name, password].iter().all(|field| (1..=MAX_FIELD).contains(&field.len())) {
                return Err(Error::Line(number));
            }
            users.push(User { name: name.to_owned(), password: Zeroizing::new(password.to_owned()) });
        }
        if users.is_empty() { Err(Error::Empty) } else { Ok(Self { users }) }
    }

    /// Whether there is a user with this name and password. Compares with all of them, so that the time does not tell
    /// which one comes close.
    pub(crate) fn allow(&self, name: &[u8], password: &[u8]) -> bool {
        let matches = |user: &User| user.name.as_bytes().ct_eq(name) & user.password.as_bytes().ct_eq(password);
        self.users.iter().map(matches).fold(Choice::from(0), |any, this| any | this).into()
    }

    /// Whether the value of `Proxy-Authorization` is that of such a user (RFC 7617).
    pub(crate) fn allow_basic(&self, header: &[u8]) -> bool {
        let Some((scheme, encoded)) = std::str::from_utf8(header).ok().and_then(|text| text.trim().split_once(' '))
        else {
            return false;
        };
        if !scheme.eq_ignore_ascii_case("basic") {
            return false;
        }
        let Ok(mut decoded) = STANDARD.decode(encoded.trim_start()) else { return false };
        let colon = decoded.iter().position(|byte| *byte == b':');
        let allowed = colon.is_some_and(|colon| self.allow(&decoded[..colon], &decoded[colon + 1..]));
        decoded.zeroize();
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_pair_of_name_and_password_is_allowed() {
        let users = Credentials::parse(b"# users\nann:one\r\n\nbob:two:three\n").unwrap();
        assert!(users.allow(b"ann", b"one") && users.allow(b"bob", b"two:three"));
        for (name, password) in [("ann", "two:three"), ("ann", ""), ("", ""), ("# users", ""), ("bob", "two")] {
            assert!(!users.allow(name.as_bytes(), password.as_bytes()), "{name}:{password}");
        }
        assert!(users.allow_basic(b"Basic YW5uOm9uZQ==") && users.allow_basic(b"basic  Ym9iOnR3bzp0aHJlZQ=="));
        for header in ["Basic YW5uOnR3bw==", "Bearer YW5uOm9uZQ==", "Basic", "Basic YW5u", "Basic ?", ""] {
            assert!(!users.allow_basic(header.as_bytes()), "{header}");
        }
    }

    #[test]
    fn a_file_that_names_nobody_is_refused() {
        for (text, error) in [
            (&b""[..], "it names no user"),
            (b"# ann:one\n", "it names no user"),
            (b"ann:one\nbob\n", "line 2"),
            (b"ann:\n", "line 1"),
            (b":one\n", "line 1"),
            (b"ann:\xff\n", "line 1"),
        ] {
            let refused = Credentials::parse(text).unwrap_err().to_string();
            assert!(refused.starts_with(error), "{refused}");
        }
    }
}
