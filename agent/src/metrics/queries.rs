//! What queries name, held against pages of metrics: for tests of alert rules and dashboards, here and of all programs.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// A query of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Query {
    /// The alert, or the panel.
    pub(crate) of: String,
    pub(crate) text: String,
    /// Texts that show labels of its answer.
    pub(crate) shown: Vec<String>,
}

/// The queries of a file of rules.
pub(crate) fn of_rules(rules: &Value) -> Vec<Query> {
    let groups = rules["groups"].as_array().into_iter().flatten();
    let query = |rule: &Value| Query {
        of: string(&rule["alert"]),
        text: string(&rule["expr"]),
        shown: rule["annotations"].as_object().into_iter().flatten().map(|(_, text)| string(text)).collect(),
    };
    groups.flat_map(|group| group["rules"].as_array().into_iter().flatten().map(query)).collect()
}

/// The queries of a dashboard, those of its variables too, with what stands for those of Grafana.
pub(crate) fn of_dashboard(dashboard: &Value) -> Vec<Query> {
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = string(&target["expr"]).replace("$__rate_interval", "5m");
            queries.push(Query { of: string(&panel["title"]), text, shown: vec![string(&target["legendFormat"])] });
        }
    }
    for variable in dashboard["templating"]["list"].as_array().into_iter().flatten() {
        let of = string(&variable["name"]);
        // label_values(QUERY, LABEL)
        let inside =
            variable["query"]["query"].as_str().and_then(|text| text.strip_prefix("label_values(")?.strip_suffix(')'));
        if let Some((text, label)) = inside.and_then(|inside| inside.rsplit_once(',')) {
            queries.push(Query { of, text: text.to_owned(), shown: vec![format!("{{{{{}}}}}", label.trim())] });
        }
    }
    queries
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What a query says of one metric.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) metric: String,
    /// Labels of its matchers; with a value where that is a plain one.
    pub(crate) labels: Vec<(String, Option<String>)>,
}

/// Metrics of some pages, with the labels and values of their series.
#[derive(Debug, Default)]
pub(crate) struct Pages(BTreeMap<String, Series>);

#[derive(Debug, Default)]
struct Series {
    count: usize,
    labels: BTreeMap<String, BTreeSet<String>>,
}

impl Pages {
    /// Adds what a program serves.
    pub(crate) fn add(&mut self, page: &str) {
        for line in page.lines() {
            if let Some((name, _)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                self.0.entry(name.to_owned()).or_default();
                continue;
            }
            if line.starts_with('#') {
                continue;
            }
            let end = line.find(['{', ' ']).unwrap_or(line.len());
            if end == 0 {
                continue;
            }
            let series = self.0.entry(line[..end].to_owned()).or_default();
            series.count += 1;
            for (label, value) in matchers(line[end..].strip_prefix('{').unwrap_or_default()).0 {
                series.labels.entry(label).or_default().extend(value);
            }
        }
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// What a query names that is nowhere. A metric without series has no labels that could be compared: that is wrong,
    /// too, unless `may_be_empty`.
    pub(crate) fn problems(&self, query: &str, may_be_empty: impl Fn(&str) -> bool) -> Vec<String> {
        let (used, grouped) = used(query);
        let mut problems = Vec::new();
        let mut known: BTreeSet<&str> = OF_PROMETHEUS.into();
        let mut is_open = false;
        for Used { metric, labels } in &used {
            let Some(series) = self.0.get(metric) else {
                problems.push(format!("{metric} is served by nobody"));
                continue;
            };
            if series.count == 0 {
                is_open = true;
                if !may_be_empty(metric) {
                    problems.push(format!("{metric} has no series"));
                }
                continue;
            }
            known.extend(series.labels.keys().map(String::as_str));
            for (label, value) in labels.iter().filter(|(label, _)| !OF_PROMETHEUS.contains(&&**label)) {
                match series.labels.get(label) {
                    None => problems.push(format!("{metric} has no label {label}")),
                    Some(values) => {
                        if let Some(value) = value.as_ref().filter(|value| !values.contains(*value)) {
                            problems.push(format!("{metric} has no {label}=\"{value}\""));
                        }
                    }
                }
            }
        }
        if !is_open && !used.is_empty() {
            let unknown = grouped.iter().filter(|label| !known.contains(&***label));
            problems.extend(unknown.map(|label| format!("no metric of {query} has the label {label}")));
        }
        problems
    }

    /// What is wrong with a query and with what shows its answer.
    pub(crate) fn wrong(&self, query: &Query, may_be_empty: impl Fn(&str) -> bool) -> Vec<String> {
        let mut wrong = self.problems(&query.text, may_be_empty);
        let labels = query.shown.iter().flat_map(|text| shown_labels(text));
        wrong.extend(
            labels
                .filter(|label| !self.has_label(&query.text, label))
                .map(|label| format!("no label {label} is shown")),
        );
        wrong.into_iter().map(|wrong| format!("{}: {wrong}", query.of)).collect()
    }

    /// Whether some metric of a query has a label, or may have it.
    pub(crate) fn has_label(&self, query: &str, label: &str) -> bool {
        let is_of = |used: &Used| {
            self.0.get(&used.metric).is_none_or(|series| series.count == 0 || series.labels.contains_key(label))
        };
        OF_PROMETHEUS.contains(&label) || used(query).0.iter().any(is_of)
    }
}

/// Our metrics in a query, and the labels by which it groups or joins.
pub(crate) fn used(query: &str) -> (Vec<Used>, Vec<String>) {
    let (mut all, mut grouped) = (Vec::new(), Vec::new());
    let mut rest = query;
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '"') {
        rest = &rest[start..];
        if let Some(text) = rest.strip_prefix('"') {
            rest = &text[text.find('"').map_or(text.len(), |end| end + 1)..];
            continue;
        }
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        if word.starts_with("nebula_") {
            let mut used = Used { metric: word.to_owned(), labels: Vec::new() };
            if let Some(inside) = after.strip_prefix('{') {
                let (labels, length) = matchers(inside);
                used.labels = labels;
                rest = &inside[length..];
            }
            all.push(used);
        } else if ["by", "without", "on", "ignoring", "group_left", "group_right"].contains(&word)
            && let Some(list) = after.trim_start().strip_prefix('(')
        {
            let end = list.find(')').unwrap_or(list.len());
            grouped
                .extend(list[..end].split(',').map(|label| label.trim().to_owned()).filter(|label| !label.is_empty()));
            rest = &list[end..];
        }
    }
    (all, grouped)
}

