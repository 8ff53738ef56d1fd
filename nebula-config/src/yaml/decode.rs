//! Turns nodes into a tree as go-yaml v3 decodes a document into `map[string]any`.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::scalar::{MERGE, MERGE_KEY, STR, Scalar};
use super::{Document, Kind};
use crate::Value;

/// Decodes a document. The root must be a mapping; no document is an empty mapping.
pub(super) fn root(document: &Document) -> Result<Value, String> {
    let Some(root) = document.root() else { return Ok(Value::empty()) };
    let mut decoder = Decoder { document, following: 0, depth: 0, decoded: 0, through_aliases: 0 };
    let other = |tag: &str| {
        Err(format!("cannot unmarshal {tag} into map[string]interface {{}}: the file must hold `key: value` pairs"))
    };
    match &document.node(root).kind {
        Kind::Map(pairs) => {
            let mut entries = Entries::default();
            decoder.fill(pairs, &mut entries, Keys::Text, None)?;
            Ok(Value::Map(entries))
        }
        Kind::Scalar { text, is_plain, tag } => match Scalar::resolve(text, *is_plain, tag.as_deref())? {
            Scalar { value: Value::Null, .. } => Ok(Value::empty()),
            Scalar { tag, .. } => other(&tag),
        },
        Kind::List(_) => other("!!seq"),
        Kind::Alias(_) => other("an alias"),
    }
}

struct Decoder<'a> {
    document: &'a Document,
    /// Number of aliases and merged mappings that are being followed, one inside of the other.
    following: usize,
    /// Number of lists and mappings that are being decoded, one inside of the other.
    depth: usize,
    decoded: u64,
    through_aliases: u64,
}

/// What a mapping's keys become.
#[derive(Clone, Copy, PartialEq)]
enum Keys {
    /// The text that was written; a key that is null is left out with its value.
    Text,
    /// What it stands for: `1` and `0x1` are one key.
    Meaning,
}

type Entries = BTreeMap<String, Value>;

