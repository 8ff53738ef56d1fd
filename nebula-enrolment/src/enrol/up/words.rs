//! The words after `nebula up`, and how `nebula` hands them to `nebula-enrol`: a join token among them is wiped off the
//! command line first, and goes on by a pipe.

use std::io::{Read, Write};
use std::process::{ExitCode, Stdio};

use nebula_cert::JoinToken;
use nebula_config::go::flags::{self, Parsed};
use nebula_linux::{command_line, companion, terminal};
use zeroize::Zeroizing;

/// Flags, and the token if it is an argument.
#[derive(Debug, Default)]
pub(super) struct Words {
    flags: Vec<Parsed>,
    token: Option<Zeroizing<String>>,
}

/// Takes the words after `up` off the command line of this process, if that is its first argument. To be called before
/// anything else.
#[must_use]
pub fn take() -> Option<Zeroizing<Vec<String>>> {
    std::env::args_os().nth(1).is_some_and(|word| word == "up").then(|| Zeroizing::new(command_line::take(2)))
}

/// Replaces this process by `nebula-enrol up` with the same words, of which no token is an argument.
#[must_use]
pub fn hand_over(words: Zeroizing<Vec<String>>) -> ExitCode {
    let handed = match Words::parse(words) {
        Ok(words) => words.hand_over(),
        Err(Error::Help) => {
            companion::execute(PROGRAM, ["up", "-help"].map(Into::into)).map_err(|error| error.to_string())
        }
        Err(Error::Usage(message)) => {
            eprintln!("nebula up: {message}; see nebula up -help");
            return ExitCode::from(2);
        }
    };
    match handed {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("nebula: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Why the words are no order.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Error {
    Help,
    Usage(String),
}

impl Words {
    pub(super) fn parse(mut words: Zeroizing<Vec<String>>) -> Result<Self, Error> {
        let mut read = Self::default();
        loop {
            let parsed = flags::parse(std::mem::take(&mut *words), super::FLAGS).map_err(|error| match error {
                flags::Error::Help => Error::Help,
                error => Error::Usage(error.to_string()),
            })?;
            let mut rest = Zeroizing::new(parsed.rest().to_vec());
            read.flags.push(parsed);
            if rest.is_empty() {
                return Ok(read);
            }
            if read.token.replace(Zeroizing::new(rest.remove(0))).is_some() {
                return Err(Error::Usage("there is more than one token".to_owned()));
            }
            words = rest;
        }
    }

    /// The last value of a flag.
    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.flags.iter().rev().find_map(|flags| flags.value(name))
    }

    /// All values of a flag.
    pub(super) fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.flags.iter().flat_map(move |flags| flags.values(name))
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.value(name) == Some("true")
    }

    /// Whether there is a token, or where to read one.
    pub(super) fn names_token(&self) -> bool {
        self.token.is_some() || self.value("token-file").is_some()
    }

    /// The join token: the argument, the file, or what `ask` returns.
    pub(super) fn token(
        &self,
        ask: impl FnOnce() -> Result<Zeroizing<String>, String>,
    ) -> Result<Zeroizing<String>, String> {
        let text = match (&self.token, self.value("token-file")) {
            (Some(_), Some(_)) => return Err("give the token or -token-file, not both".to_owned()),
            (Some(token), None) if **token != "-" => token.clone(),
            (None, Some(path)) => {
                let file = std::fs::File::open(path).map_err(|error| format!("cannot read {path}: {error}"))?;
                read(file, path)?
            }
            _ => ask()?,
        };
        match text.trim() {
            "" => Err("the join token is missing (nebula-ca token create --join)".to_owned()),
            _ => Ok(text),
        }
    }

    /// What to say to somebody who gave a token as an argument.
    pub(super) fn warning(&self) -> Option<&'static str> {
        let token = self.token.as_ref().filter(|token| ***token != "-")?;
        // One that is bound to the key of this host is worth nothing to others.
        let is_bound = token.parse::<JoinToken>().is_ok_and(|token| token.key().is_some());
        (!is_bound).then_some(SEEN)
    }

    fn hand_over(self) -> Result<std::convert::Infallible, String> {
        let flags = self.flags.iter().flat_map(Parsed::words).map(Into::into);
        let arguments = ["up".into()].into_iter().chain(flags);
        let Some(token) = &self.token else {
            return companion::execute(PROGRAM, arguments).map_err(|error| error.to_string());
        };
        if let Some(warning) = self.warning() {
            eprintln!("nebula up: warning: {warning}");
        }
        let arguments = arguments.chain(["-".into()]);
        if **token == "-" {
            return companion::execute(PROGRAM, arguments).map_err(|error| error.to_string());
        }
        let input = piped(token).map_err(|error| format!("cannot hand over the token: {error}"))?;
        companion::execute_with(PROGRAM, arguments, input).map_err(|error| error.to_string())
    }
}

