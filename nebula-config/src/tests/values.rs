//! Text to scalars and trees, as go-yaml parses it.

use proptest::prelude::*;

use super::*;

fn scalar(text: &str) -> Value {
    tree(&format!("key: {text}")).at("key").cloned().unwrap_or(Value::Null)
}

#[test]
fn scalars_have_the_types_go_yaml_gives_them() {
    for (text, expected) in [
        ("yes", Value::String("yes".into())),
        ("on", Value::String("on".into())),
        ("true", Value::Bool(true)),
        ("0755", Value::Int(0o755)),
        ("0o755", Value::Int(0o755)),
        ("0x1F", Value::Int(31)),
        ("1_000", Value::Int(1000)),
        ("-5", Value::Int(-5)),
        ("18446744073709551615", Value::Uint(u64::MAX)),
        ("1e3", Value::Float(1000.0)),
        ("443.0", Value::Float(443.0)),
        (".inf", Value::Float(f64::INFINITY)),
        ("'1e3'", Value::String("1e3".into())),
        ("10.42.0.1", Value::String("10.42.0.1".into())),
        ("2001-01-01", Value::String("2001-01-01".into())),
        ("~", Value::Null),
        ("${FOO}", Value::String("${FOO}".into())),
    ] {
        assert_eq!(scalar(text), expected, "{text}");
    }
}

#[test]
fn integers_are_decimal_text_after_yaml() {
    for (text, expected) in [
        ("4242", Some(4242)),
        ("'4242'", Some(4242)),
        ("0x1F", Some(31)),
        ("1e3", Some(1000)),
        ("443.0", Some(443)),
        ("1_000", Some(1000)),
        ("1e6", None),
        ("'1e3'", None),
        ("'0x10'", None),
        ("'1_000'", None),
        ("true", None),
        ("[1]", None),
    ] {
        assert_eq!(scalar(text).int(), expected, "{text}");
    }
}

#[test]
fn booleans_accept_words_and_digits() {
    for (text, expected) in [
        ("yes", Some(true)),
        ("Y", Some(true)),
        ("1", Some(true)),
        ("'FALSE'", Some(false)),
        ("off", None),
        ("2", None),
    ] {
        assert_eq!(scalar(text).boolean(), expected, "{text}");
    }
}

#[test]
fn durations_need_a_unit() {
    for (text, expected) in [
        ("10s", Some(10_000)),
        ("1h30m", Some(5_400_000)),
        ("1.5s", Some(1500)),
        (".5s", Some(500)),
        ("250ms", Some(250)),
        ("0", Some(0)),
        ("60", None),
        ("1d", None),
        ("s", None),
        ("1.2.3s", None),
        ("99999999999h", None),
    ] {
        let read = scalar(text).duration().map(|d| d.magnitude.as_millis());
        assert_eq!(read, expected, "{text}");
    }
    assert!(scalar("-5s").duration().unwrap().negative);
}

#[test]
fn a_section_with_a_key_that_is_not_text_is_not_read_as_in_go() {
    for keys in ["1: x", "true: x", "0x10: x", "a: y, 1: x"] {
        let map = tree(&format!("static_host_map: {{{keys}}}"));
        for path in ["static_host_map.1", "static_host_map.true", "static_host_map.16", "static_host_map.a"] {
            assert_eq!(map.at(path), None, "{keys}");
        }
    }
    let map = tree("static_host_map: {'1': x, 10.0.0.1: y}");
    assert_eq!(map.at("static_host_map.1"), Some(&Value::String("x".into())));
}

#[test]
fn merge_keys_and_anchors_work() {
    let map = tree("base: &b {a: 1, b: 2}\nkey:\n  <<: *b\n  b: 3");
    assert_eq!(map.at("key.a"), Some(&Value::Int(1)));
    assert_eq!(map.at("key.b"), Some(&Value::Int(3)));
}

#[test]
fn only_a_mapping_is_a_configuration() {
    assert!(parse("[1, 2]").unwrap_err().to_string().contains("cannot unmarshal !!seq"));
    assert!(parse("a: 1\na: 2").is_err());
    assert!(parse("a: [1").is_err());
    for empty in ["", "# only a comment\n", "---\n"] {
        assert_eq!(parse(empty).unwrap(), Value::empty());
    }
    assert_eq!(parse("{\"a\": 1}").unwrap().at("a"), Some(&Value::Int(1)));
}

#[test]
fn of_several_documents_the_first_counts() {
    assert_eq!(parse("a: 1\n---\na: 2\n").unwrap().at("a"), Some(&Value::Int(1)));
}

#[test]
fn hostile_text_is_refused_in_bounded_time() {
    assert!(parse(&"[".repeat(100_000)).is_err());
    assert!(parse(&format!("a: {}1{}", "[".repeat(1000), "]".repeat(1000))).is_err());
    assert!(parse(&"x".repeat(MAX_TEXT + 1)).is_err());
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let previous = format!("*a{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("a{level}: &a{level} [{previous}]\n"));
    }
    assert!(parse(&bomb).is_err());
}

#[test]
fn a_printed_tree_reads_back_as_itself() {
    let text =
        "a: {b: [1, {c: 'x: y', d: [[2], []]}, 'yes'], e: {}}\nf: \"line\\nbreak\"\ng: ~\nh: '0755'\n'10.0.0.1': -1.5";
    let tree = tree(text);
    assert_eq!(parse(&tree.to_yaml()).unwrap(), tree, "{}", tree.to_yaml());
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
        if let Ok(tree) = parse(&text) {
            let _ = Settings::read_without_pki(&tree);
        }
    }

    #[test]
    fn any_yaml_shaped_text_is_read_or_refused(
        lines in prop::collection::vec("( ){0,4}(- )?(listen|tun|firewall|inbound|port|'1'|&a|\\*a|<<|\\{|\\[)(: ?(1-|0x1|any|~|\\*a|&a x|\\[|-5s|1e999|))?", 0..12)
    ) {
        if let Ok(tree) = parse(&lines.join("\n")) {
            let _ = Settings::read_without_pki(&tree);
            prop_assert!(parse(&tree.to_yaml()).is_ok());
        }
    }
}
