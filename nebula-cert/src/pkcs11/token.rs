//! A key in a token, found by its URI.

use std::sync::{Mutex, PoisonError};

use cryptoki::context::{CInitializeArgs, CInitializeFlags, Function, Pkcs11};
use cryptoki::error::{Error as ModuleError, RvError};
use cryptoki::mechanism::Mechanism;
use cryptoki::mechanism::eddsa::{EddsaParams, EddsaSignatureScheme};
use cryptoki::object::{Attribute, AttributeType, ObjectClass, ObjectHandle};
use cryptoki::session::{Session, UserType};
use cryptoki::slot::{Slot, TokenInfo};
use cryptoki::types::RawAuthPin;
use sha2::{Digest as _, Sha256};

use super::uri::{GivenPin, TokenPart};
use super::{TokenError, Uri, point};
use crate::key::check_public_key;
use crate::{Curve, Error, Signer};

/// A P-256 or Ed25519 key in a token, with a logged-in session. The private key never leaves the token.
///
/// Threads can share it; signatures are serialized. Keys that require the PIN for every signature
/// (`CKA_ALWAYS_AUTHENTICATE`) are not supported.
pub struct TokenKey {
    connection: Connection,
    key: ObjectHandle,
    curve: Curve,
    public_key: Vec<u8>,
}

impl TokenKey {
    /// Loads the module, logs in and finds the key. Loading runs the module's code, so it must come from a trusted
    /// place.
    ///
    /// # Errors
    /// Returns an error for a part of the URI that matches nothing, or an operation that the token refused.
    pub fn open(uri: &Uri) -> Result<Self, TokenError> {
        let connection = Connection::open(uri)?;
        let pin = uri.pin()?;
        connection.login(pin.as_ref())?;
        let key = connection.find_key(uri, pin.is_some())?;
        let curve = connection.curve_of(key)?;
        let public_key = connection.public_key_of(key, curve)?;
        check_public_key(curve, &public_key).map_err(|_| TokenError::KeyKind)?;
        Ok(Self { connection, key, curve, public_key })
    }
}

impl Signer for TokenKey {
    fn curve(&self) -> Curve {
        self.curve
    }

    fn public_key(&self) -> Vec<u8> {
        self.public_key.clone()
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let sign = |mechanism, bytes: &[u8]| {
            let made = self.connection.sign(&mechanism, self.key, bytes);
            made.map_err(|error| Error::Signer { reason: error.to_string() })
        };
        match self.curve {
            Curve::Curve25519 => sign(Mechanism::Eddsa(EddsaParams::new(EddsaSignatureScheme::Pure)), message),
            Curve::P256 => {
                // Hash here: every token supports this mechanism, but few support one that also hashes.
                let made = sign(Mechanism::Ecdsa, &Sha256::digest(message))?;
                // r and s of 32 bytes each.
                let signature = p256::ecdsa::Signature::from_slice(&made).map_err(|_| Error::SignerFault)?;
                Ok(signature.to_der().as_bytes().to_vec())
            }
        }
    }
}

impl std::fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenKey({})", self.curve)
    }
}

/// A session with a token. Dropping it closes the session and finalizes the module, unless that is shared.
struct Connection {
    /// A session can only do one operation at a time.
    session: Mutex<Option<Session>>,
    module: Option<Pkcs11>,
    /// Whether another part of this program initialized the module and may still need it.
    is_shared: bool,
    has_pin_pad: bool,
}

impl Connection {
    fn open(uri: &Uri) -> Result<Self, TokenError> {
        if cfg!(target_feature = "crt-static") {
            return Err(TokenError::StaticProgram);
        }
        let unusable = |reason: String| TokenError::Module { path: uri.module_path().to_owned(), reason };
        let module = Pkcs11::new(uri.module_path()).map_err(|error| match error {
            ModuleError::LibraryLoading(error) => unusable(error.to_string()),
            other => unusable(reason_of(&other)),
        })?;
        let is_shared = match module.initialize(CInitializeArgs::new(CInitializeFlags::OS_LOCKING_OK)) {
            Ok(()) => false,
            Err(ModuleError::Pkcs11(RvError::CryptokiAlreadyInitialized, _)) => true,
            Err(error) => return Err(unusable(reason_of(&error))),
        };
        let mut connection =
            Self { session: Mutex::new(None), module: Some(module.clone()), is_shared, has_pin_pad: false };
        let (slot, info) = choose(uri, tokens(&module).map_err(refused("list its tokens"))?)?;
        connection.has_pin_pad = info.protected_authentication_path();
        connection.session = Mutex::new(Some(module.open_ro_session(slot).map_err(refused("open a session"))?));
        Ok(connection)
    }

