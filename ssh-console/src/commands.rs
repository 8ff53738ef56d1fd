//! The console's commands: their names and flags, and what a typed line requests.

use nebula_config::go::flags::{self, Flag, Parsed};

use super::words;

/// What a typed line requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    /// Only print this text.
    Say(String),
    /// End the session.
    Logout,
    /// Reload the configuration.
    Reload,
    /// Query or change the running node.
    Ask(Question),
}

/// A request to the running node. Addresses are as they were typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Question {
    Hostmap {
        form: Form,
        by_index: bool,
    },
    PendingHostmap {
        form: Form,
    },
    LighthouseMap {
        form: Form,
    },
    Tunnel {
        peer: Option<String>,
        form: Form,
    },
    Relays {
        form: Form,
    },
    Certificate {
        peer: Option<String>,
        form: Form,
        pem: bool,
    },
    Device {
        form: Form,
    },
    Version,
    LogLevel(Option<String>),
    LogFormat(Option<String>),
    Query {
        peer: Option<String>,
    },
    Create {
        peer: Option<String>,
        endpoint: Option<String>,
    },
    Close {
        peer: Option<String>,
        quietly: bool,
    },
    ChangeRemote {
        peer: Option<String>,
        endpoint: Option<String>,
    },
    /// Write a profile to this file.
    Profile {
        file: Option<String>,
    },
    StopProfile,
    ProfileFraction,
}

/// Output format of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Text,
    Json,
    Indented,
}

struct Command {
    name: &'static str,
    about: &'static str,
    /// More text for `help NAME`.
    more: Option<&'static str>,
    /// `None`: all words are taken as they are, flags or not.
    flags: Option<&'static [Flag]>,
    wish: fn(&Parsed, &[String]) -> Wish,
}

/// Parses `line` into what it requests.
pub(super) fn read(line: &str) -> Wish {
    let words = match words::split(line) {
        Ok(words) => words,
        Err(unfinished) => return Wish::Say(format!("{unfinished}\n")),
    };
    let Some((name, rest)) = words.split_first() else { return Wish::Say(list()) };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return Wish::Say(format!("did not understand: {line}\n{}", list()));
    };
    if rest.iter().any(|word| matches!(word.as_str(), "-h" | "-help")) {
        return Wish::Say(help(Some(command.name)));
    }
    let Some(flags) = command.flags else { return (command.wish)(&Parsed::default(), rest) };
    match flags::parse(rest.iter().cloned(), flags) {
        Ok(parsed) => (command.wish)(&parsed, parsed.rest()),
        Err(flags::Error::Help) => Wish::Say(format!("Usage:\n{}", flags::describe(flags))),
        Err(error) => Wish::Say(format!("{error}\nUsage:\n{}", flags::describe(flags))),
    }
}

/// Commands that start with `start`.
pub(super) fn beginning_with(start: &str) -> Vec<&'static str> {
    COMMANDS.iter().map(|command| command.name).filter(|name| name.starts_with(start)).collect()
}

fn list() -> String {
    let lines = COMMANDS.iter().map(|Command { name, about, .. }| format!("{name} - {about}\n"));
    format!("Available commands:\n{}\n", lines.collect::<String>())
}

fn help(name: Option<&str>) -> String {
    let Some(name) = name else { return list() };
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        return format!("Command not available {name}\n");
    };
    let more = command.more.map(|more| format!("  {more}\n")).unwrap_or_default();
    let flags = command.flags.map(flags::describe).unwrap_or_default();
    format!("{name} - {}\n{more}{flags}", command.about)
}

fn form(parsed: &Parsed) -> Form {
    if parsed.is_set("pretty") {
        Form::Indented
    } else if parsed.is_set("json") {
        Form::Json
    } else {
        Form::Text
    }
}

/// Output format for commands whose only output is JSON.
fn json_form(parsed: &Parsed) -> Form {
    if parsed.is_set("pretty") { Form::Indented } else { Form::Json }
}

fn endpoint(parsed: &Parsed) -> Option<String> {
    parsed.value("address").filter(|text| !text.is_empty()).map(str::to_owned)
}

fn profile(_: &Parsed, words: &[String]) -> Wish {
    Wish::Ask(Question::Profile { file: words.first().cloned() })
}

const fn switch(name: &'static str, help: &'static str) -> Flag {
    Flag { name, takes_value: false, help }
}

