//! Address management: how the overlay address of a pod is computed or allotted, and who may hold one.

use std::{
    borrow::Cow,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;
use nebula_cert::UnixTime;
use serde::{Deserialize, Serialize};

/// Where a pod's overlay address comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AddressMode {
    /// Computed from the pod's primary address; needs no state, so any number of services agree.
    Derive,
    /// Allotted from the overlay prefix and recorded per pod.
    Pool,
    /// The pod's primary address itself.
    Same,
}

/// Why a pod address does not map to an address of an overlay prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeriveError {
    /// An IPv6 pod address does not fit into an IPv4 overlay.
    #[error("an IPv6 pod address has no image in the IPv4 overlay {0}")]
    Family(IpNet),
    /// The host bits are all zero or, in IPv4, all one.
    #[error("it would become {0}, the network or broadcast address of the overlay")]
    Reserved(IpAddr),
}

/// The overlay address of a pod: its host bits in `overlay`; an IPv4 address in the low 32 bits of an IPv6 overlay.
///
/// # Errors
/// Returns an error if the address does not map to one that a host may use.
pub(crate) fn derive(pod: IpAddr, overlay: IpNet) -> Result<IpNet, DeriveError> {
    let image = match (overlay, pod) {
        (IpNet::V4(prefix), IpAddr::V4(pod)) => {
            let host = pod.to_bits() & prefix.hostmask().to_bits();
            IpAddr::V4(Ipv4Addr::from_bits(prefix.network().to_bits() | host))
        }
        (IpNet::V6(prefix), IpAddr::V6(pod)) => {
            let host = pod.to_bits() & prefix.hostmask().to_bits();
            IpAddr::V6(Ipv6Addr::from_bits(prefix.network().to_bits() | host))
        }
        (IpNet::V6(prefix), IpAddr::V4(pod)) => {
            let host = u128::from(pod.to_bits()) & prefix.hostmask().to_bits();
            IpAddr::V6(Ipv6Addr::from_bits(prefix.network().to_bits() | host))
        }
        (IpNet::V4(_), IpAddr::V6(_)) => return Err(DeriveError::Family(overlay)),
    };
    if is_usable(image, overlay) { Ok(with_prefix_of(image, overlay)) } else { Err(DeriveError::Reserved(image)) }
}

/// Whether a host may have `address` in `overlay`.
pub(crate) fn is_usable(address: IpAddr, overlay: IpNet) -> bool {
    let host_bits = overlay.max_prefix_len() - overlay.prefix_len();
    // Prefixes of one or two addresses have neither a network nor a broadcast address (RFC 3021, RFC 6164).
    host_bits < 2 || (address != overlay.network() && (overlay.addr().is_ipv6() || address != overlay.broadcast()))
}

/// The first address of a range that a host may have, but for a range of one address: that one.
pub(crate) fn first_host(range: IpNet) -> IpAddr {
    range.hosts().find(|host| *host != range.network()).unwrap_or_else(|| range.network())
}

/// `address`, with the length of the prefix `overlay`.
pub(crate) fn with_prefix_of(address: IpAddr, overlay: IpNet) -> IpNet {
    // The length came from a prefix of the same family, so it fits.
    IpNet::new(address, overlay.prefix_len()).unwrap_or_else(|_| IpNet::from(address))
}

/// Addresses of a pool in the order in which they are allotted, starting after `last` and wrapping once; at most
/// [`MAX_ADDRESSES_TRIED`] of them.
pub(crate) fn candidates(overlay: IpNet, last: Option<IpAddr>) -> impl Iterator<Item = IpNet> {
    let base = bits(overlay.network());
    let host_bits = u32::from(overlay.max_prefix_len() - overlay.prefix_len());
    let hosts = 1_u128.checked_shl(host_bits).unwrap_or(u128::MAX);
    let start = match last {
        Some(last) if overlay.contains(&last) => bits(last) - base + 1,
        _ => 0,
    };
    (0..hosts.min(MAX_ADDRESSES_TRIED)).filter_map(move |step| {
        let bits = base + (start + step) % hosts;
        let address = match overlay {
            IpNet::V4(_) => IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(bits).ok()?)),
            IpNet::V6(_) => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        };
        is_usable(address, overlay).then(|| with_prefix_of(address, overlay))
    })
}

