//! The rows of the page: one per name, with its certificate in use and the earlier ones.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use nebula_cert::{Fingerprint, UnixTime, rfc3339};

use super::view::{Order, View};
use super::{cell, escaped, listed};
use crate::{address::Subject, store::IssuedRecord, time::time_left};

/// All certificates of one name.
pub(super) struct Identity {
    /// The one in use: the newest that is valid and not blocked, or else the newest.
    current: (Fingerprint, IssuedRecord),
    /// The others, newest first.
    history: Vec<(Fingerprint, IssuedRecord)>,
}

impl Identity {
    /// All names with a certificate that has not expired, in alphabetical order.
    pub(super) fn all(issued: Vec<(Fingerprint, IssuedRecord)>, now: UnixTime) -> Vec<Self> {
        let mut names: BTreeMap<String, Vec<(Fingerprint, IssuedRecord)>> = BTreeMap::new();
        for (fingerprint, record) in issued {
            names.entry(record.name.clone()).or_default().push((fingerprint, record));
        }
        let identity = |mut all: Vec<(Fingerprint, IssuedRecord)>| {
            let is_out = |record: &IssuedRecord| (record.not_after < now, record.revoked.is_some());
            all.sort_by_key(|(_, record)| (is_out(record), -record.issued));
            let mut all = all.into_iter();
            let current = all.next().filter(|(_, record)| record.not_after >= now)?;
            let mut history: Vec<_> = all.collect();
            history.sort_by_key(|(_, record)| -record.issued);
            Some(Self { current, history })
        };
        names.into_values().filter_map(identity).collect()
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.current.1.revoked.is_some()
    }

    /// Whether it is in the last third of its life, in which it should have been renewed.
    pub(super) fn is_soon_over(&self, now: UnixTime) -> bool {
        let record = &self.current.1;
        !self.is_blocked() && record.not_after - now < (record.not_after - record.issued) / 3
    }

    /// Sorts identities; blocked ones come last in every order.
    pub(super) fn sort(identities: &mut [Self], order: Order) {
        let key = |identity: &Self| match order {
            Order::Expiry => identity.current.1.not_after,
            Order::Name => 0,
            Order::Newest => -identity.current.1.issued,
        };
        // They are sorted by name already, and the sort is stable.
        identities.sort_by_key(|identity| (identity.is_blocked(), key(identity)));
    }

    /// Whether the search text of `view` occurs in any column of any of its certificates.
    pub(super) fn is_in(&self, view: &View) -> bool {
        let wanted = view.search.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&wanted);
        wanted.is_empty()
            || std::iter::once(&self.current).chain(&self.history).any(|(fingerprint, record)| {
                has(&record.name)
                    || has(&whose(record))
                    || record.groups.iter().any(|group| has(group))
                    || record.networks.iter().any(|network| has(&network.to_string()))
                    || has(&fingerprint.to_string())
            })
    }

    pub(super) fn write(&self, html: &mut String, now: UnixTime) {
        let (fingerprint, record) = &self.current;
        let left = record.not_after + 1 - now;
        let class = match record.revoked {
            Some(_) => "blocked",
            None if self.is_soon_over(now) => "late",
            None => "",
        };
        let time = match record.revoked {
            Some(at) => format!("<span class=\"tag\">blocked</span> {}", rfc3339(at)),
            // The bar is an element of its own, since the Content-Security-Policy forbids inline styles.
            None => format!(
                "<meter min=\"0\" max=\"{life}\" low=\"{low}\" optimum=\"{life}\" value=\"{left}\"></meter> {text}",
                life = (record.not_after - record.issued).max(1),
                low = (record.not_after - record.issued) / 3,
                text = time_left(left),
            ),
        };
        let _ = write!(html, "<tr class=\"{class}\">");
        cell(html, "Name", &escaped(&record.name));
        cell(html, "Whose", &escaped(&whose(record)));
        cell(html, "Networks", &listed(&record.networks));
        cell(html, "Groups", &listed(&record.groups));
        cell(html, "Time left", &time);
        cell(html, "Valid until", &rfc3339(record.not_after));
        cell(html, "Certificate", &format!("{}{}", code(fingerprint), self.earlier(now)));
        html.push_str("</tr>\n");
    }

    /// The earlier certificates, folded.
    fn earlier(&self, now: UnixTime) -> String {
        if self.history.is_empty() {
            return String::new();
        }
        let mut html = format!("<details><summary>{} earlier</summary><ol>", self.history.len());
        for (fingerprint, record) in self.history.iter().take(MAX_HISTORY) {
            let state = match record.revoked {
                Some(at) => format!("blocked {}", rfc3339(at)),
                None if record.not_after < now => format!("expired {}", rfc3339(record.not_after)),
                None => format!("valid until {}", rfc3339(record.not_after)),
            };
            let (code, issued) = (code(fingerprint), rfc3339(record.issued));
            let _ = write!(html, "<li>{code} issued {issued}, {state}; {}", listed(&record.networks));
        }
        html.push_str("</ol></details>");
        html
    }
}

fn whose(record: &IssuedRecord) -> String {
    match &record.subject {
        Subject::Host { .. } => "host".to_owned(),
        pod => pod.to_string(),
    }
}

fn code(fingerprint: &Fingerprint) -> String {
    let shown = fingerprint.to_string();
    format!("<code title=\"{shown}\">{}</code>", &shown[..12])
}

/// Maximum number per name: pods that are recreated again and again have many.
const MAX_HISTORY: usize = 20;
