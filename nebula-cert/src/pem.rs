//! PEM as used in Nebula's files: bundles, text between blocks, lines of 64 columns.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use zeroize::{Zeroize as _, Zeroizing};

use crate::Error;

/// One `-----BEGIN label-----` block. The contents may be a secret.
pub(crate) struct Block {
    /// Line of its BEGIN, counted from 1.
    pub(crate) line: usize,
    pub(crate) label: String,
    pub(crate) contents: Zeroizing<Vec<u8>>,
}

/// Reads the first block and ignores what follows it.
pub(crate) fn first(input: &[u8]) -> Result<Block, Error> {
    Lines::new(input)?.next_block()?.ok_or(Error::NoPemBlock)
}

/// Every whole block, and what is wrong with the rest: there must be a block, and only blanks may follow the last.
pub(crate) fn readable(input: &[u8]) -> (Vec<Block>, Option<Error>) {
    let mut blocks = Vec::new();
    let mut lines = match Lines::new(input) {
        Ok(lines) => lines,
        Err(error) => return (blocks, Some(error)),
    };
    loop {
        match lines.next_block() {
            Ok(Some(block)) => blocks.push(block),
            Ok(None) => break,
            Err(error) => return (blocks, Some(error)),
        }
    }
    let rest = match lines.text_since_block {
        _ if blocks.is_empty() => Some(Error::NoPemBlock),
        Some(line) => Some(Error::PemTrailingText { line }),
        None => None,
    };
    (blocks, rest)
}

/// Encodes one block. The buffer never grows, so that no copy of a secret is left behind.
pub(crate) fn encode(label: &str, contents: &[u8]) -> String {
    let lines = contents.len().div_ceil(BYTES_PER_LINE);
    let mut text = String::with_capacity(2 * (label.len() + 17) + lines * (COLUMNS + 1));
    text.extend([BEGIN, label, DASHES, "\n"]);
    let mut line = [0; COLUMNS];
    for chunk in contents.chunks(BYTES_PER_LINE) {
        // 48 bytes always fit in 64 characters.
        let length = BASE64.encode_slice(chunk, &mut line).unwrap_or(0);
        text.extend(line.iter().take(length).map(|&byte| char::from(byte)));
        text.push('\n');
    }
    line.zeroize();
    text.extend([END, label, DASHES, "\n"]);
    text
}

struct Lines<'a> {
    rest: &'a [u8],
    /// Number of the last line read, counted from 1.
    number: usize,
    /// First non-blank line after the last block.
    text_since_block: Option<usize>,
}

impl<'a> Lines<'a> {
    fn new(input: &'a [u8]) -> Result<Self, Error> {
        if input.len() > MAX_INPUT {
            return Err(Error::InputTooLong { length: input.len(), limit: MAX_INPUT });
        }
        Ok(Self { rest: input, number: 0, text_since_block: None })
    }

    fn next_line(&mut self) -> Option<&'a [u8]> {
        if self.rest.is_empty() {
            return None;
        }
        let end = self.rest.iter().position(|&byte| byte == b'\n').map_or(self.rest.len(), |at| at + 1);
        let (line, rest) = self.rest.split_at(end);
        self.rest = rest;
        self.number += 1;
        Some(line.trim_ascii_end())
    }

    fn next_block(&mut self) -> Result<Option<Block>, Error> {
        while let Some(line) = self.next_line() {
            if let Some(label) = boundary(line, BEGIN) {
                self.text_since_block = None;
                return self.body(label).map(Some);
            }
            if !line.is_empty() {
                self.text_since_block.get_or_insert(self.number);
            }
        }
        Ok(None)
    }

    fn body(&mut self, label: &[u8]) -> Result<Block, Error> {
        let begin = self.number;
        let label =
            str::from_utf8(label).map_err(|_| Error::PemMalformed { line: begin, what: "the label is not text" })?;
        let mut text = Zeroizing::new(Vec::with_capacity(self.unread_body_length()));
        while let Some(line) = self.next_line() {
            if line.starts_with(b"-----") {
                if boundary(line, END) == Some(label.as_bytes()) {
                    let contents = decode(&text)
                        .ok_or(Error::PemMalformed { line: begin, what: "the text inside is not base64" })?;
                    return Ok(Block { line: begin, label: label.to_owned(), contents });
                }
                let what = "the block that begins here has no END line with the same label";
                return Err(Error::PemMalformed { line: begin, what });
            }
            // "Key: value" headers may precede the base64 text; Nebula ignores them.
            let header = text.is_empty() && line.contains(&b':');
            if !header {
                text.extend(line.iter().filter(|byte| !byte.is_ascii_whitespace()));
            }
        }
        Err(Error::PemMalformed { line: begin, what: "the block that begins here is cut off" })
    }

    fn unread_body_length(&self) -> usize {
        self.rest.windows(5).position(|window| window == b"-----").unwrap_or(self.rest.len())
    }
}

