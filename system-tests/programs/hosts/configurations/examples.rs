//! The example configurations of all Go Nebula releases since 1.5, as published and with the edits that their comments
//! suggest.

use super::bench::{Bench, Verdict};

/// Releases whose examples differ; the releases in between have the same text as the one before.
const PUBLISHED: &[(&str, &str)] = &[
    ("1.5.0", include_str!("../../../../tests/vectors/configs/v1.5.0.yml")),
    ("1.6.0", include_str!("../../../../tests/vectors/configs/v1.6.0.yml")),
    ("1.7.0", include_str!("../../../../tests/vectors/configs/v1.7.0.yml")),
    ("1.8.0", include_str!("../../../../tests/vectors/configs/v1.8.0.yml")),
    ("1.8.1", include_str!("../../../../tests/vectors/configs/v1.8.1.yml")),
    ("1.9.0", include_str!("../../../../tests/vectors/configs/v1.9.0.yml")),
    ("1.9.6", include_str!("../../../../tests/vectors/configs/v1.9.6.yml")),
    ("1.10.0", include_str!("../../../../tests/vectors/configs/v1.10.0.yml")),
    ("1.10.1", include_str!("../../../../tests/vectors/configs/v1.10.1.yml")),
    ("1.11.0", include_str!("../../../../tests/vectors/configs/v1.11.0.yml")),
];

/// One edit of an example, with a name that identifies it.
struct Variant {
    name: String,
    text: String,
}

fn variants(release: &str, example: &str) -> Vec<Variant> {
    let lines: Vec<&str> = example.lines().collect();
    let mut variants = vec![Variant { name: format!("{release}: as published"), text: example.to_owned() }];
    let mut add = |what: String, edited: Vec<String>| {
        variants.push(Variant { name: format!("{release}: {what}"), text: edited.join("\n") + "\n" });
    };
    for (number, items) in lists(&lines) {
        let place = format!("line {} {:?}", number + 1, lines[number].trim());
        add(format!("list emptied, {place}"), edit(&lines, |index, _| (!items.contains(&index)).then_some("")));
        add(
            format!("list commented out, {place}"),
            edit(&lines, |index, _| Some(if items.contains(&index) { "#" } else { "" })),
        );
    }
    for (number, end) in sections(&lines) {
        let inside = |index: usize| (number..end).contains(&index);
        let place = format!("line {} {:?}", number + 1, lines[number].trim());
        add(
            format!("section commented out, {place}"),
            edit(&lines, |index, _| Some(if inside(index) { "#" } else { "" })),
        );
        add(
            format!("section without its keys, {place}"),
            edit(&lines, |index, _| Some(if inside(index) && index != number { "#" } else { "" })),
        );
    }
    for number in options(&lines) {
        let mut edited = edit(&lines, |_, _| Some(""));
        edited[number] =
            edited[number].replacen('#', "", 1).replacen("  ", " ", usize::from(lines[number].starts_with("# ")));
        add(format!("option switched on, line {} {:?}", number + 1, lines[number].trim()), edited);
    }
    variants
}

/// Adds to each line the prefix that `keep` returns, and drops the lines for which it returns none.
fn edit(lines: &[&str], keep: impl Fn(usize, &str) -> Option<&'static str>) -> Vec<String> {
    let kept = lines.iter().enumerate();
    kept.filter_map(|(index, line)| keep(index, line).map(|prefix| format!("{prefix}{line}"))).collect()
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn is_remark(line: &str) -> bool {
    line.trim_start().starts_with('#') || line.trim().is_empty()
}

/// Keys whose value is a block-style list, each with the lines of its items.
fn lists(lines: &[&str]) -> Vec<(usize, Vec<usize>)> {
    let mut found = Vec::new();
    for (number, line) in lines.iter().enumerate() {
        if is_remark(line) || !line.trim_end().ends_with(':') {
            continue;
        }
        let below = (number + 1..lines.len()).filter(|&at| !is_remark(lines[at]));
        let items: Vec<usize> = below
            .take_while(|&at| indent(lines[at]) > indent(line) || lines[at].trim_start().starts_with("- "))
            .take_while(|&at| indent(lines[at]) >= indent(line))
            .collect();
        if items.first().is_some_and(|&at| lines[at].trim_start().starts_with("- ")) {
            found.push((number, items));
        }
    }
    found
}

/// Top-level keys, each with the line after its last one.
fn sections(lines: &[&str]) -> Vec<(usize, usize)> {
    let heads: Vec<usize> = (0..lines.len())
        .filter(|&at| !is_remark(lines[at]) && indent(lines[at]) == 0 && !lines[at].starts_with('-'))
        .collect();
    let ends = heads.iter().skip(1).copied().chain([lines.len()]);
    heads.iter().copied().zip(ends).collect()
}

/// Commented-out keys with a value: `#key: value`, but not a sentence.
fn options(lines: &[&str]) -> Vec<usize> {
    let is_key =
        |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let is_option = |line: &str| {
        let option = line.trim_start().strip_prefix('#').map(|rest| rest.strip_prefix(' ').unwrap_or(rest));
        option
            .and_then(|option| option.split_once(": "))
            .is_some_and(|(key, value)| is_key(key) && !value.contains(' '))
    };
    (0..lines.len()).filter(|&at| is_option(lines[at])).collect()
}

#[test]
fn the_edits_find_lists_sections_and_options_in_every_example() {
    for (release, example) in PUBLISHED {
        let lines: Vec<&str> = example.lines().collect();
        assert!(lists(&lines).len() >= 4, "{release}: {:?}", lists(&lines));
        assert!(sections(&lines).len() >= 8, "{release}: {:?}", sections(&lines));
        assert!(options(&lines).len() >= 12, "{release}: {:?}", options(&lines));
    }
}

#[test]
fn a_strict_test_accepts_the_published_examples() {
    let bench = Bench::without_go();
    for (release, example) in PUBLISHED {
        bench.strict(example).unwrap_or_else(|said| panic!("{release}: {said}"));
    }
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn go_and_ours_agree_on_every_published_example_and_its_usual_edits() {
    let texts: Vec<_> = PUBLISHED.iter().flat_map(|(release, example)| variants(release, example)).collect();
    let texts: Vec<_> = texts.into_iter().map(|Variant { name, text }| (name, text)).collect();
    let (mut panics, mut failures) = (Vec::new(), Vec::new());
    for (name, verdict) in Bench::judge_all(&texts) {
        match verdict {
            Verdict::Agreed => {}
            Verdict::GoPanics => panics.push(name),
            Verdict::Differs(said) => failures.push(format!("{name}: {said}")),
        }
    }
    let tried = texts.len();
    assert!(tried >= 500, "{tried} variants");
    assert!(failures.is_empty(), "{} of {tried} differ:\n{}", failures.len(), failures.join("\n"));
    // Row `deviation-groups-empty` of docs/migration.md.
    assert!(panics.iter().all(|name| name.ends_with("\"groups:\"")), "{panics:?}");
}
