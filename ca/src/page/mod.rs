//! The page for operators: identities and the time they have left, unused tokens, and the most recent refusals.
//! Rendered here as a whole: no script, no external asset, and nothing to click that changes anything. Search and order
//! are part of its address.

mod identities;
mod view;

use std::fmt::Write as _;
use std::net::IpAddr;

use base64::{Engine, prelude::BASE64_STANDARD};
use nebula_cert::{Certificate, Fingerprint, UnixTime, rfc3339};
use sha2::{Digest, Sha256};

use crate::{
    proof::token::TokenHash,
    store::{IssuedRecord, LighthouseRecord, TokenRecord},
    time::time_left,
};
use identities::Identity;
use view::Order;
pub(crate) use view::View;

/// The page, and the Content-Security-Policy that a browser must apply to it.
pub(crate) struct Page {
    pub(crate) html: String,
    pub(crate) content_security_policy: String,
}

/// What the page shows, each in any order.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) issued: Vec<(Fingerprint, IssuedRecord)>,
    /// Used and expired ones included.
    pub(crate) tokens: Vec<(TokenHash, TokenRecord)>,
    /// Those of the StatefulSet.
    pub(crate) lighthouses: Vec<LighthouseRecord>,
    /// Newest last.
    pub(crate) refusals: Vec<RefusalNote>,
}

/// A request that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RefusalNote {
    pub(crate) at: UnixTime,
    pub(crate) source: IpAddr,
    pub(crate) code: &'static str,
    /// The caller, if known.
    pub(crate) subject: Option<String>,
    pub(crate) message: String,
}

/// Renders the page.
pub(crate) fn identities(ca: &Certificate, shown: Shown, view: &View, now: UnixTime) -> Page {
    let mut identities = Identity::all(shown.issued, now);
    let blocked = identities.iter().filter(|identity| identity.is_blocked()).count();
    let soon = identities.iter().filter(|identity| identity.is_soon_over(now)).count();
    let valid = identities.len() - blocked;
    let mut tokens = shown.tokens;
    tokens.retain(|(_, token)| token.used.is_none() && token.expires >= now);
    tokens.sort_by_key(|(_, token)| token.expires);
    // Automatic refresh would discard what is being typed.
    let refresh = if view.search.is_empty() { "<meta http-equiv=\"refresh\" content=\"60\">" } else { "" };
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">{refresh}\
         <title>{name} - identities</title><style>{STYLE}</style></head>\n<body><header><h1>{name}</h1>\
         <p>Nebula CA, valid until {until} ({left} left)</p></header>\n<ul class=\"sums\">\
         <li><b>{valid}</b> valid</li><li class=\"{soon_class}\"><b>{soon}</b> due for renewal</li>\
         <li><b>{blocked}</b> blocked</li><li><b>{open}</b> open tokens</li></ul>\n",
        name = escaped(ca.name()),
        until = rfc3339(ca.not_after()),
        left = time_left(ca.not_after() + 1 - now),
        soon_class = if soon > 0 { "late" } else { "" },
        open = tokens.len(),
    );
    let has_any = !identities.is_empty();
    identities.retain(|identity| identity.is_in(view));
    Identity::sort(&mut identities, view.order);
    tools(&mut html, view);
    match (has_any, identities.is_empty()) {
        (false, _) => html.push_str("<p class=\"note\">No certificate is valid now.</p>\n"),
        (true, true) => html.push_str("<p class=\"note\">No identity matches.</p>\n"),
        (true, false) => {
            table(
                &mut html,
                &["Name", "Whose", "Networks", "Groups", "Time left", "Valid until", "Certificate"],
                |html| {
                    identities.iter().take(MAX_ROWS).for_each(|identity| identity.write(html, now));
                },
            );
        }
    }
    if identities.len() > MAX_ROWS {
        let rest = identities.len() - MAX_ROWS;
        let _ = writeln!(html, "<p class=\"note\">{rest} more: search for some, or `nebula-ca certificate list`.</p>");
    }
    tokens_of(&mut html, &tokens, now);
    lighthouses_of(&mut html, &shown.lighthouses);
    refusals_of(&mut html, &shown.refusals);
    let renews = if refresh.is_empty() { "" } else { " This page renews itself every minute." };
    let _ = writeln!(html, "<footer>As of {}.{renews}</footer></body></html>", rfc3339(now));
    let style = BASE64_STANDARD.encode(Sha256::digest(STYLE.as_bytes()));
    let content_security_policy = format!(
        "default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    );
    Page { html, content_security_policy }
}