fn boundary<'a>(line: &'a [u8], start: &str) -> Option<&'a [u8]> {
    line.strip_prefix(start.as_bytes())?.strip_suffix(DASHES.as_bytes())
}

fn decode(text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let mut contents = Zeroizing::new(vec![0; text.len().div_ceil(4) * 3]);
    let length = BASE64.decode_slice(text, &mut contents).ok()?;
    contents.truncate(length);
    Some(contents)
}

/// Like Go's standard encoding: padding is required, unused bits at the end are ignored.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical),
);
const BEGIN: &str = "-----BEGIN ";
const END: &str = "-----END ";
const DASHES: &str = "-----";
const COLUMNS: usize = 64;
const BYTES_PER_LINE: usize = 48;
// Room for some ten thousand CA certificates.
pub(crate) const MAX_INPUT: usize = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(input: &str) -> Result<Vec<(String, Vec<u8>)>, Error> {
        let (blocks, error) = readable(input.as_bytes());
        let blocks = blocks.into_iter().map(|block| (block.label, block.contents.to_vec())).collect();
        error.map_or(Ok(blocks), Err)
    }

    #[test]
    fn encoded_text_reads_back_and_has_64_columns() {
        for length in [0, 1, 47, 48, 49, 96, 500] {
            let bytes: Vec<u8> = (0..length).map(|byte| byte as u8).collect();
            let text = encode("X", &bytes);
            assert!(text.lines().all(|line| line.len() <= 64));
            assert_eq!(contents(&text), Ok(vec![("X".to_owned(), bytes)]));
        }
    }

    #[test]
    fn text_before_and_between_blocks_is_skipped() {
        let text = format!("first CA\n{}\n# second CA\r\n{}\n \n", encode("A", b"1"), encode("B", b"2"));
        assert_eq!(contents(&text), Ok(vec![("A".into(), b"1".to_vec()), ("B".into(), b"2".to_vec())]));
    }

    #[test]
    fn text_after_the_last_block_is_refused_with_its_line() {
        let text = format!("{}\njunk\n", encode("A", b"1"));
        assert_eq!(contents(&text), Err(Error::PemTrailingText { line: 5 }));
    }

    #[test]
    fn a_truncated_last_block_is_refused() {
        let whole = encode("A", b"1");
        let cut = format!("{whole}{}", whole.strip_suffix("-----END A-----\n").unwrap());
        assert!(matches!(contents(&cut), Err(Error::PemMalformed { line: 4, .. })));
    }

    #[test]
    fn an_end_line_with_another_label_is_refused() {
        let text = encode("A", b"1").replace("END A", "END B");
        assert!(matches!(contents(&text), Err(Error::PemMalformed { line: 1, .. })));
    }

    #[test]
    fn windows_line_ends_wide_lines_and_headers_are_read() {
        let body = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB";
        let text = format!("-----BEGIN A-----\r\nProc-Type: 4\r\n\r\n{body}\r\n-----END A-----  \r\n");
        assert_eq!(contents(&text).unwrap()[0].1, vec![b'A'; 66]);
    }

    #[test]
    fn input_without_a_block_is_refused() {
        assert_eq!(contents(""), Err(Error::NoPemBlock));
        assert_eq!(contents("hello\n"), Err(Error::NoPemBlock));
    }
}
