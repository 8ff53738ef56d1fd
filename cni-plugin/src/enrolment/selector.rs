//! A label selector in the form of Kubernetes' LabelSelector: all of `matchLabels` and `matchExpressions` must hold.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::reply::Error;
use crate::request::checked::{refuse_other_keys, refused};

/// A label selector. An empty one matches everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Operator {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
}

impl Selector {
    /// Reads the value of the setting `name`.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(name: &str, value: &Value) -> Result<Self, Error> {
        const EXPECTED: &str = "an object with \"matchLabels\" and \"matchExpressions\", as in Kubernetes";
        let wrong = || refused(name, value, EXPECTED);
        let object = value.as_object().ok_or_else(wrong)?;
        refuse_other_keys(name, object, &["matchLabels", "matchExpressions"])?;
        let mut requirements = Vec::new();
        if let Some(labels) = object.get("matchLabels") {
            for (key, value) in labels.as_object().ok_or_else(wrong)? {
                let value = value.as_str().ok_or_else(wrong)?.to_owned();
                requirements.push(Requirement { key: key.clone(), operator: Operator::In(vec![value]) });
            }
        }
        if let Some(expressions) = object.get("matchExpressions") {
            for expression in expressions.as_array().ok_or_else(wrong)? {
                requirements.push(Requirement::read(&format!("{name}.matchExpressions"), expression)?);
            }
        }
        Ok(Self { requirements })
    }

    /// Whether the selector matches these labels.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            match &requirement.operator {
                Operator::In(values) => value.is_some_and(|value| values.contains(value)),
                // As in Kubernetes, `NotIn` also matches if the label is absent.
                Operator::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

impl Requirement {
    fn read(name: &str, value: &Value) -> Result<Self, Error> {
        const EXPECTED: &str =
            "\"key\", \"operator\" (In, NotIn, Exists, DoesNotExist) and, with In and NotIn, \"values\"";
        let wrong = || refused(name, value, EXPECTED);
        let object = value.as_object().ok_or_else(wrong)?;
        refuse_other_keys(name, object, &["key", "operator", "values"])?;
        let key = object.get("key").and_then(Value::as_str).filter(|key| !key.is_empty()).ok_or_else(wrong)?.to_owned();
        let values: Option<Vec<String>> = match object.get("values") {
            None => Some(Vec::new()),
            Some(list) => list.as_array().and_then(|list| list.iter().map(|v| v.as_str().map(str::to_owned)).collect()),
        };
        let values = values.ok_or_else(wrong)?;
        let operator = match (object.get("operator").and_then(Value::as_str), values.is_empty()) {
            (Some("In"), false) => Operator::In(values),
            (Some("NotIn"), false) => Operator::NotIn(values),
            (Some("Exists"), true) => Operator::Exists,
            (Some("DoesNotExist"), true) => Operator::DoesNotExist,
            _ => return Err(wrong()),
        };
        Ok(Self { key, operator })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn matches(selector: Value, labels: &[(&str, &str)]) -> bool {
        let labels = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Selector::read("s", &selector).unwrap().matches(&labels)
    }

    #[test]
    fn all_requirements_must_hold() {
        let selector =
            json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]});
        assert!(matches(selector.clone(), &[("app", "web"), ("tier", "x")]));
        assert!(!matches(selector.clone(), &[("app", "web")]));
        assert!(!matches(selector, &[("app", "db"), ("tier", "x")]));
        assert!(matches(json!({}), &[]));
    }

    #[test]
    fn operators_treat_a_missing_label_as_kubernetes_does() {
        let one = |operator: &str| {
            let values = if operator.ends_with("In") { json!(["a", "b"]) } else { json!([]) };
            json!({"matchExpressions": [{"key": "k", "operator": operator, "values": values}]})
        };
        for (operator, a, c, missing) in [
            ("In", true, false, false),
            ("NotIn", false, true, true),
            ("Exists", true, true, false),
            ("DoesNotExist", false, false, true),
        ] {
            assert_eq!(matches(one(operator), &[("k", "a")]), a, "{operator} a");
            assert_eq!(matches(one(operator), &[("k", "c")]), c, "{operator} c");
            assert_eq!(matches(one(operator), &[]), missing, "{operator} missing");
        }
    }

    #[test]
    fn what_kubernetes_refuses_is_refused() {
        for selector in [
            json!([]),
            json!({"matchLabel": {}}),
            json!({"matchLabels": {"a": 1}}),
            json!({"matchExpressions": {}}),
            json!({"matchExpressions": [{"key": "k", "operator": "In"}]}),
            json!({"matchExpressions": [{"key": "k", "operator": "Exists", "values": ["a"]}]}),
            json!({"matchExpressions": [{"key": "k", "operator": "Gt", "values": ["1"]}]}),
            json!({"matchExpressions": [{"operator": "Exists"}]}),
        ] {
            assert_eq!(Selector::read("s", &selector).unwrap_err().code, 7, "{selector}");
        }
    }
}