impl Decoder<'_> {
    fn value(&mut self, index: usize) -> Result<Value, String> {
        self.count()?;
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err("nested too deep by its aliases".to_owned());
        }
        let value = match &self.document.node(index).kind {
            Kind::Scalar { text, is_plain, tag } => Scalar::resolve(text, *is_plain, tag.as_deref())?.value,
            Kind::List(items) => Value::List(items.iter().map(|item| self.value(*item)).collect::<Result<_, _>>()?),
            Kind::Map(pairs) => {
                let keys = if self.has_text_keys(pairs) { Keys::Text } else { Keys::Meaning };
                let mut entries = Entries::default();
                self.fill(pairs, &mut entries, keys, None)?;
                if keys == Keys::Text { Value::Map(entries) } else { Value::Mixed(entries) }
            }
            Kind::Alias(target) => {
                self.following += 1;
                let value = self.value(*target)?;
                self.following -= 1;
                value
            }
        };
        self.depth -= 1;
        Ok(value)
    }

    /// Adds the pairs of a mapping. `seen` has the keys that are not to be set again, if the mapping is merged into
    /// another.
    fn fill(
        &mut self,
        pairs: &[usize],
        entries: &mut Entries,
        keys: Keys,
        mut seen: Option<&mut BTreeSet<String>>,
    ) -> Result<(), String> {
        self.refuse_double(pairs)?;
        let mut merged = None;
        for pair in pairs.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            if self.is_merge(key) {
                merged = Some(value);
                continue;
            }
            let Some(name) = self.key(key, keys)? else { continue };
            if seen.as_deref_mut().is_some_and(|seen| !seen.insert(name.clone())) {
                continue;
            }
            let value = self.value(value)?;
            entries.insert(name, value);
        }
        let Some(merged) = merged else { return Ok(()) };
        let mut own = BTreeSet::new();
        let seen = match seen {
            Some(seen) => seen,
            None => {
                for key in pairs.iter().step_by(2) {
                    if !self.is_merge(*key) {
                        own.extend(self.key(*key, keys)?);
                    }
                }
                &mut own
            }
        };
        self.merge(merged, entries, keys, seen)
    }

    fn merge(
        &mut self,
        node: usize,
        entries: &mut Entries,
        keys: Keys,
        seen: &mut BTreeSet<String>,
    ) -> Result<(), String> {
        let document = self.document;
        let sources = match &document.node(node).kind {
            Kind::List(items) => items.as_slice(),
            _ => &[node],
        };
        for source in sources {
            let target = document.followed(*source);
            let Kind::Map(pairs) = &document.node(target).kind else {
                return Err("map merge requires map or sequence of maps as the value".to_owned());
            };
            self.count()?;
            (self.following, self.depth) = (self.following + 1, self.depth + 1);
            if self.depth > MAX_DEPTH {
                return Err("merged too deep".to_owned());
            }
            self.fill(pairs, entries, keys, Some(&mut *seen))?;
            (self.following, self.depth) = (self.following - 1, self.depth - 1);
        }
        Ok(())
    }

    /// A key's name; `None` if go-yaml leaves it out with its value.
    fn key(&mut self, index: usize, keys: Keys) -> Result<Option<String>, String> {
        self.count()?;
        let Kind::Scalar { text, is_plain, tag } = &self.document.node(self.document.followed(index)).kind else {
            return Err("invalid map key: a key must be a single value".to_owned());
        };
        let Scalar { value, tag } = Scalar::resolve(text, *is_plain, tag.as_deref())?;
        Ok(match keys {
            Keys::Text if value == Value::Null => None,
            Keys::Text if tag != "!!binary" => Some(text.clone()),
            Keys::Meaning if value == Value::Null => Some("null".to_owned()),
            _ => Some(value.printed().into_owned()),
        })
    }

    /// A key written twice is an error: the same text, whatever its type. Keys that only mean the same are none.
    fn refuse_double(&self, pairs: &[usize]) -> Result<(), String> {
        let mut seen = HashSet::new();
        for key in pairs.iter().step_by(2) {
            let node = self.document.node(*key);
            let (kind, text) = match &node.kind {
                Kind::Scalar { text, .. } => ("scalar", text.clone()),
                Kind::List(_) => ("list", String::new()),
                Kind::Map(_) => ("map", String::new()),
                Kind::Alias(target) => ("alias", target.to_string()),
            };
            if let Some((_, text)) = seen.replace((kind, text)) {
                return Err(format!("mapping key {text:?} already defined at line {}", node.line));
            }
        }
        Ok(())
    }

    /// Whether Go gets a `map[string]any`, and not a `map[any]any`.
    fn has_text_keys(&self, pairs: &[usize]) -> bool {
        pairs.iter().step_by(2).all(|key| match &self.document.node(self.document.followed(*key)).kind {
            Kind::Scalar { text, is_plain, tag } => {
                let tag = Scalar::tag(text, *is_plain, tag.as_deref());
                tag == STR || tag == MERGE
            }
            _ => false,
        })
    }

    fn is_merge(&self, key: usize) -> bool {
        match &self.document.node(key).kind {
            Kind::Scalar { text, is_plain, tag } => {
                text == MERGE_KEY && Scalar::tag(text, *is_plain, tag.as_deref()) == MERGE
            }
            _ => false,
        }
    }

    /// Refuses documents that grow by their aliases, by go-yaml's measure.
    fn count(&mut self) -> Result<(), String> {
        self.decoded += 1;
        self.through_aliases += u64::from(self.following > 0);
        let is_too_much = self.through_aliases > 100
            && self.decoded > 1000
            && self.through_aliases as f64 / self.decoded as f64 > allowed_share(self.decoded);
        if is_too_much || self.decoded > MAX_DECODED {
            return Err("document contains excessive aliasing".to_owned());
        }
        Ok(())
    }
}

/// The part of all values that may come through aliases.
fn allowed_share(decoded: u64) -> f64 {
    const LOW: f64 = 400_000.0;
    const HIGH: f64 = 4_000_000.0;
    let decoded = decoded as f64;
    if decoded <= LOW { 0.99 } else { 0.99 - 0.89 * ((decoded - LOW) / (HIGH - LOW)) }
}

/// Twice the parser's limit: through aliases a value may be deeper than it is written, and each level takes room on
/// the stack.
const MAX_DEPTH: usize = 512;

/// Twice as many as a document may have without aliases.
const MAX_DECODED: u64 = 1_000_000;

#[cfg(test)]
mod tests {
    use crate::yaml::parse;

    #[test]
    fn a_value_that_contains_itself_or_is_deep_by_its_aliases_is_refused() {
        for text in ["a: &a [*a]", "a: &a {b: {c: *a}}", "a: &a {<<: *a}"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("contains itself"), "{text}: {error}");
        }
        // Each is written a hundred levels deep, around the one before; far fewer aliases than there may be.
        let lists = |count: usize| -> String {
            let open = |n: usize| format!("a{n}: &a{n} {}*a{} {}\n", "[".repeat(100), n - 1, "]".repeat(100));
            std::iter::once("a0: &a0 x\n".to_owned()).chain((1..count).map(open)).collect()
        };
        assert!(parse(&lists(5)).is_ok());
        assert!(parse(&lists(100)).unwrap_err().to_string().contains("too deep"));
        let merges: String = (1..10_000).map(|n| format!("a{n}: &a{n} {{<<: *a{}}}\n", n - 1)).collect();
        assert!(parse(&format!("a0: &a0 {{k: x}}\n{merges}")).is_err());
    }
}
