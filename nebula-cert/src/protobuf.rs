//! A reader and a writer for the subset of protobuf that Nebula's certificates and messages use.

/// The bytes are not a valid message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub struct Malformed(pub &'static str);

impl Malformed {
    /// What is wrong with the bytes.
    #[must_use]
    #[inline]
    pub fn reason(self) -> &'static str {
        self.0
    }
}

/// Value of one field, by wire type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// A number.
    Varint(u64),
    /// Bytes, text or a nested message.
    Bytes(&'a [u8]),
    /// A fixed field of 32 or 64 bits, which no message of Nebula has.
    Fixed,
}

impl<'a> Value<'a> {
    /// Returns the number.
    ///
    /// # Errors
    /// Returns an error for another wire type.
    #[inline]
    pub fn u64(self) -> Result<u64, Malformed> {
        let Self::Varint(value) = self else { return Err(Malformed("number field with another wire type")) };
        Ok(value)
    }

    /// Returns the number.
    ///
    /// # Errors
    /// Returns an error for another wire type or a number of more than 32 bits.
    #[inline]
    pub fn u32(self) -> Result<u32, Malformed> {
        u32::try_from(self.u64()?).map_err(|_| Malformed("number does not fit 32 bits"))
    }

    /// Returns the bytes.
    ///
    /// # Errors
    /// Returns an error for another wire type.
    #[inline]
    pub fn bytes(self) -> Result<&'a [u8], Malformed> {
        let Self::Bytes(bytes) = self else { return Err(Malformed("bytes field with another wire type")) };
        Ok(bytes)
    }
}

/// Iterates over the fields of a message; ends after the first error.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Iterates over the fields of a message.
    #[must_use]
    #[inline]
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    #[inline]
    fn field(&mut self) -> Result<(u32, Value<'a>), Malformed> {
        let tag = read_varint(&mut self.rest)?;
        let number = u32::try_from(tag >> 3).map_err(|_| Malformed("field number too large"))?;
        if number == 0 || number > MAX_FIELD_NUMBER {
            return Err(Malformed("field number out of range"));
        }
        let value = match tag & 7 {
            0 => Value::Varint(read_varint(&mut self.rest)?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let len = read_varint(&mut self.rest)?;
                Value::Bytes(self.take(usize::try_from(len).map_err(|_| TRUNCATED)?)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            _ => return Err(Malformed("unknown wire type")),
        };
        Ok((number, value))
    }

    #[inline]
    fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(TRUNCATED)?;
        self.rest = rest;
        Ok(bytes)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Malformed>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

const TRUNCATED: Malformed = Malformed("truncated");
const MAX_FIELD_NUMBER: u32 = (1 << 29) - 1;

/// Reads a varint and advances `bytes` past it.
///
/// # Errors
/// Returns an error if the varint is truncated or does not fit into 64 bits.
#[inline]
pub fn read_varint(bytes: &mut &[u8]) -> Result<u64, Malformed> {
    let mut value = 0;
    for (at, &byte) in bytes.iter().enumerate() {
        if at == 9 && byte > 1 {
            return Err(Malformed("number does not fit 64 bits"));
        }
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            *bytes = &bytes[at + 1..];
            return Ok(value);
        }
    }
    Err(TRUNCATED)
}

/// Calls `each` with every value of a packed repeated field.
#[inline]
pub(crate) fn packed(mut bytes: &[u8], mut each: impl FnMut(u64)) -> Result<(), Malformed> {
    while !bytes.is_empty() {
        each(read_varint(&mut bytes)?);
    }
    Ok(())
}

/// Writes a message field by field. Write fields in ascending order of their numbers, like all other implementations.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Default for Writer {
    #[inline]
    fn default() -> Self {
        // Large enough for most messages, so that the buffer rarely has to grow.
        Self { bytes: Vec::with_capacity(96) }
    }
}

