//! The owner of a flow: the peer that it was allowed for, and the rights that the peer's certificate grants.

use std::fmt::Write as _;

use aws_lc_rs::digest::{SHA256, digest};
use ipnet::IpNet;
use nebula_cert::{Fingerprint, VerifiedCertificate};

/// The parts of a certificate that rules match, as digests. Key, fingerprint and validity are not among them, so that
/// renewing a certificate changes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerIdentity {
    /// The name; a different name is a different peer.
    pub(crate) name: [u64; 2],
    /// Groups, networks, unsafe networks and issuer; if they differ, the peer may be entitled to less.
    pub(crate) rights: [u64; 2],
}

impl From<&VerifiedCertificate> for PeerIdentity {
    fn from(certificate: &VerifiedCertificate) -> Self {
        Self::new(
            certificate.name(),
            certificate.groups(),
            [certificate.networks(), certificate.unsafe_networks()],
            (certificate.issuer_fingerprint(), certificate.issuer_name()),
        )
    }
}

impl PeerIdentity {
    pub(crate) fn new(
        name: &str,
        groups: &[String],
        networks: [&[IpNet]; 2],
        (issuer, issuer_name): (Fingerprint, &str),
    ) -> Self {
        let mut rights = issuer.0.to_vec();
        // Every list and every text is prefixed with its length, so that no two certificates yield the same bytes.
        push_text(&mut rights, issuer_name);
        push_length(&mut rights, groups.len());
        groups.iter().for_each(|group| push_text(&mut rights, group));
        let mut text = String::new();
        for list in networks {
            push_length(&mut rights, list.len());
            for network in list {
                text.clear();
                // Writing to a string cannot fail.
                let _written = write!(text, "{network}");
                push_text(&mut rights, &text);
            }
        }
        Self { name: words(NAME, name.as_bytes()), rights: words(RIGHTS, &rights) }
    }
}

/// Digest that stands for all gateways of a subnet route, which share their flows.
pub(crate) fn route_digest(network: IpNet) -> [u64; 2] {
    words(ROUTE, network.to_string().as_bytes())
}

fn push_text(bytes: &mut Vec<u8>, text: &str) {
    push_length(bytes, text.len());
    bytes.extend_from_slice(text.as_bytes());
}

fn push_length(bytes: &mut Vec<u8>, length: usize) {
    bytes.extend((length as u64).to_be_bytes());
}

/// The first half of a SHA-256 digest. `kind` says what the bytes mean.
fn words(kind: u8, bytes: &[u8]) -> [u64; 2] {
    let digest = digest(&SHA256, &[&[kind], bytes].concat());
    let (words, _) = digest.as_ref().as_chunks::<8>();
    std::array::from_fn(|n| words.get(n).map_or(0, |word| u64::from_be_bytes(*word)))
}

const NAME: u8 = 0;
const RIGHTS: u8 = 1;
const ROUTE: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(name: &str, groups: &[&str], networks: &[&str], behind: &[&str], issuer: u8) -> PeerIdentity {
        let groups: Vec<_> = groups.iter().map(|group| (*group).to_owned()).collect();
        let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
        PeerIdentity::new(name, &groups, [&nets(networks), &nets(behind)], (Fingerprint([issuer; 32]), "ca"))
    }

    #[test]
    fn everything_that_rules_see_makes_a_difference_and_lists_do_not_run_into_each_other() {
        let all = [
            identity("a", &["x", "y"], &["10.1.0.2/16"], &[], 1),
            identity("a", &["xy"], &["10.1.0.2/16"], &[], 1),
            identity("a", &["x"], &["10.1.0.2/16"], &[], 1),
            identity("a", &["x"], &["10.1.0.2/24"], &[], 1),
            identity("a", &["x"], &["10.1.0.2/16", "10.2.0.0/16"], &[], 1),
            identity("a", &["x"], &["10.1.0.2/16"], &["10.2.0.0/16"], 1),
            identity("a", &["x"], &["10.1.0.2/16"], &[], 2),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(all.iter().skip(at + 1).all(|other| one.rights != other.rights), "{at}");
            assert_eq!(one.name, all[0].name);
        }
        let renamed = identity("b", &["x", "y"], &["10.1.0.2/16"], &[], 1);
        assert_eq!(renamed.rights, all[0].rights);
        assert_ne!(renamed.name, all[0].name);
        assert_ne!(route_digest("10.2.0.0/16".parse().unwrap()), identity("10.2.0.0/16", &[], &[], &[], 1).name);
    }
}
