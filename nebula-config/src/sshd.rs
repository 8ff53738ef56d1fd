//! `sshd.*`: the SSH debug console. As in Go Nebula, a mistake disables the console and nothing else.

use std::fmt;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use russh::keys::ssh_key::public::KeyData;
use russh::keys::{Algorithm, PrivateKey, PublicKey, decode_secret_key};
use zeroize::Zeroizing;

use super::section::Section;
use super::{Invalid, Value, merge};

/// The console: where it listens, and who may use it.
#[derive(Clone, PartialEq, Eq)]
pub struct Sshd {
    /// `host:port`; without a host it means every address.
    pub listen: String,
    /// The console's own key.
    pub host_key: PrivateKey,
    /// Users, each with one key that may log in.
    pub users: Vec<(String, KeyData)>,
    /// CAs whose certificates may log in.
    pub authorities: Vec<KeyData>,
    /// Directory in which commands may write the files that they name; empty: anywhere.
    pub sandbox: PathBuf,
}

impl fmt::Debug for Sshd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sshd").field("listen", &self.listen).finish_non_exhaustive()
    }
}

impl Sshd {
    /// `None` if there is no console.
    pub(super) fn read(section: &Section<'_>) -> Option<Self> {
        if !section.boolean("sshd.enabled", false) {
            return None;
        }
        let text = |path: &str| section.string(path).unwrap_or_default();
        let absent = |(key, cause): (&'static str, String)| {
            section.warn(key, format!("Failed to configure sshd, ssh debugging will not be available: {cause}"));
        };
        let listen = check_listen(text(LISTEN)).map_err(absent).ok()?;
        let host_key = host_key(section, Zeroizing::new(text(HOST_KEY))).map_err(absent).ok()?;
        let authorities = section.strings(CAS).into_iter().enumerate().filter_map(|(index, text)| {
            let refuse =
                |cause| section.warn(format!("{CAS}.{index}"), format!("SSH CA had an error, ignoring: {cause}"));
            public_key(section, &format!("{CAS}.{index}"), &text).map_err(refuse).ok()
        });
        let authorities = authorities.collect();
        let users = users(section);
        let sandbox = section.string("sshd.sandbox_dir").map_or_else(default_sandbox, PathBuf::from);
        Some(Self { listen, host_key, users, authorities, sandbox })
    }
}

fn default_sandbox() -> PathBuf {
    std::env::temp_dir().join("nebula-debug")
}

fn check_listen(listen: String) -> Result<String, (&'static str, String)> {
    let refuse = |cause: &str| Err((LISTEN, cause.to_owned()));
    if listen.is_empty() {
        return refuse("sshd.listen must be provided");
    }
    match listen.rsplit_once(':') {
        None => refuse("invalid sshd.listen address: missing port in address"),
        Some((_, "22")) => refuse("sshd.listen can not use port 22"),
        Some((_, port)) if port.parse::<u16>().is_err() => refuse("invalid sshd.listen address: no port number"),
        Some(_) => Ok(listen),
    }
}

fn host_key(section: &Section<'_>, given: Zeroizing<String>) -> Result<PrivateKey, (&'static str, String)> {
    let refuse = |cause: String| (HOST_KEY, cause);
    if given.is_empty() {
        return Err(refuse("sshd.host_key must be provided".to_owned()));
    }
    let pem = if given.contains("-----BEGIN") {
        given
    } else {
        let path = Path::new(given.as_str());
        let pem = merge::read_bounded(path)
            .map_err(|error| refuse(format!("error while loading sshd.host_key file: open {}: {error}", *given)))?;
        let mode = std::fs::metadata(path).map_or(0, |file| file.permissions().mode() & 0o777);
        if mode & 0o077 != 0 {
            let text =
                format!("sshd.host_key {}: others may read or replace this key (mode {mode:04o}); chmod 600", *given);
            section.warn(HOST_KEY, text);
        }
        Zeroizing::new(pem)
    };
    let refuse = |cause: &dyn fmt::Display| {
        refuse(format!("error while adding sshd.host_key: failed to parse private key: {cause}"))
    };
    let key = decode_secret_key(&pem, None).map_err(|error| refuse(&error))?;
    if key.is_encrypted() {
        return Err(refuse(&"this private key is passphrase protected"));
    }
    if is_usable(key.algorithm()) { Ok(key) } else { Err(refuse(&NOT_USABLE)) }
}

fn users(section: &Section<'_>) -> Vec<(String, KeyData)> {
    let entries = match section.get(USERS) {
        None => return Vec::new(),
        Some(Value::List(entries)) => entries,
        Some(_) => {
            section.warn(USERS, "sshd.authorized_users is no list: no ssh users to authorize");
            return Vec::new();
        }
    };
    let mut users = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let at = format!("{USERS}.{index}");
        let Value::Map(entry) = entry else {
            section.warn(at, format!("entry #{index} of {USERS} is no map with user and keys, ignoring"));
            continue;
        };
        let Some(Value::String(user)) = entry.get("user") else {
            section.warn(at, format!("entry #{index} of {USERS} is missing the user field (a text), ignoring"));
            continue;
        };
        let keys = match entry.get("keys") {
            Some(single @ Value::String(_)) => std::slice::from_ref(single),
            Some(Value::List(keys)) => keys,
            _ => {
                let text = format!("entry #{index} of {USERS} is missing the keys field or was not understood");
                section.warn(at, text);
                continue;
            }
        };
        for key in keys {
            let read = match key {
                Value::String(key) => public_key(section, &at, key),
                _ => Err("it is no text".into()),
            };
            match read {
                Ok(key) => users.push((user.clone(), key)),
                Err(cause) => section.warn(&at, format!("Failed to authorize key of {user}: {cause}")),
            }
        }
    }
    users
}

