//! Tables in plain text, and what is in their cells.

/// A dash stands for what is empty.
#[must_use]
pub fn or_dash(text: &str) -> String {
    if text.is_empty() { "-".to_owned() } else { text.to_owned() }
}

/// A dash stands for what is not there.
#[must_use]
pub fn optional<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| or_dash(&value.to_string()))
}

/// A number of bytes in its largest unit.
#[must_use]
pub fn bytes(count: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| count >> bits > 0) {
        Some((unit, bits)) => format!("{:.1} {unit}", count as f64 / (1_u64 << bits) as f64),
        None => format!("{count} B"),
    }
}

/// A time span in its two largest units.
#[must_use]
pub fn span(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// Rows below their head, in columns that line up. All texts are printed as they are.
#[must_use]
pub fn columns<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |cells: &[String; N]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
        padded.collect::<String>().trim_end().to_owned() + "\n"
    };
    lines.iter().map(line).collect()
}
