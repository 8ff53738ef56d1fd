//! `pkcs11:` URIs (RFC 7512), which name a key, its token and the module to load.

use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use zeroize::Zeroizing;

use super::TokenError;

/// A parsed `pkcs11:` URI. Parsing opens nothing. The PIN is never printed, and zeroized on drop.
///
/// ```
/// use nebula_cert::pkcs11::Uri;
///
/// let uri: Uri = "pkcs11:token=ca;object=key?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-value=1234".parse()?;
/// assert!(!format!("{uri:?}").contains("1234"));
/// assert_eq!("pkcs11:tokne=ca?module-path=/m.so".parse::<Uri>().unwrap_err().to_string()[..6], *"tokne:");
/// # Ok::<(), nebula_cert::pkcs11::TokenError>(())
/// ```
#[derive(Clone)]
pub struct Uri {
    module_path: PathBuf,
    pub(super) token: Vec<(TokenPart, String)>,
    pub(super) slot_id: Option<u64>,
    pub(super) object: Option<String>,
    pub(super) id: Option<Vec<u8>>,
    pin: Option<Pin>,
}

/// A property of a token that a URI can select by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenPart {
    Label,
    Manufacturer,
    Model,
    Serial,
}

impl TokenPart {
    /// Its name in a URI.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Label => "token",
            Self::Manufacturer => "manufacturer",
            Self::Model => "model",
            Self::Serial => "serial",
        }
    }
}

/// A PIN and the part of the URI that it came from.
pub(super) struct GivenPin {
    pub(super) part: &'static str,
    pub(super) secret: Zeroizing<Vec<u8>>,
}

#[derive(Clone)]
enum Pin {
    Value(Zeroizing<Vec<u8>>),
    Source(PathBuf),
}

impl Uri {
    /// The shared library to load.
    #[must_use]
    pub fn module_path(&self) -> &Path {
        &self.module_path
    }

    /// The PIN, if there is one; reads the file of `pin-source`.
    pub(super) fn pin(&self) -> Result<Option<GivenPin>, TokenError> {
        let (part, secret) = match &self.pin {
            None => return Ok(None),
            Some(Pin::Value(pin)) => ("pin-value", pin.clone()),
            Some(Pin::Source(path)) => ("pin-source", read_pin(path)?),
        };
        Ok(Some(GivenPin { part, secret }))
    }
}

impl FromStr for Uri {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        if text.len() > MAX_LENGTH {
            return Err(TokenError::TooLong { limit: MAX_LENGTH });
        }
        let parts = text.strip_prefix("pkcs11:").ok_or(TokenError::Scheme)?;
        let (path, query) = parts.split_once('?').unwrap_or((parts, ""));
        let mut seen = Vec::new();
        let mut uri =
            Self { module_path: PathBuf::new(), token: Vec::new(), slot_id: None, object: None, id: None, pin: None };
        for part in path.split(';').filter(|part| !part.is_empty()) {
            let (name, value) = named(part, &PATH_PARTS, &mut seen)?;
            uri.set_path_part(name, value)?;
        }
        for part in query.split('&').filter(|part| !part.is_empty()) {
            let (name, value) = named(part, &QUERY_PARTS, &mut seen)?;
            uri.set_query_part(name, value)?;
        }
        if uri.module_path.as_os_str().is_empty() {
            return Err(bad("module-path", "missing, it names the PKCS#11 module of the token's vendor"));
        }
        Ok(uri)
    }
}

impl Uri {
    fn set_path_part(&mut self, name: &'static str, value: &str) -> Result<(), TokenError> {
        match name {
            "token" => self.token.push((TokenPart::Label, text(name, value)?)),
            "manufacturer" => self.token.push((TokenPart::Manufacturer, text(name, value)?)),
            "model" => self.token.push((TokenPart::Model, text(name, value)?)),
            "serial" => self.token.push((TokenPart::Serial, text(name, value)?)),
            "slot-id" => self.slot_id = Some(number(value).ok_or_else(|| bad(name, "not a decimal number"))?),
            "object" => self.object = Some(text(name, value)?),
            "id" => self.id = Some(decoded(name, value)?.to_vec()),
            // Both objects of the key pair are looked up, whichever of them the URI names.
            _ if value == "private" || value == "public" => {}
            _ => return Err(bad("type", "only private and public lead to a key pair")),
        }
        Ok(())
    }

