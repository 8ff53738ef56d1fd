//! The system's error texts as Go words them, because scripts match on them.

/// The error's text, for example `address already in use`.
#[must_use]
pub fn text(error: &std::io::Error) -> String {
    let Some(code) = error.raw_os_error() else { return error.to_string() };
    let description = nix::errno::Errno::from_raw(code).desc();
    let mut chars = description.chars();
    match chars.next() {
        // Go lower-cases acronyms such as `I/O error` as well.
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => error.to_string(),
    }
}

/// The error's symbol, such as `EPERM`, which programs and people look for.
#[must_use]
pub fn symbol(code: i32) -> String {
    format!("{:?}", nix::errno::Errno::from_raw(code))
}

/// The error with the call that it is about.
pub fn of_call(call: &str, error: impl Into<std::io::Error>) -> std::io::Error {
    let error = error.into();
    std::io::Error::new(error.kind(), format!("{call}: {}", text(&error)))
}

/// A system error that displays in Go's wording.
#[derive(Debug)]
pub struct Plain(pub std::io::Error);

impl std::fmt::Display for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&text(&self.0))
    }
}

impl std::error::Error for Plain {}

#[cfg(test)]
mod tests {
    #[test]
    fn texts_are_those_go_prints() {
        for (code, expected) in [
            (libc_codes::EADDRINUSE, "address already in use"),
            (libc_codes::ENOENT, "no such file or directory"),
            (libc_codes::EPERM, "operation not permitted"),
            (libc_codes::EBUSY, "device or resource busy"),
        ] {
            assert_eq!(super::text(&std::io::Error::from_raw_os_error(code as i32)), expected);
        }
    }

    use nix::errno::Errno as libc_codes;
}
