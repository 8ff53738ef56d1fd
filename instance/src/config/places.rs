//! Finds the file and line of a configuration key. The files are read again only when there is something to report.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

use super::{Value, merge, yaml};

/// The line numbers of a configuration's files.
#[derive(Debug, Default)]
pub struct Places {
    /// In the order in which the files are merged.
    files: Vec<(PathBuf, Place)>,
}

#[derive(Debug)]
struct Place {
    line: u64,
    inside: Inside,
}

#[derive(Debug)]
enum Inside {
    Nothing,
    List(Vec<Place>),
    Map(BTreeMap<String, Place>),
}

impl Places {
    /// Reads the files at `path` again; a file that cannot be read has no places.
    #[must_use]
    pub fn read(path: &Path) -> Self {
        let place = |file: PathBuf| {
            let text = merge::read_bounded(&file).ok()?;
            Some((file, yaml::read::<Spanned<Inside>>(&text).ok()??.into()))
        };
        Self { files: merge::find(path).unwrap_or_default().into_iter().filter_map(place).collect() }
    }

    /// File and line of the key, or of its nearest ancestor. If several files have it, the last one counts, as its
    /// value wins; list indices run through all files, as lists are merged.
    #[must_use]
    pub fn of(&self, key: &str) -> Option<(&Path, u64)> {
        let segments: Vec<&str> = key.split('.').collect();
        let mut passed = 0;
        let mut nearest: Option<(usize, &Path, u64)> = None;
        for (file, root) in self.files.iter().rev() {
            let (depth, line) = root.deepest(&segments, &mut passed);
            if depth > nearest.map_or(0, |(depth, ..)| depth) {
                nearest = Some((depth, file, line));
            }
        }
        nearest.map(|(_, file, line)| (file, line))
    }
}

impl Place {
    /// How many of `segments` exist, and the line of the last one. `passed` counts the items of the list in later
    /// files.
    fn deepest(&self, segments: &[&str], passed: &mut usize) -> (usize, u64) {
        let mut place = self;
        for (depth, segment) in segments.iter().enumerate() {
            let next = match &place.inside {
                Inside::Nothing => None,
                // An address that is a key contains dots of its own.
                Inside::Map(map) => map.get(*segment).or_else(|| map.get(&segments[depth..].join("."))),
                Inside::List(items) => {
                    let index = segment.parse::<usize>().ok().and_then(|index| index.checked_sub(*passed));
                    let found = index.and_then(|index| items.get(index));
                    *passed += if found.is_none() { items.len() } else { 0 };
                    found
                }
            };
            match next {
                Some(next) => place = next,
                None => return (depth, place.line),
            }
        }
        (segments.len(), place.line)
    }
}

impl From<Spanned<Inside>> for Place {
    fn from(spanned: Spanned<Inside>) -> Self {
        Self { line: spanned.referenced.line(), inside: spanned.value }
    }
}

impl<'de> Deserialize<'de> for Inside {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(InsideVisitor)
    }
}

struct InsideVisitor;

macro_rules! nothing {
    ($($visit:ident: $type:ty),*) => {
        $(fn $visit<E>(self, _: $type) -> Result<Inside, E> {
            Ok(Inside::Nothing)
        })*
    };
}

impl<'de> Visitor<'de> for InsideVisitor {
    type Value = Inside;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a configuration value")
    }
    nothing!(visit_bool: bool, visit_i64: i64, visit_u64: u64, visit_i128: i128, visit_u128: u128, visit_f64: f64,
        visit_str: &str, visit_bytes: &[u8]);
    fn visit_unit<E>(self) -> Result<Inside, E> {
        Ok(Inside::Nothing)
    }
    fn visit_none<E>(self) -> Result<Inside, E> {
        Ok(Inside::Nothing)
    }
    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Inside, D::Error> {
        deserializer.deserialize_any(self)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Inside, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Inside>>()? {
            items.push(item.into());
        }
        Ok(Inside::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Inside, A::Error> {
        let mut map = BTreeMap::new();
        while let Some(key) = access.next_key::<Spanned<Value>>()? {
            let Some(name) = key.value.text().map(std::borrow::Cow::into_owned) else {
                access.next_value::<IgnoredAny>()?;
                continue;
            };
            let inside = access.next_value::<Inside>()?;
            map.insert(name, Place { line: key.referenced.line(), inside });
        }
        Ok(Inside::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_items_are_found_in_the_file_that_decides() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write("a.yml", "listen:\n  port: 1\n  host: x\nfirewall:\n  inbound:\n    - port: 1\n    - port: 2\n");
        write("b.yml", "# later\nlisten: {port: 2}\nfirewall:\n  inbound:\n  - {port: 3}\n");
        let places = Places::read(folder.path());
        let of = |key: &str| places.of(key).map(|(file, line)| (file.file_name().unwrap().to_str().unwrap(), line));
        assert_eq!(of("listen.port"), Some(("b.yml", 2)));
        assert_eq!(of("listen.host"), Some(("a.yml", 3)));
        assert_eq!(of("firewall.inbound.0"), Some(("b.yml", 5)));
        assert_eq!(of("firewall.inbound.1.port"), Some(("a.yml", 6)));
        assert_eq!(of("firewall.inbound.2"), Some(("a.yml", 7)));
        assert_eq!(of("firewall.inbound"), Some(("b.yml", 4)));
        assert_eq!(of("nowhere.at.all"), None);
    }

    #[test]
    fn an_address_as_a_key_is_found() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yml"), "static_host_map:\n  10.42.0.1: [x]\n  10.42.0.2: [y]\n").unwrap();
        assert_eq!(Places::read(folder.path()).of("static_host_map.10.42.0.2").map(|(_, line)| line), Some(3));
    }
}
