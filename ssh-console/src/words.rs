//! Splits a typed line into words, as a shell does.

/// A quote or an escape is not terminated.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unfinished(&'static str);

/// Splits at white space; quotes keep white space, and a backslash takes the next character literally. In double quotes
/// a backslash escapes only another backslash and a double quote. There are no empty words.
pub(super) fn split(line: &str) -> Result<Vec<String>, Unfinished> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        match (character, quote) {
            (end, Some(begun)) if end == begun => quote = None,
            ('\\', None | Some('"')) => {
                let next = characters.next().ok_or(Unfinished("No escaped character"))?;
                if quote.is_some() && !matches!(next, '\\' | '"') {
                    word.push('\\');
                }
                word.push(next);
            }
            ('\'' | '"', None) => quote = Some(character),
            (space, None) if space.is_whitespace() => keep(&mut words, &mut word),
            (other, _) => word.push(other),
        }
    }
    if quote.is_some() {
        return Err(Unfinished("No closing quotation"));
    }
    keep(&mut words, &mut word);
    Ok(words)
}

fn keep(words: &mut Vec<String>, word: &mut String) {
    if !word.is_empty() {
        words.push(std::mem::take(word));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_backslashes_keep_what_a_shell_keeps() {
        for (line, words) in [
            ("", &[][..]),
            ("  list-hostmap\t-json ", &["list-hostmap", "-json"]),
            ("a 'b c' \"d e\"", &["a", "b c", "d e"]),
            ("a'b'\"c\"d", &["abcd"]),
            (r"a\ b \'c", &["a b", "'c"]),
            (r#""a\"b" "a\nb" 'a\'"#, &["a\"b", r"a\nb", r"a\"]),
            ("'' \"\" a", &["a"]),
        ] {
            assert_eq!(split(line).unwrap(), words, "{line}");
        }
        for line in ["'a", "\"a", "a\\", "\"a\\"] {
            assert!(split(line).is_err(), "{line}");
        }
    }
}
