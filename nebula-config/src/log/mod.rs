//! Log lines in the format of Go Nebula 1.11 (slog text or JSON).

pub mod cause;
mod denied;
pub mod events;
mod sink;
mod throttle;

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use nebula_cert::{is_visible, visible, visible_json};
use nebula_linux::clock::{now, since_epoch};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::log::throttle::{Limits, LogThrottle};
use crate::{LogFormat, LogLevel, Logging};

pub(crate) use sink::keep_all;

/// Where lines go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Standard output, as Go Nebula does.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Starts logging; later calls only change level and format.
pub fn start(logging: Logging, output: Output) {
    apply(logging);
    // Fails if a subscriber is already set, as in a test.
    STARTED.call_once(|| drop(tracing::subscriber::set_global_default(Lines(output))));
}

/// Changes the level and format of the lines.
pub fn apply(logging: Logging) {
    FORM.store(form_bits(logging), Ordering::Relaxed);
    set_level(logging.level);
}

/// Changes only the level.
pub fn set_level(level: LogLevel) {
    LEVEL.store(level as u8, Ordering::Relaxed);
    // Each callsite caches whether it is enabled.
    tracing::callsite::rebuild_interest_cache();
}

/// Changes only the format of the lines.
#[cfg(feature = "ssh")]
pub fn set_format(format: LogFormat) {
    match format {
        LogFormat::Json => FORM.fetch_or(JSON, Ordering::Relaxed),
        LogFormat::Text => FORM.fetch_and(!JSON, Ordering::Relaxed),
    };
}

/// The current format.
#[cfg(feature = "ssh")]
#[must_use]
pub fn format() -> LogFormat {
    if FORM.load(Ordering::Relaxed) & JSON == 0 { LogFormat::Text } else { LogFormat::Json }
}

/// The current level.
#[must_use]
pub fn level() -> LogLevel {
    let stored = LEVEL.load(Ordering::Relaxed);
    let levels = [LogLevel::Trace, LogLevel::Debug, LogLevel::Warn, LogLevel::Error];
    levels.into_iter().find(|level| *level as u8 == stored).unwrap_or_default()
}

static STARTED: Once = Once::new();
static FORM: AtomicU8 = AtomicU8::new(0);
static LEVEL: AtomicU8 = AtomicU8::new(LogLevel::Info as u8);
const JSON: u8 = 1;
const NO_TIME: u8 = 2;

fn form_bits(logging: Logging) -> u8 {
    let json = if logging.format == LogFormat::Json { JSON } else { 0 };
    json | if logging.disable_timestamp { NO_TIME } else { 0 }
}

fn filter() -> LevelFilter {
    match level() {
        LogLevel::Trace => LevelFilter::TRACE,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Error => LevelFilter::ERROR,
    }
}

/// Rate limits a line that a peer or a client caused; `true` if it is to be written. `kind` is the text of the line. A
/// line that the level excludes is refused without being counted as left out.
#[must_use]
pub fn admits(level: Level, kind: &'static str, source: &str) -> bool {
    if level > filter() {
        return false;
    }
    let limits = if filter() >= LevelFilter::DEBUG { Limits::VERBOSE } else { Limits::NORMAL };
    throttle().admit(now(), &limits, (kind, level), source)
}

/// The part of an underlay address that identifies a source: a single host may have 2^64 IPv6 addresses.
pub fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        v4 => v4,
    }
}

/// If a summary of left-out lines is due, writes it. Returns the time until the next one is due.
pub(crate) fn summarize() -> Option<Duration> {
    let now = now();
    let (summaries, next) = {
        let mut throttle = throttle();
        (throttle.summaries(now), throttle.next_summary())
    };
    for summary in summaries {
        let (kind, count, seconds) = (summary.kind, summary.left_out, summary.within.as_secs());
        let (source, of_source) = summary.most.map_or((None, None), |(source, count)| (Some(source), Some(count)));
        let source = source.as_deref();
        match summary.level {
            Level::ERROR => tracing::error!(kind, count, seconds, source, ofSource = of_source, "{LEFT_OUT}"),
            Level::WARN => tracing::warn!(kind, count, seconds, source, ofSource = of_source, "{LEFT_OUT}"),
            Level::INFO => tracing::info!(kind, count, seconds, source, ofSource = of_source, "{LEFT_OUT}"),
            _ => tracing::debug!(kind, count, seconds, source, ofSource = of_source, "{LEFT_OUT}"),
        }
    }
    next.map(|next| next.saturating_duration_since(now))
}

fn throttle() -> MutexGuard<'static, LogThrottle> {
    THROTTLE.lock().unwrap_or_else(PoisonError::into_inner)
}

static THROTTLE: Mutex<LogThrottle> = Mutex::new(LogThrottle::new());
const NOT_READ: &str = "Log lines were lost because nobody read them";
const LEFT_OUT: &str = "Log lines were left out because there were too many";

