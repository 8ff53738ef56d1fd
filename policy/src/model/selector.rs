//! Label selectors.

use super::labels::{Labels, Profile};
use super::limits::{MAX_REQUIREMENTS, MAX_VALUES};

/// One condition of a selector.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Requirement {
    /// The label is there with one of the values.
    In(String, Vec<String>),
    /// The label is missing, or has none of the values.
    NotIn(String, Vec<String>),
    /// The label is there.
    Exists(String),
    /// The label is missing.
    DoesNotExist(String),
}

/// A label selector: all of its requirements hold. Without requirements it selects everything.
///
/// An invalid one (an unknown operator, a key that is none, no values where there must be some, too many of anything)
/// keeps its valid requirements. It [selects](Self::selects) nothing, so it allows nobody. Pods that match the valid
/// part are those that it [may select](Self::may_select): as the subject of a policy, it isolates these.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
    is_valid: bool,
}

impl Selector {
    /// The selector without requirements.
    #[must_use]
    pub const fn everything() -> Self {
        Self { requirements: Vec::new(), is_valid: true }
    }

    /// The selector of these requirements. `None` stands for one that cannot be read.
    pub fn new(requirements: impl IntoIterator<Item = Option<Requirement>>) -> Self {
        let mut selector = Self::everything();
        for requirement in requirements {
            match requirement.filter(is_valid) {
                Some(requirement) if selector.requirements.len() < MAX_REQUIREMENTS => {
                    selector.requirements.push(requirement);
                }
                _ => selector.is_valid = false,
            }
        }
        // There may be thousands, most of them of one requirement.
        selector.requirements.shrink_to_fit();
        selector
    }

    /// The selector of everything with these labels.
    pub fn labels<'a>(labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        Self::new(labels.into_iter().map(|(key, value)| Some(Requirement::In(key.into(), vec![value.into()]))))
    }

    /// Whether all of it could be read.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        self.is_valid
    }

    /// Whether it is valid, and all of it holds for these labels.
    #[must_use]
    pub fn selects(&self, labels: &Labels) -> bool {
        self.is_valid && self.may_select(labels)
    }

    /// The same for labels that `value` looks up.
    fn selects_by<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.is_valid && self.may_select_by(value)
    }

    /// Whether the valid part of it holds for these labels.
    #[must_use]
    pub fn may_select(&self, labels: &Labels) -> bool {
        self.may_select_by(|key| labels.get(key).map(String::as_str))
    }

    fn may_select_by<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        let is_among = |value: &str, values: &[String]| values.iter().any(|other| other == value);
        self.requirements.iter().all(|requirement| match requirement {
            Requirement::In(key, values) => value(key).is_some_and(|value| is_among(value, values)),
            Requirement::NotIn(key, values) => value(key).is_none_or(|value| !is_among(value, values)),
            Requirement::Exists(key) => value(key).is_some(),
            Requirement::DoesNotExist(key) => value(key).is_none(),
        })
    }

    /// The selector of what this one may select.
    #[must_use]
    pub fn valid_part(&self) -> Self {
        Self { is_valid: true, ..self.clone() }
    }

    /// Its valid requirements.
    #[must_use]
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    const fn is_everything(&self) -> bool {
        self.is_valid && self.requirements.is_empty()
    }
}

/// Which namespaces a [`PodSelector`] looks at.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Namespaces {
    /// The one with this name.
    Named(String),
    /// Those that a selector selects.
    Matching(Selector),
}

/// Selects pods by namespace and labels.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodSelector {
    /// Namespaces of the pods.
    pub namespaces: Namespaces,
    /// Labels of the pods.
    pub pods: Selector,
}

impl PodSelector {
    /// The selector of all pods of a namespace.
    pub fn namespace(name: impl Into<String>) -> Self {
        Self { namespaces: Namespaces::Named(name.into()), pods: Selector::everything() }
    }

    /// Whether all of it could be read.
    #[must_use]
    pub const fn is_valid(&self) -> bool {
        let namespaces = match &self.namespaces {
            Namespaces::Named(_) => true,
            Namespaces::Matching(selector) => selector.is_valid(),
        };
        namespaces && self.pods.is_valid()
    }

    /// Whether it is valid and selects a pod.
    #[must_use]
    pub fn selects(&self, pod: &Profile) -> bool {
        let namespaces = match &self.namespaces {
            Namespaces::Named(name) => name == pod.namespace(),
            Namespaces::Matching(selector) => selector.selects_by(|key| pod.namespace_label(key)),
        };
        namespaces && self.pods.selects_by(|key| pod.label(key))
    }

    /// The selector of what this one may select.
    #[must_use]
    pub fn valid_part(&self) -> Self {
        let namespaces = match &self.namespaces {
            Namespaces::Named(name) => Namespaces::Named(name.clone()),
            Namespaces::Matching(selector) => Namespaces::Matching(selector.valid_part()),
        };
        Self { namespaces, pods: self.pods.valid_part() }
    }

