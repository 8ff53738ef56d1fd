//! Guesses what a misspelt key was meant to be.

use super::table::KEYS;

/// Keys of earlier Go Nebula releases, and what replaced them.
const FORMER: &[(&str, &str)] = &[
    ("local_range", "it is called preferred_ranges now, and is a list"),
    ("pki.blacklist", "it is called pki.blocklist now"),
    ("x509", "it is called pki now"),
    ("handshakes.wait_rotation", "Go Nebula dropped handshakes.wait_rotation; handshakes.try_interval is what is left"),
    ("sshd.port", "the port is a part of sshd.listen"),
    ("lighthouse.dns.enabled", "the switch is lighthouse.serve_dns"),
    ("punchy.punch_back", "it is called punchy.respond"),
];

/// The likely fix for an unknown key, as a sentence without its full stop.
pub(super) fn key(path: &str) -> Option<String> {
    if let Some((_, fix)) = FORMER.iter().find(|(former, _)| *former == path) {
        return Some((*fix).to_owned());
    }
    let sections = KEYS.iter().map(|key| section_of(key.path)).filter(|section| !section.is_empty());
    let known = KEYS.iter().map(|key| key.path).chain(sections);
    let misspelt = match path.rsplit_once('.') {
        // Names such as `host` and `enabled` occur in several sections, so a typo is only corrected within its own.
        Some((own, leaf)) => {
            let leaves = known.filter_map(|known| known.rsplit_once('.').filter(|(section, _)| *section == own));
            nearest(leaf, leaves.map(|(_, leaf)| leaf)).map(|leaf| format!("{own}.{leaf}"))
        }
        None => nearest(path, known).map(str::to_owned),
    };
    let meant = misspelt.or_else(|| elsewhere(path).map(str::to_owned))?;
    Some(format!("did you mean {meant}?"))
}

/// The section that has all these keys, which were found outside of it: its header is probably missing.
pub(super) fn missing_header(found_in: &str, leaves: &[&str]) -> Option<&'static str> {
    let has = |section: &str, leaf: &str| KEYS.iter().any(|key| key.path.rsplit_once('.') == Some((section, leaf)));
    let mut sections = KEYS.iter().map(|key| section_of(key.path)).filter(|section| !section.is_empty());
    let all = |section: &&str| *section != found_in && leaves.iter().all(|leaf| has(section, leaf));
    if leaves.len() < 2 { None } else { sections.find(all) }
}

/// A key of the same name in another section, if there is only one and its name is specific enough.
fn elsewhere(path: &str) -> Option<&'static str> {
    let leaf = path.rsplit('.').next().unwrap_or(path);
    let mut same = KEYS.iter().map(|key| key.path).filter(|key| *key != leaf && key.rsplit('.').next() == Some(leaf));
    let (first, second) = (same.next(), same.next());
    first.filter(|_| second.is_none() && leaf.contains('_'))
}

fn section_of(path: &'static str) -> &'static str {
    path.rsplit_once('.').map_or("", |(section, _)| section)
}

/// The likely name of an unknown field.
pub(super) fn field(name: &str, fields: &[&'static str]) -> Option<&'static str> {
    nearest(name, fields.iter().copied())
}

fn nearest(name: &str, known: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let name = name.to_lowercase();
    let allowed = if name.len() > SHORT_KEY_BYTES { 2 } else { 1 };
    known
        .map(|known| (distance(&name, known), known))
        .filter(|(distance, _)| *distance <= allowed)
        .min()
        .map(|(_, known)| known)
}

// Two typos in so short a word make another word.
const SHORT_KEY_BYTES: usize = 5;
// No known key is this long, so a longer name is not worth the time.
const MAX_KEY_BYTES: usize = 64;

/// Edit distance: letters to insert, remove, replace or swap with a neighbour.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len().abs_diff(b.len()) > 2 || a.len() > MAX_KEY_BYTES {
        return usize::MAX;
    }
    let mut rows = vec![vec![0; b.len() + 1]; a.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=b.len()).collect();
    for i in 1..=a.len() {
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            let mut cost = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                cost = cost.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = cost;
        }
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_find_the_key_that_was_meant() {
        for (written, meant) in [
            ("firewal", "did you mean firewall?"),
            ("Listen", "did you mean listen?"),
            ("lighthouse.am_lighthous", "did you mean lighthouse.am_lighthouse?"),
            ("firewall.conntrack.tcp_timoeut", "did you mean firewall.conntrack.tcp_timeout?"),
            ("tun.am_relay", "did you mean relay.am_relay?"),
            ("am_lighthouse", "did you mean lighthouse.am_lighthouse?"),
            ("pki.blacklist", "it is called pki.blocklist now"),
            ("punchy.punch_back", "it is called punchy.respond"),
        ] {
            assert_eq!(key(written).as_deref(), Some(meant), "{written}");
        }
        assert_eq!(field("grups", &["host", "groups"]), Some("groups"));
    }

    #[test]
    fn common_names_are_not_looked_for_in_other_sections() {
        for written in ["stats.enabled", "stats.port", "tun.host", "listen.dev"] {
            assert_eq!(key(written), None, "{written}");
        }
    }

    #[test]
    fn keys_without_their_header_name_their_section() {
        assert_eq!(missing_header("tun", &["type", "prefix", "protocol"]), Some("stats"));
        assert_eq!(missing_header("", &["cadence", "lookup_timeout"]), Some("static_map"));
        assert_eq!(missing_header("tun", &["type"]), None, "one key may be a slip");
        assert_eq!(missing_header("tun", &["type", "nonsense"]), None);
    }

    #[test]
    fn other_words_are_no_slips() {
        for written in ["nonsense-of-mine", "nonsense", "tin", &"a".repeat(5000)] {
            assert_eq!(key(written).filter(|_| written != "tin"), None, "{written}");
        }
    }
}