    /// Runs one operation on the session; fails if it is closed.
    fn with_session<T>(
        &self,
        action: &'static str,
        work: impl FnOnce(&Session) -> Result<T, ModuleError>,
    ) -> Result<T, TokenError> {
        // A panic in another thread does not affect the session.
        let session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let closed = || TokenError::Refused { action, reason: "the session is closed".to_owned() };
        work(session.as_ref().ok_or_else(closed)?).map_err(refused(action))
    }

    fn login(&self, pin: Option<&GivenPin>) -> Result<(), TokenError> {
        let part = pin.map_or("pin-value", |pin| pin.part);
        let login = |session: &Session| match pin {
            Some(pin) => session.login_with_raw(UserType::User, &RawAuthPin::new(Box::new(pin.secret.to_vec()))),
            // The user types the PIN on the device.
            None if self.has_pin_pad => session.login(UserType::User, None),
            None => Ok(()),
        };
        self.with_session("log in", |session| {
            Ok(match login(session) {
                Err(ModuleError::Pkcs11(RvError::UserAlreadyLoggedIn, _)) => Ok(()),
                Err(ModuleError::Pkcs11(RvError::PinIncorrect | RvError::PinInvalid | RvError::PinLenRange, _)) => {
                    Err(TokenError::PinRefused { part })
                }
                Err(ModuleError::Pkcs11(RvError::PinLocked, _)) => Err(TokenError::PinLocked { part }),
                other => return other.map(Ok),
            })
        })?
    }

    /// Finds the one private key that the URI describes. Filters part by part, so that the error can name the part that
    /// ruled out the last key.
    fn find_key(&self, uri: &Uri, logged_in: bool) -> Result<ObjectHandle, TokenError> {
        let mut wanted = vec![Attribute::Class(ObjectClass::PRIVATE_KEY)];
        let mut keys = self.find(&wanted)?;
        if keys.is_empty() {
            return Err(TokenError::NoKeys { logged_in });
        }
        let object = uri.object.as_ref().map(|name| ("object", name.clone(), Attribute::Label(name.clone().into())));
        let id = uri.id.as_ref().map(|id| ("id", crate::hex::encode(id), Attribute::Id(id.clone())));
        for (part, value, attribute) in object.into_iter().chain(id) {
            wanted.push(attribute);
            keys = self.find(&wanted)?;
            if keys.is_empty() {
                return Err(TokenError::NoKey { part, value, logged_in });
            }
        }
        match keys[..] {
            [key] => Ok(key),
            _ => Err(TokenError::SeveralKeys { count: keys.len() }),
        }
    }

    fn curve_of(&self, key: ObjectHandle) -> Result<Curve, TokenError> {
        let parameters = self.bytes_of(key, AttributeType::EcParams)?.ok_or(TokenError::KeyKind)?;
        point::curve(&parameters).ok_or(TokenError::KeyKind)
    }

    /// Reads the public key from the private key object if that contains it, else from the public key object with the
    /// same id or, without an id, the same label.
    fn public_key_of(&self, key: ObjectHandle, curve: Curve) -> Result<Vec<u8>, TokenError> {
        let info = self.bytes_of(key, AttributeType::PublicKeyInfo)?;
        if let Some(found) = info.and_then(|info| point::from_key_info(curve, &info)) {
            return Ok(found);
        }
        let id = self.bytes_of(key, AttributeType::Id)?.filter(|id| !id.is_empty());
        let pair = match id {
            Some(id) => Attribute::Id(id),
            None => Attribute::Label(self.bytes_of(key, AttributeType::Label)?.ok_or(TokenError::NoPublicKey)?),
        };
        let found = self.find(&[Attribute::Class(ObjectClass::PUBLIC_KEY), pair])?;
        let [public] = found[..] else { return Err(TokenError::NoPublicKey) };
        let bytes = self.bytes_of(public, AttributeType::EcPoint)?.ok_or(TokenError::NoPublicKey)?;
        point::from_ec_point(curve, &bytes).ok_or(TokenError::KeyKind)
    }

