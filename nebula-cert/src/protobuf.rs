//! The few protobuf wire-format pieces that v1 certificates and encrypted keys need.

/// The bytes are not protobuf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadWire;

/// Value of one field; a field of a type its reader does not expect is skipped like an unknown one, as Go does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// Reads fields one after the other, borrowing from the message.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// The next field number and value, or nothing at the end.
    pub(crate) fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, BadWire> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = take_varint(&mut self.rest)?;
        let number = u32::try_from(tag >> 3).map_err(|_| BadWire)?;
        if !(1..=MAX_FIELD_NUMBER).contains(&number) {
            return Err(BadWire);
        }
        let value = match tag & 7 {
            VARINT => Value::Varint(take_varint(&mut self.rest)?),
            FIXED64 => self.take(8).map(|_| Value::Fixed)?,
            LENGTH_DELIMITED => {
                let length = take_varint(&mut self.rest)?;
                Value::Bytes(self.take(usize::try_from(length).map_err(|_| BadWire)?)?)
            }
            FIXED32 => self.take(4).map(|_| Value::Fixed)?,
            // Groups are obsolete; no certificate ever held one.
            _ => return Err(BadWire),
        };
        Ok(Some((number, value)))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], BadWire> {
        let (head, rest) = self.rest.split_at_checked(length).ok_or(BadWire)?;
        self.rest = rest;
        Ok(head)
    }
}

/// Reads the values of a packed repeated field.
pub(crate) fn packed(mut bytes: &[u8], mut each: impl FnMut(u64)) -> Result<(), BadWire> {
    while !bytes.is_empty() {
        each(take_varint(&mut bytes)?);
    }
    Ok(())
}

/// Appends a varint field; the default value 0 is omitted.
pub(crate) fn put_number(out: &mut Vec<u8>, field: u32, value: u64) {
    if value != 0 {
        put_varint(out, u64::from(field) << 3 | VARINT);
        put_varint(out, value);
    }
}

/// Appends a length-delimited field, also when empty (repeated strings, messages).
pub(crate) fn put_bytes(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    put_varint(out, u64::from(field) << 3 | LENGTH_DELIMITED);
    put_varint(out, value.len() as u64);
    out.extend_from_slice(value);
}

/// Appends a singular length-delimited field; the default (empty) is omitted.
pub(crate) fn put_nonempty(out: &mut Vec<u8>, field: u32, value: &[u8]) {
    if !value.is_empty() {
        put_bytes(out, field, value);
    }
}

pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, BadWire> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(BadWire)?;
        *bytes = rest;
        // The tenth byte holds only the top bit of 64.
        if shift == 63 && byte > 1 {
            return Err(BadWire);
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(BadWire)
}

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH_DELIMITED: u64 = 2;
const FIXED32: u64 = 5;
const MAX_FIELD_NUMBER: u32 = (1 << 29) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_survive_a_round_trip() {
        for value in [1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            put_number(&mut bytes, 100, value);
            assert_eq!(Fields::new(&bytes).next(), Ok(Some((100, Value::Varint(value)))));
        }
    }

    #[test]
    fn a_length_beyond_the_end_is_refused() {
        assert_eq!(Fields::new(&[0x0a, 5, 1, 2]).next(), Err(BadWire));
        assert_eq!(Fields::new(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]).next(), Err(BadWire));
    }

    #[test]
    fn a_number_of_more_than_64_bits_is_refused() {
        let bytes = [0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2];
        assert_eq!(Fields::new(&bytes).next(), Err(BadWire));
    }

    #[test]
    fn field_number_zero_is_refused() {
        assert_eq!(Fields::new(&[0x00, 0x01]).next(), Err(BadWire));
    }
}
