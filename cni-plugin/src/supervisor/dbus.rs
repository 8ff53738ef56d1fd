//! A minimal D-Bus client, just enough to ask systemd for a unit: one connection, blocking calls, signals.
//! Little-endian, no file descriptors, everything bounded (D-Bus specification, "Message Protocol").

use std::env;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};

/// A connection to the system bus.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    serial: u32,
    // Signals that arrived while a call waited for its reply.
    signals: Vec<Message>,
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("the system bus: {0}")]
    Io(#[from] io::Error),
    #[error("{text} ({name})")]
    Refused { name: String, text: String },
}

impl Error {
    pub(super) fn is_no_such_unit(&self) -> bool {
        matches!(self, Self::Refused { name, .. } if name == "org.freedesktop.systemd1.NoSuchUnit")
    }
}

/// Where a call goes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Method<'a> {
    pub(super) destination: &'a str,
    pub(super) path: &'a str,
    pub(super) interface: &'a str,
    pub(super) member: &'a str,
}

/// A received message.
#[derive(Debug, Default)]
pub(super) struct Message {
    kind: u8,
    reply_to: u32,
    error: String,
    pub(super) member: String,
    body: Vec<u8>,
}

impl Connection {
    /// Connects, authenticates and sends `Hello`.
    pub(super) fn open(clock: &dyn Clock, deadline: Deadline) -> Result<Self, Error> {
        let stream = UnixStream::connect(address());
        let mut stream = stream.map_err(|e| io::Error::new(e.kind(), format!("AF_UNIX socket: {e}")))?;
        set_patience(&stream, deadline.left(clock))?;
        // The bus learns our user id from the kernel; the text only repeats it.
        let uid: String = nix::unistd::geteuid().to_string().bytes().map(|byte| format!("{byte:02x}")).collect();
        stream.write_all(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes())?;
        let answer = read_line(&mut stream)?;
        if !answer.starts_with("OK ") {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, answer).into());
        }
        stream.write_all(b"BEGIN\r\n")?;
        let mut connection = Self { stream, serial: 0, signals: Vec::new() };
        connection.call(&BUS.method("Hello"), &Body::default(), clock, deadline)?;
        Ok(connection)
    }

    /// Calls a method and waits for the reply.
    pub(super) fn call(
        &mut self,
        method: &Method<'_>,
        body: &Body,
        clock: &dyn Clock,
        deadline: Deadline,
    ) -> Result<Message, Error> {
        self.serial += 1;
        self.stream.write_all(&encode(self.serial, method, body))?;
        loop {
            let message = self.receive(clock, deadline)?;
            match message.kind {
                METHOD_RETURN if message.reply_to == self.serial => return Ok(message),
                ERROR if message.reply_to == self.serial => {
                    let text = message.body().text().unwrap_or_default();
                    return Err(Error::Refused { name: message.error, text });
                }
                SIGNAL if self.signals.len() < MAX_SIGNALS => self.signals.push(message),
                _ => {}
            }
        }
    }

    /// Subscribes to the signals that match `rule`.
    pub(super) fn subscribe(&mut self, rule: &str, clock: &dyn Clock, deadline: Deadline) -> Result<(), Error> {
        self.call(&BUS.method("AddMatch"), &Body::default().text(rule), clock, deadline).map(|_| ())
    }

    /// Waits for the next signal.
    pub(super) fn signal(&mut self, clock: &dyn Clock, deadline: Deadline) -> Result<Message, Error> {
        if !self.signals.is_empty() {
            return Ok(self.signals.remove(0));
        }
        loop {
            let message = self.receive(clock, deadline)?;
            if message.kind == SIGNAL {
                return Ok(message);
            }
        }
    }

    fn receive(&mut self, clock: &dyn Clock, deadline: Deadline) -> Result<Message, Error> {
        set_patience(&self.stream, deadline.left(clock))?;
        let mut fixed = [0; 16];
        self.stream.read_exact(&mut fixed)?;
        let lengths = Lengths::of(&fixed).ok_or_else(malformed)?;
        let mut rest = vec![0; lengths.rest()];
        self.stream.read_exact(&mut rest)?;
        Ok(decode(&fixed, &lengths, rest).ok_or_else(malformed)?)
    }
}

/// Lengths of the variable parts of a message.
struct Lengths {
    fields: usize,
    body: usize,
}