/// A list or a map as a field: structured in JSON lines, and as Go prints it in text lines.
pub fn structured(value: serde_json::Value) -> Structured {
    let text = go_text(&value);
    Structured { json: value, text }
}

/// A list of texts.
pub(crate) fn list<T: ToString>(items: &[T]) -> Structured {
    structured(items.iter().map(ToString::to_string).collect())
}

/// The origin of a datagram: with the key `way` in JSON lines, bare in text lines.
pub(crate) fn origin(way: &'static str, from: &str) -> Structured {
    Structured { json: serde_json::json!({ way: from }), text: from.to_owned() }
}

/// Passed as the text of a field, because a field can only be text or a number.
pub struct Structured {
    json: serde_json::Value,
    text: String,
}

impl fmt::Debug for Structured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MARK}{}{MARK}{}", self.json, self.text)
    }
}

// JSON never contains this character outside strings, and escapes it inside.
const MARK: char = '\0';

fn go_text(value: &serde_json::Value) -> String {
    match value {
        // Go's nil lists are null in JSON.
        serde_json::Value::Null => "[]".to_owned(),
        serde_json::Value::String(text) => text.clone(),
        serde_json::Value::Array(items) => {
            format!("[{}]", items.iter().map(go_text).collect::<Vec<_>>().join(" "))
        }
        serde_json::Value::Object(map) => {
            let parts: Vec<_> = map.iter().map(|(key, value)| format!("{key}:{}", go_text(value))).collect();
            format!("map[{}]", parts.join(" "))
        }
        other => other.to_string(),
    }
}

/// Writes a line for each event. These programs have no spans, so nothing has to be remembered between events: the
/// usual subscriber's registry takes 32 KiB of every process.
struct Lines(Output);

impl Subscriber for Lines {
    /// Our own crates log at the configured level, libraries only errors.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let most = if metadata.target().starts_with(OWN) { filter() } else { LevelFilter::ERROR };
        metadata.is_event() && *metadata.level() <= most
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(filter())
    }

    fn event(&self, event: &Event<'_>) {
        let form = FORM.load(Ordering::Relaxed);
        let time = (form & NO_TIME == 0).then(since_epoch);
        let mut fields = Fields::default();
        event.record(&mut fields);
        // The core's own lines are about peers and what they send, so they are rate limited.
        let metadata = event.metadata();
        if metadata.target().starts_with(CORE) && !admits(*metadata.level(), metadata.name(), fields.peer()) {
            return;
        }
        let level = level_name(*event.metadata().level());
        let to_line = |level, fields: &Fields| match form & JSON {
            0 => text_line(time, level, fields),
            _ => json_line(time, level, fields),
        };
        sink::write(self.0, &to_line(level, &fields), |lost| to_line(level_name(Level::WARN), &Fields::lost(lost)));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

// Prefix of all targets of this project.
const OWN: &str = "nebula";
const CORE: &str = "nebula_core::node";

#[derive(Default)]
struct Fields {
    message: String,
    rest: Vec<(&'static str, serde_json::Value)>,
    /// The text form of fields that are lists or maps, by their index in `rest`.
    texts: Vec<(usize, String)>,
}

impl Fields {
    /// What is said of lines that nobody read.
    fn lost(count: u64) -> Self {
        Self { message: NOT_READ.to_owned(), rest: vec![("count", count.into())], texts: Vec::new() }
    }

    /// The peer that the line is about.
    fn peer(&self) -> &str {
        let peer = self.rest.iter().find(|(name, _)| *name == "peer");
        peer.and_then(|(_, value)| value.as_str()).unwrap_or_default()
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        let structured = text.strip_prefix(MARK).and_then(|rest| rest.split_once(MARK));
        match structured.and_then(|(json, text)| Some((serde_json::from_str(json).ok()?, text))) {
            Some((json, text)) => {
                self.texts.push((self.rest.len(), text.to_owned()));
                self.rest.push((field.name(), json));
            }
            None => self.record_str(field, &text),
        }
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.rest.push((field.name(), value.into()));
        }
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.rest.push((field.name(), value.into()));
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.rest.push((field.name(), value.into()));
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.rest.push((field.name(), value.into()));
    }
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.rest.push((field.name(), value.into()));
    }
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.rest.push((field.name(), value.to_string().into()));
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARN",
        Level::INFO => "INFO",
        Level::DEBUG => "DEBUG",
        // slog has no such level; Go Nebula's is four below debug.
        Level::TRACE => "DEBUG-4",
    }
}

