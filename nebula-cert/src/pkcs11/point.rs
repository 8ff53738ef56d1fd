//! Decoding public keys in the formats that tokens return.

use crate::Curve;

/// The curve that `CKA_EC_PARAMS` names.
pub(super) fn curve(parameters: &[u8]) -> Option<Curve> {
    match parameters {
        P256_OID => Some(Curve::P256),
        ED25519_OID | ED25519_NAME => Some(Curve::Curve25519),
        _ => None,
    }
}

/// The key in `CKA_EC_POINT`: a DER octet string according to the standard, but some tokens return the bare point.
pub(super) fn from_ec_point(curve: Curve, bytes: &[u8]) -> Option<Vec<u8>> {
    let length = curve.public_key_length();
    let key = match bytes {
        [OCTET_STRING, short, key @ ..] if usize::from(*short) == length && key.len() == length => key,
        key if key.len() == length => key,
        _ => return None,
    };
    Some(key.to_vec())
}

/// The key in `CKA_PUBLIC_KEY_INFO`, a DER SubjectPublicKeyInfo.
pub(super) fn from_key_info(curve: Curve, info: &[u8]) -> Option<Vec<u8>> {
    let prefix = match curve {
        Curve::P256 => P256_KEY_INFO,
        Curve::Curve25519 => ED25519_KEY_INFO,
    };
    info.strip_prefix(prefix).filter(|key| key.len() == curve.public_key_length()).map(<[u8]>::to_vec)
}

const OCTET_STRING: u8 = 0x04;
// 1.2.840.10045.3.1.7
const P256_OID: &[u8] = &[0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07];
// 1.3.101.112
const ED25519_OID: &[u8] = &[0x06, 0x03, 0x2b, 0x65, 0x70];
// PKCS#11 3.0 names the curve as a printable string.
const ED25519_NAME: &[u8] = b"\x13\x0cedwards25519";
// SEQUENCE { SEQUENCE { OID id-ecPublicKey, OID of the curve }, BIT STRING without unused bits }
const P256_KEY_INFO: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
// SEQUENCE { SEQUENCE { OID of the curve }, BIT STRING without unused bits }
const ED25519_KEY_INFO: &[u8] = &[0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_read_bare_and_as_an_octet_string() {
        for (curve, length) in [(Curve::P256, 65_u8), (Curve::Curve25519, 32)] {
            let key = vec![4; length.into()];
            assert_eq!(from_ec_point(curve, &key), Some(key.clone()));
            assert_eq!(from_ec_point(curve, &[&[OCTET_STRING, length], &*key].concat()), Some(key.clone()));
            for bytes in [&[][..], &key[1..], &[&[OCTET_STRING, length - 1], &*key].concat()] {
                assert_eq!(from_ec_point(curve, bytes), None);
            }
        }
    }

    #[test]
    fn a_key_info_of_another_kind_or_length_is_refused() {
        let key = vec![7; 32];
        let info = [ED25519_KEY_INFO, &key].concat();
        assert_eq!(from_key_info(Curve::Curve25519, &info), Some(key));
        assert_eq!(from_key_info(Curve::Curve25519, &info[..43]), None);
        assert_eq!(from_key_info(Curve::P256, &info), None);
    }
}
