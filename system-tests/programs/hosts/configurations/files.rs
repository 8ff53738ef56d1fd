//! Files and folders, and how several files become one configuration.

use super::bench::{Case, good, refused, refused_as, remarked};

pub(super) const CASES: &[Case] = &[
    refused_as("path missing", "nowhere", "no config files found at", "no config files found at").with(&[("x", "")]),
    refused_as("folder without configuration", "", "no config files found at", "no config files found at")
        .with(&[("readme.txt", "hello")]),
    good("file of another extension named itself", "main.conf").with(&[("main.conf", "$PKI")]),
    good("folder of one file", "").with(&[("a.yml", "$PKI")]),
    good("folder of both extensions", "").with(&[("a.yml", "$PKI"), ("b.yaml", "cipher: aes")]),
    good("file of another extension in a folder is not read", "").with(&[("a.yml", "$PKI"), ("b.txt", "{")]),
    good("folder in the folder", "").with(&[("a/b/c.yml", "$PKI"), ("z.yml", "listen: {port: 1}")]),
    refused_as("one file of many broken", "", "yaml", "yaml").with(&[("a.yml", "$PKI"), ("b.yml", "listen: {")]),
    refused_as("list and map", "", "cannot append two slices", "firewall").with(&[
        ("a.yml", "$PKI"),
        ("b.yml", "firewall: [1]"),
        ("c.yml", "firewall: {inbound: []}"),
    ]),
    good("later scalar wins", "").with(&[("a.yml", "$PKI\ncipher: des"), ("b.yml", "cipher: aes")]),
    refused("earlier scalar loses", "", "cipher").with(&[("a.yml", "$PKI\ncipher: aes"), ("b.yml", "cipher: des")]),
    good("later file in a sub folder wins", "")
        .with(&[("99.yaml", "$PKI\ncipher: des"), ("sub/50.yml", "cipher: aes")]),
    remarked("later false does not win", "", "relay.am_relay")
        .with(&[("a.yml", "$PKI\nrelay: {am_relay: true}"), ("b.yml", "relay: {am_relay: false}")]),
    remarked("later zero does not win", "", "listen.port").with(&[
        ("a.yml", "$PKI\nlisten: {port: 4242}\nlighthouse: {am_lighthouse: true}"),
        ("b.yml", "listen: {port: 0}"),
    ]),
    good("lists add up", "").with(&[
        ("a.yml", "$PKI\nfirewall: {inbound: [{port: any, proto: any, host: a}]}"),
        ("b.yml", "firewall: {inbound: [{port: any, proto: any, host: b}]}"),
    ]),
    refused("later list comes first", "", "firewall.inbound rule #1").with(&[
        ("a.yml", "$PKI\nfirewall: {inbound: [{port: x, proto: any, host: a}]}"),
        ("b.yml", "firewall: {inbound: [{port: any, proto: any, host: b}]}"),
    ]),
    good("maps merge", "").with(&[
        ("a.yml", "$PKI\nlisten: {port: 4242}"),
        ("b.yml", "lighthouse: {am_lighthouse: true}\nlisten: {host: 0.0.0.0}"),
    ]),
    good("empty file among others", "").with(&[("a.yml", "$PKI"), ("b.yml", ""), ("c.yml", "# nothing")]),
    refused_as("root of another kind among others", "", "cannot unmarshal", "cannot unmarshal")
        .with(&[("a.yml", "$PKI"), ("b.yml", "- x")]),
    good("scalar over map", "").with(&[("a.yml", "$PKI\npunchy: {punch: true}"), ("b.yml", "punchy: true")]),
    refused("folder without credentials", "", "pki.key").with(&[("a.yml", "listen: {port: 1}")]),
];
