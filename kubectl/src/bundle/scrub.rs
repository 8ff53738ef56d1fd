//! Takes secrets out of texts: PEM of any kind, tokens, passwords, and whatever looks like a key in base64. What is
//! taken away for nothing is a lesser evil than what stays.

use serde_json::Value;

/// The text without what may be a secret.
pub(super) fn scrub(text: &str) -> String {
    without_tokens(&without_users(&without_pem(text)))
}

/// The document without what may be a secret: texts, and values of keys that are called like one.
pub(super) fn scrub_value(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(scrub(&text)),
        Value::Array(items) => items.into_iter().map(scrub_value).collect(),
        Value::Object(fields) => {
            let scrubbed = |(key, value): (String, Value)| {
                let value = if is_secret(&key) { without_texts(value) } else { scrub_value(value) };
                (scrub(&key), value)
            };
            fields.into_iter().map(scrubbed).collect()
        }
        other => other,
    }
}

fn without_texts(value: Value) -> Value {
    match value {
        Value::String(_) => Value::String(REMOVED.to_owned()),
        Value::Array(items) => items.into_iter().map(without_texts).collect(),
        Value::Object(fields) => fields.into_iter().map(|(key, value)| (scrub(&key), without_texts(value))).collect(),
        other => other,
    }
}

/// Blocks of PEM, whatever is in them, and whether or not both of their ends are there.
fn without_pem(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find(FENCE) {
        let (before, block) = rest.split_at(at);
        out.push_str(before);
        rest = if block.starts_with(BEGIN) {
            match block.find(END) {
                Some(end) => behind_fence(&block[end..]),
                // It was cut off, or other lines came between. The rest of it is in the next lines.
                None => block.match_indices('\n').nth(MOST_LINES).map_or("", |(at, _)| &block[at..]),
            }
        } else if block.starts_with(END) {
            // Its first lines were cut off. Those that are full look like keys by themselves, the last one does not.
            let cut = out.trim_end_matches('\n').rmatch_indices('\n').nth(1).map_or(0, |(at, _)| at + 1);
            out.truncate(cut);
            behind_fence(block)
        } else {
            out.push_str(FENCE);
            rest = &block[FENCE.len()..];
            continue;
        };
        out.push_str(REMOVED);
    }
    out.push_str(rest);
    out
}

/// What comes behind the second row of dashes of a line that begins with dashes.
fn behind_fence(line: &str) -> &str {
    let label = &line[FENCE.len()..];
    let end = label.char_indices().take(MOST_OF_LABEL).map(|(at, _)| at).find(|at| label[*at..].starts_with(FENCE));
    end.map_or(label, |at| &label[at + FENCE.len()..])
}

/// Users and passwords in URLs.
fn without_users(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find("://") {
        let (before, behind) = rest.split_at(at + 3);
        out.push_str(before);
        let end = behind.find(|c: char| c.is_whitespace() || "/\"'`<>".contains(c)).unwrap_or(behind.len());
        rest = match behind[..end].rfind('@') {
            Some(user) => {
                out.push_str(REMOVED);
                &behind[user..]
            }
            None => behind,
        };
    }
    out.push_str(rest);
    out
}

fn without_tokens(text: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while !rest.is_empty() {
        let begin = rest.find(is_of_word).unwrap_or(rest.len());
        out.push_str(&rest[..begin]);
        rest = &rest[begin..];
        let end = rest.find(|c| !is_of_word(c)).unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        out.push_str(if is_token(word) { REMOVED } else { word });
        rest = behind;
        if let Some((separator, value)) = value_behind(word, behind) {
            out.push_str(&behind[..separator]);
            out.push_str(REMOVED);
            rest = &behind[separator + value..];
        }
    }
    out
}

/// The characters of JSON Web Tokens and of base64 of both kinds.
fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "+/_.~-".contains(c)
}