/// The address `steps` after `first`, if there is one.
pub(crate) fn after(first: IpAddr, steps: u32) -> Option<IpAddr> {
    match first {
        IpAddr::V4(first) => first.to_bits().checked_add(steps).map(|bits| Ipv4Addr::from_bits(bits).into()),
        IpAddr::V6(first) => first.to_bits().checked_add(steps.into()).map(|bits| Ipv6Addr::from_bits(bits).into()),
    }
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The owner of an identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Subject {
    /// A host that enrolled with a token.
    Host {
        /// Certificate name; a host keeps it across tokens.
        name: String,
    },
    /// A pod that a node vouched for.
    Pod {
        /// Kubernetes namespace.
        namespace: String,
        /// Pod name.
        name: String,
        /// Pod UID.
        uid: String,
        /// Primary address.
        address: IpAddr,
        /// Its primary address of the other family, if that is in its certificate.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        other_address: Option<IpAddr>,
        /// The node it runs on: its name in Kubernetes, or else the address its proof came from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<String>,
        /// Its service account, with Kubernetes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service_account: Option<String>,
    },
    /// A pod of the lighthouses' StatefulSet.
    Lighthouse {
        /// Kubernetes namespace.
        namespace: String,
        /// Pod name.
        name: String,
        /// Pod UID.
        uid: String,
    },
    /// A pod of the gateways' DaemonSet: the way from and to the pods of its node.
    Gateway {
        /// Kubernetes namespace.
        namespace: String,
        /// Pod name.
        name: String,
        /// Pod UID.
        uid: String,
        /// The node it runs on.
        node: String,
    },
}

impl Subject {
    /// Names the subject among all others: the UID of a pod, or `host NAME`, which is no UID.
    #[must_use]
    pub(crate) fn id(&self) -> Cow<'_, str> {
        match self {
            Self::Pod { uid, .. } | Self::Lighthouse { uid, .. } | Self::Gateway { uid, .. } => Cow::Borrowed(uid),
            Self::Host { name } => Cow::Owned(format!("host {name}")),
        }
    }

    /// Namespace and name of the pod, lighthouses and gateways among them; `None` for a host.
    #[must_use]
    pub(crate) fn pod(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pod { namespace, name, .. }
            | Self::Lighthouse { namespace, name, .. }
            | Self::Gateway { namespace, name, .. } => Some((namespace, name)),
            Self::Host { .. } => None,
        }
    }

    /// The identity that owns a connection after a valid proof.
    #[must_use]
    pub(crate) fn identity(&self) -> String {
        match self {
            Self::Host { .. } => self.to_string(),
            Self::Pod { uid, .. } | Self::Lighthouse { uid, .. } | Self::Gateway { uid, .. } => {
                format!("{self} {uid}")
            }
        }
    }

    /// Whether this is a pod with a primary address of the pod `earlier`, and so with its overlay address.
    ///
    /// A primary network reassigns the address of a pod that is gone. The overlay address must go with it, or the new
    /// pod could not start before the old certificate expires. That the first pod *is* gone must be shown separately.
    /// Two *different* pod addresses that map to the same overlay address mean that the overlay prefix is too small for
    /// the pod networks, which nothing here can solve.
    #[must_use]
    pub(crate) fn has_address_of(&self, earlier: &Self, mode: AddressMode) -> bool {
        match (earlier, self) {
            (
                Self::Pod { address: earlier, other_address: earlier_other, .. },
                Self::Pod { address, other_address, .. },
            ) => {
                let is_same = |one: &IpAddr| one == address || Some(*one) == *other_address;
                match mode {
                    AddressMode::Pool => false,
                    AddressMode::Derive | AddressMode::Same => {
                        is_same(earlier) || earlier_other.as_ref().is_some_and(is_same)
                    }
                }
            }
            _ => false,
        }
    }

    /// Whether this is the lighthouse that replaces the lighthouse `earlier`: of the same name, with another UID. A
    /// name has one pod at a time, so the API server has confirmed that the earlier one is gone when it confirms this.
    /// Likewise the next gateway of the same node, which the API server has confirmed to be there.
    fn replaces(&self, earlier: &Self) -> bool {
        match (earlier, self) {
            (
                Self::Lighthouse { namespace: earlier_namespace, name: earlier_name, uid: earlier },
                Self::Lighthouse { namespace, name, uid },
            ) => (earlier_namespace, earlier_name) == (namespace, name) && earlier != uid,
            (Self::Gateway { node: earlier_node, uid: earlier, .. }, Self::Gateway { node, uid, .. }) => {
                earlier_node == node && earlier != uid
            }
            _ => false,
        }
    }
}