    fn set_query_part(&mut self, name: &'static str, value: &str) -> Result<(), TokenError> {
        if name == "module-path" {
            self.module_path = text(name, value)?.into();
            return Ok(());
        }
        if self.pin.is_some() {
            return Err(bad(name, "pin-value and pin-source exclude each other"));
        }
        if name == "pin-value" {
            self.pin = Some(Pin::Value(decoded(name, value)?)).filter(|_| !value.is_empty());
            return Ok(());
        }
        let source = text(name, value)?;
        if source.starts_with('|') {
            return Err(bad(name, "commands are not run, give a file"));
        }
        let path = source.strip_prefix("file:").unwrap_or(&source);
        let path = path.strip_prefix("//").unwrap_or(path);
        if !path.starts_with('/') {
            return Err(bad(name, "not an absolute path, such as file:/etc/ca.pin"));
        }
        self.pin = Some(Pin::Source(path.into()));
        Ok(())
    }
}

/// Shows neither the PIN nor the path of its file.
impl fmt::Debug for Uri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { module_path, token, slot_id, object, id, pin } = self;
        let pin = pin.as_ref().map(|_| "redacted");
        write!(f, "Uri({module_path:?}, {token:?}, {slot_id:?}, {object:?}, {id:?}, pin: {pin:?})")
    }
}

/// Splits `name=value` and checks the name.
fn named<'a>(
    part: &'a str,
    known: &[&'static str],
    seen: &mut Vec<&'static str>,
) -> Result<(&'static str, &'a str), TokenError> {
    let (name, value) = part.split_once('=').unwrap_or((part, ""));
    let Some(name) = known.iter().copied().find(|&it| it == name) else {
        // Truncate at the first character that cannot be part of a name, so that a misspelt `pin-value` does not reveal
        // the PIN.
        let name = name.chars().take_while(|&letter| letter.is_ascii_alphabetic() || letter == '-').take(32);
        return Err(TokenError::UnknownPart { name: name.collect() });
    };
    if seen.contains(&name) {
        return Err(TokenError::RepeatedPart { name });
    }
    seen.push(name);
    Ok((name, value))
}

fn text(name: &'static str, value: &str) -> Result<String, TokenError> {
    match str::from_utf8(&decoded(name, value)?) {
        Ok(text) if !text.contains('\0') => Ok(text.to_owned()),
        _ => Err(bad(name, "not UTF-8 text")),
    }
}

/// Decodes percent-encoding. The buffer never grows, so that no copy of a PIN is left behind.
fn decoded(name: &'static str, value: &str) -> Result<Zeroizing<Vec<u8>>, TokenError> {
    let mut out = Zeroizing::new(Vec::with_capacity(value.len()));
    let mut bytes = value.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || char::from(bytes.next()?).to_digit(16);
        match digit().zip(digit()) {
            Some((high, low)) => out.push((high << 4 | low) as u8),
            None => return Err(bad(name, "a percent sign is not followed by two hexadecimal digits")),
        }
    }
    Ok(out)
}

