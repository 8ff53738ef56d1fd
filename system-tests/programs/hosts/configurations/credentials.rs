//! `pki` and `cipher`.

use super::bench::{Case, good, refused, refused_as, remarked};

pub(super) const CASES: &[Case] = &[
    good("no other key", ""),
    refused("no pki at all", "NO_CREDENTIALS: 1", "pki.key"),
    refused("pki without key", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt}", "no pki.key path or PEM data provided"),
    refused("pki without cert", "pki: {ca: $DIR/ca.crt, key: $DIR/host.key}", "no pki.cert path or PEM data provided"),
    refused("pki without ca", "pki: {cert: $DIR/host.crt, key: $DIR/host.key}", "no pki.ca path or PEM data provided"),
    refused("pki as a scalar", "pki: yes", "pki.key"),
    refused("pki as a list", "pki: [ca, cert]", "pki.key"),
    refused("pki null", "pki:", "pki.key"),
    refused("key path empty", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: ''}", "pki.key"),
    refused("key null", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: ~}", "pki.key"),
    refused("key as a list", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: [$DIR/host.key]}", "pki.key"),
    refused("cert as a list", "pki: {ca: $DIR/ca.crt, cert: [$DIR/host.crt], key: $DIR/host.key}", "pki.cert"),
    refused("ca as a list", "pki: {ca: [$DIR/ca.crt], cert: $DIR/host.crt, key: $DIR/host.key}", "pki.ca"),
    refused(
        "key file missing",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/none.key}",
        "unable to read pki.key file",
    ),
    refused(
        "cert file missing",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/none.crt, key: $DIR/host.key}",
        "unable to read pki.cert file",
    ),
    refused(
        "ca file missing",
        "pki: {ca: $DIR/none.crt, cert: $DIR/host.crt, key: $DIR/host.key}",
        "unable to read pki.ca file",
    ),
    refused("key is a folder", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR}", "unable to read pki.key file"),
    refused(
        "key of another host",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/other.key}",
        "private key is not a pair with public key in nebula cert",
    ),
    refused("signing key as host key", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/ca.key}", "pki.key"),
    refused(
        "key file with a certificate",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.crt}",
        "pki.key",
    ),
    refused("key file without PEM", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/junk.crt}", "pki.key"),
    refused("cert file without PEM", "pki: {ca: $DIR/ca.crt, cert: $DIR/junk.crt, key: $DIR/host.key}", "pki.cert"),
    refused("cert file empty", "pki: {ca: $DIR/ca.crt, cert: $DIR/empty.crt, key: $DIR/host.key}", "pki.cert"),
    refused_as(
        "ca file without PEM",
        "pki: {ca: $DIR/junk.crt, cert: $DIR/host.crt, key: $DIR/host.key}",
        "CA trust store",
        "CA trust store",
    ),
    remarked("ca file empty", "pki: {ca: $DIR/empty.crt, cert: $DIR/host.crt, key: $DIR/host.key}", "pki.ca"),
    refused("ca as host certificate", "pki: {ca: $DIR/ca.crt, cert: $DIR/ca.crt, key: $DIR/host.key}", "cert"),
    refused(
        "host certificate expired",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/expired.crt, key: $DIR/host.key}",
        "nebula certificate for this host is expired",
    ),
    refused(
        "every ca expired",
        "pki: {ca: $DIR/old-ca.crt, cert: $DIR/host.crt, key: $DIR/host.key}",
        "no valid CA certificates present",
    ),
    remarked("one ca of two expired", "pki: {ca: $DIR/cas.crt, cert: $DIR/host.crt, key: $DIR/host.key}", "expired"),
    refused(
        "host certificate among the cas",
        "pki: {ca: $DIR/ca-and-host.crt, cert: $DIR/host.crt, key: $DIR/host.key}",
        "certificate is not a CA",
    ),
    remarked("ca that did not sign", "pki: {ca: $DIR/ca-p256.crt, cert: $DIR/host.crt, key: $DIR/host.key}", "pki.ca"),
    good("P256", "pki: {ca: $DIR/ca-p256.crt, cert: $DIR/host-p256.crt, key: $DIR/host-p256.key}"),
    refused_as(
        "key of another curve",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host-p256.key}",
        "not a pair",
        "pki.key",
    ),
    good("version 1", "pki: {ca: $DIR/ca.crt, cert: $DIR/v1.crt, key: $DIR/host.key}"),
    good("both versions", "pki: {ca: $DIR/ca.crt, cert: $DIR/both.crt, key: $DIR/host.key}"),
    good("two addresses", "pki: {ca: $DIR/ca.crt, cert: $DIR/dual.crt, key: $DIR/host.key}"),
    refused(
        "version 2 twice",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/twice.crt, key: $DIR/host.key}",
        "v2 certificate already found in pki.cert",
    ),
    refused(
        "versions with different networks",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/differ.crt, key: $DIR/host.key}",
        "v1 and v2 networks are not the same",
    ),
    good(
        "initiating_version 1 of both",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/both.crt, key: $DIR/host.key, initiating_version: 1}",
    ),
    good(
        "initiating_version 2 quoted",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/both.crt, key: $DIR/host.key, initiating_version: '2'}",
    ),
    refused(
        "initiating_version without its certificate",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, initiating_version: 1}",
        "pki.initiating_version",
    ),
    refused(
        "initiating_version 0",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, initiating_version: 0}",
        "unknown pki.initiating_version: 0",
    ),
    remarked(
        "initiating_version 2 without its certificate",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/v1.crt, key: $DIR/host.key, initiating_version: 2}",
        "pki.initiating_version",
    ),
    refused(
        "initiating_version unknown",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, initiating_version: 3}",
        "unknown pki.initiating_version: 3",
    ),
    remarked(
        "initiating_version negative",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, initiating_version: -1}",
        "pki.initiating_version",
    ),
    remarked(
        "initiating_version as a word",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, initiating_version: two}",
        "pki.initiating_version",
    ),
    good(
        "blocklist",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, blocklist: \
         [c99d4e650533b92061b09918e838a5a0a6aaee21eed1d12fd937682865936c72]}",
    ),
    remarked(
        "blocklist entry that is no fingerprint",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, blocklist: [abc]}",
        "pki.blocklist.0",
    ),
    remarked(
        "blocklist as a scalar",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, blocklist: \
         c99d4e650533b92061b09918e838a5a0a6aaee21eed1d12fd937682865936c72}",
        "pki.blocklist",
    ),
    good("blocklist empty", "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, blocklist: []}"),
    remarked(
        "blocklist under its old name",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, blacklist: [abc]}",
        "pki.blocklist",
    ),
    good(
        "disconnect_invalid as yes",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, disconnect_invalid: yes}",
    ),
    remarked(
        "disconnect_invalid as a word",
        "pki: {ca: $DIR/ca.crt, cert: $DIR/host.crt, key: $DIR/host.key, disconnect_invalid: maybe}",
        "pki.disconnect_invalid",
    ),
    good("cipher aes", "cipher: aes"),
    good("cipher chachapoly", "cipher: chachapoly"),
    refused("cipher unknown", "cipher: des", "cipher"),
    refused("cipher in capitals", "cipher: AES", "cipher"),
    refused("cipher empty", "cipher: ''", "cipher"),
    good("cipher null", "cipher:"),
    refused("cipher as a list", "cipher: [aes]", "[aes]"),
    refused("cipher from the environment, which nobody reads", "cipher: ${FOO}", "cipher"),
];
