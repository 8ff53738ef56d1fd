//! Which path is answered by what, and who may ask for it.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use axum::{Json, Router};
use nebula_cert::listener::Source;
use nebula_cni_contract::agent_api::{
    DOCTOR_PATH, FLOWS_PATH, PAUSE_PATH, PODS_PATH, POLICY_SEEN_PATH, POLICY_TEST_PATH, RESUME_PATH, STATUS_PATH,
    UPGRADE_PATH, WHY_PATH, of_node,
};
use nebula_cni_contract::policy_test;
use nebula_cni_contract::why::{BadQuestion, Question};
use tower::ServiceExt;

use super::Api;
use super::answers;
use super::denied::Denied;
use super::doctor::{self, Scope};
use super::flows::{self, Wanted};
use super::policies;
use super::review::Asked;
use super::token::Token;
use super::why;
use crate::cluster::api::is_name;
use crate::rollout::plan;

/// What answers the requests of one connection.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) api: Arc<Api>,
    pub(super) source: Source,
}

/// What decides whose agent a request is for.
#[derive(Clone)]
struct Door {
    shared: Shared,
    own: Router,
}

/// Names and values of the parameters of a request.
pub(super) type Pairs<'a> = Vec<(Cow<'a, str>, Cow<'a, str>)>;

/// Whoever asks, and what for. It has been allowed.
pub(super) struct Permit {
    pub(super) token: Token,
    pub(super) asked: Asked,
    pub(super) user: String,
}

pub(super) fn router(api: Arc<Api>, source: Source) -> Router {
    let shared = Shared { api, source };
    let own = Router::new()
        .route(STATUS_PATH, only(get(status)))
        .route(PODS_PATH, only(get(pods)))
        .route(FLOWS_PATH, only(get(flow_records)))
        .route(DOCTOR_PATH, only(get(doctor)))
        .route(WHY_PATH, only(get(explain)))
        .route(POLICY_TEST_PATH, only(get(test_policies)))
        .route(POLICY_SEEN_PATH, only(get(seen)))
        .route(UPGRADE_PATH, only(get(upgrade)))
        .route(PAUSE_PATH, only(post(pause)))
        .route(RESUME_PATH, only(post(resume)))
        .fallback(async || Denied::Path)
        .with_state(shared.clone());
    Router::new().fallback(enter).with_state(Door { shared, own })
}

/// Takes a request for this node to its answer, and forwards others.
async fn enter(State(Door { shared, own }): State<Door>, mut request: Request) -> Result<Response, Denied> {
    let (node, path) = of_node(request.uri().path()).ok_or(Denied::Path)?;
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"/-".contains(&byte);
    if !is_name(node) || !path.bytes().all(is_plain) {
        return Err(Denied::Path);
    }
    let (node, Shared { api, source }) = (node.to_owned(), shared);
    if node == api.name {
        let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
        *request.uri_mut() = format!("{path}{query}").parse().map_err(|_| Denied::Path)?;
        return Ok(own.oneshot(request).await.into_response());
    }
    let token = Token::take(request.headers_mut())?;
    api.reviewer.accept(&token, source).await?;
    api.gateway.forward(&node, &token, request).await
}

fn only(route: MethodRouter<Shared>) -> MethodRouter<Shared> {
    route.fallback_service(any(async || Denied::Path))
}

async fn status(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    shared.permit(request, "get", "nodes", None).await?;
    Ok(Json(answers::status(&shared.api)).into_response())
}

async fn pods(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let namespace = parameter(&request, "namespace")?.map(Cow::into_owned);
    let namespace = namespace.map(|name| checked("namespace", name)).transpose()?;
    shared.permit(request, "get", "pods", namespace.clone()).await?;
    Ok(Json(answers::pods(&shared.api, namespace).await?).into_response())
}

async fn flow_records(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let wanted = Wanted::of(&pairs(&request)?)?;
    let namespace = wanted.filter.namespace.clone().map(|name| checked("namespace", name)).transpose()?;
    let permit = shared.permit(request, "get", "flows", namespace).await?;
    flows::answer(shared, permit, wanted).await
}