/// The labels in `a="b",c=~"d"}`, with the values of those that are equal to one, and where that ends.
fn matchers(text: &str) -> (Vec<(String, Option<String>)>, usize) {
    let (mut labels, mut at) = (Vec::new(), 0);
    while let Some(start) = text[at..].find(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '}') {
        at += start;
        if text[at..].starts_with('}') {
            return (labels, at + 1);
        }
        let Some(quote) = text[at..].find('"').map(|quote| at + quote) else { break };
        let operator = text[at..quote].find(['=', '!']).map_or(quote, |operator| at + operator);
        let is_equal = text[operator..quote].trim() == "=";
        let label = text[at..operator].trim().to_owned();
        let mut end = quote + 1;
        while end < text.len() && !text[end..].starts_with('"') {
            end += if text[end..].starts_with('\\') { 2 } else { 1 };
            while !text.is_char_boundary(end.min(text.len())) {
                end += 1;
            }
        }
        let value = text[quote + 1..end.min(text.len())].to_owned();
        labels.push((label, is_equal.then_some(value).filter(|value| !value.contains('$'))));
        at = (end + 1).min(text.len());
    }
    (labels, text.len())
}

/// `{{label}}` and `$labels.label` in texts.
pub(crate) fn shown_labels(text: &str) -> Vec<String> {
    let word = |rest: &str| rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect::<String>();
    let braces = text.split("{{").skip(1).map(|rest| word(rest.trim_start()));
    let dollars = text.split("$labels.").skip(1).map(word);
    braces.chain(dollars).filter(|label| !label.is_empty()).collect()
}

/// What Prometheus itself adds.
const OF_PROMETHEUS: [&str; 2] = ["instance", "job"];

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> Pages {
        let mut pages = Pages::default();
        pages
            .add("# HELP nebula_a X.\n# TYPE nebula_a gauge\nnebula_a{x=\"1\",y=\"a}b\\\"\"} 7\nnebula_a{x=\"2\"} 8\n");
        pages.add("# TYPE nebula_b counter\n# TYPE nebula_c counter\nnebula_c 1\n");
        pages
    }

    #[test]
    fn a_wrong_name_label_or_value_is_found() {
        let pages = pages();
        let problems = |query: &str| pages.problems(query, |_| false);
        for query in [
            "sum by (x) (rate(nebula_a{x=\"1\", instance=~\"$i\"}[5m])) > 0 and on (instance) nebula_c",
            "nebula_a{y=\"a}b\\\"\"} unless nebula_c == 0",
            "label_replace(up, \"nebula_zzz\", \"\", \"\", \"\") and nebula_c",
        ] {
            assert_eq!(problems(query), Vec::<String>::new(), "{query}");
        }
        for (query, says) in [
            ("rate(nebula_aa[5m])", "nebula_aa is served by nobody"),
            ("nebula_b > 1", "nebula_b has no series"),
            ("nebula_a{z=\"1\"}", "nebula_a has no label z"),
            ("nebula_a{x=\"3\"}", "nebula_a has no x=\"3\""),
            ("nebula_c{x=\"1\"}", "nebula_c has no label x"),
            ("sum by (z) (nebula_a)", "has the label z"),
            ("nebula_a * on (x) group_left (w) nebula_c", "has the label w"),
        ] {
            let found = problems(query);
            assert!(found.len() == 1 && found[0].contains(says), "{query}: {found:?}");
        }
        assert!(pages.problems("nebula_b{any=\"x\"}", |name| name == "nebula_b").is_empty());
        assert!(pages.has_label("nebula_a", "x") && !pages.has_label("nebula_c", "x"));
    }

    #[test]
    fn labels_in_texts_are_found() {
        assert_eq!(shown_labels("{{instance}} {{ $labels.pod }}: {{kind}}"), ["instance", "kind", "pod"]);
        assert_eq!(pages().names().collect::<Vec<_>>(), ["nebula_a", "nebula_b", "nebula_c"]);
    }
}
