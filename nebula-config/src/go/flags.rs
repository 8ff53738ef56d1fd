//! Command-line flags by the rules of Go's flag package: `-x`, `--x`, `-x=v`, `-x v`.

/// A flag the program knows.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    /// Name without dashes.
    pub name: &'static str,
    /// Whether it takes a value; otherwise it is a boolean.
    pub takes_value: bool,
    /// One line for `-help`.
    pub help: &'static str,
}

/// A parsed command line.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    values: Vec<(&'static str, String)>,
    rest: Vec<String>,
}

/// Why the command line is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// `-help` or `-h`.
    #[error("flag: help requested")]
    Help,
    /// No such flag.
    #[error("flag provided but not defined: -{0}")]
    Unknown(String),
    /// The last word is a flag that needs a value.
    #[error("flag needs an argument: -{0}")]
    NeedsValue(String),
    /// Not a boolean.
    #[error("invalid boolean value {value:?} for -{name}: parse error")]
    NotBoolean {
        /// Name of the flag.
        name: String,
        /// What was given.
        value: String,
    },
    /// Dashes without a name.
    #[error("bad flag syntax: {0}")]
    Syntax(String),
}

impl Parsed {
    /// Value of a flag; the last occurrence wins.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<&str> {
        self.values.iter().rev().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// All values of a flag that may be given several times, in their order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.values.iter().filter(move |(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    /// Whether a boolean flag is on.
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        self.value(name) == Some("true")
    }

    /// The flags as words that [`parse`] reads as the same again.
    pub fn words(&self) -> impl Iterator<Item = String> {
        self.values.iter().map(|(name, value)| format!("-{name}={value}"))
    }

    /// Words after the flags.
    #[must_use]
    pub fn rest(&self) -> &[String] {
        &self.rest
    }
}

/// Parses the words after the program's name. Stops at the first word that is not a flag.
///
/// # Errors
/// Returns an error for the first invalid word.
pub fn parse(words: impl IntoIterator<Item = String>, flags: &[Flag]) -> Result<Parsed, Error> {
    let mut parsed = Parsed::default();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if word == "--" {
            break;
        }
        if word == "-" || !word.starts_with('-') {
            parsed.rest.push(word);
            break;
        }
        let body = word.strip_prefix("--").or_else(|| word.strip_prefix('-')).unwrap_or(&word);
        if body.is_empty() || body.starts_with(['-', '=']) {
            return Err(Error::Syntax(word));
        }
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        let Some(flag) = flags.iter().find(|flag| flag.name == name) else {
            let help = matches!(name, "help" | "h");
            return Err(if help { Error::Help } else { Error::Unknown(name.to_owned()) });
        };
        let value = match (flag.takes_value, value) {
            (true, Some(value)) => value,
            (true, None) => words.next().ok_or_else(|| Error::NeedsValue(name.to_owned()))?,
            (false, None) => "true".to_owned(),
            (false, Some(value)) => match value.as_str() {
                "1" | "t" | "T" | "TRUE" | "true" | "True" => "true".to_owned(),
                "0" | "f" | "F" | "FALSE" | "false" | "False" => "false".to_owned(),
                _ => return Err(Error::NotBoolean { name: name.to_owned(), value }),
            },
        };
        parsed.values.push((flag.name, value));
    }
    parsed.rest.extend(words);
    Ok(parsed)
}

/// The text `-help` prints.
#[must_use]
pub fn usage(program: &str, flags: &[Flag]) -> String {
    format!("Usage of {program}:\n{}", describe(flags))
}

/// Lists the flags with their help texts.
#[must_use]
pub fn describe(flags: &[Flag]) -> String {
    let describe = |flag: &Flag| {
        let kind = if flag.takes_value { " string" } else { "" };
        format!("  -{}{kind}\n    \t{}\n", flag.name, flag.help)
    };
    flags.iter().map(describe).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: &[Flag] =
        &[Flag { name: "config", takes_value: true, help: "" }, Flag { name: "test", takes_value: false, help: "" }];

    fn words(line: &str) -> Result<Parsed, Error> {
        parse(line.split_whitespace().map(str::to_owned), FLAGS)
    }

    #[test]
    fn one_dash_two_dashes_and_equals_are_the_same() {
        for line in ["-config a", "--config a", "-config=a", "--config=a", "-config b -config a"] {
            assert_eq!(words(line).unwrap().value("config"), Some("a"), "{line}");
        }
    }

    #[test]
    fn values_of_a_repeated_flag_keep_their_order() {
        let parsed = words("-config b -test -config=a").unwrap();
        assert_eq!(parsed.values("config").collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(parsed.values("other").count(), 0);
    }

    #[test]
    fn booleans_take_no_word_but_an_explicit_value() {
        assert!(words("-test rest").unwrap().is_set("test"));
        assert!(!words("-test=false").unwrap().is_set("test"));
        assert_eq!(words("-test=maybe"), Err(Error::NotBoolean { name: "test".to_owned(), value: "maybe".to_owned() }));
    }

    #[test]
    fn parsing_stops_at_the_first_other_word() {
        for (line, rest) in
            [("extra -nope", &["extra", "-nope"][..]), ("-- -nope", &["-nope"]), ("-test - -nope", &["-", "-nope"])]
        {
            assert_eq!(words(line).unwrap().rest(), rest, "{line}");
        }
    }

    #[test]
    fn errors_name_the_flag() {
        assert_eq!(words("-nope").unwrap_err().to_string(), "flag provided but not defined: -nope");
        assert_eq!(words("-config").unwrap_err().to_string(), "flag needs an argument: -config");
        assert_eq!(words("--help"), Err(Error::Help));
        assert_eq!(words("---test"), Err(Error::Syntax("---test".to_owned())));
    }
}