async fn doctor(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let scope = Scope::of(&pairs(&request)?)?;
    let permit = shared.permit(request, "get", "pods", scope.namespace.clone()).await?;
    Ok(Json(doctor::findings(&shared, &permit, &scope).await?).into_response())
}

async fn explain(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let question = ends(&request, Question::parse)?;
    let permit = shared.permit(request, "get", "pods", Some(question.namespace.clone())).await?;
    Ok(Json(why::answer(&shared, &permit, question).await?).into_response())
}

async fn test_policies(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let question = ends(&request, policy_test::question)?;
    // An address may be anybody's.
    let namespace = question.source_address().is_none().then(|| question.namespace.clone());
    let permit = shared.permit(request, "get", "pods", namespace).await?;
    Ok(Json(policies::test(&shared, &permit, question).await?).into_response())
}

async fn seen(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    let namespace = parameter(&request, "namespace")?.map(Cow::into_owned).unwrap_or_default();
    let namespace = checked("namespace", namespace)?;
    let mut permit = shared.permit(request, "get", "flows", Some(namespace.clone())).await?;
    // Flows do not show the labels of those who had them: the permission for pods does.
    let of_pods = Asked { resource: "pods", ..permit.asked.clone() };
    shared.may_also(&permit, of_pods.clone()).await?;
    permit.asked = of_pods;
    Ok(Json(policies::seen(&shared, &permit, namespace).await?).into_response())
}

async fn upgrade(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    shared.permit(request, "get", "upgrades", None).await?;
    Ok(Json(answers::upgrade(&shared.api)).into_response())
}

async fn pause(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    shared.change(request, plan::Request::Pause).await
}

async fn resume(State(shared): State<Shared>, request: Request) -> Result<Response, Denied> {
    shared.change(request, plan::Request::Resume).await
}

impl Shared {
    async fn permit(
        &self,
        mut request: Request,
        verb: &'static str,
        resource: &'static str,
        namespace: Option<String>,
    ) -> Result<Permit, Denied> {
        let token = Token::take(request.headers_mut())?;
        let asked = Asked { verb, resource, namespace };
        let user = self.api.reviewer.permit(&token, &asked, self.source).await?;
        Ok(Permit { token, asked, user })
    }

    /// Whether whoever was permitted something is permitted this as well.
    pub(super) async fn may_also(&self, permit: &Permit, asked: Asked) -> Result<(), Denied> {
        self.api.reviewer.permit(&permit.token, &asked, self.source).await.map(drop)
    }

    async fn change(&self, request: Request, change: plan::Request) -> Result<Response, Denied> {
        let permit = self.permit(request, "update", "upgrades", None).await?;
        tracing::info!(user = %permit.user, ?change, "kubectl changes the upgrade of instances");
        Ok(Json(answers::change_upgrade(&self.api, change).await?).into_response())
    }
}

/// The ends of a flow, from the parameters of a request.
fn ends(request: &Request, parse: impl Fn(&str, &str) -> Result<Question, BadQuestion>) -> Result<Question, Denied> {
    let end = |name| parameter(request, name).map(Option::unwrap_or_default);
    Ok(parse(&end("from")?, &end("to")?)?)
}

/// The parameters of a request.
fn pairs(request: &Request) -> Result<Pairs<'_>, Denied> {
    let query = request.uri().query().unwrap_or_default();
    let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).take(MOST_PARAMETERS + 1).collect();
    let names = pairs.iter().map(|(key, _)| key).collect::<std::collections::HashSet<_>>();
    // One that is there twice could be read in two ways.
    let is_fine = pairs.len() <= MOST_PARAMETERS && names.len() == pairs.len();
    if is_fine { Ok(pairs) } else { Err(Denied::Parameter("(too many, or one twice)")) }
}

fn parameter<'a>(request: &'a Request, name: &str) -> Result<Option<Cow<'a, str>>, Denied> {
    Ok(pairs(request)?.into_iter().find(|(key, _)| key == name).map(|(_, value)| value))
}

/// A name that the API server may be asked about, in this parameter: an empty one would mean all namespaces.
pub(super) fn checked(parameter: &'static str, name: String) -> Result<String, Denied> {
    if is_name(&name) { Ok(name) } else { Err(Denied::Parameter(parameter)) }
}

const MOST_PARAMETERS: usize = 32;
