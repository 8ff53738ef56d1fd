//! The condition of the node that says whether network policies of its pods are enforced as they are written. It is
//! written when it changes, and never merely renewed: every write goes to all who watch nodes.

use std::time::Duration;

use axum::http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::api::{ApiError, STRATEGIC_MERGE_PATCH, ask, is_name, named};
use crate::readiness::{Part, Standing, Standings};

/// Keeps the condition of `node` until the task is cancelled.
pub(crate) async fn keep(client: Client, node: String, mut standings: watch::Receiver<Standings>) {
    if !is_name(&node) {
        return;
    }
    // What an earlier agent wrote counts: agents of all nodes may start at once.
    let mut written = loop {
        match read(&client, &node).await {
            Ok(found) => break found,
            Err(error) => tracing::warn!(%error, "cannot read the condition of the node"),
        }
        tokio::time::sleep(RETRY).await;
    };
    loop {
        let wanted = settled(&mut standings, &written).await;
        let Some(wanted) = wanted else { return };
        match write(&client, &node, &wanted).await {
            Ok(()) => written = Some(wanted),
            Err(error) => {
                tracing::warn!(%error, "cannot write the condition of the node");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// What the condition says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    is_enforced: bool,
    message: String,
}

impl Said {
    fn of(standing: &Standing) -> Self {
        let advice = if standing.advice.is_empty() { String::new() } else { format!("; {}", standing.advice) };
        let mut message = nebula_cert::visible(&format!("{}{advice}", standing.reason)).into_owned();
        while message.len() > MAX_MESSAGE {
            message.pop();
        }
        Self { is_enforced: standing.ok, message }
    }
}

/// Waits until the standing of policies differs from what was written, and has done so for a while: while an agent
/// starts, it does not know yet what it will know in a moment. `None` if the agent ends.
async fn settled(standings: &mut watch::Receiver<Standings>, written: &Option<Said>) -> Option<Said> {
    loop {
        let wanted = standings.borrow_and_update().get(&Part::Policies).map(Said::of);
        let pause = match (&wanted, written) {
            (Some(wanted), Some(written)) if wanted.is_enforced == written.is_enforced => TEXT_SETTLES,
            _ => SETTLES,
        };
        let Some(wanted) = wanted.filter(|wanted| Some(wanted) != written.as_ref()) else {
            standings.changed().await.ok()?;
            continue;
        };
        let is_same = |now: &Standings| now.get(&Part::Policies).map(Said::of).as_ref() == Some(&wanted);
        match tokio::time::timeout(pause, standings.wait_for(|now| !is_same(now))).await {
            Err(_) => return Some(wanted),
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return None,
        }
    }
}

async fn read(client: &Client, node: &str) -> Result<Option<Said>, ApiError> {
    let node = named(client, "/api/v1/nodes", node).await?.unwrap_or_default();
    let mut conditions = node["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == TYPE);
    let said = |condition: &Value| Said {
        is_enforced: condition["status"] == "True",
        message: condition["message"].as_str().unwrap_or_default().to_owned(),
    };
    Ok(found.map(said))
}

async fn write(client: &Client, node: &str, said: &Said) -> Result<(), ApiError> {
    let now = Timestamp::from_second(SystemClock.unix_seconds()).unwrap_or_default().to_string();
    let (status, reason) = match said.is_enforced {
        true => ("True", "PoliciesEnforced"),
        false => ("False", "PoliciesNotEnforced"),
    };
    // Conditions are merged by their type, so those of others stay.
    let condition = json!({"type": TYPE, "status": status, "reason": reason, "message": said.message,
        "lastHeartbeatTime": now, "lastTransitionTime": now});
    let patch = json!({"status": {"conditions": [condition]}});
    let path = format!("/api/v1/nodes/{node}/status");
    ask(client, Method::PATCH, &path, Some((STRATEGIC_MERGE_PATCH, &patch))).await.map(drop)
}

/// The condition's type.
pub(crate) const TYPE: &str = "NebulaPoliciesEnforced";
const MAX_MESSAGE: usize = 1000;
const RETRY: Duration = Duration::from_secs(60);
const SETTLES: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 15_000 });
/// Numbers in the text may change all the time.
const TEXT_SETTLES: Duration = Duration::from_millis(if cfg!(test) { 1000 } else { 120_000 });

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::fake_api_server::FakeApiServer;
    use crate::readiness::Readiness;

    fn said(is_enforced: bool, message: &str) -> Option<Said> {
        Some(Said { is_enforced, message: message.to_owned() })
    }

    #[tokio::test]
    async fn only_what_settles_and_differs_is_to_be_written() {
        let readiness = Readiness::default();
        let (mut standings, before) = (readiness.watch(), said(true, "well"));
        let change = async {
            readiness.set(Part::Policies, Standing::bad("waits for the table"));
            tokio::time::sleep(SETTLES / 2).await;
            readiness.set(Part::Policies, Standing::good("well"));
            tokio::time::sleep(2 * TEXT_SETTLES).await;
        };
        tokio::select! {
            () = change => {}
            said = settled(&mut standings, &before) => panic!("an earlier agent has said it: {said:?}"),
        }
        readiness.set(Part::Policies, Standing::bad("shop\n10.0.0.1").advice("restart it"));
        let bad = settled(&mut standings, &before).await;
        assert_eq!(bad, said(false, "shop\\n10.0.0.1; restart it"));

        let began = tokio::time::Instant::now();
        let change = async {
            for n in 0..10 {
                readiness.set(Part::Policies, Standing::bad(format!("{n} pods")));
                tokio::time::sleep(SETTLES).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = change => {}
            last = settled(&mut standings, &bad) => assert_eq!(last, said(false, "9 pods"), "the text goes on changing"),
        }
        assert!(began.elapsed() >= 9 * SETTLES + TEXT_SETTLES);
    }

    #[tokio::test]
    async fn what_was_written_is_read_back() {
        let server = FakeApiServer::default();
        let client = server.clone().start().await;
        server.put("/api/v1/nodes/n1", json!({"metadata": {"name": "n1"}}));
        server.put(
            "/api/v1/nodes/n2",
            json!({"metadata": {"name": "n2"}, "status": {"conditions": [
            {"type": "Ready", "status": "True"}, {"type": TYPE, "status": "False", "message": "why"}]}}),
        );
        assert_eq!(read(&client, "n1").await.unwrap(), None);
        assert_eq!(read(&client, "n2").await.unwrap(), said(false, "why"));
        write(&client, "n1", &said(true, "well").unwrap()).await.unwrap();
        let asked = server.asked("/api/v1/nodes/n1/status");
        let [(method, _, body)] = &asked[..] else { panic!("{asked:?}") };
        let [condition] = &body["status"]["conditions"].as_array().unwrap()[..] else { panic!("{body}") };
        assert_eq!(
            (method.as_str(), &condition["type"], &condition["status"]),
            ("PATCH", &TYPE.into(), &"True".into())
        );
        assert_eq!(body.as_object().unwrap().len(), 1, "nothing else of the node");
    }
}
