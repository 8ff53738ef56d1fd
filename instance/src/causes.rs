//! Formats an error together with its causes.

use std::error::Error;

/// Formats an error and all its causes on one line. Skips a cause if the text so far already ends with it.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::with_causes;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Layer {
        text: &'static str,
        #[source]
        source: Option<Box<Self>>,
    }

    #[test]
    fn every_cause_is_named_once() {
        let last = Layer { text: "permission denied", source: None };
        let middle = Layer { text: "cannot open x: permission denied", source: Some(Box::new(last)) };
        let first = Layer { text: "no start", source: Some(Box::new(middle)) };
        assert_eq!(with_causes(&first), "no start: cannot open x: permission denied");
    }
}
