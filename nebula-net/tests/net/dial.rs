//! What an error of a dial says about its cause.

use std::io::{Error, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template};
use nebula_core::Config;
use nebula_core::diagnosis::RefusalReason;
use nebula_net::{Net, StartError, Unreached};

use crate::common::{hosts, overlay};
use crate::within;

fn cause(error: &Error) -> Unreached {
    error.get_ref().and_then(|cause| cause.downcast_ref::<Unreached>()).unwrap_or_else(|| panic!("{error}")).clone()
}

/// Two nodes whose configurations are changed before they start.
fn nets(change: impl FnOnce(&mut [Config; 2])) -> [Net; 2] {
    let [(near_socket, near), (far_socket, far)] = hosts().expect("two hosts");
    let mut configs = [near, far];
    change(&mut configs);
    let [near, far] = configs;
    [(near_socket, near), (far_socket, far)]
        .map(|(socket, config)| Net::builder(config).socket(socket).start().expect("it starts"))
}

async fn fails(net: &Net, limit: Duration) -> (ErrorKind, Unreached) {
    let error = within(net.dial_timeout("10.42.0.2:7", limit)).await.expect_err("no way");
    (error.kind(), cause(&error))
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_rule_that_is_missing_on_either_side_is_told_apart() {
    let target = SocketAddr::new(overlay(2).into(), 7);
    let [near, _far] = nets(|[near, _]| near.firewall.outbound.clear());
    let (kind, cause) = fails(&near, 10 * SECOND).await;
    assert_eq!((kind, cause), (ErrorKind::PermissionDenied, Unreached::NoRule(target)));

    let [near, _far] = nets(|[_, far]| far.firewall.inbound.clear());
    let (kind, cause) = fails(&near, SECOND / 2).await;
    assert_eq!((kind, cause), (ErrorKind::TimedOut, Unreached::Silent { peer: target.ip(), port: 7 }));
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_named_with_what_was_tried() {
    let nowhere = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = nowhere.local_addr().unwrap();
    let [near, _far] = nets(|[near, _]| {
        near.static_hosts.insert(overlay(2).into(), vec![at]);
    });
    let expected = Unreached::NoAnswer { peer: overlay(2).into(), tried: vec![at] };
    assert_eq!(fails(&near, SECOND).await, (ErrorKind::HostUnreachable, expected.clone()));
    let error = within(near.up_timeout(overlay(2).into(), SECOND / 10)).await.unwrap_err();
    assert_eq!(cause(&error), expected);
    assert!(error.to_string().contains(&at.to_string()), "{error}");

    let [near, _far] = nets(|[near, _]| near.static_hosts.clear());
    assert_eq!(fails(&near, SECOND).await, (ErrorKind::HostUnreachable, Unreached::NoEndpoint(overlay(2).into())));
}

#[tokio::test]
async fn a_peer_of_another_ca_is_refused_with_the_reason() {
    let [_, (_, stranger)] = hosts::<2>().unwrap();
    // The far one trusts us, but not we it.
    let [near, _far] = nets(|[_, far]| far.identity = stranger.identity);
    let (kind, cause) = fails(&near, 2 * SECOND).await;
    assert_eq!(kind, ErrorKind::PermissionDenied);
    let Unreached::Handshake { reason, text, .. } = cause else { panic!("{cause:?}") };
    assert_eq!(reason, RefusalReason::UnknownCa, "{text}");
}

#[tokio::test]
async fn a_closed_port_is_refused_as_before() {
    let [near, _far] = nets(|_| {});
    let error = within(near.dial("10.42.0.2:7")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    assert!(error.get_ref().is_some_and(|cause| cause.is::<nebula_net::tcp::Error>()), "{error:?}");
}

#[tokio::test]
async fn a_node_whose_certificate_is_not_valid_does_not_start() {
    let key = SigningKey::generate(Curve::Curve25519).unwrap();
    let long = 1_600_000_000..=2_000_000_000;
    let authority = Template { public_key: key.public_key(), ..Template::new("ca", long) }.self_sign(&key).unwrap();
    for (validity, text) in
        [(1_600_000_001..=1_600_000_002, "expired"), (1_999_999_998..=1_999_999_999, "not valid yet")]
    {
        let host_key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let template = Template {
            networks: vec!["10.42.0.1/16".parse().unwrap()],
            public_key: host_key.public_key(),
            ..Template::new("host", validity)
        };
        let identity = Identity::new(vec![template.sign(&authority, &key).unwrap()], host_key).unwrap();
        let mut trust = CaPool::new();
        trust.add(authority.clone()).unwrap();
        let error = Net::builder(Config::new(identity, trust)).start().unwrap_err();
        assert!(matches!(&error, StartError::Identity(_)) && error.to_string().contains(text), "{error}");
    }
}
