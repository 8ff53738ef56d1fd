//! Formats an error together with its causes.

use std::error::Error;

/// Formats an error and all its causes on one line. Skips a cause that the text so far already contains: some errors
/// repeat their cause in their own text.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
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

    fn named(texts: &[&'static str]) -> String {
        let stack = |source, text: &&'static str| Some(Box::new(Layer { text, source }));
        with_causes(&*texts.iter().rev().fold(None, stack).unwrap())
    }

    #[test]
    fn every_cause_is_named_once() {
        let shown = named(&["no start", "cannot open x: permission denied", "permission denied"]);
        assert_eq!(shown, "no start: cannot open x: permission denied");
        assert_eq!(
            named(&["send failed (reset by peer), retried", "reset by peer"]),
            "send failed (reset by peer), retried"
        );
        assert_eq!(named(&["alone"]), "alone");
    }
}
