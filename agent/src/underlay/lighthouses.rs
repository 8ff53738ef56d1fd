//! Whether datagrams of this node reach the lighthouses. Without any of them, new pods of the node are ready and
//! reach nobody whom they do not know, and no instance can tell whether that is the network or the peer.

use std::path::Path;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::probe::ask;
use super::{MAX_ENDPOINTS, RETRY, SILENT_ROUNDS, TEST_EVERY};
use crate::ca::{Target, trusted};
use crate::config::TLS_CA_FILE;
use crate::node::Node;
use crate::readiness::{Part, Standing};

/// Tests the way to every lighthouse that the CA announces, for ever.
pub(crate) async fn watch(node: &Node, mut target: watch::Receiver<Option<Target>>) {
    let readiness = &node.readiness;
    let roots = node.config.host_root.resolve(Path::new(TLS_CA_FILE));
    // Good until it is known to be bad: people are told of a change.
    readiness.set(Part::Underlay, Standing::good("is tested for the first time"));
    // While the CA is away, those that it named last.
    let (mut known, mut silent) = (None::<Vec<String>>, 0);
    loop {
        let Some(now) = target.borrow_and_update().clone() else {
            readiness.set(Part::Underlay, Standing::good(WAITS));
            if target.changed().await.is_err() {
                return;
            }
            continue;
        };
        let path = roots.clone();
        match tokio::task::spawn_blocking(move || now.trust(&path)).await {
            Ok(Ok(trust)) => {
                node.cas.send_replace(trusted(&trust.ca));
                known = Some(trust.lighthouses.into_values().flatten().take(MAX_ENDPOINTS).collect());
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "the CA does not say whom to trust and where the lighthouses are")
            }
            Err(_) => {}
        }
        let Some(endpoints) = &known else {
            readiness.set(Part::Underlay, Standing::good(WAITS));
            tokio::time::sleep(RETRY).await;
            continue;
        };
        let round = test_all(endpoints).await;
        let is_silent = !round.is_empty() && round.iter().all(|(_, answer)| answer.is_err());
        silent = if is_silent { silent + 1 } else { 0 };
        if let Some(standing) = judge(&round, silent) {
            readiness.set(Part::Underlay, standing);
        }
        tokio::time::sleep(if is_silent { RETRY } else { TEST_EVERY }).await;
    }
}

/// How the node stands after rounds in a row, this many, in which no lighthouse answered; `None`: as before.
fn judge(round: &[(String, Result<(), String>)], silent: u32) -> Option<Standing> {
    if round.is_empty() {
        return Some(Standing::good("the CA announces no lighthouses, so none is tested"));
    }
    let failed: Vec<_> =
        round.iter().filter_map(|(at, answer)| Some(format!("{at} ({})", answer.as_ref().err()?))).collect();
    let (all, answering) = (round.len(), round.len() - failed.len());
    match (answering, silent) {
        (0, ..SILENT_ROUNDS) => None,
        (0, _) => Some(Standing::bad(format!("no lighthouse answers datagrams of this node: {}", failed.join(", "))).advice(
            "pods reach only peers that they know; are the lighthouses running, does a firewall keep their UDP port from this \
             node, and is \"listen.send_recv_error\" there not \"never\"?",
        )),
        _ if failed.is_empty() => Some(Standing::good(format!("{all} of {all} endpoints of lighthouses answer"))),
        // One is enough, and one that is down is no reason to warn of every node.
        _ => {
            Some(Standing::good(format!("{answering} of {all} endpoints of lighthouses answer; not {}", failed.join(", "))))
        }
    }
}

/// What became of one test of each endpoint.
async fn test_all(endpoints: &[String]) -> Vec<(String, Result<(), String>)> {
    let mut tests = JoinSet::new();
    for (place, endpoint) in endpoints.iter().cloned().enumerate() {
        tests.spawn(async move {
            let answer = ask(&endpoint).await.map_err(|error| error.to_string());
            (place, (endpoint, answer))
        });
    }
    let mut round = tests.join_all().await;
    round.sort_unstable_by_key(|(place, _)| *place);
    round.into_iter().map(|(_, outcome)| outcome).collect()
}

const WAITS: &str = "waits for the CA, which names the lighthouses";

#[cfg(test)]
mod tests {
    use tokio::net::UdpSocket;

    use super::super::probe::tests::host;
    use super::*;

    #[tokio::test]
    async fn one_lighthouse_that_answers_is_enough_and_the_others_are_named() {
        let good = host(|_| {}).await;
        let strange = host(|answer| answer[4] ^= 1).await;
        let gone = UdpSocket::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
        let round = test_all(&[good, strange.clone(), gone.clone(), "no port".to_owned()]).await;
        assert_eq!(round.iter().map(|(_, answer)| answer.is_ok()).collect::<Vec<_>>(), [true, false, false, false]);
        let standing = judge(&round, 0).unwrap();
        assert!(standing.ok && standing.reason.contains(&strange) && standing.reason.contains(&gone), "{standing:?}");
    }

    #[test]
    fn silence_of_all_is_told_after_two_rounds_and_names_them() {
        let failed = |at: &str| (at.to_owned(), Err("no answer".to_owned()));
        let round = vec![failed("192.0.2.1:4242"), failed("192.0.2.2:4242")];
        assert_eq!(judge(&round, 1), None);
        let standing = judge(&round, 2).unwrap();
        assert!(!standing.ok && !standing.advice.is_empty(), "{standing:?}");
        assert!(standing.reason.contains("192.0.2.1:4242 (no answer), 192.0.2.2:4242"), "{standing:?}");
        assert!(judge(&[], 0).unwrap().ok, "there may be none");
        assert!(!Part::Underlay.is_required(), "one lighthouse must not take every node out");
    }
}
