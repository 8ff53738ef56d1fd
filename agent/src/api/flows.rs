//! Flow records as a stream of lines, from the store of the node.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use nebula_cni_contract::agent_api::{FlowLine, FlowsState};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::Filter;

use super::Api;
use super::denied::Denied;
use super::routes::{Permit, Shared};
use crate::flows::folder;
use crate::flows::store::{Answer, Limits, Reader, StoreError};

/// What is asked for.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// Its namespace is the one for which there must be a permission: only what the instances of its pods recorded.
    /// What they say of the other end proves nothing about it, and what others recorded of them is not theirs.
    pub(super) filter: Filter,
    after: u64,
    limit: usize,
    is_following: bool,
}

impl Wanted {
    pub(super) fn of(pairs: &[(Cow<'_, str>, Cow<'_, str>)]) -> Result<Self, Denied> {
        let filter = Filter::of_pairs(pairs.iter().map(|(key, value)| (&**key, &**value)))?;
        let text = |name| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| &**value);
        let number =
            |name, default| text(name).map_or(Ok(default), |value| value.parse().map_err(|_| Denied::Parameter(name)));
        let (after, limit) = (number("after", 0)?, number("limit", DEFAULT_LIMIT)?);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(Denied::Parameter("limit"));
        }
        let is_following = match text("follow") {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err(Denied::Parameter("follow")),
        };
        Ok(Self { filter, after, limit: usize::try_from(limit).unwrap_or_default(), is_following })
    }
}

/// A stream that goes on.
struct Following {
    shared: Shared,
    permit: Permit,
    wanted: Wanted,
    ends: Instant,
    /// When the permission is looked for again.
    permitted_until: Instant,
    /// When something was sent last.
    sent: Instant,
    /// What comes first.
    first: Option<Bytes>,
    is_over: bool,
}

pub(super) async fn answer(shared: Shared, permit: Permit, mut wanted: Wanted) -> Result<Response, Denied> {
    let answer = read(&shared.api, &wanted).await?.map_err(|error| match error {
        StoreError::None => Denied::NoFlows,
        other => Denied::Failed(format!("cannot read the flow records of this node: {other}")),
    })?;
    let head = [(header::CONTENT_TYPE, "application/jsonl"), (header::CACHE_CONTROL, "no-store")];
    if !wanted.is_following {
        return Ok((head, lines(&answer, true)).into_response());
    }
    // Taken by a stream until it ends.
    let api = Arc::clone(&shared.api);
    let place = api.following.try_acquire().map_err(|_| Denied::Working)?;
    place.forget();
    let now = SystemClock.now();
    wanted.after = answer.newest;
    let following = Following {
        shared,
        permit,
        wanted,
        ends: now + MOST_TIME,
        permitted_until: now + PERMITTED_FOR,
        sent: now,
        first: Some(lines(&answer, false).into()),
        is_over: false,
    };
    let body = stream::unfold(following, |mut following| async move {
        following.next().await.map(|bytes| (Ok::<_, Infallible>(bytes), following))
    });
    Ok((head, Body::from_stream(body)).into_response())
}

impl Drop for Following {
    fn drop(&mut self) {
        self.shared.api.following.add_permits(1);
    }
}

impl Following {
    /// The next lines; `None`: they were the last.
    async fn next(&mut self) -> Option<Bytes> {
        if self.is_over {
            return None;
        }
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            tokio::time::sleep(EVERY).await;
            let now = SystemClock.now();
            if now >= self.ends {
                return self.last(true, "ask again with a new token");
            }
            if now >= self.permitted_until {
                let Shared { api, source } = &self.shared;
                if let Err(denied) = api.reviewer.permit(&self.permit.token, &self.permit.asked, *source).await {
                    return self.last(false, &denied.to_string());
                }
                self.permitted_until = now + PERMITTED_FOR;
            }
            let answer = match read(&self.shared.api, &self.wanted).await {
                Ok(Ok(answer)) => answer,
                // The agent is making a new one.
                Ok(Err(StoreError::None | StoreError::Damaged(_))) | Err(Denied::Working) => continue,
                Ok(Err(error)) => {
                    return self.last(false, &format!("cannot read the flow records of this node: {error}"));
                }
                Err(error) => return self.last(false, &error.to_string()),
            };
            // A new store counts from the start.
            self.wanted.after = if answer.newest < self.wanted.after { 0 } else { answer.newest };
            if !answer.records.is_empty() || now >= self.sent + SIGN_OF_LIFE {
                self.sent = now;
                return Some(lines(&answer, false).into());
            }
        }
    }

    fn last(&mut self, is_renewable: bool, why: &str) -> Option<Bytes> {
        self.is_over = true;
        let state = FlowsState {
            is_last: true,
            newest: self.wanted.after,
            is_renewable,
            why: Some(why.to_owned()),
            ..FlowsState::default()
        };
        Some(line(&FlowLine { flow: None, state: Some(state) }).into())
    }
}

async fn read(api: &Api, wanted: &Wanted) -> Result<Result<Answer, StoreError>, Denied> {
    let place = tokio::time::timeout(PLACE_WITHIN, api.working.acquire()).await;
    let _place = place.map_err(|_| Denied::Working)?.map_err(|_| Denied::Working)?;
    let (folder, wanted) = (folder(&api.node.config.host_root), wanted.clone());
    let limits = Limits { records: wanted.limit, time: TIME };
    let asked =
        tokio::task::spawn_blocking(move || Reader::open(&folder)?.ask(&wanted.filter, wanted.after, limits)).await;
    asked.map_err(|_| Denied::Failed("the agent failed to read the flow records".to_owned()))
}

/// The lines of an answer, with how far it is below them.
fn lines(answer: &Answer, is_last: bool) -> String {
    let flows = answer.records.iter().map(|record| FlowLine { flow: Some(Box::new(record.clone())), state: None });
    let state = FlowLine {
        flow: None,
        state: Some(FlowsState {
            is_last,
            newest: answer.newest,
            is_cut: answer.is_cut,
            is_late: answer.is_late,
            lost: answer.lost,
            ..FlowsState::default()
        }),
    };
    flows.chain([state]).map(|one| line(&one)).collect()
}

fn line(line: &FlowLine) -> String {
    // A record that was read from the store can be written.
    serde_json::to_string(line).map(|text| text + "\n").unwrap_or_default()
}

const DEFAULT_LIMIT: u64 = 1000;
const MAX_LIMIT: u64 = 10_000;
const TIME: Duration = Duration::from_secs(10);
const EVERY: Duration = Duration::from_secs(1);
const PLACE_WITHIN: Duration = Duration::from_secs(10);
/// Of a stream: the life of a token.
const MOST_TIME: Duration = Duration::from_secs(10 * 60);
const PERMITTED_FOR: Duration = Duration::from_secs(30);
/// Whoever is silent for longer is gone.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);
