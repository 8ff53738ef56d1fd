//! How an answer is printed: as a table, as JSON with one object a line, or as YAML. Texts of others cannot leave their
//! places: what a terminal would obey is escaped.

use std::io::{self, IsTerminal, Write};

use nebula_cert::{is_visible, json_line, visible, visible_json};
use nebula_cni_contract::agent_api::change_texts;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::Form;
use crate::outcome::ToolError;

/// Prints answers, and remarks about them.
pub struct Printer<'a> {
    form: Option<Form>,
    out: &'a mut dyn Write,
    notes: &'a mut dyn Write,
    has_colour: bool,
}

/// How a line is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mark {
    /// As it should be.
    Good,
    /// Worth a look.
    Warning,
    /// Wrong.
    Bad,
}

impl<'a> Printer<'a> {
    /// Colours are for terminals only, and not where `NO_COLOR` is set.
    pub fn new(form: Option<Form>, out: &'a mut dyn Write, notes: &'a mut dyn Write) -> Self {
        let is_wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self { form, out, notes, has_colour: is_wanted && io::stdout().is_terminal() }
    }

    /// Whether a table is wanted, and not a document.
    pub fn is_table(&self) -> bool {
        matches!(self.form, None | Some(Form::Wide))
    }

    /// Whether the table has further columns.
    pub fn is_wide(&self) -> bool {
        self.form == Some(Form::Wide)
    }

    /// Whether somebody watches, rather than a file.
    pub fn is_watched(&self) -> bool {
        self.is_table() && io::stdout().is_terminal()
    }

    /// Prints text that is visible already.
    pub fn text(&mut self, text: &str) -> Result<(), ToolError> {
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Prints documents as JSON, one a line, or as YAML.
    pub fn documents<T: Serialize>(&mut self, documents: &[T]) -> Result<(), ToolError> {
        for document in documents {
            let text = match self.form {
                Some(Form::Yaml) => {
                    let value = serde_json::to_value(document).map_err(form)?;
                    let text = serde_saphyr::to_string(&value).map_err(form)?;
                    let is_fine = text.chars().all(|c| c == '\n' || is_visible(c));
                    // JSON is YAML, too, and has an escape for every character.
                    let text = if is_fine { text } else { visible_json(&format!("{value:#}\n")).into_owned() };
                    format!("---\n{text}")
                }
                _ => json_line(serde_json::to_string(document).map_err(form)?),
            };
            self.out.write_all(text.as_bytes())?;
        }
        Ok(self.out.flush()?)
    }

    /// Says something about the answer that is no part of it.
    pub fn note(&mut self, text: &str) -> Result<(), ToolError> {
        for line in text.lines() {
            writeln!(self.notes, "{}", visible(line))?;
        }
        Ok(())
    }

    /// A sign with its colour.
    pub fn sign(&self, mark: Mark) -> String {
        let (sign, colour) = match mark {
            Mark::Good => ("✓", "32"),
            Mark::Warning => ("!", "33"),
            Mark::Bad => ("✗", "31"),
        };
        if self.has_colour { format!("\u{1b}[{colour}m{sign}\u{1b}[0m") } else { sign.to_owned() }
    }
}

/// The document with everything in it visible, for tables.
pub(crate) fn shown<T: Serialize + DeserializeOwned>(document: &T) -> Result<T, ToolError> {
    change_texts(document, &mut |text| visible(text).into_owned()).map_err(form)
}

fn form(error: impl std::fmt::Display) -> ToolError {
    ToolError::Form(error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn printed(form: Form, document: &Value) -> String {
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        Printer::new(Some(form), &mut out, &mut notes).documents(&[document]).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn documents_are_read_back_as_they_were_and_show_nothing_that_a_terminal_obeys() {
        let hostile = "a\u{1b}[2J\n---\n- b: \u{202e}\"c\"'# d";
        let document =
            json!({"name": hostile, hostile: 1, "no": "no", "n": "017", "list": [{"x": null}, "~"], "empty": {}});
        let text = printed(Form::Json, &document);
        assert!(text.lines().count() == 1 && text.trim_end().chars().all(is_visible), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), document);
        let plain =
            json!({"no": "no", "n": "017", "time": "12:30", "list": [{"x": null}, "~", "- a"], "empty": {}, "e": ""});
        for document in [document, plain, json!({"name": "\u{202e}"})] {
            let yaml = printed(Form::Yaml, &document);
            assert!(yaml.chars().all(|c| c == '\n' || is_visible(c)), "{yaml}");
            assert_eq!(serde_saphyr::from_str::<Value>(&yaml).unwrap(), document, "{yaml}");
        }
    }

    #[test]
    fn signs_have_no_colour_where_no_terminal_is() {
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        let printer = Printer { form: None, out: &mut out, notes: &mut notes, has_colour: false };
        assert_eq!([Mark::Good, Mark::Warning, Mark::Bad].map(|mark| printer.sign(mark)), ["✓", "!", "✗"]);
        let printer = Printer { has_colour: true, ..printer };
        assert_eq!(printer.sign(Mark::Bad), "\u{1b}[31m✗\u{1b}[0m");
    }
}
