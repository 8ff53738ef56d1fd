//! Hexadecimal encoding and decoding.

/// Encodes each byte as two lower-case digits.
#[must_use]
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes digits of either case; returns `None` for any other character or an odd number of digits.
#[must_use]
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| Some(char::from(byte).to_digit(16)? as u8);
    let (pairs, rest) = text.as_bytes().as_chunks();
    let bytes = pairs.iter().map(|&[high, low]| Some(digit(high)? << 4 | digit(low)?));
    if rest.is_empty() { bytes.collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_of_either_case_are_read_back() {
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(decode(&encode(&all)), Some(all.clone()));
        assert_eq!(decode(&encode(&all).to_uppercase()), Some(all));
        assert_eq!(decode(""), Some(Vec::new()));
    }

    #[test]
    fn what_is_no_hex_is_refused() {
        for text in ["0", "0g", "+1", " 1", "0x", "é", "00é"] {
            assert_eq!(decode(text), None, "{text:?}");
        }
    }
}
