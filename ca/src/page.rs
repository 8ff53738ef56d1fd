//! The page for operators: which identities there are and how much of their time is left. Made here as a whole: no
//! script, no asset from elsewhere, nothing to click that changes anything.

use std::fmt::Write as _;

use base64::{Engine, prelude::BASE64_STANDARD};
use nebula_cert::{Certificate, Fingerprint, UnixTime, rfc3339};
use sha2::{Digest, Sha256};

use crate::{address::Subject, store::IssuedRecord, time::time_left};

/// The page, and the policy that a browser has to apply to it.
pub(crate) struct Page {
    pub(crate) html: String,
    pub(crate) content_security_policy: String,
}

/// Makes the page. `issued` in any order.
pub(crate) fn identities(ca: &Certificate, mut issued: Vec<(Fingerprint, IssuedRecord)>, now: UnixTime) -> Page {
    issued.retain(|(_, record)| record.not_after >= now);
    // Blocked ones last, then by name, then the newest of a name first.
    issued.sort_by(|(_, a), (_, b)| {
        let key = |record: &IssuedRecord| (record.revoked.is_some(), record.name.clone(), -record.issued);
        key(a).cmp(&key(b))
    });
    let blocked = issued.iter().filter(|(_, record)| record.revoked.is_some()).count();
    let soon = issued.iter().filter(|(_, record)| is_soon_over(record, now)).count();
    let ca_left = ca.not_after() + 1 - now;
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><meta http-equiv=\"refresh\" content=\"60\">\
         <title>{name} - identities</title><style>{STYLE}</style></head>\n<body><header><h1>{name}</h1>\
         <p>Nebula CA, valid until {until} ({left} left)</p></header>\n<ul class=\"sums\">\
         <li><b>{valid}</b> valid</li><li class=\"{soon_class}\"><b>{soon}</b> due for renewal</li>\
         <li><b>{blocked}</b> blocked</li></ul>\n",
        name = escaped(ca.name()),
        until = rfc3339(ca.not_after()),
        left = time_left(ca_left),
        valid = issued.len() - blocked,
        soon_class = if soon > 0 { "late" } else { "" },
    );
    if issued.is_empty() {
        html.push_str("<p class=\"note\">No certificate is valid now.</p>\n");
    } else {
        html.push_str(
            "<table><thead><tr><th>Name<th>Whose<th>Networks<th>Groups<th>Time left<th>Valid until<th>Fingerprint\
             </tr></thead>\n<tbody>\n",
        );
        for (fingerprint, record) in issued.iter().take(MAX_ROWS) {
            row(&mut html, fingerprint, record, now);
        }
        html.push_str("</tbody></table>\n");
    }
    if issued.len() > MAX_ROWS {
        let rest = issued.len() - MAX_ROWS;
        let _ = writeln!(html, "<p class=\"note\">{rest} more; `nebula-ca certificate list` shows all.</p>");
    }
    let _ =
        writeln!(html, "<footer>As of {}. This page renews itself every minute.</footer></body></html>", rfc3339(now));
    let style = BASE64_STANDARD.encode(Sha256::digest(STYLE.as_bytes()));
    let content_security_policy = format!(
        "default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    Page { html, content_security_policy }
}

fn row(html: &mut String, fingerprint: &Fingerprint, record: &IssuedRecord, now: UnixTime) {
    let left = record.not_after + 1 - now;
    let class = match record.revoked {
        Some(_) => "blocked",
        None if is_soon_over(record, now) => "late",
        None => "",
    };
    let whose = match &record.subject {
        Subject::Host { .. } => "host".to_owned(),
        Subject::Pod { namespace, name, .. } => format!("pod {namespace}/{name}"),
    };
    let time = match record.revoked {
        Some(at) => format!("<span class=\"tag\">blocked</span> {}", rfc3339(at)),
        // The bar is an element of its own: styles of single elements are not allowed by the policy.
        None => format!(
            "<meter min=\"0\" max=\"{life}\" low=\"{low}\" optimum=\"{life}\" value=\"{left}\"></meter> {text}",
            life = (record.not_after - record.issued).max(1),
            low = (record.not_after - record.issued) / 3,
            text = time_left(left),
        ),
    };
    let shown = fingerprint.to_string();
    let _ = writeln!(
        html,
        "<tr class=\"{class}\"><td>{}<td>{}<td>{}<td>{}<td>{time}<td>{}<td><code title=\"{shown}\">{}</code></tr>",
        escaped(&record.name),
        escaped(&whose),
        listed(&record.networks),
        listed(&record.groups),
        rfc3339(record.not_after),
        &shown[..12],
    );
}

/// In the last third of its life, in which it should have been renewed.
fn is_soon_over(record: &IssuedRecord, now: UnixTime) -> bool {
    record.revoked.is_none() && record.not_after - now < (record.not_after - record.issued) / 3
}

fn listed<T: ToString>(items: &[T]) -> String {
    items.iter().map(|item| format!("<span>{}</span>", escaped(&item.to_string()))).collect::<Vec<_>>().join(" ")
}