    fn sign(&self, mechanism: &Mechanism<'_>, key: ObjectHandle, bytes: &[u8]) -> Result<Vec<u8>, TokenError> {
        self.with_session("sign", |session| session.sign(mechanism, key, bytes))
    }

    fn find(&self, wanted: &[Attribute]) -> Result<Vec<ObjectHandle>, TokenError> {
        self.with_session("list its keys", |session| session.find_objects(wanted))
    }

    fn bytes_of(&self, object: ObjectHandle, attribute: AttributeType) -> Result<Option<Vec<u8>>, TokenError> {
        let found = self.with_session("describe its key", |session| session.get_attributes(object, &[attribute]))?;
        Ok(found.into_iter().find_map(|found| match found {
            Attribute::EcParams(bytes)
            | Attribute::EcPoint(bytes)
            | Attribute::PublicKeyInfo(bytes)
            | Attribute::Id(bytes)
            | Attribute::Label(bytes) => Some(bytes),
            _ => None,
        }))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Closing a program's last session logs it out; nothing can be done if that fails.
        drop(self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(module) = self.module.take().filter(|_| !self.is_shared) {
            let _ = module.finalize();
        }
    }
}

fn tokens(module: &Pkcs11) -> Result<Vec<(Slot, TokenInfo)>, ModuleError> {
    let slots = module.get_slots_with_initialized_token()?;
    slots.into_iter().map(|slot| Ok((slot, module.get_token_info(slot)?))).collect()
}

/// Finds the one token that the URI describes.
fn choose(uri: &Uri, mut tokens: Vec<(Slot, TokenInfo)>) -> Result<(Slot, TokenInfo), TokenError> {
    let shown: Vec<_> = tokens
        .iter()
        .map(|(slot, info)| format!("token={} (serial={} slot-id={})", info.label(), info.serial_number(), slot.id()))
        .collect();
    let present = shown.join(", ").escape_debug().to_string();
    if tokens.is_empty() {
        return Err(TokenError::NoTokens);
    }
    let no_token = |part, value: &str| TokenError::NoToken { part, value: value.to_owned(), present: present.clone() };
    for (part, value) in &uri.token {
        tokens.retain(|(_, info)| property(info, *part) == value);
        if tokens.is_empty() {
            return Err(no_token(part.name(), value));
        }
    }
    if let Some(id) = uri.slot_id {
        tokens.retain(|(slot, _)| slot.id() == id);
        if tokens.is_empty() {
            return Err(no_token("slot-id", &id.to_string()));
        }
    }
    match tokens.pop() {
        Some(only) if tokens.is_empty() => Ok(only),
        _ => Err(TokenError::SeveralTokens { present }),
    }
}

fn property(info: &TokenInfo, part: TokenPart) -> &str {
    match part {
        TokenPart::Label => info.label(),
        TokenPart::Manufacturer => info.manufacturer_id(),
        TokenPart::Model => info.model(),
        TokenPart::Serial => info.serial_number(),
    }
}

fn refused(action: &'static str) -> impl Fn(ModuleError) -> TokenError {
    move |error| TokenError::Refused { action, reason: reason_of(&error) }
}

/// Function and return code. The crate's own text for a code is a whole paragraph of the standard.
fn reason_of(error: &ModuleError) -> String {
    match error {
        ModuleError::Pkcs11(code, function) => format!("{}: {code:?}", name_of(*function)),
        other => other.to_string(),
    }
}

fn name_of(function: Function) -> String {
    format!("C_{function:?}")
}