const fn text(name: &'static str, help: &'static str) -> Flag {
    Flag { name, takes_value: true, help }
}

const JSON: Flag = switch("json", "JSON, with all details");
const PRETTY: Flag = switch("pretty", "indented JSON");
const HOSTMAP: &[Flag] = &[switch("by-index", "every tunnel, instead of one for each overlay address"), JSON, PRETTY];
const BOTH: &[Flag] = &[JSON, PRETTY];

/// Sorted by name.
const COMMANDS: &[Command] = &[
    Command {
        name: "change-remote",
        about: "Sends what is for a peer to another underlay address",
        more: None,
        flags: Some(&[text("address", "the new endpoint, ip:port")]),
        wish: |parsed, words| {
            Wish::Ask(Question::ChangeRemote { peer: words.first().cloned(), endpoint: endpoint(parsed) })
        },
    },
    Command {
        name: "close-tunnel",
        about: "Closes the tunnel with an overlay address",
        more: None,
        flags: Some(&[switch("local-only", "the peer is not told")]),
        wish: |parsed, words| {
            Wish::Ask(Question::Close { peer: words.first().cloned(), quietly: parsed.is_set("local-only") })
        },
    },
    Command {
        name: "create-tunnel",
        about: "Starts a handshake with an overlay address",
        more: Some("Lighthouses are asked where the peer is; an endpoint that is given is tried, too."),
        flags: Some(&[text("address", "an endpoint to try, ip:port")]),
        wish: |parsed, words| Wish::Ask(Question::Create { peer: words.first().cloned(), endpoint: endpoint(parsed) }),
    },
    Command {
        name: "device-info",
        about: "Name and networks of the overlay device",
        more: None,
        flags: Some(BOTH),
        wish: |parsed, _| Wish::Ask(Question::Device { form: form(parsed) }),
    },
    Command {
        name: "help",
        about: "This list; help COMMAND describes one",
        more: None,
        flags: None,
        wish: |_, words| Wish::Say(help(words.first().map(String::as_str))),
    },
    Command {
        name: "list-hostmap",
        about: "Peers with a tunnel",
        more: None,
        flags: Some(HOSTMAP),
        wish: |parsed, _| Wish::Ask(Question::Hostmap { form: form(parsed), by_index: parsed.is_set("by-index") }),
    },
    Command {
        name: "list-lighthouse-addrmap",
        about: "Where peers may be, and who says so",
        more: None,
        flags: Some(BOTH),
        wish: |parsed, _| Wish::Ask(Question::LighthouseMap { form: form(parsed) }),
    },
    Command {
        name: "list-pending-hostmap",
        about: "Peers with which a handshake is under way",
        more: None,
        flags: Some(HOSTMAP),
        wish: |parsed, _| Wish::Ask(Question::PendingHostmap { form: form(parsed) }),
    },
    Command {
        name: "log-format",
        about: "Form of the log lines; with a word, sets it: text or json",
        more: None,
        flags: None,
        wish: |_, words| Wish::Ask(Question::LogFormat(words.first().cloned())),
    },
    Command {
        name: "log-level",
        about: "Level of the log; with a word, sets it until the next reload",
        more: None,
        flags: None,
        wish: |_, words| Wish::Ask(Question::LogLevel(words.first().cloned())),
    },
    Command { name: "logout", about: "Ends this session", more: None, flags: None, wish: |_, _| Wish::Logout },
    Command {
        name: "mutex-profile-fraction",
        about: "Of Go's runtime, which is not here",
        more: None,
        flags: None,
        wish: |_, _| Wish::Ask(Question::ProfileFraction),
    },
    Command {
        name: "print-cert",
        about: "This host's certificate, or that of the peer with an overlay address",
        more: None,
        flags: Some(&[JSON, PRETTY, switch("raw", "PEM")]),
        wish: |parsed, words| {
            let (peer, pem) = (words.first().cloned(), parsed.is_set("raw"));
            Wish::Ask(Question::Certificate { peer, form: form(parsed), pem })
        },
    },
    Command {
        name: "print-relays",
        about: "Every hop through a relay, and of this host as a relay",
        more: None,
        flags: Some(&[PRETTY]),
        wish: |parsed, _| Wish::Ask(Question::Relays { form: json_form(parsed) }),
    },
    Command {
        name: "print-tunnel",
        about: "Details of the tunnel with an overlay address",
        more: None,
        flags: Some(&[PRETTY]),
        wish: |parsed, words| Wish::Ask(Question::Tunnel { peer: words.first().cloned(), form: json_form(parsed) }),
    },
    Command {
        name: "query-lighthouse",
        about: "Asks the lighthouses where an overlay address is",
        more: Some("Answers come later: what is known by now is printed."),
        flags: None,
        wish: |_, words| Wish::Ask(Question::Query { peer: words.first().cloned() }),
    },
    Command {
        name: "reload",
        about: "Reads the configuration again, as SIGHUP",
        more: None,
        flags: None,
        wish: |_, _| Wish::Reload,
    },
    Command { name: "save-heap-profile", about: NO_PROFILE, more: None, flags: None, wish: profile },
    Command { name: "save-mutex-profile", about: NO_PROFILE, more: None, flags: None, wish: profile },
    Command { name: "start-cpu-profile", about: NO_PROFILE, more: None, flags: None, wish: profile },
    Command {
        name: "stop-cpu-profile",
        about: NO_PROFILE,
        more: None,
        flags: None,
        wish: |_, _| Wish::Ask(Question::StopProfile),
    },
    Command {
        name: "version",
        about: "Version of this program",
        more: None,
        flags: None,
        wish: |_, _| Wish::Ask(Question::Version),
    },
];

