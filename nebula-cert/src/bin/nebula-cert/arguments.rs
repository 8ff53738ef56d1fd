//! Go's flag syntax (`-x v`, `-x=v`, `--x`, `-x=false`) on top of clap.

use clap::builder::Styles;
use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, Command};

use crate::hardware::shown;

/// A usage error, after which the help of the mode is printed.
#[derive(Debug)]
pub(crate) struct Usage(String);

impl Usage {
    pub(crate) fn error(text: impl Into<String>) -> anyhow::Error {
        anyhow::Error::new(Self(text.into()))
    }
}

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Turns a mode into a stand-alone command.
pub(crate) fn prepare(command: Command) -> Command {
    let name = format!("nebula-cert {}", command.get_name());
    let mut command = command
        .bin_name(name)
        .no_binary_name(true)
        .args_override_self(true)
        .styles(Styles::plain())
        .after_help("One dash works as well as two. A path of - means standard input or output.");
    command.build();
    command
}

/// Rewrites the arguments to `--flag=value`, the only unambiguous form in clap.
pub(crate) fn from_go_form(command: &Command, words: &[String]) -> Vec<String> {
    let mut out = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word == "--" {
            // Go's tools stop here and ignore what follows.
            break;
        }
        let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')).filter(|flag| !flag.is_empty())
        else {
            out.push(word.clone());
            continue;
        };
        let name = flag.split_once('=').map_or(flag, |(name, _)| name);
        let known = command.get_arguments().find(|argument| is_called(argument, name));
        let wants_value = known.and_then(Arg::get_num_args).is_some_and(|values| values.min_values() > 0);
        match words.as_slice().first().filter(|_| wants_value && name == flag) {
            // Go takes the next word as the value, even if it looks like a flag.
            Some(value) => {
                out.push(format!("--{flag}={value}"));
                words.next();
            }
            None if flag == "h" => out.push("--help".to_owned()),
            None => out.push(format!("--{flag}")),
        }
    }
    out
}

/// Parses a boolean flag; accepts the same values as Go.
pub(crate) fn boolean(text: &str) -> Result<bool, &'static str> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true or false expected"),
    }
}

/// Parses a number like Go's flags: the base is given by its prefix, and `_` may stand between digits.
pub(crate) fn unsigned(text: &str) -> Result<u64, &'static str> {
    let (digits, base) = match text.get(..2).map(str::to_ascii_lowercase).as_deref() {
        Some("0x") => (&text[2..], 16),
        Some("0o") => (&text[2..], 8),
        Some("0b") => (&text[2..], 2),
        // The zero is a digit, so that `0_1` is a number.
        Some(_) if text.starts_with('0') => (text, 8),
        _ => (text, 10),
    };
    // Go lets a prefix count as a digit: `0x_10`.
    let separated = digits.strip_prefix('_').filter(|_| digits.len() < text.len()).unwrap_or(digits);
    if separated.split('_').any(|part| part.is_empty() || !part.chars().all(|c| c.is_digit(base))) {
        return Err("a number from 0 to 18446744073709551615 expected");
    }
    u64::from_str_radix(&separated.replace('_', ""), base).map_err(|_| OUT_OF_RANGE)
}

/// Go's words for a number that is too large.
const OUT_OF_RANGE: &str = "value out of range";

/// Describes a usage error in the words of the Go tool.
pub(crate) fn complaint(error: &clap::Error) -> String {
    let context = |kind| error.get(kind).map(ToString::to_string).unwrap_or_default();
    // `--name <NAME>`, `--json[=<JSON>]` or the word itself.
    let argument = context(ContextKind::InvalidArg);
    let is_flag = argument.starts_with('-');
    let is_boolean = argument.contains("[=");
    let flag = argument.trim_start_matches('-').split([' ', '[', '=']).next().unwrap_or_default();
    let value = context(ContextKind::InvalidValue);
    let reason = match std::error::Error::source(error).map(ToString::to_string) {
        Some(reason) if reason == OUT_OF_RANGE => reason,
        Some(reason) => format!("parse error: {reason}"),
        None => "parse error".to_owned(),
    };
    match error.kind() {
        ErrorKind::UnknownArgument if is_flag => format!("flag provided but not defined: -{flag}"),
        ErrorKind::UnknownArgument => format!("{:?} is neither a flag nor the value of one", shown(&argument)),
        ErrorKind::InvalidValue if value.is_empty() => format!("flag needs an argument: -{flag}"),
        ErrorKind::ValueValidation if is_boolean => {
            format!("invalid boolean value {value:?} for -{flag}: {reason}")
        }
        ErrorKind::ValueValidation => format!("invalid value {value:?} for flag -{flag}: {reason}"),
        _ => error.to_string().trim_start_matches("error: ").trim_end().to_owned(),
    }
}

/// Checks a flag that must be given and not empty, as in the Go tool.
pub(crate) fn required<'a>(flag: &str, value: &'a str) -> anyhow::Result<&'a str> {
    if value.is_empty() { Err(Usage::error(format!("-{flag} is required"))) } else { Ok(value) }
}

/// Deprecated names of flags, shared by all modes that have the newer ones.
#[derive(clap::Args)]
pub(crate) struct Deprecated {
    /// Deprecated, see -unsafe-networks.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) subnets: String,
}

fn is_called(argument: &Arg, name: &str) -> bool {
    argument.get_long_and_visible_aliases().is_some_and(|names| names.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(words: &[&str]) -> String {
        let command = prepare(
            Command::new("t").arg(Arg::new("name").long("name")).arg(Arg::new("json").long("json").num_args(0..=1)),
        );
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        from_go_form(&command, &words).join(" ")
    }

    #[test]
    fn one_dash_two_dashes_and_both_value_forms_are_the_same() {
        for words in [&["-name", "x"][..], &["--name", "x"], &["-name=x"], &["--name=x"]] {
            assert_eq!(rewritten(words), "--name=x");
        }
    }

    #[test]
    fn two_dashes_alone_end_the_flags() {
        assert_eq!(rewritten(&["-name", "x", "--", "-json", "y"]), "--name=x");
        assert_eq!(rewritten(&["-name", "--"]), "--name=--");
    }

    #[test]
    fn numbers_read_as_go_reads_them() {
        let numbers = [("2", 2), ("0x2", 2), ("0X1f", 31), ("010", 8), ("0b11", 3), ("0o17", 15), ("0", 0), ("00", 0)];
        let separated = [("0_1", 1), ("1_000", 1000), ("0x_10", 16), ("0x1_0", 16), ("0b_1_1", 3)];
        for (text, number) in numbers.into_iter().chain(separated) {
            assert_eq!(unsigned(text), Ok(number), "{text}");
        }
        let refused = ["", "-1", "+1", "two", "0x", "0x+1", "08", "1 ", "\u{e9}\u{e9}"];
        for text in refused.into_iter().chain(["_1", "1_", "1__0", "0x_", "0x__1", "0_", "0x1_"]) {
            assert!(unsigned(text).is_err_and(|reason| reason != OUT_OF_RANGE), "{text}");
        }
        assert_eq!(unsigned("18446744073709551616"), Err(OUT_OF_RANGE));
    }

    #[test]
    fn a_value_may_look_like_a_flag() {
        assert_eq!(rewritten(&["-name", "-"]), "--name=-");
        assert_eq!(rewritten(&["-name", "-json", "-json"]), "--name=-json --json");
    }

    #[test]
    fn a_boolean_takes_no_following_word() {
        assert_eq!(rewritten(&["-json", "-name", "x"]), "--json --name=x");
        assert_eq!(rewritten(&["-json=false", "-h"]), "--json=false --help");
    }
}