/// Parses one line of an `authorized_keys` file.
fn public_key(section: &Section<'_>, at: &str, line: &str) -> Result<KeyData, Invalid> {
    let line = line.trim();
    let key = match PublicKey::from_openssh(line) {
        Ok(key) => key,
        Err(error) => {
            let key =
                PublicKey::from_openssh(after_options(line)).map_err(|_| format!("ssh: no key found ({error})"))?;
            let text = format!("{at}: the options before the key are ignored, as by Go Nebula; they restrict nothing");
            section.warn(at, text);
            key
        }
    };
    let key = key.key_data().clone();
    if is_usable(key.algorithm()) { Ok(key) } else { Err(NOT_USABLE.into()) }
}

/// The text after the first white space outside double quotes.
fn after_options(line: &str) -> &str {
    let mut quoted = false;
    let end = line.find(|character: char| {
        quoted ^= character == '"';
        !quoted && character.is_whitespace()
    });
    end.map_or("", |end| line[end..].trim_start())
}

fn is_usable(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::Ed25519 | Algorithm::Ecdsa { .. } | Algorithm::SkEd25519 | Algorithm::SkEcdsaSha2NistP256
    )
}

const LISTEN: &str = "sshd.listen";
const HOST_KEY: &str = "sshd.host_key";
const USERS: &str = "sshd.authorized_users";
const CAS: &str = "sshd.trusted_cas";
const NOT_USABLE: &str = "RSA and DSA keys are not supported here, only Ed25519 and ECDSA";

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> (String, String) {
        let key = PrivateKey::random(&mut russh::keys::key::safe_rng(), Algorithm::Ed25519).unwrap();
        let pem = key.to_openssh(russh::keys::ssh_key::LineEnding::LF).unwrap().to_string();
        (pem, key.public_key().to_openssh().unwrap())
    }

    /// The console, and the remarks.
    fn read(text: &str) -> (Option<Sshd>, Vec<String>) {
        let tree = super::super::parse(text).unwrap();
        let section = Section::new(&tree);
        let sshd = Sshd::read(&section);
        (sshd, section.into_remarks().into_iter().map(|remark| remark.text).collect())
    }

    #[test]
    fn a_mistake_leaves_the_console_away_and_says_why() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, key().0).unwrap();
        let with = |listen: &str, key: &str| format!("sshd: {{enabled: true, listen: '{listen}', host_key: '{key}'}}");
        let file = path.display().to_string();
        for (text, expected) in [
            ("sshd: {enabled: true}".to_owned(), "sshd.listen must be provided"),
            (with("127.0.0.1", &file), "invalid sshd.listen address"),
            (with("127.0.0.1:22", &file), "sshd.listen can not use port 22"),
            (with("127.0.0.1:2222", ""), "sshd.host_key must be provided"),
            (with("127.0.0.1:2222", "/none"), "error while loading sshd.host_key file"),
            (with("127.0.0.1:2222", "-----BEGIN nothing"), "error while adding sshd.host_key"),
        ] {
            let (sshd, remarks) = read(&text);
            assert!(sshd.is_none() && remarks.iter().any(|remark| remark.contains(expected)), "{text}: {remarks:?}");
        }
        assert_eq!(read("sshd: {enabled: false, listen: nonsense}"), (None, Vec::new()));
        let (sshd, remarks) = read(&with(":2222", &file));
        assert!(sshd.is_some() && remarks.iter().any(|remark| remark.contains("chmod 600")), "{remarks:?}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&with(":2222", &file)).1, Vec::<String>::new());
    }

    #[test]
    fn every_key_of_a_user_counts_and_what_is_none_is_named() {
        let (pem, public) = key();
        let pem = pem.replace('\n', "\n    ");
        let rsa = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAAgQDDE4/C8AamCvtnAN5eMzt6I9iwhh0JrNsDu0FELQMT63EXGiDciK6lEEfd6x\
                   Oa2rmslpE7LseAv5+pGBmllfy/oiuKB8pIabJ23cirdVJ39G6FAfSaG7np1WNFhoJf3VEsR7LpNcdRqHxy+IZUBJ+Imy6IgrTvwkIkJ/qqf//ceQ== x";
        let text = format!(
            "sshd:\n  enabled: true\n  listen: '[::1]:2222'\n  host_key: |\n    {pem}\n  trusted_cas: ['{public}', nonsense]\n  \
             authorized_users:\n  - {{user: one, keys: '{public} with a comment'}}\n  - {{user: two, keys: ['{public}', 7, '{rsa}']}}\n  \
             - {{user: 7, keys: '{public}'}}\n  - {{user: none}}\n  - text\n  - {{user: opts, keys: 'from=\"a b\",no-pty {public}'}}\n"
        );
        let (sshd, remarks) = read(&text);
        let sshd = sshd.unwrap();
        let names: Vec<_> = sshd.users.iter().map(|(user, _)| user.as_str()).collect();
        assert_eq!((names, sshd.authorities.len()), (vec!["one", "two", "opts"], 1));
        assert!(!format!("{sshd:?}").contains("PRIVATE"));
        for expected in
            ["SSH CA had an error", "it is no text", "missing the user", "missing the keys", "no map", "options"]
        {
            assert!(remarks.iter().any(|remark| remark.contains(expected)), "{expected}: {remarks:?}");
        }
        assert_eq!(sshd.sandbox, default_sandbox());
    }
}