/// The holder of an overlay address, and how long it holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    /// The holder.
    pub(crate) subject: Subject,
    /// Last second of its longest-lived certificate or reservation.
    pub(crate) until: UnixTime,
    /// Its certificates for the address, by fingerprint, with the last second of each.
    pub(crate) certificates: Vec<(String, UnixTime)>,
    /// For what name of a pod, or host, the address is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept: Option<Kept>,
}

/// Keeps an address for whatever pod has a name, also while there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kept {
    /// The pod's `namespace/name`, or `host NAME`.
    pub(crate) name: String,
    /// Last second.
    pub(crate) until: UnixTime,
}

impl Holder {
    /// Whether this is `subject`, whatever its address and certificate name.
    #[must_use]
    pub(crate) fn is(&self, subject: &Subject) -> bool {
        match (&self.subject, subject) {
            (Subject::Host { name: held }, Subject::Host { name }) => held == name,
            (Subject::Pod { uid: held, .. }, Subject::Pod { uid, .. })
            | (Subject::Lighthouse { uid: held, .. }, Subject::Lighthouse { uid, .. })
            | (Subject::Gateway { uid: held, .. }, Subject::Gateway { uid, .. }) => held == uid,
            _ => false,
        }
    }

    /// Whether `asker` may have this holder's address at `now`, without proof that the holder is gone.
    #[must_use]
    pub(crate) fn yields_to(&self, asker: &Subject, now: UnixTime) -> bool {
        let is_kept = self.kept.as_ref().is_some_and(|kept| kept.until >= now);
        (self.until < now && !is_kept) || self.is(asker) || asker.replaces(&self.subject)
    }

    /// Whether the address is kept for the pod of that name, so that it goes from one pod of the name to the next.
    pub(crate) fn is_kept_for(&self, name: Option<&str>) -> bool {
        name.is_some() && self.kept.as_ref().map(|kept| kept.name.as_str()) == name
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host { name } => write!(f, "host {name}"),
            Self::Pod { namespace, name, .. } => write!(f, "pod {namespace}/{name}"),
            Self::Lighthouse { namespace, name, .. } => write!(f, "lighthouse {namespace}/{name}"),
            Self::Gateway { node, .. } => write!(f, "gateway of node {node}"),
        }
    }
}

