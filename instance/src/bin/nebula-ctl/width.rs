//! Lines as long as a terminal is wide.

use std::io::{IsTerminal, stdout};

use rustix::termios::tcgetwinsize;

/// How long lines may be: as the terminal on standard output is wide, within what can be read; `None` if it is none.
pub(crate) fn of_output() -> Option<usize> {
    let output = stdout();
    if !output.is_terminal() {
        return None;
    }
    // A terminal that does not know its size says 0.
    let columns = tcgetwinsize(&output).map_or(0, |size| size.ws_col);
    Some(usize::from(columns).clamp(NARROWEST, WIDEST))
}

/// Breaks the lines of a text between words. What follows is indented as its line is, and a little more. A word that
/// is too long, such as a command, stays whole.
pub(crate) fn wrap(text: &str, width: usize) -> String {
    let mut wrapped = String::with_capacity(text.len());
    for line in text.lines() {
        let indent = line.len() - line.trim_start_matches(' ').len();
        let mut column = 0;
        for word in line.trim_start_matches(' ').split(' ') {
            let length = word.chars().count();
            let (spaces, breaks) = match column {
                0 => (indent, false),
                _ if column + 1 + length > width => (indent + FOLLOWING, true),
                _ => (1, false),
            };
            if breaks {
                wrapped.push('\n');
                column = 0;
            }
            wrapped.extend(std::iter::repeat_n(' ', spaces));
            wrapped.push_str(word);
            column += spaces + length;
        }
        wrapped.push('\n');
    }
    wrapped
}

const NARROWEST: usize = 80;
const WIDEST: usize = 120;
/// More than the indentation of the advice below a finding, so that it is not taken for one.
const FOLLOWING: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_and_lose_none() {
        let text = "ERROR: the network 10.42.0.0/16: the kernel sends it by eth0 and not into the overlay (nebula1) [route_elsewhere]\n    \
                    `ip route add 10.42.0.0/16 dev nebula1`, or restart nebula. `ip route get` shows which interface has it.\n\nend\n";
        let wrapped = wrap(text, 80);
        assert!(wrapped.lines().all(|line| line.chars().count() <= 80), "{wrapped}");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&wrapped), words(text));
        let lines: Vec<&str> = wrapped.lines().collect();
        assert!(
            lines[1].starts_with("      ") && lines[2].starts_with("    `ip") && lines[3].starts_with("          "),
            "{wrapped}"
        );
        assert_eq!((&lines[4..], wrap(text, 1_000).as_str()), (&["", "end"][..], text));
    }

    #[test]
    fn a_word_that_is_longer_than_a_line_stays_whole() {
        let long = "x".repeat(90);
        assert_eq!(wrap(&format!("a {long} b\n"), 80), format!("a\n      {long}\n      b\n"));
    }
}
