//! What a misspelt key was probably meant to be.

use super::table::KEYS;

/// Names that former releases of Go Nebula read, and where their meaning went.
const FORMER: &[(&str, &str)] = &[
    ("local_range", "it is called preferred_ranges now, and is a list"),
    ("pki.blacklist", "it is called pki.blocklist now"),
    ("x509", "it is called pki now"),
    ("handshakes.wait_rotation", "Go Nebula dropped handshakes.wait_rotation; handshakes.try_interval is what is left"),
    ("sshd.port", "the port is a part of sshd.listen"),
    ("lighthouse.dns.enabled", "the switch is lighthouse.serve_dns"),
];

/// The likely fix of an unknown key, as a sentence without its stop.
pub(super) fn key(path: &str) -> Option<String> {
    if let Some((_, fix)) = FORMER.iter().find(|(former, _)| *former == path) {
        return Some((*fix).to_owned());
    }
    let leaf = path.rsplit('.').next().unwrap_or(path);
    let elsewhere = KEYS.iter().find(|key| key.path != leaf && key.path.rsplit('.').next() == Some(leaf));
    let sections = KEYS.iter().filter_map(|key| key.path.rsplit_once('.').map(|(section, _)| section));
    let misspelt = nearest(path, KEYS.iter().map(|key| key.path).chain(sections));
    let meant = misspelt.or_else(|| elsewhere.map(|key| key.path))?;
    Some(format!("did you mean {meant}?"))
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

// Two slips in so few letters make another word.
const SHORT_KEY_BYTES: usize = 5;
// No key is that long: a long name is not worth the time.
const MAX_KEY_BYTES: usize = 64;

/// Letters to insert, remove, replace or swap with a neighbour.
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
        ] {
            assert_eq!(key(written).as_deref(), Some(meant), "{written}");
        }
        assert_eq!(field("grups", &["host", "groups"]), Some("groups"));
    }

    #[test]
    fn other_words_are_no_slips() {
        for written in ["x-defaults", "nonsense", "tin", &"a".repeat(5000)] {
            assert_eq!(key(written).filter(|_| written != "tin"), None, "{written}");
        }
    }
}
