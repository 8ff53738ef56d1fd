//! Line editing: what the terminal shows while a line is typed, and the resulting events.

use std::collections::VecDeque;

/// The line being typed, and the history.
#[derive(Debug)]
pub(super) struct Terminal {
    prompt: String,
    line: String,
    /// Byte offset of the cursor.
    at: usize,
    state: State,
    /// Bytes of an incomplete UTF-8 character.
    partial: Vec<u8>,
    former: VecDeque<String>,
    /// Which line of the history is shown, counted from the latest.
    shown: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Plain,
    /// After an escape character.
    Escaped,
    /// In a control sequence.
    Sequence,
    /// After a carriage return: a following line feed belongs to it.
    Returned,
}

/// The result of some typed bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed {
    /// Text to show.
    Echo(String),
    /// A complete line.
    Line(String),
    /// The user asks for completion of this text.
    Complete(String),
    /// The user ends the session.
    End,
}

impl Terminal {
    pub(super) fn new(prompt: String) -> Self {
        Self {
            prompt,
            line: String::new(),
            at: 0,
            state: State::Plain,
            partial: Vec::new(),
            former: VecDeque::new(),
            shown: None,
        }
    }

    pub(super) fn prompt(&self) -> &str {
        &self.prompt
    }

    /// Converts text for a terminal, where a line feed alone does not return to the first column.
    pub(super) fn shown(text: &str) -> String {
        text.replace('\n', "\r\n")
    }

    /// The prompt and the typed text, redrawn on the current line.
    pub(super) fn redrawn(&self) -> String {
        let back = self.line[self.at..].chars().count();
        let back = if back > 0 { format!("\x1b[{back}D") } else { String::new() };
        format!("\r\x1b[K{}{}{back}", self.prompt, self.line)
    }

    /// Replaces the line with a completed one.
    pub(super) fn complete(&mut self, line: String) -> String {
        self.at = line.len();
        self.line = line;
        self.redrawn()
    }

    /// Takes one byte at a time, so that the caller can handle each line before the next one.
    pub(super) fn typed(&mut self, byte: u8) -> Option<Typed> {
        let before = std::mem::replace(&mut self.state, State::Plain);
        match (before, byte) {
            (State::Returned, b'\n') => None,
            (State::Escaped, b'[' | b'O') => {
                self.state = State::Sequence;
                None
            }
            (State::Escaped, _) => None,
            (State::Sequence, b'@'..=b'~') => self.key(byte),
            (State::Sequence, _) => {
                self.state = State::Sequence;
                None
            }
            (State::Plain | State::Returned, _) => self.plain(byte),
        }
    }

    fn plain(&mut self, byte: u8) -> Option<Typed> {
        match byte {
            b'\r' | b'\n' => {
                if byte == b'\r' {
                    self.state = State::Returned;
                }
                let line = std::mem::take(&mut self.line);
                (self.at, self.shown) = (0, None);
                self.remember(&line);
                Some(Typed::Line(line))
            }
            CTRL_C => Some(Typed::End),
            CTRL_D if self.line.is_empty() => Some(Typed::End),
            b'\t' => Some(Typed::Complete(self.line.clone())),
            BACKSPACE | DELETE => self.remove_before(|line| line.chars().next_back().map_or(0, char::len_utf8)),
            CTRL_U => self.remove_before(str::len),
            CTRL_W => self.remove_before(|line| {
                line.len() - line.trim_end().trim_end_matches(|it: char| !it.is_whitespace()).len()
            }),
            CTRL_A => self.key(b'H'),
            CTRL_E => self.key(b'F'),
            CTRL_L => Some(Typed::Echo(format!("\x1b[2J\x1b[H{}", self.redrawn()))),
            ESCAPE => {
                self.state = State::Escaped;
                None
            }
            0..b' ' => None,
            _ => self.character(byte),
        }
    }

    fn character(&mut self, byte: u8) -> Option<Typed> {
        self.partial.push(byte);
        let character = match std::str::from_utf8(&self.partial) {
            Ok(text) => text.chars().next(),
            // These are the first bytes of a longer character.
            Err(error) if error.error_len().is_none() => return None,
            Err(_) => None,
        };
        self.partial.clear();
        let character = character.filter(|it| !it.is_control() && self.line.len() + it.len_utf8() <= MAX_LINE_BYTES)?;
        self.line.insert(self.at, character);
        self.at += character.len_utf8();
        let last = self.at == self.line.len();
        Some(Typed::Echo(if last { character.to_string() } else { self.redrawn() }))
    }