impl Lengths {
    fn of(fixed: &[u8; 16]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]) as usize;
        let (body, fields) = (word(4), word(12));
        (fixed[0] == b'l' && body <= MAX_MESSAGE && fields <= MAX_MESSAGE).then_some(Self { fields, body })
    }

    /// Length of everything after the fixed part: the fields, padded to a multiple of eight, and the body.
    fn rest(&self) -> usize {
        self.fields.next_multiple_of(8) + self.body
    }
}

fn decode(fixed: &[u8; 16], lengths: &Lengths, mut rest: Vec<u8>) -> Option<Message> {
    let body = rest.split_off(lengths.fields.next_multiple_of(8));
    rest.truncate(lengths.fields);
    let mut message = Message { kind: fixed[1], body, ..Message::default() };
    // Alignment counts from the start of the message; the 16 bytes before the fields do not change it.
    decode_fields(&rest, &mut message)?;
    Some(message)
}

/// Decodes a message and its arguments, for the fuzzer.
pub(crate) fn fuzz(data: &[u8]) {
    let Some((fixed, rest)) = data.split_first_chunk() else { return };
    let Some(lengths) = Lengths::of(fixed) else { return };
    let Some(rest) = rest.get(..lengths.rest()) else { return };
    let Some(message) = decode(fixed, &lengths, rest.to_vec()) else { return };
    let types: [fn(&mut Reader<'_>) -> bool; 3] =
        [|it| it.number().is_some(), |it| it.text().is_some(), |it| it.text_variant().is_some()];
    // Each pass starts with a different type.
    for first in 0..types.len() {
        let mut reader = message.body();
        let mut next = first;
        while types[next % types.len()](&mut reader) {
            next += 1;
        }
    }
}

impl Message {
    /// Returns a reader of the arguments, in order.
    pub(super) fn body(&self) -> Reader<'_> {
        Reader { bytes: &self.body, at: 0 }
    }
}

/// The bus itself.
const BUS: Object =
    Object { destination: "org.freedesktop.DBus", path: "/org/freedesktop/DBus", interface: "org.freedesktop.DBus" };

/// An interface of an object.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) destination: &'static str,
    pub(super) path: &'static str,
    pub(super) interface: &'static str,
}

impl Object {
    pub(super) fn method(self, member: &'static str) -> Method<'static> {
        Method { destination: self.destination, path: self.path, interface: self.interface, member }
    }
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Body {
    signature: String,
    bytes: Vec<u8>,
}

impl Body {
    pub(super) fn text(mut self, text: &str) -> Self {
        self.signature.push('s');
        put_text(&mut self.bytes, text);
        self
    }

    pub(super) fn number(mut self, number: i32) -> Self {
        self.signature.push('i');
        put_u32(&mut self.bytes, number.cast_unsigned());
        self
    }

    /// Appends a list of named values, a(sv).
    pub(super) fn properties(mut self, properties: &[(&str, Value<'_>)]) -> Self {
        self.signature.push_str("a(sv)");
        put_list(&mut self.bytes, 8, properties, |bytes, (name, value)| {
            put_text(bytes, name);
            put_signature(bytes, value.signature());
            value.put(bytes);
        });
        self
    }

    /// Appends the empty list of auxiliary units, a(sa(sv)).
    pub(super) fn no_units(mut self) -> Self {
        self.signature.push_str("a(sa(sv))");
        put_list(&mut self.bytes, 8, &[(); 0], |_, ()| ());
        self
    }
}

/// Value of a unit's property, in the types that systemd uses.
#[derive(Debug)]
pub(super) enum Value<'a> {
    Text(&'a str),
    Bool(bool),
    I32(i32),
    U32(u32),
    U64(u64),
    Texts(&'a [&'a str]),
    /// argv of the program; the first element is its path.
    Exec(&'a [&'a str]),
    /// Allow-list.
    Allow(&'a [&'a str]),
    /// Exceptions from an allow-list.
    Deny(&'a [&'a str]),
    Pairs(&'a [(&'a str, &'a str)]),
    /// Conditions that must hold: kind and parameter.
    Conditions(&'a [(&'a str, &'a str)]),
}

impl Value<'_> {
    fn signature(&self) -> &'static str {
        match self {
            Self::Text(_) => "s",
            Self::Bool(_) => "b",
            Self::I32(_) => "i",
            Self::U32(_) => "u",
            Self::U64(_) => "t",
            Self::Texts(_) => "as",
            Self::Exec(_) => "a(sasb)",
            Self::Allow(_) | Self::Deny(_) => "(bas)",
            Self::Pairs(_) => "a(ss)",
            Self::Conditions(_) => "a(sbbs)",
        }
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        let put_texts = |bytes: &mut Vec<u8>, texts: &[&str]| {
            put_list(bytes, 4, texts, |bytes, text| put_text(bytes, text));
        };
        match self {
            Self::Text(text) => put_text(bytes, text),
            Self::Bool(value) => put_u32(bytes, u32::from(*value)),
            Self::I32(value) => put_u32(bytes, value.cast_unsigned()),
            Self::U32(value) => put_u32(bytes, *value),
            Self::U64(value) => {
                pad(bytes, 8);
                bytes.extend(value.to_le_bytes());
            }
            Self::Texts(texts) => put_texts(bytes, texts),
            Self::Exec(argv) => put_list(bytes, 8, &[argv], |bytes, argv| {
                put_text(bytes, argv.first().copied().unwrap_or_default());
                put_texts(bytes, argv);
                put_u32(bytes, 0);
            }),
            Self::Allow(texts) | Self::Deny(texts) => {
                pad(bytes, 8);
                put_u32(bytes, u32::from(matches!(self, Self::Allow(_))));
                put_texts(bytes, texts);
            }
            Self::Pairs(pairs) => put_list(bytes, 8, pairs, |bytes, (first, second)| {
                put_text(bytes, first);
                put_text(bytes, second);
            }),
            Self::Conditions(conditions) => put_list(bytes, 8, conditions, |bytes, (kind, parameter)| {
                put_text(bytes, kind);
                put_u32(bytes, 0);
                put_u32(bytes, 0);
                put_text(bytes, parameter);
            }),
        }
    }
}