fn text_line(time: Option<Duration>, level: &str, fields: &Fields) -> String {
    let mut line = String::new();
    if let Some(time) = time {
        let _ = write!(line, "time={} ", rfc3339(time, 3));
    }
    let _ = write!(line, "level={level} msg={}", quoted(&fields.message));
    for (at, (name, value)) in fields.rest.iter().enumerate() {
        let structured = fields.texts.iter().find(|(place, _)| *place == at).map(|(_, text)| text);
        let _ = match (structured, value) {
            (Some(text), _) | (None, serde_json::Value::String(text)) => write!(line, " {name}={}", quoted(text)),
            (None, other) => write!(line, " {name}={other}"),
        };
    }
    line.push('\n');
    line
}

fn json_line(time: Option<Duration>, level: &str, fields: &Fields) -> String {
    let mut object = serde_json::Map::new();
    if let Some(time) = time {
        object.insert("time".to_owned(), rfc3339(time, 9).into());
    }
    object.insert("level".to_owned(), level.into());
    object.insert("msg".to_owned(), fields.message.as_str().into());
    for (name, value) in &fields.rest {
        object.insert((*name).to_owned(), value.clone());
    }
    format!("{}\n", visible_json(&serde_json::Value::Object(object).to_string()))
}

/// Quotes the text unless slog's text handler would leave it bare.
fn quoted(text: &str) -> std::borrow::Cow<'_, str> {
    let bare = |c: char| !c.is_whitespace() && is_visible(c) && !matches!(c, '"' | '=' | '\\');
    if !text.is_empty() && text.chars().all(bare) {
        return text.into();
    }
    // Debug escapes most of what is not visible, as Go does.
    visible(&format!("{text:?}")).into_owned().into()
}

/// Formats a time as UTC, with `decimals` digits of the second's fraction.
fn rfc3339(since_epoch: Duration, decimals: usize) -> String {
    let seconds = since_epoch.as_secs();
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = nebula_cert::civil_date(days.cast_signed());
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let nanos = format!("{:09}", since_epoch.subsec_nanos());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{}Z", &nanos[..decimals.min(9)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(Duration::from_secs(seconds), 3), expected);
        }
        assert_eq!(rfc3339(Duration::new(1, 2_003_004), 9), "1970-01-01T00:00:01.002003004Z");
    }

    #[test]
    fn text_lines_quote_only_what_needs_it() {
        let fields = Fields {
            message: "Nebula interface is active".to_owned(),
            rest: vec![("interface", "nebula1".into()), ("error", "a \"b\"".into()), ("port", 4242.into())],
            texts: Vec::new(),
        };
        assert_eq!(
            text_line(None, "INFO", &fields),
            "level=INFO msg=\"Nebula interface is active\" interface=nebula1 error=\"a \\\"b\\\"\" port=4242\n"
        );
        assert_eq!(quoted(""), "\"\"");
        assert_eq!(quoted("a=b"), "\"a=b\"");
    }

    #[test]
    fn a_name_adds_no_line_and_nothing_that_is_not_seen() {
        let name = "web\nlevel=ERROR\u{202e}\u{200b}\u{3164}";
        let fields =
            |name: &str| Fields { message: "m".to_owned(), rest: vec![("name", name.into())], texts: Vec::new() };
        for name in [name, "\u{202e}", "\u{3164}", "\u{7f}", "\u{fe0f}"] {
            for line in [text_line(None, "INFO", &fields(name)), json_line(None, "INFO", &fields(name))] {
                assert!(line.trim_end_matches('\n').chars().all(is_visible), "{line:?}");
            }
            let json: serde_json::Value = serde_json::from_str(&json_line(None, "INFO", &fields(name))).unwrap();
            assert_eq!(json["name"], name, "it is the same name");
        }
        let shown = text_line(None, "INFO", &fields(name));
        assert_eq!(shown, "level=INFO msg=m name=\"web\\nlevel=ERROR\\u{202e}\\u{200b}\\u{3164}\"\n");
    }

    #[test]
    fn lists_and_maps_are_printed_as_go_prints_them() {
        let rule = serde_json::json!({"groups": null, "hosts": ["a", "b"], "port": 1});
        assert_eq!(go_text(&rule), "map[groups:[] hosts:[a b] port:1]");
        let sent = format!("{:?}", structured(rule.clone()));
        let (json, text) = sent.strip_prefix(MARK).and_then(|rest| rest.split_once(MARK)).unwrap();
        assert_eq!(serde_json::from_str::<serde_json::Value>(json).unwrap(), rule);
        assert_eq!(text, go_text(&rule));
    }

    #[test]
    fn json_lines_keep_the_order_of_slog() {
        let fields = Fields { message: "x".to_owned(), rest: vec![("count", 1.into())], texts: Vec::new() };
        let line = json_line(Some(Duration::ZERO), "WARN", &fields);
        assert_eq!(
            line,
            "{\"time\":\"1970-01-01T00:00:00.000000000Z\",\"level\":\"WARN\",\"msg\":\"x\",\"count\":1}\n"
        );
    }
}