    fn remove_before(&mut self, length: impl FnOnce(&str) -> usize) -> Option<Typed> {
        let from = self.at - length(&self.line[..self.at]);
        if from == self.at {
            return None;
        }
        self.line.replace_range(from..self.at, "");
        self.at = from;
        Some(Typed::Echo(self.redrawn()))
    }

    /// Handles the last byte of a control sequence.
    fn key(&mut self, key: u8) -> Option<Typed> {
        match key {
            b'A' => return self.show(self.shown.map_or(0, |nth| nth + 1)),
            b'B' => {
                return match self.shown? {
                    0 => {
                        self.shown = None;
                        Some(Typed::Echo(self.complete(String::new())))
                    }
                    nth => self.show(nth - 1),
                };
            }
            b'C' => self.at += self.line[self.at..].chars().next().map_or(0, char::len_utf8),
            b'D' => self.at -= self.line[..self.at].chars().next_back().map_or(0, char::len_utf8),
            b'H' => self.at = 0,
            b'F' => self.at = self.line.len(),
            _ => return None,
        }
        Some(Typed::Echo(self.redrawn()))
    }

    fn show(&mut self, nth: usize) -> Option<Typed> {
        let line = self.former.get(nth)?.clone();
        self.shown = Some(nth);
        Some(Typed::Echo(self.complete(line)))
    }

    fn remember(&mut self, line: &str) {
        if line.is_empty() || self.former.front().is_some_and(|last| last == line) {
            return;
        }
        self.former.push_front(line.to_owned());
        self.former.truncate(MAX_HISTORY);
    }
}

/// Longest command, in bytes.
pub(super) const MAX_LINE_BYTES: usize = 4096;
const MAX_HISTORY: usize = 32;
const CTRL_A: u8 = 1;
const CTRL_C: u8 = 3;
const CTRL_D: u8 = 4;
const CTRL_E: u8 = 5;
const BACKSPACE: u8 = 8;
const CTRL_L: u8 = 12;
const CTRL_U: u8 = 21;
const CTRL_W: u8 = 23;
const ESCAPE: u8 = 27;
const DELETE: u8 = 127;

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(typed: &[u8]) -> Vec<String> {
        let mut terminal = Terminal::new("> ".to_owned());
        let events = typed.iter().filter_map(|byte| terminal.typed(*byte));
        events.filter_map(|event| if let Typed::Line(line) = event { Some(line) } else { None }).collect()
    }

    #[test]
    fn keys_edit_the_line_and_find_former_ones() {
        for (typed, expected) in [
            (&b"help\r\nversion\n\r"[..], &["help", "version", ""][..]),
            (b"hexlp\x1b[D\x1b[D\x7f\r", &["help"]),
            (b"elp\x1b[Hh\x1b[F!\r", &["help!"]),
            (b"elp\x01h\x05!\r", &["help!"]),
            (b"log-level  debug\x17info\r", &["log-level  info"]),
            (b"nonsense\x15help\r", &["help"]),
            (b"one\rtwo\rtwo\r\x1b[A\x1b[A\r\x1bOA\x1b[A\x1b[B\x1b[B\r", &["one", "two", "two", "one", ""]),
            ("gr\u{fc}n\x7f\x7f\u{df}\r".as_bytes(), &["gr\u{df}"]),
            (b"a\xff\x00\x1b[200~b\r", &["ab"]),
        ] {
            assert_eq!(lines(typed), expected, "{:?}", String::from_utf8_lossy(typed));
        }
    }

    #[test]
    fn the_end_is_asked_for_by_name_on_an_empty_line() {
        let mut terminal = Terminal::new("> ".to_owned());
        assert_eq!(terminal.typed(b'x'), Some(Typed::Echo("x".to_owned())));
        assert_eq!(terminal.typed(CTRL_D), None, "there is something on the line");
        assert_eq!(terminal.typed(b'\t'), Some(Typed::Complete("x".to_owned())));
        assert_eq!(terminal.typed(DELETE), Some(Typed::Echo("\r\x1b[K> ".to_owned())));
        assert_eq!(terminal.typed(CTRL_D), Some(Typed::End));
        assert_eq!(terminal.typed(CTRL_C), Some(Typed::End));
        assert_eq!(Terminal::shown("a\nb\n"), "a\r\nb\r\n");
    }

    #[test]
    fn a_line_does_not_grow_without_end_and_no_bytes_panic() {
        assert_eq!(lines(&[&[b'x'; 2 * MAX_LINE_BYTES][..], b"\r"].concat())[0].len(), MAX_LINE_BYTES);
        let mut terminal = Terminal::new(String::new());
        let mut state = 1_u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let _ = terminal.typed((state >> 24) as u8);
        }
        assert!(terminal.former.len() <= MAX_HISTORY && terminal.line.len() <= MAX_LINE_BYTES);
    }
}