impl Writer {
    /// A writer with room for this many bytes. While the message fits, the buffer is never moved, so no copy of a
    /// secret stays behind.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes) }
    }

    /// Returns the message.
    #[must_use]
    #[inline]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    /// Writes a number, except zero, which is the default.
    #[inline]
    pub fn number(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.varint(u64::from(field << 3));
            self.varint(value);
        }
    }

    /// Writes bytes or a nested message, even if empty.
    #[inline]
    pub fn bytes(&mut self, field: u32, value: &[u8]) {
        self.varint(u64::from(field << 3 | 2));
        self.varint(value.len() as u64);
        self.bytes.extend_from_slice(value);
    }

    /// Writes bytes, unless they are empty, which is the default.
    #[inline]
    pub fn nonempty(&mut self, field: u32, value: &[u8]) {
        if !value.is_empty() {
            self.bytes(field, value);
        }
    }

    /// Writes a nested message, even if empty.
    #[inline]
    pub fn message(&mut self, field: u32, write: impl FnOnce(&mut Self)) {
        self.varint(u64::from(field << 3 | 2));
        let at = self.bytes.len();
        self.bytes.push(0);
        write(self);
        let len = self.bytes.len() - at - 1;
        match u8::try_from(len) {
            Ok(len @ 0..0x80) => self.bytes[at] = len,
            _ => {
                let mut longer = Self::default();
                longer.varint(len as u64);
                self.bytes.splice(at..=at, longer.bytes);
            }
        }
    }

    /// Writes a packed list of numbers, unless it is empty.
    #[inline]
    pub fn packed(&mut self, field: u32, values: impl IntoIterator<Item = u32>) {
        let mut values = values.into_iter().peekable();
        if values.peek().is_some() {
            self.message(field, |inner| values.for_each(|value| inner.varint(value.into())));
        }
    }

    #[inline]
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fields(bytes: &[u8]) -> Result<Vec<(u32, Value<'_>)>, Malformed> {
        Fields::new(bytes).collect()
    }

    #[test]
    fn every_wire_type_of_proto3_is_read() {
        let bytes = [0x08, 0xac, 0x02, 0x12, 2, b'h', b'i', 0x19, 1, 2, 3, 4, 5, 6, 7, 8, 0x25, 1, 2, 3, 4];
        let expected = [(1, Value::Varint(300)), (2, Value::Bytes(b"hi")), (3, Value::Fixed), (4, Value::Fixed)];
        assert_eq!(fields(&bytes).unwrap(), expected);
        for cut in [1, 2, 4, 5, 6, 8, 12, 17, 20] {
            assert_eq!(fields(&bytes[..cut]), Err(TRUNCATED), "cut at {cut}");
        }
    }

    #[test]
    fn a_length_beyond_the_end_is_refused_without_trusting_it() {
        assert_eq!(fields(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]), Err(TRUNCATED));
        assert_eq!(fields(&[0x0a, 0x05, 1, 2, 3, 4]), Err(TRUNCATED));
    }

    #[test]
    fn field_zero_groups_and_long_varints_are_refused() {
        assert!(fields(&[0x00, 0x00]).is_err());
        assert!(fields(&[0x0b, 0x0c]).is_err());
        assert!(fields(&[0x08, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02]).is_err());
        assert_eq!(
            fields(&[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]).unwrap(),
            [(1, Value::Varint(u64::MAX))]
        );
    }

    proptest! {
        #[test]
        fn written_fields_are_read_back(field in 1_u32..=MAX_FIELD_NUMBER, number in 1_u64.., bytes: Vec<u8>) {
            // The writer only supports small field numbers like those in Nebula's messages.
            let field = field % 100 + 1;
            let mut writer = Writer::default();
            writer.number(field, number);
            writer.bytes(field, &bytes);
            let written = writer.finish();
            prop_assert_eq!(fields(&written).unwrap(), [(field, Value::Varint(number)), (field, Value::Bytes(&bytes))]);
        }

        #[test]
        fn nested_messages_of_any_length_are_written_like_bytes(inner in proptest::collection::vec(any::<u8>(), 0..400)) {
            let mut nested = Writer::default();
            nested.message(7, |outer| outer.message(8, |message| message.bytes(9, &inner)));
            let (mut innermost, mut middle, mut outer) = (Writer::default(), Writer::default(), Writer::default());
            innermost.bytes(9, &inner);
            middle.bytes(8, &innermost.finish());
            outer.bytes(7, &middle.finish());
            prop_assert_eq!(nested.finish(), outer.finish());
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = fields(&bytes);
        }
    }
}