const NO_PROFILE: &str = "Of Go's runtime, which is not here; perf profiles this program";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_listed_by_name_and_each_has_its_help() {
        let names: Vec<_> = COMMANDS.iter().map(|command| command.name).collect();
        assert!(names.is_sorted());
        for name in names {
            let Wish::Say(told) = read(&format!("help {name}")) else { panic!("{name}") };
            assert!(told.starts_with(&format!("{name} - ")));
            assert_eq!(read(&format!("{name} -h")), Wish::Say(told));
        }
        assert_eq!(read("help nothing"), Wish::Say("Command not available nothing\n".to_owned()));
        assert_eq!(read("help"), read("  "));
    }

    #[test]
    fn flags_come_before_words_as_gos_do() {
        let peer = || Some("10.0.0.1".to_owned());
        for (line, question) in [
            ("list-hostmap", Question::Hostmap { form: Form::Text, by_index: false }),
            ("list-hostmap -json --by-index", Question::Hostmap { form: Form::Json, by_index: true }),
            ("list-hostmap -json=false", Question::Hostmap { form: Form::Text, by_index: false }),
            ("print-cert -pretty 10.0.0.1", Question::Certificate { peer: peer(), form: Form::Indented, pem: false }),
            ("print-cert 10.0.0.1 -pretty", Question::Certificate { peer: peer(), form: Form::Text, pem: false }),
            ("print-tunnel 10.0.0.1", Question::Tunnel { peer: peer(), form: Form::Json }),
            ("print-tunnel", Question::Tunnel { peer: None, form: Form::Json }),
            ("change-remote -address= 10.0.0.1", Question::ChangeRemote { peer: peer(), endpoint: None }),
            (
                "create-tunnel -address 192.0.2.1:4242 10.0.0.1",
                Question::Create { peer: peer(), endpoint: Some("192.0.2.1:4242".to_owned()) },
            ),
            ("log-level -x", Question::LogLevel(Some("-x".to_owned()))),
            ("'version'", Question::Version),
        ] {
            assert_eq!(read(line), Wish::Ask(question), "{line}");
        }
        assert_eq!((read("logout"), read("reload now")), (Wish::Logout, Wish::Reload));
    }

    #[test]
    fn what_is_no_command_or_flag_is_said_with_what_there_is() {
        for (line, expected) in [
            ("shutdown now", "did not understand: shutdown now\nAvailable commands:\nchange-remote - "),
            ("list-hostmap -x", "flag provided but not defined: -x\nUsage:\n  -by-index\n    \t"),
            ("create-tunnel -address", "flag needs an argument: -address\nUsage:\n  -address string\n    \t"),
            ("version 'x", "No closing quotation\n"),
        ] {
            let Wish::Say(said) = read(line) else { panic!("{line}") };
            assert!(said.starts_with(expected), "{said}");
        }
        assert_eq!(beginning_with("list-p"), ["list-pending-hostmap"]);
        assert_eq!(beginning_with("print").len(), 3);
    }
}