/// Renders search and order.
fn tools(html: &mut String, view: &View) {
    let order =
        Order::ALL.iter().find_map(|(order, key, _)| (*order == view.order).then_some(*key)).unwrap_or_default();
    let _ = write!(
        html,
        "<nav><form><input type=\"search\" name=\"q\" maxlength=\"100\" placeholder=\"name, address, group\" \
         aria-label=\"Search\" value=\"{}\"><input type=\"hidden\" name=\"sort\" value=\"{order}\">\
         <button>Search</button></form><p>Order:",
        escaped(&view.search)
    );
    for (order, _, title) in Order::ALL {
        if order == view.order {
            let _ = write!(html, " <b>{title}</b>");
        } else {
            let _ = write!(html, " <a href=\"{}\">{title}</a>", view.sorted_by(order));
        }
    }
    html.push_str("</p></nav>\n");
}

fn tokens_of(html: &mut String, tokens: &[(TokenHash, TokenRecord)], now: UnixTime) {
    if tokens.is_empty() {
        return;
    }
    html.push_str("<h2>Open tokens</h2>\n");
    table(html, &["Name", "Token", "Networks", "Groups", "Time left", "Made"], |html| {
        for (hash, token) in tokens.iter().take(MAX_TOKENS) {
            html.push_str("<tr>");
            cell(html, "Name", &escaped(&token.name));
            cell(html, "Token", &format!("<code>{}</code>", escaped(&hash.id())));
            cell(html, "Networks", &listed(&token.networks));
            cell(html, "Groups", &listed(&token.groups));
            cell(html, "Time left", &time_left(token.expires + 1 - now));
            cell(html, "Made", &rfc3339(token.created));
            html.push_str("</tr>\n");
        }
    });
    if let Some(rest) = tokens.len().checked_sub(MAX_TOKENS).filter(|rest| *rest > 0) {
        let _ = writeln!(html, "<p class=\"note\">{rest} more; `nebula-ca token list` shows all.</p>");
    }
}

fn lighthouses_of(html: &mut String, lighthouses: &[LighthouseRecord]) {
    if lighthouses.is_empty() {
        return;
    }
    html.push_str("<h2>Lighthouses of the cluster</h2>\n");
    table(html, &["Address", "Pod", "Node", "Endpoints", "Gone since"], |html| {
        for lighthouse in lighthouses {
            html.push_str("<tr>");
            cell(html, "Address", &listed(&[lighthouse.address]));
            cell(html, "Pod", &escaped(&format!("{}/{}", lighthouse.namespace, lighthouse.name)));
            cell(html, "Node", &escaped(&lighthouse.node));
            cell(html, "Endpoints", &listed(&lighthouse.endpoints));
            cell(html, "Gone since", &lighthouse.gone.map(rfc3339).unwrap_or_default());
            html.push_str("</tr>\n");
        }
    });
}

fn refusals_of(html: &mut String, refusals: &[RefusalNote]) {
    if refusals.is_empty() {
        return;
    }
    html.push_str(
        "<h2>Last refusals</h2>\n<p class=\"note\">Of this replica since its start; audit.log has all.</p>\n",
    );
    table(html, &["When", "From", "Who", "Code", "Why"], |html| {
        for refusal in refusals.iter().rev() {
            html.push_str("<tr>");
            cell(html, "When", &rfc3339(refusal.at));
            cell(html, "From", &refusal.source.to_string());
            cell(html, "Who", &escaped(refusal.subject.as_deref().unwrap_or_default()));
            cell(html, "Code", &format!("<code>{}</code>", refusal.code));
            cell(html, "Why", &escaped(&refusal.message));
            html.push_str("</tr>\n");
        }
    });
}