/// Text that is only text in HTML, in elements and in quoted attributes.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// A browser shows so many rows without effort.
const MAX_ROWS: usize = 2_000;

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#d5dae1;--soft:#f3f5f8;--dim:#5c6673;--late:#b45309;--bad:#b42318}\
@media(prefers-color-scheme:dark){:root{--line:#333b46;--soft:#1b2027;--dim:#9aa5b1;--late:#f0a848;--bad:#f08072}}\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:82rem;padding:0 1.5rem}\
h1{font-size:1.6rem;margin:0}header p,footer,.note{color:var(--dim);margin:.2rem 0}footer{margin-top:1.5rem}\
.sums{display:flex;gap:1rem;list-style:none;padding:0;margin:1.2rem 0}\
.sums li{background:var(--soft);border:1px solid var(--line);border-radius:.5rem;padding:.6rem 1.1rem;min-width:8rem}\
.sums b{display:block;font-size:1.5rem}.sums .late b{color:var(--late)}\
table{border-collapse:collapse;width:100%;font-size:.9rem}\
th{text-align:left;color:var(--dim);font-weight:600;border-bottom:2px solid var(--line)}\
th,td{padding:.45rem .8rem .45rem 0;vertical-align:top}td{border-bottom:1px solid var(--line)}\
td:first-child{font-weight:600;overflow-wrap:anywhere}td span{background:var(--soft);border-radius:.3rem;padding:0 .35rem;white-space:nowrap}\
td:nth-child(2),td:nth-child(5),td:nth-child(6){white-space:nowrap}meter{width:5rem;vertical-align:middle}\
.late td:nth-child(5){color:var(--late);font-weight:600}.blocked td{color:var(--dim)}\
.blocked td:first-child{text-decoration:line-through}.blocked .tag{background:none;color:var(--bad);font-weight:600;padding:0}";

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, SigningKey, Template};

    use super::*;

    const NOW: UnixTime = 1_800_000_000;

    fn ca(name: &str) -> Certificate {
        let template = Template::new(name, NOW - 10..=NOW + 86_400);
        template.self_sign(&SigningKey::generate(Curve::Curve25519).unwrap()).unwrap()
    }

    fn record(name: &str, issued: UnixTime, not_after: UnixTime) -> IssuedRecord {
        IssuedRecord {
            name: name.into(),
            networks: vec!["10.42.0.5/16".parse().unwrap()],
            groups: vec!["<b>x".into()],
            subject: Subject::Host { name: name.into() },
            issued,
            not_after,
            pem: String::new(),
            revoked: None,
            provisional: false,
        }
    }

    fn page(records: Vec<IssuedRecord>) -> String {
        let issued = records.into_iter().zip(1..).map(|(record, at)| (Fingerprint([at; 32]), record)).collect();
        identities(&ca("my <CA>"), issued, NOW).html
    }

    #[test]
    fn names_and_groups_cannot_become_markup() {
        let html = page(vec![record("a<script>alert('\"&\u{1b}')</script>", NOW, NOW + 100)]);
        assert!(html.contains("a&lt;script&gt;alert(&#39;&quot;&amp;\u{fffd}&#39;)&lt;/script&gt;"), "{html}");
        assert!(html.contains("&lt;b&gt;x") && html.contains("my &lt;CA&gt;"));
        assert!(!html.contains("<script") && !html.contains("<b>x"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_allows_no_script() {
        let page = identities(&ca("ca"), vec![], NOW);
        assert!(page.content_security_policy.starts_with("default-src 'none'; style-src 'sha256-"));
        assert!(!page.content_security_policy.contains("unsafe"));
        for word in ["http:", "https:", "src=", "href=", "<script", "style=", "onload"] {
            assert!(!page.html.contains(word), "{word}");
        }
        assert!(page.html.contains("No certificate is valid now"));
    }

    #[test]
    fn expired_ones_are_left_out_and_sums_tell_what_is_due() {
        let blocked = IssuedRecord { revoked: Some(NOW - 5), ..record("blocked", NOW - 10, NOW + 90) };
        let html = page(vec![
            record("over", NOW - 200, NOW - 1),
            record("late", NOW - 80, NOW + 20),
            record("fresh", NOW, NOW + 100),
            blocked,
        ]);
        assert!(!html.contains(">over<"));
        for sum in ["<b>2</b> valid", "<b>1</b> due", "<b>1</b> blocked"] {
            assert!(html.contains(sum), "{sum}: {html}");
        }
        let order = ["<td>fresh<", "<td>late<", "<td>blocked<"].map(|cell| html.find(cell).unwrap());
        assert!(order.is_sorted());
    }

    #[test]
    fn a_long_ledger_is_cut_and_says_so() {
        let many = (0..MAX_ROWS + 3).map(|number| record(&format!("n{number}"), NOW, NOW + 100));
        let issued = many.map(|record| (Fingerprint([1; 32]), record)).collect();
        let html = identities(&ca("ca"), issued, NOW).html;
        assert_eq!(html.matches("<tr class").count(), MAX_ROWS);
        assert!(html.contains("3 more"));
    }
}