/// Maximum number of addresses tried before a pool counts as full: bounds the work of one request in a huge prefix.
const MAX_ADDRESSES_TRIED: u128 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn image(pod: &str, overlay: &str) -> Result<String, DeriveError> {
        derive(pod.parse().unwrap(), overlay.parse().unwrap()).map(|net| net.to_string())
    }

    fn pod(uid: &str, address: &str) -> Subject {
        let address = address.parse().unwrap();
        Subject::Pod {
            namespace: "default".into(),
            name: "web".into(),
            uid: uid.into(),
            address,
            other_address: None,
            node: None,
            service_account: None,
        }
    }

    #[test]
    fn host_bits_move_into_the_overlay_prefix() {
        assert_eq!(image("10.244.3.7", "10.42.0.0/16").unwrap(), "10.42.3.7/16");
        assert_eq!(image("192.168.77.5", "100.64.0.0/10").unwrap(), "100.104.77.5/10");
        assert_eq!(image("2001:db8::1:2", "fd42::/64").unwrap(), "fd42::1:2/64");
    }

    #[test]
    fn an_ipv4_pod_address_is_embedded_in_an_ipv6_overlay() {
        assert_eq!(image("10.244.3.7", "fd42::/96").unwrap(), "fd42::af4:307/96");
        assert_eq!(image("10.244.3.7", "fd42:1::/48").unwrap(), "fd42:1::af4:307/48");
    }

    #[test]
    fn host_bits_of_the_overlay_itself_are_ignored() {
        assert_eq!(image("10.244.3.7", "10.42.9.9/16").unwrap(), "10.42.3.7/16");
    }

    #[test]
    fn network_and_broadcast_images_are_refused() {
        assert!(matches!(image("10.244.0.0", "10.42.0.0/16"), Err(DeriveError::Reserved(_))));
        assert!(matches!(image("10.244.255.255", "10.42.0.0/16"), Err(DeriveError::Reserved(_))));
        assert!(matches!(image("0.0.0.0", "fd42::/96"), Err(DeriveError::Reserved(_))));
        assert_eq!(image("10.0.0.255", "10.42.0.0/16").unwrap(), "10.42.0.255/16");
    }

    #[test]
    fn an_ipv6_pod_has_no_ipv4_image() {
        assert!(matches!(image("fd00::1", "10.42.0.0/16"), Err(DeriveError::Family(_))));
    }

    #[test]
    fn pool_candidates_skip_reserved_ones_and_wrap_once() {
        let all = |last: Option<&str>| -> Vec<String> {
            candidates("10.0.0.0/29".parse().unwrap(), last.map(|last| last.parse().unwrap()))
                .map(|net| net.addr().to_string())
                .collect()
        };
        assert_eq!(all(None), ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        assert_eq!(all(Some("10.0.0.5")), ["10.0.0.6", "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"]);
        assert_eq!(all(Some("192.0.2.1")).len(), 6);
    }

    #[test]
    fn a_huge_pool_is_searched_only_so_far() {
        let last = Some("fd42::ffff:ffff:ffff:fffe".parse().unwrap());
        assert!(candidates("::/0".parse().unwrap(), None).count() <= MAX_ADDRESSES_TRIED as usize);
        assert!(candidates("fd42::/64".parse().unwrap(), last).count() <= MAX_ADDRESSES_TRIED as usize);
    }

    #[test]
    fn a_reused_pod_address_goes_to_the_newer_pod_only_when_derived() {
        let old = Holder { subject: pod("one", "10.244.0.5"), until: 1_000, certificates: Vec::new(), kept: None };
        let new = pod("two", "10.244.0.5");
        assert!(new.has_address_of(&old.subject, AddressMode::Derive));
        assert!(!new.has_address_of(&old.subject, AddressMode::Pool));
        assert!(!old.yields_to(&new, 10), "not before it is shown that the old one is gone");
        assert!(old.yields_to(&new, 1_001));
    }

    #[test]
    fn a_reused_pod_address_of_either_family_counts() {
        let both = |uid: &str, address: &str, other: &str| match pod(uid, address) {
            Subject::Pod { namespace, name, uid, address, node, service_account, .. } => {
                let other_address = Some(other.parse().unwrap());
                Subject::Pod { namespace, name, uid, address, other_address, node, service_account }
            }
            _ => unreachable!(),
        };
        let old = both("one", "10.244.0.5", "fd00:244::5");
        for mode in [AddressMode::Derive, AddressMode::Same] {
            assert!(both("two", "10.244.0.6", "fd00:244::5").has_address_of(&old, mode), "{mode:?}");
            assert!(!both("two", "10.244.0.6", "fd00:244::6").has_address_of(&old, mode), "{mode:?}");
        }
    }

    #[test]
    fn two_pod_addresses_with_one_image_are_a_conflict() {
        let held = Holder { subject: pod("one", "10.244.0.5"), until: 1_000, certificates: Vec::new(), kept: None };
        assert!(!held.yields_to(&pod("two", "10.245.0.5"), 10));
        assert!(!pod("two", "10.245.0.5").has_address_of(&held.subject, AddressMode::Derive));
        assert!(held.yields_to(&pod("one", "10.245.0.5"), 10));
    }

    #[test]
    fn hosts_and_pods_never_take_each_others_address() {
        let host = Subject::Host { name: "lighthouse".into() };
        let held = Holder { subject: host.clone(), until: 1_000, certificates: Vec::new(), kept: None };
        assert!(held.yields_to(&host, 10));
        for other in [Subject::Host { name: "other".into() }, pod("one", "10.244.0.5")] {
            assert!(!held.yields_to(&other, 10) && !other.has_address_of(&host, AddressMode::Derive));
        }
    }
}