/// A JSON Web Token, or something as long as a key in base64. Fingerprints and UIDs have no capital letters.
fn is_token(word: &str) -> bool {
    let is_web_token = word.find("eyJ").is_some_and(|at| word[at..].contains('.'));
    let is_key = |part: &str| {
        let count = |is: fn(&u8) -> bool| part.as_bytes().iter().filter(|byte| is(byte)).count();
        part.len() >= SHORTEST_KEY && count(u8::is_ascii_uppercase) >= FEW && count(u8::is_ascii_lowercase) >= FEW
    };
    is_web_token || word.split('.').any(is_key)
}

/// Where the value of a key that is called like a secret is behind it: the length of what is between, and its own.
fn value_behind(word: &str, behind: &str) -> Option<(usize, usize)> {
    let lower = word.to_ascii_lowercase();
    let is_scheme = lower == "bearer" || lower == "basic";
    if !is_scheme && !is_secret(word) {
        return None;
    }
    let blank = |c: char| c == ' ' || c == '\t';
    let quote = |c: char| "\"'\\".contains(c);
    let value = if is_scheme {
        let value = behind.trim_start_matches(|c| blank(c) || quote(c));
        if value.len() == behind.len() || lower == "basic" && !has_form_of_password(value) {
            return None;
        }
        value
    } else {
        let separated = behind.trim_start_matches(|c| blank(c) || quote(c));
        let value = separated.strip_prefix([':', '='])?;
        value.trim_start_matches(|c| blank(c) || quote(c))
    };
    let separator = behind.len() - value.len();
    let is_quoted = behind[..separator].ends_with(quote);
    let is_line = LINES.contains(&normal(word).as_str());
    let is_end = |c: char| match (is_quoted, is_line) {
        (true, _) => quote(c) || c == '\n',
        (false, true) => "\"\n\r".contains(c),
        (false, false) => c.is_whitespace() || ",;&\"'})]".contains(c),
    };
    let length = value.find(is_end).unwrap_or(value.len());
    let is_harmless = ["", "true", "false", "null", "-", REMOVED].contains(&&value[..length]);
    (!is_harmless).then_some((separator, length))
}

/// `basic` is a word of prose, too.
fn has_form_of_password(value: &str) -> bool {
    let word: String = value.chars().take_while(|c| !c.is_whitespace()).collect();
    word.len() >= 8 && word.chars().any(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '=')
}

fn normal(key: &str) -> String {
    key.to_ascii_lowercase().replace('-', "_")
}

/// Whether a key is called like a secret. Names of files are none.
fn is_secret(key: &str) -> bool {
    let normal = normal(key);
    let is_name = !normal.contains(['/', '.']);
    is_name && (LINES.contains(&normal.as_str()) || ENDS.iter().any(|end| normal.ends_with(end)))
}

