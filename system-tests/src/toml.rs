//! Reader of tables in the part of TOML that they use: headers, texts, numbers, switches, lists and inline tables.

use std::str::Chars;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Text(String),
    Number(u32),
    Switch(bool),
    List(Vec<Self>),
    Table(Entries),
}

pub(crate) type Entries = Vec<(String, Value)>;

/// A header with what follows it, in the order of the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) name: String,
    pub(crate) entries: Entries,
}

/// Reads a file; an error names the line.
pub(crate) fn read(text: &str) -> Result<Vec<Section>, String> {
    let mut reader = Reader { rest: text.chars() };
    let mut sections = Vec::new();
    reader.sections(&mut sections).map_err(|problem| {
        let line = text[..text.len() - reader.rest.as_str().len()].matches('\n').count() + 1;
        format!("line {line}: {problem}")
    })?;
    Ok(sections)
}

struct Reader<'a> {
    rest: Chars<'a>,
}

impl Reader<'_> {
    fn sections(&mut self, sections: &mut Vec<Section>) -> Result<(), String> {
        loop {
            self.skip_blank();
            match self.peek() {
                None => return Ok(()),
                Some('[') => {
                    self.rest.next();
                    let name = self.key()?;
                    self.expect(']')?;
                    if sections.iter().any(|section| section.name == name) {
                        return Err(format!("a second [{name}]"));
                    }
                    sections.push(Section { name, entries: Vec::new() });
                }
                Some(_) => {
                    let entry = self.entry()?;
                    let section = sections.last_mut().ok_or("a key before the first header")?;
                    add(&mut section.entries, entry)?;
                }
            }
        }
    }

    fn entry(&mut self) -> Result<(String, Value), String> {
        let key = self.key()?;
        self.expect('=')?;
        Ok((key, self.value()?))
    }

    fn key(&mut self) -> Result<String, String> {
        self.skip_blank();
        let key = self.take(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter));
        if key.is_empty() { Err("no name where one is expected".to_owned()) } else { Ok(key) }
    }

    fn value(&mut self) -> Result<Value, String> {
        self.skip_blank();
        match self.peek() {
            Some('"') => self.text().map(Value::Text),
            Some('[') => {
                let mut list = Vec::new();
                self.between('[', ']', |reader| {
                    list.push(reader.value()?);
                    Ok(())
                })?;
                Ok(Value::List(list))
            }
            Some('{') => {
                let mut table = Vec::new();
                self.between('{', '}', |reader| {
                    let entry = reader.entry()?;
                    add(&mut table, entry)
                })?;
                Ok(Value::Table(table))
            }
            _ => match self.take(|letter| letter.is_ascii_alphanumeric()).as_str() {
                "true" => Ok(Value::Switch(true)),
                "false" => Ok(Value::Switch(false)),
                word => word.parse().map(Value::Number).map_err(|_| format!("no value: {word:?}")),
            },
        }
    }

    fn text(&mut self) -> Result<String, String> {
        self.expect('"')?;
        let text = self.take(|letter| letter != '"' && letter != '\n');
        if text.contains('\\') {
            return Err("a text with a backslash, which this reader does not know".to_owned());
        }
        if self.peek() == Some('"') {
            self.rest.next();
            return Ok(text);
        }
        Err("a text without an end".to_owned())
    }

    /// Items with commas between them, and perhaps one after the last.
    fn between(
        &mut self,
        open: char,
        close: char,
        mut item: impl FnMut(&mut Self) -> Result<(), String>,
    ) -> Result<(), String> {
        self.expect(open)?;
        loop {
            self.skip_blank();
            if self.peek() == Some(close) {
                break;
            }
            item(self)?;
            self.skip_blank();
            if self.peek() == Some(',') {
                self.rest.next();
            } else {
                break;
            }
        }
        self.expect(close)
    }

    fn expect(&mut self, letter: char) -> Result<(), String> {
        self.skip_blank();
        if self.peek() == Some(letter) {
            self.rest.next();
            return Ok(());
        }
        Err(match self.peek() {
            Some(found) => format!("{found:?} instead of {letter:?}"),
            None => format!("the end instead of {letter:?}"),
        })
    }

    fn take(&mut self, is_part: impl Fn(char) -> bool) -> String {
        let mut word = String::new();
        while let Some(letter) = self.peek().filter(|letter| is_part(*letter)) {
            word.push(letter);
            self.rest.next();
        }
        word
    }

    fn skip_blank(&mut self) {
        loop {
            self.take(char::is_whitespace);
            if self.peek() != Some('#') {
                return;
            }
            self.take(|letter| letter != '\n');
        }
    }

    fn peek(&self) -> Option<char> {
        self.rest.clone().next()
    }
}

fn add(entries: &mut Entries, entry: (String, Value)) -> Result<(), String> {
    if entries.iter().any(|(key, _)| *key == entry.0) {
        return Err(format!("a second {}", entry.0));
    }
    entries.push(entry);
    Ok(())
}

/// The entries of one table, each of which is taken once: what nobody took is a mistake of its writer.
pub(crate) struct Fields {
    place: String,
    entries: Entries,
}

impl Fields {
    pub(crate) fn new(place: impl Into<String>, entries: Entries) -> Self {
        Self { place: place.into(), entries }
    }

