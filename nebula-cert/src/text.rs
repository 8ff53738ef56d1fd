//! The text of a file in whatever form of Unicode it was saved: programs of Windows save UTF-16 or UTF-8 with a byte
//! order mark. All our programs read their files with it.

use std::io::{self, ErrorKind, Read};

use zeroize::Zeroizing;

/// Reads a text to its end, which may hold a secret: a buffer of `capacity` is not copied if it suffices.
///
/// # Errors
/// Returns the reader's error, or what is wrong with the bytes.
pub fn read(mut reader: impl Read, capacity: usize) -> io::Result<Zeroizing<String>> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(capacity));
    reader.read_to_end(&mut bytes)?;
    let text = decode(std::mem::take(&mut *bytes)).map_err(|why| io::Error::new(ErrorKind::InvalidData, why))?;
    Ok(Zeroizing::new(text))
}

/// Decodes a file, which may hold a private key. Like go-yaml, takes UTF-16 after a byte order mark, and UTF-8 else.
/// The mark is no part of the text.
///
/// # Errors
/// Returns what is wrong with the bytes.
pub fn decode(bytes: Vec<u8>) -> Result<String, String> {
    match bytes.as_slice() {
        [0xef, 0xbb, 0xbf, ..] => utf8(bytes).map(|mut text| {
            text.drain(..'\u{feff}'.len_utf8());
            text
        }),
        [0xff, 0xfe, rest @ ..] => utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, u16::from_be_bytes),
        [0, _, ..] | [_, 0, ..] => Err(format!("it looks like UTF-16 without a byte order mark: {SAVE}")),
        _ => utf8(bytes),
    }
}

fn utf8(bytes: Vec<u8>) -> Result<String, String> {
    String::from_utf8(bytes).map_err(|error| {
        format!("it is neither UTF-8 nor UTF-16 (byte {}): {SAVE}", error.utf8_error().valid_up_to() + 1)
    })
}

fn utf16(bytes: &[u8], unit: impl Fn([u8; 2]) -> u16) -> Result<String, String> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let units: Zeroizing<Vec<u16>> = Zeroizing::new(pairs.iter().map(|pair| unit(*pair)).collect());
    let text = String::from_utf16(&units).ok().filter(|_| rest.is_empty());
    text.ok_or_else(|| format!("it begins as UTF-16 and is not: {SAVE}"))
}

const SAVE: &str = "save it as UTF-8";

#[cfg(test)]
mod tests {
    use super::*;

    fn saved(text: &str, to_bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
        text.encode_utf16().flat_map(to_bytes).collect()
    }

    #[test]
    fn each_form_with_a_byte_order_mark_is_the_same_text() {
        let text = "pki: {ca: /etc/nebula/ca.crt} # Größe \u{1f600}\r\n";
        let marked = format!("\u{feff}{text}");
        for bytes in [
            text.as_bytes().to_vec(),
            marked.clone().into_bytes(),
            saved(&marked, u16::to_le_bytes),
            saved(&marked, u16::to_be_bytes),
        ] {
            assert_eq!(decode(bytes).as_deref(), Ok(text));
        }
        assert_eq!(decode(Vec::new()).as_deref(), Ok(""));
    }

    #[test]
    fn other_bytes_are_refused_with_what_to_do() {
        let said = |bytes: Vec<u8>| decode(bytes).unwrap_err();
        for to_bytes in [u16::to_le_bytes, u16::to_be_bytes] {
            assert!(said(saved("pki: {}", to_bytes)).contains("UTF-16 without a byte order mark: save it as UTF-8"));
        }
        assert!(said(b"pki: {} # Gr\xf6\xdfe".to_vec()).contains("(byte 13): save it as UTF-8"));
        assert!(said(vec![0xff, 0xfe, b'a']).contains("begins as UTF-16 and is not"));
        assert!(said(vec![0xff, 0xfe, 0x00, 0xd8]).contains("begins as UTF-16 and is not"), "half of a pair");
    }
}
