//! Fuzzes the input of the SSH console: its line editor and its command parser.
//!
//! The source files of the console are included directly: its crate would add a whole SSH server, which is not fuzzed,
//! to the sanitized build.

#[path = "../../ssh-console/src/commands.rs"]
mod commands;
#[path = "../../ssh-console/src/terminal.rs"]
mod terminal;
#[path = "../../ssh-console/src/words.rs"]
mod words;

use commands::Wish;
use terminal::{MAX_LINE_BYTES, Terminal, Typed};

const PROMPT: &str = "user@nebula > ";

/// Uses the input twice: as a command sent without a terminal, and as key presses on a terminal.
pub fn console(data: &[u8]) {
    if let Ok(line) = std::str::from_utf8(data) {
        let _ = commands::read(line);
        words_are_found_again(line);
    }
    let mut terminal = Terminal::new(PROMPT.to_owned());
    let mut screen = Screen::default();
    screen.show(terminal.prompt());
    for (nth, byte) in data.iter().take(3 * MAX_LINE_BYTES).enumerate() {
        match terminal.typed(*byte) {
            None => {}
            Some(Typed::Echo(text)) => screen.show(&text),
            Some(Typed::Complete(line)) => match commands::beginning_with(&line)[..] {
                [only] => screen.show(&terminal.complete(format!("{only} "))),
                ref several => {
                    screen.show(&Terminal::shown(&format!("\n{}\n\n", several.join("\n"))));
                    screen.show(&terminal.redrawn());
                }
            },
            Some(Typed::Line(line)) => {
                assert!(line.len() <= MAX_LINE_BYTES && !line.contains(char::is_control));
                assert_eq!(screen.row().0, format!("{PROMPT}{line}"), "what is obeyed is what was seen");
                screen.show("\r\n");
                if let Wish::Say(text) = commands::read(&line) {
                    screen.show(&Terminal::shown(&text));
                }
                screen.show(terminal.prompt());
            }
            Some(Typed::End) => break,
        }
        // Drawing a long line is slow, so compare less often.
        if nth < 512 || nth % 512 == 0 {
            assert_eq!(screen.row(), Screen::of(&terminal.redrawn()).row(), "after {:?}", &data[..=nth]);
        }
    }
}

/// Escaping every character of a word with a backslash must not change the word.
fn words_are_found_again(line: &str) {
    let Ok(found) = words::split(line) else { return };
    let escaped = |word: &String| word.chars().flat_map(|character| ['\\', character]).collect::<String>();
    let line = found.iter().map(escaped).collect::<Vec<_>>().join(" ");
    assert_eq!(words::split(&line).expect("nothing is left open"), found);
}

/// The last row of a terminal that supports only what the line editor sends.
#[derive(Default)]
struct Screen {
    row: Vec<char>,
    at: usize,
}

impl Screen {
    fn of(text: &str) -> Self {
        let mut screen = Self::default();
        screen.show(text);
        screen
    }

    fn row(&self) -> (String, usize) {
        (self.row.iter().collect(), self.at)
    }

    fn show(&mut self, text: &str) {
        let mut characters = text.chars();
        while let Some(character) = characters.next() {
            match character {
                '\r' => self.at = 0,
                '\n' => {
                    assert_eq!(self.at, 0, "a new line begins in the middle: {text:?}");
                    self.row.clear();
                }
                '\x1b' => {
                    assert_eq!(characters.next(), Some('['));
                    let rest = characters.as_str();
                    let end = rest.find(|it: char| it.is_ascii_alphabetic()).expect("the sequence has an end");
                    self.sequence(&rest[..=end]);
                    characters = rest[end + 1..].chars();
                }
                _ => {
                    // The description of a command's flags contains tabs.
                    assert!(!character.is_control() || character == '\t', "{text:?}");
                    match self.row.get_mut(self.at) {
                        Some(there) => *there = character,
                        None => self.row.push(character),
                    }
                    self.at += 1;
                }
            }
        }
    }

    fn sequence(&mut self, sequence: &str) {
        match sequence {
            "K" => self.row.truncate(self.at),
            "2J" => self.row.clear(),
            "H" => self.at = 0,
            _ => {
                let back = sequence.strip_suffix('D').and_then(|count| count.parse::<usize>().ok());
                self.at -= back.expect("a sequence that terminals know");
            }
        }
    }
}
