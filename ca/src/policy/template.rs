//! Templates with fields of a pod, for names and groups of certificates.

use std::borrow::Cow;

use crate::pod::PodFacts;

/// A text that may contain `{name}`, `{namespace}`, `{uid}`, `{service_account}`, `{node}` and `{label:KEY}` of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Namespace,
    Name,
    Uid,
    ServiceAccount,
    Node,
    Label(String),
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// Returns a description of the first error.
    pub(crate) fn parse(template: &str) -> Result<Self, &'static str> {
        if template.is_empty() || template.len() > MAX_TEMPLATE_LENGTH || template.chars().any(char::is_control) {
            return Err("it must be 1 to 253 characters without control characters");
        }
        let (mut parts, mut rest) = (Vec::new(), template);
        while let Some((literal, tail)) = rest.split_once('{') {
            let (field, tail) = tail.split_once('}').ok_or("a { has no }")?;
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(match field {
                "namespace" => Part::Namespace,
                "name" => Part::Name,
                "uid" => Part::Uid,
                "service_account" => Part::ServiceAccount,
                "node" => Part::Node,
                _ => match field.strip_prefix("label:") {
                    Some(key) if is_label_key(key) => Part::Label(key.to_owned()),
                    Some(_) => return Err("{label:KEY} needs the key of a label"),
                    None => {
                        return Err(
                            "only {name}, {namespace}, {uid}, {service_account}, {node} and {label:KEY} are known",
                        );
                    }
                },
            });
            rest = tail;
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        let is_stray = |part: &Part| matches!(part, Part::Literal(text) if text.contains('}'));
        if parts.iter().any(is_stray) { Err("a } has no {") } else { Ok(Self(parts)) }
    }

    /// The text for a pod; `None` if the pod lacks a label, or if a needed fact is not confirmed.
    pub(crate) fn render(&self, pod: &PodFacts) -> Option<String> {
        let confirmed = pod.confirmed.as_ref();
        self.0
            .iter()
            .map(|part| {
                Some(Cow::Borrowed(match part {
                    Part::Literal(text) => text.as_str(),
                    Part::Namespace => &pod.namespace,
                    Part::Name => &pod.name,
                    Part::Uid => &pod.uid,
                    Part::ServiceAccount => &confirmed?.service_account,
                    Part::Node => &confirmed?.node,
                    Part::Label(key) => confirmed?.labels.get(key)?,
                }))
            })
            .collect()
    }

    /// The text, if it contains no fields.
    pub(crate) fn literal(&self) -> Option<&str> {
        match &self.0[..] {
            [Part::Literal(text)] => Some(text),
            _ => None,
        }
    }

    /// Whether it needs facts that only the API server knows.
    pub(crate) fn needs_kubernetes(&self) -> bool {
        self.0.iter().any(|part| matches!(part, Part::ServiceAccount | Part::Node | Part::Label(_)))
    }

    /// Whether it uses a label, which anybody who creates a pod can choose.
    pub(crate) fn has_label(&self) -> bool {
        self.0.iter().any(|part| matches!(part, Part::Label(_)))
    }
}

/// Whether `key` may be the key of a label: `name` or `prefix/name`.
pub(crate) fn is_label_key(key: &str) -> bool {
    let is_key_byte = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'/');
    !key.is_empty() && key.len() <= 317 && key.bytes().all(is_key_byte) && key.matches('/').count() <= 1
}

/// The length of Nebula's longest certificate name.
const MAX_TEMPLATE_LENGTH: usize = super::MAX_NAME_BYTES;
