//! The system's error texts in the wording Go prints, which scripts match on.

/// For example `address already in use`.
#[must_use]
pub(crate) fn text(error: &std::io::Error) -> String {
    let Some(code) = error.raw_os_error() else { return error.to_string() };
    let description = nix::errno::Errno::from_raw(code).desc();
    let mut chars = description.chars();
    match chars.next() {
        // Acronyms such as `I/O error` are lower-cased by Go as well.
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => error.to_string(),
    }
}

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