fn number(value: &str) -> Option<u64> {
    value.bytes().all(|byte| byte.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

fn read_pin(path: &Path) -> Result<Zeroizing<Vec<u8>>, TokenError> {
    let unreadable = |reason: String| TokenError::PinFile { path: path.to_owned(), reason };
    let mut pin = Zeroizing::new(Vec::with_capacity(MAX_PIN + 1));
    let file = File::open(path).map_err(|error| unreadable(error.to_string()))?;
    file.take(MAX_PIN as u64 + 1).read_to_end(&mut pin).map_err(|error| unreadable(error.to_string()))?;
    if pin.len() > MAX_PIN {
        return Err(unreadable(format!("longer than any PIN ({MAX_PIN} bytes)")));
    }
    let length = pin.trim_ascii_end().len();
    pin.truncate(length);
    if pin.is_empty() { Err(unreadable("it holds no PIN".to_owned())) } else { Ok(pin) }
}

fn bad(name: &'static str, what: &'static str) -> TokenError {
    TokenError::BadPart { name, what }
}

const PATH_PARTS: [&str; 8] = ["token", "manufacturer", "model", "serial", "slot-id", "object", "id", "type"];
const QUERY_PARTS: [&str; 3] = ["module-path", "pin-source", "pin-value"];
const MAX_LENGTH: usize = 4096;
const MAX_PIN: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(parts: &str) -> Result<Uri, TokenError> {
        format!("pkcs11:{parts}").parse()
    }

    fn complaint(parts: &str) -> String {
        parsed(parts).unwrap_err().to_string()
    }

    #[test]
    fn every_part_is_decoded_and_kept() {
        let uri = parsed(
            "token=my%20ca;manufacturer=m;model=o;serial=s;slot-id=7;object=k%3b;id=%00%fF;type=private\
             ?pin-value=a%26b&module-path=/m%2B.so",
        )
        .unwrap();
        assert_eq!(uri.module_path(), Path::new("/m+.so"));
        let names: Vec<_> = uri.token.iter().map(|(part, value)| (part.name(), &**value)).collect();
        assert_eq!(names, [("token", "my ca"), ("manufacturer", "m"), ("model", "o"), ("serial", "s")]);
        assert_eq!((uri.slot_id, uri.object.as_deref(), uri.id.as_deref()), (Some(7), Some("k;"), Some(&[0, 255][..])));
        let pin = uri.pin().unwrap().unwrap();
        assert_eq!((pin.part, &**pin.secret), ("pin-value", &b"a&b"[..]));
    }

    #[test]
    fn a_part_that_is_wrong_is_named() {
        for (parts, name) in [
            ("lable=x?module-path=/m", "lable:"),
            ("object=%zz?module-path=/m", "object:"),
            ("object=%4?module-path=/m", "object:"),
            ("object=%ff?module-path=/m", "object:"),
            ("slot-id=-1?module-path=/m", "slot-id:"),
            ("slot-id=99999999999999999999?module-path=/m", "slot-id:"),
            ("type=cert?module-path=/m", "type:"),
            ("token=a;token=b?module-path=/m", "token:"),
            ("token=a", "module-path:"),
            ("token=a?module-path=", "module-path:"),
            ("module-path=/m", "module-path:"),
            ("?module-path=/m&pin-value=1&pin-source=/p", "pin-source:"),
            ("?module-path=/m&pin-source=p", "pin-source:"),
            ("?module-path=/m&pin-source=%7Ccat /p", "pin-source:"),
            ("?module-name=m", "module-name:"),
        ] {
            assert!(complaint(parts).starts_with(name), "{parts}: {}", complaint(parts));
        }
        assert_eq!("pkcs12:token=a".parse::<Uri>().unwrap_err(), TokenError::Scheme);
        let long = format!("token={}", "a".repeat(MAX_LENGTH));
        assert_eq!(parsed(&long).unwrap_err(), TokenError::TooLong { limit: MAX_LENGTH });
    }

    #[test]
    fn a_pin_is_in_no_message() {
        let uri = parsed("token=a?module-path=/m&pin-value=s3cret").unwrap();
        assert!(!format!("{uri:?}").contains("s3cret"));
        for parts in [
            "?pin-value=s3cret%",
            "?pin-value=s3cret&pin-value=s3cret",
            "?pin-value=s3cret",
            "?pin=s3cret",
            "?pin-value 3cret",
        ] {
            assert!(!complaint(parts).contains("3cret"), "{parts}");
        }
    }

    #[test]
    fn a_pin_file_ends_where_its_line_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pin");
        let uri = parsed(&format!("?module-path=/m&pin-source=file:{}", path.display())).unwrap();
        assert!(uri.pin().is_err_and(|error| error.to_string().starts_with("pin-source: unable to read")));
        for (contents, pin) in [("1234", "1234"), ("12 34\r\n", "12 34")] {
            std::fs::write(&path, contents).unwrap();
            assert_eq!(*uri.pin().unwrap().unwrap().secret, pin.as_bytes());
        }
        for contents in [String::new(), "\n".to_owned(), "1".repeat(MAX_PIN + 1)] {
            std::fs::write(&path, contents).unwrap();
            assert!(matches!(uri.pin(), Err(TokenError::PinFile { .. })));
        }
    }
}
