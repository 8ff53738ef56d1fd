//! `kubectl nebula revoke` in a real two-node cluster: who may, and what becomes of the pod whose certificates are
//! revoked.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::time::Duration;

use super::on_call::Site;

/// The blocklist is followed; an instance that keeps its peer's tunnel for longer did not hear of it.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);
const BACK_WITHIN: Duration = Duration::from_secs(90);

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn a_team_revokes_only_once_it_may_and_peers_refuse_the_pod_until_another_one_replaces_it() {
    let site = Site::new();
    let revoke = |further: &[&str]| {
        site.ask(&[&["revoke", "shop/db", "--reason", "it was taken over", "--keep-out"], further].concat())
    };
    let kubectl = |words: &str| site.town.nodes.kubectl(&words.split(' ').collect::<Vec<_>>());
    // The team's own account, which nobody has given anything.
    kubectl("create serviceaccount -n shop nebula-operator");
    let said = revoke(&["--yes"]);
    assert!(said.contains("may not delete certificates.nebula-cni in namespace shop"), "{said}");
    assert!(said.contains("kubectl create rolebinding -n shop nebula-operator"), "{said}");
    assert!(site.knock(), "nothing was revoked");

    kubectl(
        "create rolebinding -n shop nebula-operator --clusterrole=nebula-operator --serviceaccount=shop:nebula-operator",
    );
    // The API server's authorizer learns of it in a moment.
    site.town.nodes.until("the team may", REFUSED_WITHIN, || revoke(&["--dry-run"]).contains("would be revoked"));
    assert!(site.knock(), "a preview changes nothing");
    let elsewhere =
        site.ask(&["revoke", "other/none", "--reason", "x", "--yes", "--service-account", "shop/nebula-operator"]);
    assert!(elsewhere.contains("may not delete certificates.nebula-cni in namespace other"), "{elsewhere}");

    let said = revoke(&["--yes"]);
    assert!(said.contains("gets no further certificate"), "{said}");
    site.town.nodes.until("web does not reach db any more", REFUSED_WITHIN, || !site.knock());
    // It asks for another certificate meanwhile, and gets none.
    std::thread::sleep(REFUSED_WITHIN);
    assert!(!site.knock(), "db came back: {}", site.ask(&["cert", "-A"]));
    let again = revoke(&["--yes"]);
    assert!(again.contains("was revoked "), "{again}");

    kubectl("delete pod -n shop db --wait=true --timeout=75s");
    site.make_pods();
    site.town.nodes.until("web reaches the pod that replaces db", BACK_WITHIN, || site.knock());
}
