//! Why the API does not answer.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use nebula_cni_contract::agent_api::{AUDIENCE, Lacking, Refused, TOKEN_HEADER, VERSION};
use nebula_cni_contract::flow_records::BadFilter;
use nebula_cni_contract::why::BadQuestion;

use super::agents::Away;

/// Why a request is not answered. What is said to whoever has no permission tells nothing about the node.
#[derive(Debug, thiserror::Error)]
pub(super) enum Denied {
    /// There is no token, or something that is none.
    #[error("the request has no token in its header {TOKEN_HEADER}")]
    NoToken,
    /// The API server does not accept it.
    #[error("the API server does not accept the token for the audience {AUDIENCE}: it has expired, or is for others")]
    Unknown,
    /// RBAC does not allow it.
    #[error("{0}")]
    Forbidden(Lacking),
    /// The API server was asked too often.
    #[error("the agent asks the API server about no further tokens and permissions for now; try again in a minute")]
    Busy,
    /// The API server does not say whether it is allowed.
    #[error("the API server does not say what the token allows: nothing is answered until it does")]
    NoReview,
    /// There is too much to do.
    #[error("the agent is at work for others; try again")]
    Working,
    /// A condition cannot be one.
    #[error(transparent)]
    Filter(#[from] BadFilter),
    /// An end of a flow cannot be one.
    #[error(transparent)]
    Question(#[from] BadQuestion),
    /// A parameter cannot be one.
    #[error("parameter {0} has a value that it cannot have")]
    Parameter(&'static str),
    /// There is nothing to answer from.
    #[error("no flow records are kept on this node (agent.flows in the chart)")]
    NoFlows,
    /// There is no such path in this version.
    #[error("this agent has no such path: it answers version {VERSION} of the API, of release {}", env!("CARGO_PKG_VERSION"))]
    Path,
    /// The body cannot be forwarded.
    #[error("the body of the request is too large, or comes too slowly")]
    Body,
    /// The request does not reach the agent that it is for.
    #[error(transparent)]
    Away(Away),
    /// The API server does not say where that agent is.
    #[error("the API server does not say where the agent of that node is; try again")]
    NoLookup,
    /// The node itself cannot.
    #[error("{0}")]
    Failed(String),
}

impl Denied {
    fn status(&self) -> StatusCode {
        match self {
            Self::NoToken | Self::Unknown => StatusCode::UNAUTHORIZED,
            Self::Forbidden(_) => StatusCode::FORBIDDEN,
            Self::Busy | Self::Working => StatusCode::TOO_MANY_REQUESTS,
            Self::NoReview | Self::NoLookup => StatusCode::SERVICE_UNAVAILABLE,
            Self::Filter(_) | Self::Question(_) | Self::Parameter(_) => StatusCode::BAD_REQUEST,
            Self::NoFlows | Self::Path => StatusCode::NOT_FOUND,
            Self::Body => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Away(_) => StatusCode::BAD_GATEWAY,
            Self::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        let (status, error) = (self.status(), self.to_string());
        let lacking = if let Self::Forbidden(lacking) = self { Some(lacking) } else { None };
        (status, Json(Refused { error, lacking })).into_response()
    }
}
