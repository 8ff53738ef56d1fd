//! Search and order of the page, parsed from the query of its address.

use std::fmt::Write as _;

/// Search and order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct View {
    /// Show only identities with this text in one of their columns, ignoring case; empty: all.
    pub(super) search: String,
    pub(super) order: Order,
}

/// Order of the identities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// Next to expire first.
    #[default]
    Expiry,
    /// Alphabetical by name.
    Name,
    /// Newest certificate first.
    Newest,
}

impl Order {
    pub(super) const ALL: [(Self, &'static str, &'static str); 3] =
        [(Self::Expiry, "expiry", "Expires next"), (Self::Name, "name", "Name"), (Self::Newest, "newest", "Newest")];

    /// Name in the query.
    fn key(self) -> &'static str {
        Self::ALL.iter().find_map(|(order, key, _)| (*order == self).then_some(*key)).unwrap_or_default()
    }
}

impl View {
    /// Parses the query of an address; unknown keys are ignored.
    pub(crate) fn of(query: &str) -> Self {
        let mut view = Self::default();
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            let value = decoded(value);
            match key {
                "q" => view.search = value.trim().chars().take(MAX_SEARCH).collect(),
                "sort" => {
                    let order = Order::ALL.iter().find_map(|(order, key, _)| (*key == value).then_some(*order));
                    view.order = order.unwrap_or_default();
                }
                _ => {}
            }
        }
        view
    }

    /// Address of the same search in another order; safe in an attribute.
    pub(super) fn sorted_by(&self, order: Order) -> String {
        let mut address = format!("?sort={}", order.key());
        if !self.search.is_empty() {
            address.push_str("&amp;q=");
            for byte in self.search.bytes() {
                match byte {
                    b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => address.push(byte.into()),
                    other => {
                        let _ = write!(address, "%{other:02X}");
                    }
                }
            }
        }
        address
    }
}

/// Decodes a form-encoded value.
fn decoded(value: &str) -> String {
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let escape = tail.first_chunk::<2>().filter(|_| byte == b'%').and_then(|digits| {
            let digits = str::from_utf8(digits).ok().filter(|digits| !digits.starts_with('+'))?;
            u8::from_str_radix(digits, 16).ok()
        });
        bytes.push(escape.unwrap_or(if byte == b'+' { b' ' } else { byte }));
        rest = if escape.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

const MAX_SEARCH: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_read_as_forms_write_it_and_written_so_that_it_reads_back() {
        let view = View::of("q=web+1%2e%3Cb%3E%20%26%c3%a9&sort=name&other=1");
        assert_eq!((view.search.as_str(), view.order), ("web 1.<b> &é", Order::Name));
        let address = view.sorted_by(Order::Newest);
        assert_eq!(address, "?sort=newest&amp;q=web%201.%3Cb%3E%20%26%C3%A9");
        let again = View::of(&address.replace("&amp;", "&")[1..]);
        assert_eq!(again, View { order: Order::Newest, ..view });
    }

    #[test]
    fn damaged_queries_are_read_as_far_as_they_go() {
        for (query, search) in [
            ("", ""),
            ("q", ""),
            ("q=%", "%"),
            ("q=%4", "%4"),
            ("q=%zz", "%zz"),
            ("q=%+1", "% 1"),
            ("q=%ff", "\u{fffd}"),
        ] {
            assert_eq!(View::of(query), View { search: search.to_owned(), order: Order::Expiry }, "{query}");
        }
        assert_eq!(View::of(&format!("q={}&sort=%00", "x".repeat(5_000))).search.len(), MAX_SEARCH);
    }
}