const REMOVED: &str = "[removed]";
const FENCE: &str = "-----";
const BEGIN: &str = "-----BEGIN";
const END: &str = "-----END";
/// Of a block whose end is missing: the key of an RSA of 4096 bits has 52 lines.
const MOST_LINES: usize = 100;
const MOST_OF_LABEL: usize = 80;
/// 32 bytes in base64 are 43 characters without their padding.
const SHORTEST_KEY: usize = 40;
const FEW: usize = 3;
/// What their values have in them may be anything up to the end of the line.
const LINES: [&str; 5] = ["authorization", "proxy_authorization", "cookie", "set_cookie", "x_nebula_token"];
const ENDS: [&str; 10] = [
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "apikey",
    "api_key",
    "private_key",
    "key_data",
    "access_key",
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const KEY: &str = "q8Zc3VbLkd0s9TfXh2mUuWJr5aYpNwGe1QoKxDzCi4E";

    #[test]
    fn secrets_of_every_kind_go_and_what_is_around_them_stays() {
        let pem = |label: &str| format!("-----BEGIN {label}-----\n{KEY}=\nabc=\n-----END {label}-----");
        for (text, expected) in [
            (format!("a {} b", pem("NEBULA X25519 PRIVATE KEY")), "a [removed] b".to_owned()),
            (
                format!("a {} b", pem("NEBULA ED25519 ENCRYPTED PRIVATE KEY").replace('\n', "\\n")),
                "a [removed] b".to_owned(),
            ),
            ("1\n2\nMIIB\nabc=\n-----END RSA PRIVATE KEY-----\n3\n".to_owned(), "1\n2\n[removed]\n3\n".to_owned()),
            (format!("1\n-----BEGIN PRIVATE KEY-----\n{KEY}"), "1\n[removed]".to_owned()),
            ("a ----- b -----".to_owned(), "a ----- b -----".to_owned()),
            ("GET x Authorization: Bearer abc.def\nnext".to_owned(), "GET x Authorization: [removed]\nnext".to_owned()),
            (r#"{"authorization":"Bearer abc"} x"#.to_owned(), r#"{"authorization":"[removed]"} x"#.to_owned()),
            ("used bearer abc-1 here".to_owned(), "used bearer [removed] here".to_owned()),
            ("basic Zm9vOmJhcg== and basic facts".to_owned(), "basic [removed] and basic facts".to_owned()),
            ("x-nebula-token: a.b c\n".to_owned(), "x-nebula-token: [removed]\n".to_owned()),
            ("eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln!".to_owned(), "[removed]!".to_owned()),
            ("password=hunter2, user=x".to_owned(), "password=[removed], user=x".to_owned()),
            (r#"bearerToken: 'a b' c"#.to_owned(), r#"bearerToken: '[removed]' c"#.to_owned()),
            (r#"{\"clientSecret\": \"a b\"}"#.to_owned(), r#"{\"clientSecret\": \"[removed]\"}"#.to_owned()),
            ("postgres://u:p@db/nebula".to_owned(), "postgres://[removed]@db/nebula".to_owned()),
            (format!("key {KEY}= is"), "key [removed]= is".to_owned()),
        ] {
            assert_eq!(scrub(&text), expected, "{text}");
        }
        let fine = format!(
            "own_token: false, /run/node.token: is away, {} at https://[::1]:8443/readyz 5f3c9a1e-0000-4000-8000-000000000000",
            "ab12".repeat(16)
        );
        assert_eq!(scrub(&fine), fine);
    }

    #[test]
    fn values_of_keys_that_are_called_like_secrets_go_from_documents() {
        let document = json!({"token": "x", "own_token": false, "a": {"password": ["y", {"b": "z"}]}, "reason": format!("k {KEY}")});
        let expected = json!({"token": REMOVED, "own_token": false, "a": {"password": [REMOVED, {"b": REMOVED}]},
            "reason": "k [removed]"});
        assert_eq!(scrub_value(document), expected);
    }

    proptest! {
        #[test]
        fn a_secret_never_stays_whatever_is_around_it(
            before in ".{0,200}", behind in ".{0,200}", key in "[A-Z][a-z][A-Z][a-z][A-Z][a-z][A-Za-z0-9+/]{38}", kind in 0..7,
        ) {
            let secret = match kind {
                0 => format!("-----BEGIN NEBULA P256 PRIVATE KEY-----\n{key}\n-----END NEBULA P256 PRIVATE KEY-----"),
                1 => format!("-----BEGIN PRIVATE KEY-----\n{key}"),
                2 => format!("{key}\n-----END PRIVATE KEY-----"),
                3 => format!("Authorization: Bearer {key}"),
                4 => format!("eyJhbGciOiJub25lIn0.{key}.x"),
                5 => format!("\"token\":\"{key}\""),
                _ => key.clone(),
            };
            for text in [scrub(&format!("{before} {secret} {behind}")), scrub_value(json!([format!("{before} {secret}")])).to_string()] {
                prop_assert!(!text.contains(&key), "{}", text);
            }
        }
    }
}
