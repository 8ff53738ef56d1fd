//! Translates interface patterns from the syntax of Go's `regexp` (RE2) to that of an engine that supports a little
//! less.
//!
//! Syntax that both read alike is passed through. Rewritten are quotes (`\Q..\E`), Unicode classes, octal escapes,
//! names of groups, braces that are not repetitions, and characters inside brackets that are operators only to the
//! engine. Whatever Go rejects is rejected.

use std::fmt::Write as _;

/// Highest count of a repetition, and highest product of nested ones (Go: `regexp/syntax`, `maxSize` of a repeat).
const MAX_REPEAT: u32 = 1000;

/// Translates a whole pattern for the engine, or says what is wrong with it.
pub(super) fn translate(pattern: &str) -> Result<String, String> {
    // Go puts the anchors around the text, not around its alternatives: `a|b` is `^a` or `b$`.
    let anchored = format!("^{pattern}$");
    let mut scanner = Scanner {
        rest: &anchored,
        out: String::with_capacity(anchored.len()),
        groups: vec![1],
        atom: None,
        in_class: false,
    };
    while let Some(next) = scanner.rest.chars().next() {
        scanner.one(next)?;
    }
    Ok(scanner.out)
}

/// What a repetition operator would apply to.
#[derive(Clone, Copy)]
enum Atom {
    /// An atom with the highest product of the repetitions inside it.
    Plain(u32),
    /// An atom with a repetition operator after it, which cannot take another one.
    Repeated,
}

struct Scanner<'a> {
    rest: &'a str,
    out: String,
    /// For each open group, the highest product of repetitions inside so far.
    groups: Vec<u32>,
    /// `None` at the beginning of a group or alternative.
    atom: Option<Atom>,
    in_class: bool,
}

impl<'a> Scanner<'a> {
    fn one(&mut self, next: char) -> Result<(), String> {
        match next {
            '\\' => self.escape(),
            '[' => self.class(),
            '(' => self.open(),
            ')' => {
                self.pass(1);
                let inside = self.groups.pop().unwrap_or(1);
                self.atom(inside);
                Ok(())
            }
            '|' => {
                self.pass(1);
                self.atom = None;
                Ok(())
            }
            '*' | '+' | '?' => self.repeat(1, 1),
            '{' => match counts(self.rest) {
                Some((length, most)) => self.repeat(length, most?),
                None => {
                    self.rest = &self.rest[1..];
                    self.literal('{');
                    Ok(())
                }
            },
            other => {
                self.pass(other.len_utf8());
                self.atom(1);
                Ok(())
            }
        }
    }