/// Reads arguments. Each method returns `None` if the bytes end or cannot be decoded as its type.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    pub(super) fn number(&mut self) -> Option<u32> {
        self.align(4);
        let bytes = self.take(4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }

    pub(super) fn text(&mut self) -> Option<String> {
        let length = self.number()?;
        self.terminated(length as usize)
    }

    /// Reads a variant that holds a string.
    pub(super) fn text_variant(&mut self) -> Option<String> {
        (self.signature()? == "s").then(|| self.text())?
    }

    fn signature(&mut self) -> Option<String> {
        let length = *self.take(1)?.first()?;
        self.terminated(length.into())
    }

    fn terminated(&mut self, length: usize) -> Option<String> {
        let text = self.take(length)?.to_vec();
        self.take(1)?;
        String::from_utf8(text).ok()
    }

    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, count: usize) -> Option<&[u8]> {
        let end = self.at.checked_add(count)?;
        let bytes = self.bytes.get(self.at..end)?;
        self.at = end;
        Some(bytes)
    }
}

fn decode_fields(fields: &[u8], message: &mut Message) -> Option<()> {
    let mut reader = Reader { bytes: fields, at: 0 };
    while reader.at < fields.len() {
        reader.align(8);
        let field = *reader.take(1)?.first()?;
        let kind = reader.signature()?;
        match (field, kind.as_str()) {
            (FIELD_REPLY_SERIAL, "u") => message.reply_to = reader.number()?,
            (FIELD_ERROR, "s") => message.error = reader.text()?,
            (FIELD_MEMBER, "s") => message.member = reader.text()?,
            (_, "s" | "o") => drop(reader.text()?),
            (_, "g") => drop(reader.signature()?),
            (_, "u") => drop(reader.number()?),
            _ => return None,
        }
    }
    Some(())
}

fn encode(serial: u32, method: &Method<'_>, body: &Body) -> Vec<u8> {
    let mut bytes = vec![b'l', METHOD_CALL, 0, 1];
    put_u32(&mut bytes, body.bytes.len() as u32);
    put_u32(&mut bytes, serial);
    let fields = [
        (FIELD_PATH, "o", method.path),
        (FIELD_INTERFACE, "s", method.interface),
        (FIELD_MEMBER, "s", method.member),
        (FIELD_DESTINATION, "s", method.destination),
        (FIELD_SIGNATURE, "g", body.signature.as_str()),
    ];
    let used = if body.signature.is_empty() { &fields[..4] } else { &fields };
    put_list(&mut bytes, 8, used, |bytes, (field, kind, value)| {
        bytes.push(*field);
        put_signature(bytes, kind);
        if *kind == "g" { put_signature(bytes, value) } else { put_text(bytes, value) }
    });
    pad(&mut bytes, 8);
    bytes.extend(&body.bytes);
    bytes
}