/// A pipe with this text in it, which is smaller than what a pipe holds.
fn piped(token: &str) -> std::io::Result<Stdio> {
    if token.len() > MAX_TOKEN_BYTES {
        return Err(std::io::Error::other(format!("it is longer than {MAX_TOKEN_BYTES} bytes")));
    }
    let (output, mut input) = std::io::pipe()?;
    input.write_all(token.as_bytes())?;
    Ok(output.into())
}

/// Asks for the token on the terminal, or reads what standard input has.
pub(super) fn ask() -> Result<Zeroizing<String>, String> {
    match terminal::ask_silently("Join token: ", MAX_TOKEN_BYTES) {
        Ok(Some(token)) => Ok(token),
        Ok(None) => read(std::io::stdin(), "standard input"),
        Err(error) => Err(format!("no join token: {error}")),
    }
}

fn read(source: impl Read, what: &str) -> Result<Zeroizing<String>, String> {
    // Reserved at once: growing would leave copies of the secret behind.
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN_BYTES));
    let read = source.take(MAX_TOKEN_BYTES as u64).read_to_string(&mut text);
    read.map(|_| text).map_err(|error| format!("cannot read {what}: {error}"))
}

/// It needs HTTPS, which the daemon has not.
const PROGRAM: &str = "nebula-enrol";
const MAX_TOKEN_BYTES: usize = 4096;
const SEEN: &str = "the list of processes shows a program's arguments to every user of this host, so somebody else may use that \
    token first and have this host's place in the network. Run `nebula up` without it, and paste it when it is asked for; \
    or bind it to the key that `nebula up -prepare` prints";

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, HostKey, PrivateKey};

    use super::*;

    fn parse(line: &str) -> Result<Words, Error> {
        Words::parse(Zeroizing::new(line.split_whitespace().map(str::to_owned).collect()))
    }

    fn nobody() -> Result<Zeroizing<String>, String> {
        panic!("nothing has to be asked for")
    }

    #[test]
    fn flags_may_stand_before_and_after_the_token_and_are_handed_over_without_it() {
        for line in ["-dir /x TOKEN --no-start", "TOKEN -no-start -dir=/x", "--no-start -- TOKEN --dir /x"] {
            let words = parse(line).unwrap();
            assert_eq!(words.token(nobody).unwrap().as_str(), "TOKEN");
            assert_eq!((words.value("dir"), words.is_set("no-start")), (Some("/x"), true));
            let handed: Vec<String> = words.flags.iter().flat_map(Parsed::words).collect();
            let again = parse(&format!("{} -", handed.join(" "))).unwrap();
            assert_eq!((again.value("dir"), again.is_set("no-start")), (Some("/x"), true), "{handed:?}");
            assert!(!handed.join(" ").contains("TOKEN"));
        }
        assert_eq!(parse("-help").unwrap_err(), Error::Help);
        for (line, said) in [("a b", "more than one"), ("-x", "not defined")] {
            assert!(matches!(parse(line), Err(Error::Usage(message)) if message.contains(said)), "{line}");
        }
    }

    #[test]
    fn a_token_comes_from_the_prompt_a_file_or_an_argument() {
        let asked = || Ok(Zeroizing::new("asked\n".to_owned()));
        for line in ["", "-", "-no-start", "- -dir /x"] {
            assert_eq!(parse(line).unwrap().token(asked).unwrap().as_str(), "asked\n", "{line}");
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        std::fs::write(&file, "from a file\n").unwrap();
        let line = format!("-token-file {}", file.display());
        assert_eq!(parse(&line).unwrap().token(nobody).unwrap().as_str(), "from a file\n");
        assert!(parse(&format!("TOKEN {line}")).unwrap().token(nobody).unwrap_err().contains("not both"));
        assert!(parse("").unwrap().token(|| Ok(Zeroizing::default())).unwrap_err().contains("missing"));
        assert!(parse("-token-file /nonexistent").unwrap().token(nobody).unwrap_err().contains("/nonexistent"));
    }

    #[test]
    fn whoever_gives_a_token_that_is_good_for_others_as_an_argument_is_warned() {
        let networks = ["10.42.0.0/16".parse().unwrap()];
        let token = JoinToken::new("https://ca.example", [7; 32], "x", &networks).unwrap();
        let bound = token.clone().bound_to(&HostKey::of(&PrivateKey::generate(Curve::Curve25519).unwrap()));
        let warned = |line: &str| parse(line).unwrap().warning().is_some();
        assert!(warned(&token.to_text()) && warned("nonsense"));
        assert!(!warned("") && !warned("-") && !warned("-token-file x") && !warned(&bound.to_text()));
    }
}
