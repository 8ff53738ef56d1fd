//! Finds the file and line of a configuration key. The files are read again only when there is something to report.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::merge;
use super::yaml::{self, Document, Kind};

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
            let document = Document::compose(&text).ok()?;
            let root = document.root()?;
            let mut reader = Reader { document: &document, left: MAX_PLACES, depth: 0 };
            Some((file, reader.place(document.node(root).line, root)))
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

/// Places of one file; more than that are made by aliases of aliases.
const MAX_PLACES: usize = 1_000_000;

/// No configuration that was read is deeper.
const MAX_DEPTH: usize = 512;

impl Place {
    fn into_map(self) -> Option<BTreeMap<String, Self>> {
        match self.inside {
            Inside::Map(map) => Some(map),
            Inside::Nothing | Inside::List(_) => None,
        }
    }

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

/// Makes places of nodes.
struct Reader<'a> {
    document: &'a Document,
    /// Places that aliases may still add.
    left: usize,
    /// Lists and mappings around the present place.
    depth: usize,
}

impl Reader<'_> {
    /// What is inside of a node, of which the line is that of its key or its own.
    fn place(&mut self, line: u64, index: usize) -> Place {
        let node = self.document.node(self.document.followed(index));
        self.depth += 1;
        let inside = match &node.kind {
            _ if self.left == 0 || self.depth > MAX_DEPTH => Inside::Nothing,
            Kind::List(items) => Inside::List(
                items.iter().map(|item| self.counted(|own| own.place(own.document.node(*item).line, *item))).collect(),
            ),
            Kind::Map(pairs) => {
                let mut map = BTreeMap::new();
                self.add(pairs, &mut map);
                Inside::Map(map)
            }
            Kind::Scalar { .. } | Kind::Alias(_) => Inside::Nothing,
        };
        self.depth -= 1;
        Place { line, inside }
    }

    fn add(&mut self, pairs: &[usize], map: &mut BTreeMap<String, Place>) {
        for pair in pairs.chunks_exact(2) {
            let (key, value) = (self.document.node(pair[0]), pair[1]);
            let Kind::Scalar { text, .. } = &self.document.node(self.document.followed(pair[0])).kind else { continue };
            let place = self.counted(|own| own.place(key.line, value));
            if text == yaml::MERGE_KEY {
                // What is merged stands where it was written; keys of the mapping itself come first.
                let parts = match place.inside {
                    Inside::List(parts) => parts,
                    _ => vec![place],
                };
                for (name, place) in parts.into_iter().filter_map(Place::into_map).flatten() {
                    map.entry(name).or_insert(place);
                }
            } else {
                map.insert(text.clone(), place);
            }
        }
    }

    fn counted(&mut self, read: impl FnOnce(&mut Self) -> Place) -> Place {
        self.left = self.left.saturating_sub(1);
        read(self)
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