fn put_list<T>(bytes: &mut Vec<u8>, align: usize, items: &[T], mut put: impl FnMut(&mut Vec<u8>, &T)) {
    put_u32(bytes, 0);
    let length = bytes.len() - 4;
    pad(bytes, align);
    let start = bytes.len();
    for item in items {
        pad(bytes, align);
        put(bytes, item);
    }
    let size = (bytes.len() - start) as u32;
    bytes[length..length + 4].copy_from_slice(&size.to_le_bytes());
}

fn put_u32(bytes: &mut Vec<u8>, value: u32) {
    pad(bytes, 4);
    bytes.extend(value.to_le_bytes());
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put_u32(bytes, text.len() as u32);
    bytes.extend(text.as_bytes());
    bytes.push(0);
}

fn put_signature(bytes: &mut Vec<u8>, signature: &str) {
    bytes.push(signature.len() as u8);
    bytes.extend(signature.as_bytes());
    bytes.push(0);
}

fn pad(bytes: &mut Vec<u8>, to: usize) {
    bytes.resize(bytes.len().next_multiple_of(to), 0);
}

fn read_line(stream: &mut UnixStream) -> io::Result<String> {
    let mut line = Vec::new();
    while !line.ends_with(b"\r\n") && line.len() < 512 {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

// To the kernel, zero means no timeout.
fn set_patience(stream: &UnixStream, left: Duration) -> io::Result<()> {
    let left = Some(left.max(Duration::from_millis(1)));
    stream.set_read_timeout(left)?;
    stream.set_write_timeout(left)
}

fn address() -> PathBuf {
    let configured = env::var(ADDRESS).ok();
    let path = configured.as_deref().and_then(|address| address.strip_prefix("unix:path="));
    Path::new(path.and_then(|path| path.split([',', ';']).next()).unwrap_or(SOCKET)).to_owned()
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed message")
}

const ADDRESS: &str = "DBUS_SYSTEM_BUS_ADDRESS";
const SOCKET: &str = "/run/dbus/system_bus_socket";
const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;
const SIGNAL: u8 = 4;
const FIELD_PATH: u8 = 1;
const FIELD_INTERFACE: u8 = 2;
const FIELD_MEMBER: u8 = 3;
const FIELD_ERROR: u8 = 4;
const FIELD_REPLY_SERIAL: u8 = 5;
const FIELD_DESTINATION: u8 = 6;
const FIELD_SIGNATURE: u8 = 8;
const MAX_MESSAGE: usize = 1 << 20;
const MAX_SIGNALS: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_encoded_as_the_specification_says() {
        let method = Method { destination: "d.d", path: "/p", interface: "i.i", member: "M" };
        let bytes = encode(7, &method, &Body::default().text("ab"));
        assert_eq!(&bytes[..16], &[b'l', 1, 0, 1, 7, 0, 0, 0, 7, 0, 0, 0, 71, 0, 0, 0]);
        assert_eq!(&bytes[16..27], &[1, 1, b'o', 0, 2, 0, 0, 0, b'/', b'p', 0]);
        // The fields end at 87; the body begins at the next multiple of eight.
        assert_eq!(bytes.len(), 88 + 7);
        assert_eq!(&bytes[88..], &[2, 0, 0, 0, b'a', b'b', 0]);
    }

    #[test]
    fn structures_begin_at_eight_bytes_and_lists_count_no_padding_before_them() {
        let body = Body::default().properties(&[("A", Value::U64(9)), ("B", Value::Bool(true))]);
        assert_eq!(body.signature, "a(sv)");
        assert_eq!(&body.bytes[..8], &[40, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&body.bytes[8..14], &[1, 0, 0, 0, b'A', 0]);
        assert_eq!(&body.bytes[24..32], &9_u64.to_le_bytes());
        assert_eq!(&body.bytes[32..38], &[1, 0, 0, 0, b'B', 0]);
    }

    #[test]
    fn garbage_is_refused_without_a_panic() {
        for length in 0..64 {
            let bytes: Vec<u8> = (0..length).map(|n| (n * 37 % 251) as u8).collect();
            let _ = decode_fields(&bytes, &mut Message::default());
            let mut reader = Reader { bytes: &bytes, at: 0 };
            while reader.text().is_some() {}
        }
        let mut reader = Reader { bytes: &[0xff; 8], at: 0 };
        assert_eq!(reader.text(), None);
    }
}
