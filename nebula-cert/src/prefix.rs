//! Prefixes as Go's `net/netip` parses them.

use ipnet::IpNet;

/// Parses an address with its prefix length. Leading zeros are refused, in octets and in the length, because some
/// programs read such numbers as octal.
#[must_use]
pub fn prefix(text: &str) -> Option<IpNet> {
    let (address, length) = text.split_once('/')?;
    let plain = length.bytes().all(|byte| byte.is_ascii_digit()) && (length == "0" || !length.starts_with('0'));
    let address = address.parse().ok().filter(|_| plain)?;
    IpNet::new(address, length.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_in_front_are_no_numbers() {
        for text in
            ["10.0.0.0/08", "010.0.0.0/8", "10.0.0.0/+8", "10.0.0.0/33", "10.0.0.0", "10.0.0.0/", "fe80::%eth0/64"]
        {
            assert_eq!(prefix(text), None, "{text}");
        }
        for text in ["10.0.0.0/8", "0.0.0.0/0", "10.0.0.1/8", "2001:db8::/32", "::ffff:10.0.0.0/104"] {
            assert_eq!(prefix(text), text.parse().ok(), "{text}");
        }
    }
}
