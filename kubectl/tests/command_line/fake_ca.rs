//! A fake CA behind the proxy of its Service: one pod with a certificate in each of its namespaces, and a host.

use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use nebula_cert::revocation::{
    AUDIENCE, FORBIDDEN, Next, Request, Revocation, RevokedCertificate, Spread, TOKEN_HEADER, Which,
};
use serde_json::json;

use super::fake_cluster::{json_of, refused};

#[derive(Default)]
pub(crate) struct FakeCa {
    /// User and audience by token.
    pub(crate) tokens: Vec<(String, [String; 2])>,
    /// Who may revoke certificates of which namespace; an empty one: everything.
    pub(crate) permitted: Vec<(String, String)>,
    /// Requests that arrived, and who asked.
    pub(crate) requests: Vec<(String, Request)>,
    pub(crate) is_old: bool,
    /// How many of the next requests the API server cannot forward.
    pub(crate) unreachable: usize,
    /// Whether the answer to a change is lost.
    pub(crate) is_cut_off: bool,
    pub(crate) revoked: Vec<Which>,
}

impl FakeCa {
    pub(crate) fn answer(&mut self, headers: &HeaderMap, body: &[u8]) -> Response {
        if self.unreachable > 0 {
            self.unreachable -= 1;
            return refused(StatusCode::SERVICE_UNAVAILABLE, "error trying to reach service: dial tcp: refused");
        }
        let refuse = |status, code: &str, message: &str| json_of(status, &json!({"code": code, "message": message}));
        if self.is_old {
            return refuse(StatusCode::NOT_FOUND, "not_found", "no such path");
        }
        let token = headers.get(TOKEN_HEADER).unwrap().to_str().unwrap();
        let (_, [user, audience]) = self.tokens.iter().find(|(known, _)| known == token).unwrap();
        assert_eq!(audience, AUDIENCE);
        let request: Request = serde_json::from_slice(body).unwrap();
        request.check().unwrap();
        self.requests.push((user.clone(), request.clone()));
        let namespace = request.which.namespace().unwrap_or_default();
        let is_permitted = |(name, of): &(String, String)| name == user && (of.is_empty() || of == namespace);
        if !self.permitted.iter().any(is_permitted) {
            return refuse(StatusCode::FORBIDDEN, FORBIDDEN, &format!("{user} may not"));
        }
        let (subject, next) = match &request.which {
            Which::Pod { name, .. } if name == "none" => {
                return refuse(StatusCode::NOT_FOUND, "no_certificate", "no valid certificate is that of it");
            }
            Which::Pod { namespace, name } => (format!("pod {namespace}/{name}"), Next::AnotherCertificate),
            Which::Fingerprint { .. } => ("pod shop/web".to_owned(), Next::AnotherCertificate),
            Which::Host { name } => (format!("host {name}"), Next::NewToken),
        };
        let was_revoked = self.revoked.contains(&request.which);
        if !request.dry_run {
            self.revoked.push(request.which.clone());
            if self.is_cut_off {
                return refused(StatusCode::BAD_GATEWAY, "error trying to reach service: EOF");
            }
        }
        let one = RevokedCertificate {
            subject,
            name: "a\u{1b}[2Jb".to_owned(),
            networks: vec!["10.1.0.7/16".parse().unwrap()],
            groups: vec!["ns:shop".to_owned()],
            fingerprint: "ab".repeat(32),
            not_after: i64::MAX / 2,
            revoked: was_revoked.then_some(1_700_000_000),
            next: if request.keep_out { Next::KeptOut } else { next },
        };
        let spread = Spread {
            published_within: 0,
            others: 3,
            unaware: 0,
            last_hears_by: None,
            ends: i64::MAX / 2,
            is_partial: false,
        };
        let revocation = Revocation {
            dry_run: request.dry_run,
            user: user.clone(),
            certificates: vec![one],
            total: 1,
            new: usize::from(!was_revoked),
            spread,
        };
        json_of(StatusCode::OK, &serde_json::to_value(revocation).unwrap())
    }
}
