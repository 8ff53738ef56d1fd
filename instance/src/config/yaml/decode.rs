//! Turns nodes into a tree as go-yaml v3 decodes a document into `map[string]any`.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::scalar::{MERGE, STR, Scalar};
use super::{Document, Kind};
use crate::config::Value;

/// Decodes a document. The root must be a mapping; no document is an empty mapping.
pub(super) fn root(document: &Document) -> Result<Value, String> {
    let Some(root) = document.root() else { return Ok(Value::empty()) };
    let mut decoder = Decoder { document, following: Vec::new(), decoded: 0, through_aliases: 0 };
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
    /// Nodes whose aliases are being followed.
    following: Vec<usize>,
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
        match &self.document.node(index).kind {
            Kind::Scalar { text, is_plain, tag } => Ok(Scalar::resolve(text, *is_plain, tag.as_deref())?.value),
            Kind::List(items) => Ok(Value::List(items.iter().map(|item| self.value(*item)).collect::<Result<_, _>>()?)),
            Kind::Map(pairs) => {
                let keys = if self.has_text_keys(pairs) { Keys::Text } else { Keys::Meaning };
                let mut entries = Entries::default();
                self.fill(pairs, &mut entries, keys, None)?;
                Ok(if keys == Keys::Text { Value::Map(entries) } else { Value::Mixed(entries) })
            }
            Kind::Alias(target) => {
                let target = *target;
                self.enter(target)?;
                let value = self.value(target);
                self.following.pop();
                value
            }
        }
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
            self.enter(target)?;
            self.fill(pairs, entries, keys, Some(&mut *seen))?;
            self.following.pop();
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

    fn enter(&mut self, target: usize) -> Result<(), String> {
        if self.following.contains(&target) {
            return Err("an anchor's value contains itself".to_owned());
        }
        self.following.push(target);
        Ok(())
    }

    /// Refuses documents that grow by their aliases, by go-yaml's measure.
    fn count(&mut self) -> Result<(), String> {
        self.decoded += 1;
        self.through_aliases += u64::from(!self.following.is_empty());
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

pub(in crate::config) const MERGE_KEY: &str = "<<";

/// Twice as many as a document may have without aliases.
const MAX_DECODED: u64 = 1_000_000;
