//! Text from outside, such as names in certificates and error texts of peers, as it may be printed: on one line, and
//! nothing in it that a reader cannot see.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

/// Whether a reader sees this character where it is: no control character or line feed, none that changes the
/// direction of the text around it, and none without a width.
#[must_use]
pub fn is_visible(c: char) -> bool {
    let is_hidden = c.is_control() || HIDDEN.iter().any(|(first, last)| (*first..=*last).contains(&c));
    !is_hidden
}

/// The text with an escape such as `\n` or `\u{202e}` in place of each character that is not visible. Everything that a
/// program prints about peers, certificates or answers of others goes through here.
///
/// ```
/// let name = "web\nERROR: \u{202e}all is lost";
/// assert_eq!(nebula_cert::visible(name), "web\\nERROR: \\u{202e}all is lost");
/// ```
#[must_use]
pub fn visible(text: &str) -> Cow<'_, str> {
    if text.chars().all(is_visible) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| if is_visible(c) { c.to_string() } else { c.escape_default().to_string() };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// The text of a JSON document with an escape (`\u` and four digits) for each character that is not visible: the same
/// document. Line feeds and tabs between its tokens stay; inside of its strings there are none.
#[must_use]
pub fn visible_json(text: &str) -> Cow<'_, str> {
    let is_fine = |c: char| c.is_ascii_whitespace() || is_visible(c);
    let is_plain = || text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if is_plain() || text.chars().all(is_fine) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        if is_fine(c) {
            shown.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(shown, "\\u{unit:04x}");
        }
    }
    Cow::Owned(shown)
}

/// The text of a JSON document as a line for a program, which may show it on a terminal: see [`visible_json`].
#[must_use]
pub fn json_line(mut text: String) -> String {
    if let Cow::Owned(shown) = visible_json(&text) {
        text = shown;
    }
    text.push('\n');
    text
}

/// A writer for logs: what is written at once is one line, and visible. Only its last line feed stays one.
#[derive(Debug)]
pub struct VisibleLines<W>(pub W);

impl<W: io::Write> io::Write for VisibleLines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        match text.strip_suffix('\n') {
            Some(line) => self.0.write_all(format!("{}\n", visible(line)).as_bytes())?,
            None => self.0.write_all(visible(&text).as_bytes())?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Characters that are no control characters and are not seen: those that Unicode lets programs ignore
/// (Default_Ignorable_Code_Point), separators of lines and paragraphs, and annotations. Most have no width, and some
/// set the direction of the text.
const HIDDEN: &[(char, char)] = &[
    ('\u{ad}', '\u{ad}'),
    ('\u{34f}', '\u{34f}'),
    ('\u{61c}', '\u{61c}'),
    ('\u{115f}', '\u{1160}'),
    ('\u{17b4}', '\u{17b5}'),
    ('\u{180b}', '\u{180f}'),
    ('\u{200b}', '\u{200f}'),
    ('\u{2028}', '\u{202e}'),
    ('\u{2060}', '\u{206f}'),
    ('\u{3164}', '\u{3164}'),
    ('\u{fe00}', '\u{fe0f}'),
    ('\u{feff}', '\u{feff}'),
    ('\u{ffa0}', '\u{ffa0}'),
    ('\u{fff0}', '\u{fffb}'),
    ('\u{1bca0}', '\u{1bca3}'),
    ('\u{1d173}', '\u{1d17a}'),
    ('\u{e0000}', '\u{e0fff}'),
];

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_people_write_stays_and_what_is_not_seen_is_escaped() {
        for plain in ["", "web-1.example", "bücher \"a\" \\ b", "日本 한국 ไทย हिन्दी 🦀", "a\u{fffd}"]
        {
            assert_eq!(visible(plain), plain);
            assert_eq!(visible_json(plain), plain);
        }
        for (hidden, shown) in [
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\u{1b}[2J\u{7f}\u{9b}", "\\u{1b}[2J\\u{7f}\\u{9b}"),
            ("\u{202e}\u{2066}\u{200e}\u{61c}", "\\u{202e}\\u{2066}\\u{200e}\\u{61c}"),
            ("a\u{200b}b\u{feff}\u{2060}\u{ad}", "a\\u{200b}b\\u{feff}\\u{2060}\\u{ad}"),
            ("\u{2028}\u{2029}\u{85}", "\\u{2028}\\u{2029}\\u{85}"),
            ("\u{e0041}\u{fe0f}\u{3164}", "\\u{e0041}\\u{fe0f}\\u{3164}"),
        ] {
            assert_eq!(visible(hidden), shown);
        }
    }

    #[test]
    fn a_log_line_is_one_line() {
        let mut written = VisibleLines(Vec::new());
        written.write_all(b"name=a\nERROR b\xff\n").unwrap();
        written.write_all("no end\u{202e}".as_bytes()).unwrap();
        assert_eq!(String::from_utf8(written.0).unwrap(), "name=a\\nERROR b\u{fffd}\nno end\\u{202e}");
    }

    proptest! {
        #[test]
        fn any_text_is_visible_afterwards_and_json_stays_the_same_document(text: String, code in 0..=0x10_ffff_u32) {
            let text = text + &char::from_u32(code).unwrap_or('x').to_string();
            prop_assert!(visible(&text).chars().all(is_visible));
            let document = serde_json::json!({"a": text, &text: [1]});
            for json in [document.to_string(), format!("{document:#}")] {
                let shown = visible_json(&json);
                prop_assert!(shown.chars().all(|c| c == '\n' || is_visible(c)));
                prop_assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), document.clone());
                prop_assert_eq!(json_line(json.clone()), format!("{shown}\n"));
            }
        }
    }
}