    /// Whether it selects all pods of the cluster.
    #[must_use]
    pub const fn is_everything(&self) -> bool {
        matches!(&self.namespaces, Namespaces::Matching(selector) if selector.is_everything())
            && self.pods.is_everything()
    }
}

/// As the API server decides it for label selectors.
fn is_valid(requirement: &Requirement) -> bool {
    let (key, values) = match requirement {
        Requirement::In(key, values) | Requirement::NotIn(key, values) => (key, Some(values)),
        Requirement::Exists(key) | Requirement::DoesNotExist(key) => (key, None),
    };
    let has_values = values.is_none_or(|values| {
        (1..=MAX_VALUES).contains(&values.len()) && values.iter().all(|value| value.is_empty() || is_name(value))
    });
    has_values && is_key(key)
}

fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_domain(prefix) && is_name(name),
        None => is_name(key),
    }
}

fn is_name(name: &str) -> bool {
    let inside = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    name.len() <= 63 && name.bytes().all(inside) && has_ends(name, |byte| byte.is_ascii_alphanumeric())
}

fn is_domain(name: &str) -> bool {
    let is_end = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_label = |label: &str| label.bytes().all(|byte| is_end(byte) || byte == b'-') && has_ends(label, is_end);
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether the first and the last byte are as they must be; there are some.
fn has_ends(text: &str, is_end: impl Fn(u8) -> bool) -> bool {
    let mut bytes = text.bytes();
    let first = bytes.next();
    [first, bytes.next_back().or(first)].iter().all(|byte| byte.is_some_and(&is_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(text: &[(&str, &str)]) -> Labels {
        text.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    #[test]
    fn each_operator_selects_what_the_api_says() {
        let values = || vec!["a".to_owned(), "b".to_owned()];
        let of = |requirement| Selector::new([Some(requirement)]);
        let (none, a, c) = (labels(&[]), labels(&[("app", "a")]), labels(&[("app", "c")]));
        let cases = [
            (of(Requirement::In("app".into(), values())), [false, true, false]),
            (of(Requirement::NotIn("app".into(), values())), [true, false, true]),
            (of(Requirement::Exists("app".into())), [false, true, true]),
            (of(Requirement::DoesNotExist("app".into())), [true, false, false]),
            (Selector::labels([("app", "a")]), [false, true, false]),
            (Selector::everything(), [true, true, true]),
        ];
        for (selector, expected) in cases {
            assert_eq!([&none, &a, &c].map(|labels| selector.selects(labels)), expected, "{selector:?}");
        }
    }

    #[test]
    fn requirements_are_all_needed() {
        let selector = Selector::labels([("app", "a"), ("tier", "b")]);
        assert!(selector.selects(&labels(&[("app", "a"), ("tier", "b")])));
        assert!(!selector.selects(&labels(&[("app", "a")])));
    }

    #[test]
    fn an_invalid_selector_selects_nothing_and_may_select_what_its_valid_part_does() {
        let app = Some(Requirement::In("app".into(), vec!["a".into()]));
        let invalid = [
            None,
            Some(Requirement::In("tier".into(), vec![])),
            Some(Requirement::NotIn("tier".into(), vec!["-".into()])),
            Some(Requirement::Exists(String::new())),
            Some(Requirement::DoesNotExist("x/y/z".into())),
            Some(Requirement::DoesNotExist("UPPER.example/key".into())),
            Some(Requirement::DoesNotExist("k".repeat(64))),
            Some(Requirement::NotIn("tier".into(), vec!["b".into(); MAX_VALUES + 1])),
        ];
        for requirement in invalid {
            let selector = Selector::new([requirement, app.clone()]);
            assert!(!selector.is_valid(), "{selector:?}");
            assert!(!selector.selects(&labels(&[("app", "a")])));
            assert!(selector.may_select(&labels(&[("app", "a")])));
            assert!(!selector.may_select(&labels(&[("app", "b")])));
            assert!(selector.valid_part().selects(&labels(&[("app", "a")])));
        }
        assert!(!Selector::new(vec![app; MAX_REQUIREMENTS + 1]).is_valid());
    }

    #[test]
    fn keys_with_a_domain_are_valid() {
        for key in ["app", "a", "app.kubernetes.io/name", "kubernetes.io/metadata.name", "x-1.example/A_b.c"] {
            assert!(Selector::new([Some(Requirement::Exists(key.into()))]).is_valid(), "{key}");
        }
    }

    #[test]
    fn only_the_empty_selector_of_all_namespaces_is_everything() {
        let all =
            PodSelector { namespaces: Namespaces::Matching(Selector::everything()), pods: Selector::everything() };
        assert!(all.is_everything());
        assert!(!PodSelector::namespace("shop").is_everything());
        assert!(!PodSelector { pods: Selector::labels([("a", "b")]), ..all.clone() }.is_everything());
        assert!(!PodSelector { pods: Selector::new([None]), ..all }.is_everything());
    }
}