    /// Copies this many bytes unchanged.
    fn pass(&mut self, bytes: usize) -> &'a str {
        let (passed, rest) = self.rest.split_at(bytes);
        self.out.push_str(passed);
        self.rest = rest;
        passed
    }

    fn atom(&mut self, repeated: u32) {
        if let Some(group) = self.groups.last_mut() {
            *group = repeated.max(*group);
        }
        self.atom = Some(Atom::Plain(repeated));
    }

    fn literal(&mut self, character: char) {
        let _ = write!(self.out, "\\x{{{:x}}}", u32::from(character));
        self.atom(1);
    }

    /// Handles an operator of `length` bytes that repeats at most `most` times.
    fn repeat(&mut self, length: usize, most: u32) -> Result<(), String> {
        let operator = &self.rest[..length];
        let before = match self.atom {
            None => return Err(format!("missing argument to repetition operator: `{operator}`")),
            Some(Atom::Repeated) => return Err(format!("invalid nested repetition operator: `{operator}`")),
            Some(Atom::Plain(before)) => before,
        };
        let product = before.saturating_mul(most.max(1));
        if product > MAX_REPEAT {
            return Err(format!("invalid repeat count: `{operator}`"));
        }
        self.pass(length);
        if self.rest.starts_with('?') {
            self.pass(1);
        }
        self.atom(product);
        self.atom = Some(Atom::Repeated);
        Ok(())
    }

    fn escape(&mut self) -> Result<(), String> {
        let after = &self.rest[1..];
        if let Some(quoted) = after.strip_prefix('Q') {
            if self.in_class {
                return Err(r"invalid escape sequence: `\Q`".to_owned());
            }
            let (text, rest) = quoted.split_once("\\E").unwrap_or((quoted, ""));
            text.chars().for_each(|character| self.literal(character));
            // The final anchor is not part of the quoted text, unless the quote is never closed, as in Go.
            self.rest = rest;
            return Ok(());
        }
        if let Some(class) = unicode_class(after) {
            let (length, ranges) = class?;
            // Inside brackets, only the ranges are written.
            let _ = if self.in_class { write!(self.out, "{ranges}") } else { write!(self.out, "[{ranges}]") };
            self.rest = &after[length..];
        } else if let Some((length, character)) = octal(after) {
            self.rest = &after[length..];
            self.literal(character);
        } else {
            self.pass(1);
            if let Some(escaped) = self.rest.chars().next() {
                let braced = escaped == 'x' && self.rest[1..].starts_with('{');
                let end = braced.then(|| self.rest.find('}')).flatten();
                self.pass(end.map_or_else(|| escaped.len_utf8(), |end| end + 1));
            }
        }
        self.atom(1);
        Ok(())
    }

    /// `[...]`: inside it, only `\`, `]`, `-`, a leading `^` and `[:name:]` have a meaning in Go.
    fn class(&mut self) -> Result<(), String> {
        self.pass(1);
        if self.rest.starts_with('^') {
            self.pass(1);
        }
        let mut first = true;
        loop {
            let Some(next) = self.rest.chars().next() else { return Err("missing closing ]".to_owned()) };
            match next {
                ']' if !first => {
                    self.pass(1);
                    break;
                }
                '\\' => {
                    self.in_class = true;
                    self.escape()?;
                    self.in_class = false;
                }
                '[' if self.rest.starts_with("[:") && self.rest.contains(":]") => {
                    let end = self.rest.find(":]").map_or(1, |end| end + 2);
                    self.pass(end);
                }
                ']' | '[' | '&' | '~' => {
                    self.rest = &self.rest[1..];
                    self.literal(next);
                }
                other => {
                    self.pass(other.len_utf8());
                }
            }
            first = false;
        }
        self.atom(1);
        Ok(())
    }

    /// `(`, `(?:`, `(?P<name>`, `(?flags)` or `(?flags:`.
    fn open(&mut self) -> Result<(), String> {
        let Some(special) = self.rest.strip_prefix("(?") else {
            self.pass(1);
            self.enter();
            return Ok(());
        };
        let named = special.strip_prefix("P<").or_else(|| special.strip_prefix('<'));
        if let Some(named) = named {
            let name = named.split_once('>').filter(|(name, _)| is_name(name));
            let Some((_, rest)) = name else { return Err(format!("invalid named capture: `{}`", self.rest)) };
            // The name is dropped, since nothing asks for what a group matched.
            self.out.push('(');
            self.rest = rest;
            self.enter();
            return Ok(());
        }
        let end = special.find([':', ')']).ok_or_else(|| "missing closing )".to_owned())?;
        let flags = &special[..end];
        if let Some(unknown) = flags.chars().find(|flag| !"imsU-".contains(*flag)) {
            return Err(format!("invalid or unsupported Perl syntax: `(?{unknown}`"));
        }
        if special[end..].starts_with(':') {
            self.pass(2 + end + 1);
            self.enter();
        } else {
            self.pass(2 + end + 1);
        }
        Ok(())
    }

    fn enter(&mut self) {
        self.groups.push(1);
        self.atom = None;
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// `{n}`, `{n,}` or `{n,m}`: its length and its highest count. `None` if the braces are literal.
fn counts(text: &str) -> Option<(usize, Result<u32, String>)> {
    let end = text.find('}')?;
    let inside = &text[1..end];
    let (low, high) = match inside.split_once(',') {
        None => (number(inside)?, None),
        Some((low, "")) => (number(low)?, None),
        Some((low, high)) => (number(low)?, Some(number(high)?)),
    };
    let most = high.unwrap_or(low);
    let valid = low <= MAX_REPEAT && most <= MAX_REPEAT && low <= most;
    let operator = &text[..=end];
    Some((end + 1, if valid { Ok(most) } else { Err(format!("invalid repeat count: `{operator}`")) }))
}

/// Decimal digits without a leading zero.
fn number(text: &str) -> Option<u32> {
    let well_formed =
        !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    well_formed.then(|| text.parse().unwrap_or(u32::MAX))
}

/// Octal digits after the backslash: `0` and up to two more, or two or three digits of which the first is not zero.
fn octal(text: &str) -> Option<(usize, char)> {
    let digits = text.bytes().take(3).take_while(|b| (b'0'..=b'7').contains(b)).count();
    if digits == 0 || (digits == 1 && !text.starts_with('0')) {
        return None;
    }
    let value = u32::from_str_radix(&text[..digits], 8).ok()?;
    Some((digits, char::from_u32(value)?))
}

/// `pL`, `PL`, `p{Lu}`, `p{^Lu}` after the backslash: its length, and the ranges it stands for.
fn unicode_class(text: &str) -> Option<Result<(usize, String), String>> {
    let negative = match text.chars().next()? {
        'p' => false,
        'P' => true,
        _ => return None,
    };
    let invalid = |length: usize| Err(format!("invalid character class range: `\\{}`", &text[..length]));
    let (length, name) = match text[1..].strip_prefix('{') {
        Some(braced) => match braced.find('}') {
            Some(end) => (end + 3, &braced[..end]),
            None => return Some(invalid(text.len())),
        },
        None => {
            let one = text[1..].chars().next().map_or(0, char::len_utf8);
            (1 + one, &text[1..1 + one])
        }
    };
    let (negative, name) = name.strip_prefix('^').map_or((negative, name), |rest| (!negative, rest));
    let Some((_, holds, beyond)) = CLASSES.iter().find(|(known, ..)| *known == name) else {
        return Some(invalid(length));
    };
    let mut ranges = String::new();
    for byte in 0..=0x7f_u8 {
        if holds(byte) != negative {
            let _ = write!(ranges, "\\x{byte:02x}");
        }
    }
    if *beyond != negative {
        ranges.push_str(r"\x{80}-\x{10ffff}");
    }
    // A class without any character must remain a class: use NUL, which no interface name contains.
    Some(Ok((length, if ranges.is_empty() { r"\x00".to_owned() } else { ranges })))
}

type Class = (&'static str, fn(u8) -> bool, bool);

/// General categories and common scripts: which ASCII characters each holds, and whether it holds all others. Interface
/// names are nearly always ASCII; every other character counts as a letter.
const CLASSES: &[Class] = &[
    ("Any", |_| true, true),
    ("L", |b| b.is_ascii_alphabetic(), true),
    ("Lu", |b| b.is_ascii_uppercase(), false),
    ("Ll", |b| b.is_ascii_lowercase(), false),
    ("Lt", |_| false, false),
    ("Lm", |_| false, false),
    ("Lo", |_| false, true),
    ("M", |_| false, false),
    ("Mn", |_| false, false),
    ("Mc", |_| false, false),
    ("Me", |_| false, false),
    ("N", |b| b.is_ascii_digit(), false),
    ("Nd", |b| b.is_ascii_digit(), false),
    ("Nl", |_| false, false),
    ("No", |_| false, false),
    ("P", |b| b.is_ascii_punctuation() && !is_symbol(b), false),
    ("Pc", |b| b == b'_', false),
    ("Pd", |b| b == b'-', false),
    ("Ps", |b| b"([{".contains(&b), false),
    ("Pe", |b| b")]}".contains(&b), false),
    ("Pi", |_| false, false),
    ("Pf", |_| false, false),
    ("Po", |b| b.is_ascii_punctuation() && !is_symbol(b) && !b"_-([{)]}".contains(&b), false),
    ("S", is_symbol, false),
    ("Sm", |b| b"+<=>|~".contains(&b), false),
    ("Sc", |b| b == b'$', false),
    ("Sk", |b| b"^`".contains(&b), false),
    ("So", |_| false, false),
    ("Z", |b| b == b' ', false),
    ("Zs", |b| b == b' ', false),
    ("Zl", |_| false, false),
    ("Zp", |_| false, false),
    ("C", |b| b.is_ascii_control(), false),
    ("Cc", |b| b.is_ascii_control(), false),
    ("Cf", |_| false, false),
    ("Co", |_| false, false),
    ("Cs", |_| false, false),
    ("Latin", |b| b.is_ascii_alphabetic(), false),
    ("Common", |b| !b.is_ascii_alphabetic(), false),
    ("Greek", |_| false, true),
    ("Cyrillic", |_| false, true),
    ("Han", |_| false, true),
    ("Arabic", |_| false, true),
    ("Hebrew", |_| false, true),
];

fn is_symbol(byte: u8) -> bool {
    b"$+<=>^`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use regex_lite::Regex;

    use super::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Regex::new(&translate(pattern).unwrap()).unwrap().is_match(name)
    }

    #[test]
    fn what_go_reads_is_read_as_go_reads_it() {
        for (pattern, matching, other) in [
            ("docker.*", "docker0", "mydocker0"),
            ("tun0|tun1", "tun0x", "tun10"),
            (r"\pL+\pN", "eth0", "0eth"),
            (r"[\pL_]+\PL", "a_b9", "9"),
            (r"\p{^Lu}\P{^Lu}", "aB", "Ba"),
            (r"\Qa.b\E[0-9]", "a.b1", "axb1"),
            (r"\Qeth0", "eth0$", "eth0"),
            ("[a[b]x", "[x", "cx"),
            ("[a&&b]", "&", "&&"),
            ("[]a]", "]", "b"),
            ("a{", "a{", "a"),
            ("a{,3}", "a{,3}", "aa"),
            ("a{01}", "a{01}", "a"),
            ("a{2}", "aa", "a"),
            (r"\060", "0", "060"),
            ("(?P<n>a)(?P<n>b)", "ab", "a"),
            ("(?i:ETH)0", "eth0", "0"),
            (r"x\x{41}", "xA", "x41"),
            ("[[:digit:]]+", "42", "a"),
        ] {
            assert!(matches(pattern, matching), "{pattern} does not match {matching}: {}", translate(pattern).unwrap());
            assert!(!matches(pattern, other), "{pattern} matches {other}: {}", translate(pattern).unwrap());
        }
        // The repetition applies to the anchor, and every name has an end.
        assert!(matches("*", "") && matches("*", "a"));
    }

    #[test]
    fn what_go_refuses_is_refused() {
        for pattern in [
            "x**",
            "x+*",
            "x{2}{3}",
            "a**?",
            "a|*",
            "(*)",
            "a{1001}",
            "a{2,1}",
            "(a{1000}){2}",
            "(?x)",
            "(?=a)",
            "(?P=n)",
            "[a",
            "(?P<>a)",
            r"\p{Nobody}",
            r"\pX",
            r"\p{L",
        ] {
            let read = translate(pattern).and_then(|pattern| Regex::new(&pattern).map_err(|error| error.to_string()));
            assert!(read.is_err(), "{pattern}: {read:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(pattern in r"[\\QEpPx{}\[\]()?<>*+|:,0-9a-cL^$&é-]{0,24}") {
            let _ = translate(&pattern).map(|pattern| Regex::new(&pattern));
        }
    }
}
