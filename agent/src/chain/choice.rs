//! Which file of a directory is the primary's network configuration.

use super::meta::Meta;
use super::primary::{Primary, is_loadable, is_own};

/// The result of looking through a directory.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    /// The first valid one that is no meta plugin's.
    pub primary: Option<Primary>,
    /// The meta plugin that runtimes call, if the first valid one is one's.
    pub meta: Option<Meta>,
    /// Files of meta plugins.
    pub metas: Vec<String>,
    /// Files that a runtime would try to load but that are not valid, and why.
    pub refused: Vec<(String, String)>,
}

/// As [`choose`], where our plugin makes the network itself: no file of somebody else is the primary's. The runtime
/// calls the first file, and so ours.
#[must_use]
pub(crate) fn choose_own<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>, own: Primary) -> Choice {
    let others = choose(files, None);
    Choice { primary: Some(own), refused: Vec::new(), ..others }
}

/// Picks the primary among the files of a directory: the first valid one in byte order, as runtimes do. Hidden files,
/// ours and those of meta plugins are none: we are in the chain that those call. What the first of them names as the
/// cluster's network comes before others. If `network` is set, only a list of that name is, also a meta plugin's.
#[must_use]
pub(crate) fn choose<'a>(files: impl IntoIterator<Item = (&'a str, &'a [u8])>, network: Option<&str>) -> Choice {
    let mut files: Vec<_> = files.into_iter().filter(|(name, _)| is_loadable(name) && !is_own(name)).collect();
    files.sort_by_key(|(name, _)| name.as_bytes());
    let mut choice = Choice::default();
    let mut has_seen_valid = false;
    let mut named = None;
    for (name, bytes) in files.into_iter().filter(|(name, _)| !name.starts_with('.')) {
        match Primary::parse(name, bytes) {
            Ok(found) => {
                let meta = Meta::of(&found).filter(|meta| network != Some(meta.network.as_str()));
                let is_first = !std::mem::replace(&mut has_seen_valid, true);
                if let Some(meta) = meta {
                    choice.metas.push(name.to_owned());
                    choice.meta = choice.meta.take().or_else(|| is_first.then_some(meta));
                } else if network.is_none_or(|wanted| wanted == found.network) {
                    let is_named = choice.meta.as_ref().is_some_and(|meta| meta.delegates_to(name, &found.network));
                    if is_named && named.is_none() {
                        named = Some(found);
                    } else if choice.primary.is_none() {
                        choice.primary = Some(found);
                    }
                }
            }
            Err(why) => choice.refused.push((name.to_owned(), why)),
        }
    }
    choice.primary = named.or(choice.primary);
    choice
}