    pub(crate) fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub(crate) fn number(&mut self, key: &str) -> Result<Option<u32>, String> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Number(number)) => Ok(Some(number)),
            Some(_) => Err(self.wrong(key, "a number")),
        }
    }

    pub(crate) fn is_set(&mut self, key: &str) -> Result<bool, String> {
        match self.take(key) {
            None => Ok(false),
            Some(Value::Switch(is_set)) => Ok(is_set),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A list of texts, if the key is there.
    pub(crate) fn texts(&mut self, key: &str) -> Result<Option<Vec<String>>, String> {
        let Some(value) = self.take(key) else { return Ok(None) };
        let Value::List(list) = value else { return Err(self.wrong(key, "a list of texts")) };
        let texts = list.into_iter().map(|item| match item {
            Value::Text(text) => Ok(text),
            _ => Err(self.wrong(key, "a list of texts")),
        });
        texts.collect::<Result<_, _>>().map(Some)
    }

    /// Names with texts.
    pub(crate) fn pairs(&mut self, key: &str) -> Result<Vec<(String, String)>, String> {
        let Some(value) = self.take(key) else { return Ok(Vec::new()) };
        let Value::Table(table) = value else { return Err(self.wrong(key, "a table of texts")) };
        let pairs = table.into_iter().map(|(name, item)| match item {
            Value::Text(text) => Ok((name, text)),
            _ => Err(self.wrong(key, "a table of texts")),
        });
        pairs.collect()
    }

    /// A list of tables.
    pub(crate) fn tables(&mut self, key: &str) -> Result<Vec<Self>, String> {
        let Some(value) = self.take(key) else { return Ok(Vec::new()) };
        let Value::List(list) = value else { return Err(self.wrong(key, "a list of tables")) };
        let tables = list.into_iter().enumerate().map(|(index, item)| match item {
            Value::Table(entries) => Ok(Self::new(format!("{}, {key} {}", self.place, index + 1), entries)),
            _ => Err(self.wrong(key, "a list of tables")),
        });
        tables.collect()
    }

    pub(crate) fn rest(&self) -> Vec<String> {
        self.entries.iter().map(|(key, _)| key.clone()).collect()
    }

    pub(crate) fn end(self) -> Result<(), String> {
        match self.entries.first() {
            Some((key, _)) => Err(format!("{}: {key} is not known", self.place)),
            None => Ok(()),
        }
    }

    pub(crate) fn problem(&self, text: &str) -> String {
        format!("{}: {text}", self.place)
    }

    fn wrong(&self, key: &str, expected: &str) -> String {
        self.problem(&format!("{key} is not {expected}"))
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        let index = self.entries.iter().position(|(name, _)| name == key)?;
        Some(self.entries.remove(index).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::Text(text.to_owned())
    }

    #[test]
    fn headers_and_every_kind_of_value_are_read() {
        let file = "# head\n[a.b] # more\nname = \"x # y\"\ncount = 12\non = true\n\
            list = [ # of\n  \"1\", \"2\",\n]\ntables = [{ k = \"v\", l = [] }, {}]\n[c]\n";
        let sections = read(file).unwrap();
        let entries = vec![
            ("name".to_owned(), text("x # y")),
            ("count".to_owned(), Value::Number(12)),
            ("on".to_owned(), Value::Switch(true)),
            ("list".to_owned(), Value::List(vec![text("1"), text("2")])),
            (
                "tables".to_owned(),
                Value::List(vec![
                    Value::Table(vec![("k".to_owned(), text("v")), ("l".to_owned(), Value::List(vec![]))]),
                    Value::Table(vec![]),
                ]),
            ),
        ];
        assert_eq!(sections[0], Section { name: "a.b".to_owned(), entries });
        assert_eq!(sections[1], Section { name: "c".to_owned(), entries: vec![] });
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        for (file, said) in [
            ("[a]\nb = \"c\n", "line 2: a text without an end"),
            ("[a]\n\nb = maybe\n", "line 3: no value: \"maybe\""),
            ("[a]\nb = [\"c\" \"d\"]\n", "line 2: '\"' instead of ']'"),
            ("[a]\nb = \"c\\n\"\n", "line 2: a text with a backslash, which this reader does not know"),
            ("[a]\n[a]\n", "line 2: a second [a]"),
            ("[a]\nb = 1\nb = 2\n", "line 3: a second b"),
            ("b = 1\n", "line 1: a key before the first header"),
            ("[a]\nb = [1", "line 2: the end instead of ']'"),
            ("[a]\nb = -1\n", "line 2: no value: \"\""),
        ] {
            assert_eq!(read(file).unwrap_err(), said, "{file}");
        }
    }

    #[test]
    fn a_field_of_another_kind_and_one_that_nobody_takes_are_mistakes() {
        let entries = || read("[a]\nb = 1\nc = [1]\n").unwrap().remove(0).entries;
        let mut fields = Fields::new("a", entries());
        assert_eq!(fields.text("b").unwrap_err(), "a: b is not a text");
        assert_eq!(fields.texts("c").unwrap_err(), "a: c is not a list of texts");
        let mut fields = Fields::new("a", entries());
        assert_eq!(fields.number("b").unwrap(), Some(1));
        assert_eq!(fields.end().unwrap_err(), "a: c is not known");
    }
}
