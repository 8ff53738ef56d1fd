//! Authentication by the keys and CAs of the configuration.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::UnixTime;
use nebula_config::Sshd;
use russh::keys::ssh_key::public::KeyData;
use russh::keys::{Certificate, HashAlg};

/// Whether this key may log in as `user`.
pub(super) fn key_may(sshd: &Sshd, user: &str, key: &KeyData) -> bool {
    sshd.users.iter().any(|(name, authorized)| name == user && authorized == key)
}

/// Checks whether the owner of this certificate may log in as `user` from `from`. The client has already proved that it
/// owns the key.
///
/// # Errors
/// Returns the reason for a refusal.
pub(super) fn certificate_may(
    sshd: &Sshd,
    user: &str,
    certificate: &Certificate,
    from: IpAddr,
    now: UnixTime,
) -> Result<(), &'static str> {
    let authorities: Vec<_> = sshd.authorities.iter().map(|key| key.fingerprint(HashAlg::Sha256)).collect();
    if !sshd.authorities.contains(certificate.signature_key()) {
        return Err("certificate signed by unrecognized authority");
    }
    if !certificate.cert_type().is_user() {
        return Err("certificate is not for a user");
    }
    let now = u64::try_from(now).unwrap_or_default();
    certificate.validate_at(now, &authorities).map_err(|_| "certificate is not valid now, or not signed as it says")?;
    let principals = certificate.valid_principals();
    // By the format's own rule, a certificate without principals is valid for every user.
    if !principals.is_empty() && !principals.iter().any(|principal| principal == user) {
        return Err("certificate is not for this user");
    }
    for (name, value) in certificate.critical_options().iter() {
        match name.as_str() {
            "source-address" if value.split(',').any(|range| contains(range.trim(), from)) => {}
            "source-address" => return Err("certificate is not for this source address"),
            _ => return Err("certificate has a critical option that is not supported"),
        }
    }
    Ok(())
}

/// Whether `range`, a prefix or an address, contains `address`.
fn contains(range: &str, address: IpAddr) -> bool {
    let address = address.to_canonical();
    match range.parse::<IpNet>() {
        Ok(network) => network.contains(&address),
        Err(_) => range.parse() == Ok(address),
    }
}

#[cfg(test)]
mod tests {
    use russh::keys::key::safe_rng;
    use russh::keys::ssh_key::certificate::{Builder, CertType};
    use russh::keys::{Algorithm, PrivateKey};

    use super::*;

    const NOW: u64 = 1_800_000_000;

    fn key() -> PrivateKey {
        PrivateKey::random(&mut safe_rng(), Algorithm::Ed25519).unwrap()
    }

    fn sshd(users: &[(&str, &PrivateKey)], authorities: &[&PrivateKey]) -> Sshd {
        let public = |key: &PrivateKey| key.public_key().key_data().clone();
        Sshd {
            listen: "127.0.0.1:2222".to_owned(),
            host_key: key(),
            users: users.iter().map(|(user, key)| ((*user).to_owned(), public(key))).collect(),
            authorities: authorities.iter().map(|key| public(key)).collect(),
            sandbox: "/tmp".into(),
        }
    }

    /// A certificate by `authority` for a new key, valid for an hour from [`NOW`].
    fn certificate(authority: &PrivateKey, kind: CertType, more: impl FnOnce(&mut Builder)) -> Certificate {
        let owner = key().public_key().key_data().clone();
        let mut builder = Builder::new(vec![7; 16], owner, NOW, NOW + 3600).unwrap();
        builder.cert_type(kind).unwrap().key_id("test").unwrap();
        more(&mut builder);
        builder.sign(authority).unwrap()
    }

    fn principal(builder: &mut Builder, name: &str) {
        builder.valid_principal(name).unwrap();
    }

    #[test]
    fn a_key_logs_in_as_its_own_user_only() {
        let (one, other) = (key(), key());
        let sshd = sshd(&[("one", &one), ("both", &one), ("both", &other)], &[]);
        let may = |user, key: &PrivateKey| key_may(&sshd, user, key.public_key().key_data());
        assert!(may("one", &one) && may("both", &one) && may("both", &other));
        assert!(!may("one", &other) && !may("root", &one) && !may("", &one) && !may("one", &key()));
    }

    #[test]
    fn a_certificate_logs_in_within_what_it_says() {
        let (authority, stranger) = (key(), key());
        let sshd = sshd(&[], &[&authority]);
        let from = IpAddr::from([10, 0, 0, 7]);
        let may = |certificate: &Certificate, at: u64| {
            certificate_may(&sshd, "one", certificate, from, i64::try_from(at).unwrap())
        };
        let of = |more: fn(&mut Builder)| certificate(&authority, CertType::User, more);
        let for_one = of(|builder| principal(builder, "one"));
        assert_eq!(may(&for_one, NOW + 1), Ok(()));
        assert!(may(&for_one, NOW - 1).is_err() && may(&for_one, NOW + 3600).is_err());
        assert_eq!(
            may(
                &of(|builder| {
                    builder.all_principals_valid().unwrap();
                }),
                NOW
            ),
            Ok(())
        );
        let by_stranger = certificate(&stranger, CertType::User, |builder| principal(builder, "one"));
        assert_eq!(may(&by_stranger, NOW), Err("certificate signed by unrecognized authority"));
        for (more, refusal) in [
            ((|builder| principal(builder, "two")) as fn(&mut Builder), "not for this user"),
            (
                |builder| {
                    principal(builder, "one");
                    builder.critical_option("force-command", "ls").unwrap();
                },
                "critical option",
            ),
            (
                |builder| {
                    principal(builder, "one");
                    builder.critical_option("source-address", "10.1.0.0/16,10.0.0.8").unwrap();
                },
                "source address",
            ),
        ] {
            let refused = may(&of(more), NOW).unwrap_err();
            assert!(refused.contains(refusal), "{refused}");
        }
        let of_host = certificate(&authority, CertType::Host, |builder| principal(builder, "one"));
        assert_eq!(may(&of_host, NOW), Err("certificate is not for a user"));
        for ranges in ["10.0.0.0/24", "192.0.2.1, 10.0.0.7"] {
            let within = certificate(&authority, CertType::User, |builder| {
                principal(builder, "one");
                builder.critical_option("source-address", ranges).unwrap();
            });
            assert_eq!(may(&within, NOW), Ok(()), "{ranges}");
        }
    }
}
