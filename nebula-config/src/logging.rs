//! `logging.*`: what is logged, and how.

use super::section::Section;
use super::{Refused, Value};

/// `logging.*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Logging {
    /// Least severe level that is logged.
    pub level: LogLevel,
    /// Line format.
    pub format: LogFormat,
    /// Whether to leave the time out.
    pub disable_timestamp: bool,
}

/// Level of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// Each packet.
    Trace,
    /// Small changes of state.
    Debug,
    /// Tunnels up and down.
    #[default]
    Info,
    /// Needs attention.
    Warn,
    /// Something does not work.
    Error,
}

/// Form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// `key=value`.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl LogLevel {
    /// The level with this name in the configuration.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name.to_lowercase().as_str() {
            "trace" => Some(Self::Trace),
            "debug" => Some(Self::Debug),
            "info" => Some(Self::Info),
            "warn" | "warning" => Some(Self::Warn),
            "error" | "fatal" | "panic" => Some(Self::Error),
            _ => None,
        }
    }

    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Trace => "trace",
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl Logging {
    /// Reads `logging.*` alone, which is needed before anything can be reported.
    ///
    /// # Errors
    /// Returns an error for an unknown level or format.
    pub fn of(tree: &Value) -> Result<Self, Refused> {
        Self::read(&Section::new(tree))
    }

    pub(super) fn read(section: &Section<'_>) -> Result<Self, Refused> {
        let text = |path: &str| section.string(path).map(|text| text.to_lowercase());
        let refuse = |key: &str, cause: String| Refused::new("failed to apply logging config", cause).at(key);
        let level = text("logging.level").map_or(Ok(LogLevel::Info), |name| {
            LogLevel::parse(&name).ok_or_else(|| {
                let cause =
                    format!("not a valid logging level: {name:?}. possible levels: [trace debug info warn error]");
                refuse("logging.level", cause)
            })
        })?;
        let format = match text("logging.format").as_deref() {
            None | Some("text") => LogFormat::Text,
            Some("json") => LogFormat::Json,
            Some(other) => {
                let cause = format!("unknown log format `{other}`. possible formats: [text json]");
                return Err(refuse("logging.format", cause));
            }
        };
        Ok(Self { level, format, disable_timestamp: section.boolean("logging.disable_timestamp", false) })
    }
}
