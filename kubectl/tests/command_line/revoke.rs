//! `kubectl nebula revoke`: who is asked for what, what is shown, and what is never sent twice.

use std::io::{Read, Write};
use std::process::Stdio;

use nebula_cert::revocation::{Revocation, Which};

use super::fake_cluster::{FakeCluster, OWN_SECRET};
use super::{OPERATOR, assert_visible};

const TEAM: &str = "system:serviceaccount:shop:nebula-operator";
const WHY: [&str; 2] = ["--reason", "the key leaked"];

/// With the operator of the release, and one of `shop` for its team.
async fn cluster() -> FakeCluster {
    let cluster = FakeCluster::start(false).await;
    for account in ["shop/nebula-operator", "nebula-system/nebula-operator"] {
        cluster.account(account);
    }
    cluster.ca(|ca| {
        ca.permitted = vec![(TEAM.to_owned(), "shop".to_owned()), (OPERATOR.to_owned(), String::new())];
    });
    cluster
}

async fn revoke(cluster: &FakeCluster, arguments: &[&str]) -> (i32, String, String) {
    cluster.run(&[&["revoke"], arguments, &WHY].concat()).await
}

fn pod(namespace: &str, name: &str) -> Which {
    Which::Pod { namespace: namespace.to_owned(), name: name.to_owned() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_team_revokes_in_its_namespace_and_the_operator_everywhere_each_as_its_own_account() {
    let cluster = cluster().await;
    let (code, out, notes) = revoke(&cluster, &["web", "pay/db", "--yes"]).await;
    assert_eq!((code, notes.as_str()), (0, ""), "{out}");
    assert!(out.contains("pod shop/web") && out.contains("pod pay/db") && out.contains("  revoked"), "{out}");
    assert!(out.contains("whoever follows the CA refuses it then") && out.contains("--keep-out"), "{out}");
    assert_visible(&out);
    let (code, out, _) = revoke(&cluster, &["--host", "edge", "--yes"]).await;
    assert!(code == 0 && out.contains("host edge needs another token"), "{out}");
    let asked = cluster.ca(|ca| std::mem::take(&mut ca.requests));
    let asked: Vec<_> = asked.iter().map(|(user, request)| (user.as_str(), request.which.clone())).collect();
    // pay has no account of its own.
    let host = Which::Host { name: "edge".to_owned() };
    assert_eq!(asked, [(TEAM, pod("shop", "web")), (OPERATOR, pod("pay", "db")), (OPERATOR, host)]);
    for (user, namespace) in [(TEAM, Some("shop")), (OPERATOR, None)] {
        let words = if namespace.is_none() { &["-A"][..] } else { &[] };
        let (code, ..) = revoke(&cluster, &[&["--fingerprint", &"ab".repeat(32), "--yes"], words].concat()).await;
        let (asker, request) = cluster.ca(|ca| ca.requests.pop().unwrap());
        assert_eq!((code, asker.as_str(), request.which.namespace()), (0, user, namespace));
    }
    assert!(cluster.asked().iter().all(|path| !path.contains("agent-api")), "{:?}", cluster.asked());
    assert!(!out.contains(OWN_SECRET));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_changes_nothing_and_what_was_revoked_before_says_so() {
    let cluster = cluster().await;
    let (code, out, notes) = revoke(&cluster, &["web", "--dry-run", "--keep-out"]).await;
    assert_eq!((code, notes.as_str()), (0, ""), "{out}");
    assert!(out.contains("would be revoked") && out.contains("would get no further certificate"), "{out}");
    assert!(cluster.ca(|ca| ca.revoked.is_empty() && ca.requests[0].1.keep_out));
    let (code, out, _) = revoke(&cluster, &["web", "--yes", "-o", "json"]).await;
    let first: Revocation = serde_json::from_str(&out).unwrap();
    let (again, out, _) = revoke(&cluster, &["web", "--yes", "-o", "json"]).await;
    let second: Revocation = serde_json::from_str(&out).unwrap();
    assert_eq!((code, again, first.new, second.new), (0, 0, 1, 0));
    assert!(second.certificates[0].revoked.is_some());
    let (code, out, _) = revoke(&cluster, &["web", "--yes"]).await;
    assert!(code == 0 && out.contains("was revoked "), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_terminal_or_a_reason_nothing_is_sent() {
    let cluster = cluster().await;
    for (arguments, said) in [
        (&["revoke", "web", "--reason", "x"][..], "--yes revokes without a question"),
        (&["revoke", "web", "--yes"], "--reason"),
        (&["revoke", "web", "--yes", "--reason", ""], "the reason must be"),
        (&["revoke", "web", "--yes", "--reason", "a\nb"], "the reason must be"),
        (&["revoke", "--fingerprint", "ab", "--yes", "--reason", "x"], "64 hex digits"),
        (&["revoke", "--yes", "--reason", "x"], "POD"),
    ] {
        let (code, _, notes) = cluster.run(arguments).await;
        assert!(code == 64 && notes.contains(said), "{arguments:?}: {code} {notes}");
    }
    assert!(cluster.asked().is_empty(), "{:?}", cluster.asked());
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_terminal_it_shows_what_it_would_revoke_and_asks() {
    let cluster = cluster().await;
    for (answer, code, revoked) in [("n", 1, 0), ("yes", 0, 1)] {
        let program = env!("CARGO_BIN_EXE_kubectl-nebula");
        let line = format!("{program} revoke web --reason leaked");
        // The terminal of util-linux: the plugin's own streams are pipes in these tests.
        let mut command = cluster.command(&[]);
        let variables: Vec<_> =
            command.get_envs().map(|(name, value)| (name.to_owned(), value.unwrap().to_owned())).collect();
        command = std::process::Command::new("script");
        command.args(["-qec", &line, "/dev/null"]).envs(variables).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let shown = tokio::task::spawn_blocking(move || {
            let (mut shown, mut byte) = (Vec::new(), [0]);
            while !String::from_utf8_lossy(&shown).contains("[y/N]") && output.read(&mut byte).unwrap() > 0 {
                shown.push(byte[0]);
            }
            writeln!(input, "{answer}").unwrap();
            output.read_to_end(&mut shown).unwrap();
            String::from_utf8(shown).unwrap()
        });
        let shown = shown.await.unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code), "{shown}");
        assert!(shown.contains("would be revoked") && shown.contains("Revoke these certificates? [y/N]"), "{shown}");
        assert_eq!(shown.contains("nothing was revoked"), code == 1, "{shown}");
        assert_eq!(cluster.ca(|ca| ca.revoked.len()), revoked);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_says_which_command_gives_the_right() {
    let cluster = cluster().await;
    cluster.account("pay/nebula-operator");
    let (code, _, notes) = revoke(&cluster, &["pay/db", "--yes"]).await;
    let right = "kubectl create rolebinding -n pay nebula-operator --clusterrole=nebula-operator --serviceaccount=pay:nebula-operator";
    assert!(code == 1 && notes.contains(right), "{notes}");
    let as_team = ["--host", "edge", "--yes", "--service-account", "shop/nebula-operator"];
    let (code, _, notes) = revoke(&cluster, &as_team).await;
    assert!(code == 1 && notes.contains("kubectl create clusterrolebinding shop-nebula-operator"), "{notes}");
    let (code, out, notes) = revoke(&cluster, &["none", "web", "--yes"]).await;
    assert!(code == 1 && notes.contains("pod shop/none: the CA refuses: no valid certificate"), "{notes}");
    assert!(out.contains("pod shop/web"), "the other one is revoked: {out}");
    cluster.ca(|ca| ca.is_old = true);
    let (code, _, notes) = revoke(&cluster, &["web", "--yes"]).await;
    assert!(code == 1 && notes.contains("of an earlier release"), "{notes}");
    cluster.has_proxy_right(false);
    let (code, _, notes) = revoke(&cluster, &["web", "--yes"]).await;
    assert!(code == 1 && notes.contains("--role=nebula-kubectl-revoke"), "{notes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_sent_again_only_if_it_cannot_have_arrived() {
    let cluster = cluster().await;
    cluster.ca(|ca| ca.unreachable = 2);
    let (code, _, notes) = revoke(&cluster, &["web", "--yes"]).await;
    assert_eq!((code, cluster.ca(|ca| ca.requests.len())), (0, 1), "{notes}");
    cluster.ca(|ca| ca.unreachable = 9);
    let (code, _, notes) = revoke(&cluster, &["web", "--yes"]).await;
    assert!(code == 1 && notes.contains("cannot forward the request to the CA"), "{notes}");
    cluster.ca(|ca| (ca.unreachable, ca.is_cut_off) = (0, true));
    let (code, _, notes) = revoke(&cluster, &["db", "--yes"]).await;
    assert!(code == 1 && notes.contains("--dry-run says whether it was"), "{notes}");
    assert_eq!(cluster.ca(|ca| (ca.requests.len(), ca.revoked.len())), (2, 2), "once");
}