fn table(html: &mut String, headings: &[&str], rows: impl FnOnce(&mut String)) {
    html.push_str("<table><thead><tr>");
    for heading in headings {
        let _ = write!(html, "<th>{heading}");
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    rows(html);
    html.push_str("</tbody></table>\n");
}

/// A cell that carries its heading, for layouts without room for a header row. `content` is markup.
fn cell(html: &mut String, heading: &str, content: &str) {
    let empty = if content.is_empty() { " class=\"empty\"" } else { "" };
    let _ = write!(html, "<td data-of=\"{heading}\"{empty}><div>{content}</div></td>");
}

fn listed<T: ToString>(items: &[T]) -> String {
    items.iter().map(|item| format!("<span>{}</span>", escaped(&item.to_string()))).collect::<Vec<_>>().join(" ")
}

/// Escapes text for HTML, both in elements and in quoted attributes.
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

/// Browsers show this many rows without effort.
const MAX_ROWS: usize = 2_000;
const MAX_TOKENS: usize = 200;

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#d5dae1;--soft:#f3f5f8;--dim:#5c6673;--late:#b45309;--bad:#b42318}\
@media(prefers-color-scheme:dark){:root{--line:#333b46;--soft:#1b2027;--dim:#9aa5b1;--late:#f0a848;--bad:#f08072}}\
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:82rem;padding:0 1.5rem;overflow-wrap:anywhere}\
h1{font-size:1.6rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .4rem}header p,footer,.note{color:var(--dim);margin:.2rem 0}\
footer{margin-top:1.5rem}.sums{display:flex;flex-wrap:wrap;gap:1rem;list-style:none;padding:0;margin:1.2rem 0}\
.sums li{background:var(--soft);border:1px solid var(--line);border-radius:.5rem;padding:.6rem 1.1rem;min-width:7rem}\
.sums b{display:block;font-size:1.5rem}.sums .late b{color:var(--late)}\
nav{display:flex;flex-wrap:wrap;gap:.4rem 1.5rem;align-items:center;margin:0 0 .8rem}nav p{margin:0;color:var(--dim)}\
form{display:flex;gap:.4rem;min-width:0}input,button{font:inherit;padding:.3rem .6rem}button,th{white-space:nowrap}input[type=search]{min-width:0;width:16rem}\
nav b,nav a{margin-left:.5rem}\
table{border-collapse:collapse;width:100%;font-size:.9rem}\
th{text-align:left;color:var(--dim);font-weight:600;border-bottom:2px solid var(--line)}\
th,td{padding:.45rem .8rem .45rem 0;vertical-align:top}td{border-bottom:1px solid var(--line)}\
td:first-child{font-weight:600;min-width:8rem;max-width:24rem}[data-of=Networks]{min-width:9rem}[data-of=Whose]{min-width:8rem}\
td span{background:var(--soft);border-radius:.3rem;padding:0 .35rem}\
[data-of='Time left'],[data-of='Valid until'],[data-of=Made],[data-of=When]{min-width:7.5rem}meter{width:5rem;vertical-align:middle}\
.late [data-of='Time left']{color:var(--late);font-weight:600}.blocked td{color:var(--dim)}\
.blocked td:first-child{text-decoration:line-through}.blocked .tag{background:none;color:var(--bad);font-weight:600;padding:0}\
details summary{cursor:pointer;color:var(--dim)}ol{margin:.3rem 0;padding-left:1.2rem;color:var(--dim)}\
@media(max-width:52rem){body{padding:0 1rem;margin:1rem auto}thead{display:none}table,tbody,tr,td{display:block}\
tr{border:1px solid var(--line);border-radius:.5rem;padding:.4rem .8rem;margin:0 0 .7rem}\
td,td:first-child{border:0;padding:.15rem 0;max-width:none;display:grid;grid-template-columns:6.5rem minmax(0,1fr)}td.empty{display:none}\
td::before{content:attr(data-of);color:var(--dim);font-weight:400}form,input[type=search]{width:100%}}";

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, SigningKey, Template};

    use super::*;
    use crate::address::Subject;
    use crate::store::TokenUse;

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

    fn token(name: &str, expires: UnixTime) -> (TokenHash, TokenRecord) {
        let record = TokenRecord {
            name: name.into(),
            networks: vec!["10.42.0.6/16".parse().unwrap()],
            unsafe_networks: Vec::new(),
            groups: vec!["<i>y".into()],
            life: 60,
            created: NOW - 5,
            expires,
            key: None,
            used: None,
        };
        (TokenHash::of(name), record)
    }

    fn numbered(records: Vec<IssuedRecord>) -> Vec<(Fingerprint, IssuedRecord)> {
        records.into_iter().zip(1..).map(|(record, at)| (Fingerprint([at; 32]), record)).collect()
    }

    fn page(records: Vec<IssuedRecord>, query: &str) -> String {
        let shown = Shown { issued: numbered(records), ..Shown::default() };
        identities(&ca("my <CA>"), shown, &View::of(query), NOW).html
    }

    /// The first cell of each row.
    fn names(html: &str) -> Vec<&str> {
        let cells = html.split("<td data-of=\"Name\"><div>").skip(1);
        cells.map(|rest| rest.split("</div>").next().unwrap()).collect()
    }

    #[test]
    fn names_groups_searches_tokens_and_refusals_cannot_become_markup() {
        let evil = "a<script>alert('\"&\u{1b}')</script>";
        let safe = "a&lt;script&gt;alert(&#39;&quot;&amp;\u{fffd}&#39;)&lt;/script&gt;";
        let refusal = RefusalNote {
            at: NOW,
            source: [192, 0, 2, 1].into(),
            code: "denied",
            subject: Some(evil.into()),
            message: evil.into(),
        };
        let earlier = record(evil, NOW - 50, NOW + 50);
        let lighthouse = LighthouseRecord {
            address: [10, 42, 255, 1].into(),
            namespace: "shop".into(),
            name: "lh-0".into(),
            uid: "l-1".into(),
            node: evil.into(),
            port: 4242,
            endpoints: vec!["192.0.2.7:4242".into()],
            gone: None,
        };
        let shown = Shown {
            issued: numbered(vec![record(evil, NOW, NOW + 100), earlier]),
            tokens: vec![token(evil, NOW + 9)],
            lighthouses: vec![lighthouse],
            refusals: vec![refusal],
        };
        let html = identities(&ca("my <CA>"), shown, &View::default(), NOW).html;
        assert_eq!(html.matches(safe).count(), 5, "identity, token, node, who and why: {html}");
        assert!(html.contains("&lt;b&gt;x") && html.contains("&lt;i&gt;y") && html.contains("my &lt;CA&gt;"));
        let query = "q=%22%3E%3Cscript%3E&sort=name";
        let searched = page(vec![record("a\"><script>", NOW, NOW + 100)], query);
        assert!(searched.contains("value=\"&quot;&gt;&lt;script&gt;\"") && searched.contains("q=%22%3E%3Cscript%3E"));
        for html in [html, searched] {
            assert!(!html.contains("<script") && !html.contains("<b>x") && !html.contains("<i>y"), "{html}");
        }
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere_and_allows_no_script() {
        let page = identities(&ca("ca"), Shown::default(), &View::default(), NOW);
        assert!(page.content_security_policy.starts_with("default-src 'none'; style-src 'sha256-"));
        assert!(!page.content_security_policy.contains("unsafe"));
        for word in ["http:", "https:", "src=", "href=\"/", "action=", "<script", "style=", "onload"] {
            assert!(!page.html.contains(word), "{word}");
        }
        assert!(page.html.contains("No certificate is valid now"));
        assert!(page.html.len() < 8 << 10, "{} bytes", page.html.len());
    }

    #[test]
    fn one_row_for_a_name_has_its_newest_valid_certificate_and_those_before_it() {
        let blocked = IssuedRecord { revoked: Some(NOW - 5), ..record("web", NOW - 1, NOW + 900) };
        let html = page(
            vec![
                record("web", NOW - 200, NOW - 100),
                record("web", NOW - 20, NOW + 80),
                blocked,
                record("over", 1, NOW - 1),
            ],
            "",
        );
        assert_eq!(names(&html), ["web"], "and none whose certificates have all expired");
        assert!(html.contains("<details><summary>2 earlier</summary>"), "{html}");
        let history = html.split("<details>").nth(1).unwrap();
        for state in [format!("blocked {}", rfc3339(NOW - 5)), format!("expired {}", rfc3339(NOW - 100))] {
            assert!(history.contains(&state), "{state}: {history}");
        }
        let first = html.split("<details>").next().unwrap();
        assert!(first.contains("02020202") && !first.contains("03030303"), "the valid one is shown: {first}");
    }

    #[test]
    fn the_next_to_expire_is_first_and_blocked_ones_are_last() {
        let records = || {
            let blocked = IssuedRecord { revoked: Some(NOW - 5), ..record("a-blocked", NOW - 10, NOW + 90) };
            vec![
                blocked,
                record("fresh", NOW, NOW + 200),
                record("late", NOW - 80, NOW + 20),
                record("mid", NOW - 2, NOW + 100),
            ]
        };
        let html = page(records(), "");
        assert_eq!(names(&html), ["late", "mid", "fresh", "a-blocked"]);
        for sum in ["<b>3</b> valid", "<b>1</b> due", "<b>1</b> blocked"] {
            assert!(html.contains(sum), "{sum}: {html}");
        }
        assert_eq!(names(&page(records(), "sort=name")), ["fresh", "late", "mid", "a-blocked"]);
        assert_eq!(names(&page(records(), "sort=newest")), ["fresh", "mid", "late", "a-blocked"]);
    }

    #[test]
    fn a_search_looks_into_every_column_and_keeps_the_sums() {
        let pod = |number: u8| IssuedRecord {
            networks: vec![format!("10.42.1.{number}/16").parse().unwrap()],
            groups: vec![format!("Group{number}")],
            ..record(&format!("web-{number}"), NOW, NOW + 100)
        };
        for (search, found) in [
            ("WEB-2", vec!["web-2"]),
            ("10.42.1.3/", vec!["web-3"]),
            ("group1", vec!["web-1"]),
            ("0303", vec!["web-3"]),
            ("no", vec![]),
        ] {
            let html = page((1..=3).map(pod).collect(), &format!("q={search}"));
            assert_eq!(names(&html), found, "{search}");
            assert!(html.contains("<b>3</b> valid") && !html.contains("http-equiv"), "{html}");
        }
    }

    #[test]
    fn open_tokens_and_refusals_are_listed_newest_trouble_first() {
        let used = TokenUse { at: NOW, key: String::new(), certificate: String::new() };
        let mut spent = token("spent", NOW + 50);
        spent.1.used = Some(used);
        let refusal = |at, message: &str| RefusalNote {
            at,
            source: [192, 0, 2, 1].into(),
            code: "denied",
            subject: None,
            message: message.into(),
        };
        let shown = Shown {
            tokens: vec![token("later", NOW + 90), token("sooner", NOW + 30), token("expired", NOW - 1), spent],
            refusals: vec![refusal(NOW - 9, "older"), refusal(NOW - 3, "newer")],
            ..Shown::default()
        };
        let html = identities(&ca("ca"), shown, &View::default(), NOW).html;
        assert_eq!(names(&html), ["sooner", "later"]);
        assert!(html.contains("<b>2</b> open tokens"));
        assert!(html.find("<div>newer").unwrap() < html.find("<div>older").unwrap());
    }

    #[test]
    fn a_long_ledger_is_cut_and_says_so() {
        let many = (0..MAX_ROWS + 3).map(|number| record(&format!("n{number}"), NOW, NOW + 100));
        let issued = many.map(|record| (Fingerprint([1; 32]), record)).collect();
        let html = identities(&ca("ca"), Shown { issued, ..Shown::default() }, &View::default(), NOW).html;
        assert_eq!(html.matches("<tr class").count(), MAX_ROWS);
        assert!(html.contains("3 more"));
    }
}
