//! Who gets an answer: a browser that was given the token, and nobody else on this machine or in the same browser.

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, StatusCode, Uri};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The token and the names of the server.
#[derive(Debug)]
pub(super) struct Guard {
    /// As `Host` has them. With DNS rebinding a browser sends another one.
    hosts: [String; 2],
    token: Token,
}

/// Proves that somebody saw the address that the program printed.
pub(super) struct Token(Zeroizing<String>);

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    #[error("only GET is answered")]
    Method,
    #[error("this server has another name: open the address that kubectl nebula page printed")]
    Host,
    #[error("another page asks")]
    Site,
    #[error("the token is missing or wrong: open the address that kubectl nebula page printed")]
    Token,
}

impl Token {
    /// 256 bits at random.
    pub(super) fn generate() -> Result<Self, getrandom::Error> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(&mut *bytes)?;
        let digit = |nibble: u8| char::from(if nibble < 10 { b'0' + nibble } else { b'a' + nibble - 10 });
        let mut text = Zeroizing::new(String::with_capacity(64));
        text.extend(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]));
        Ok(Self(text))
    }

    /// For the address that is printed.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Guard {
    pub(super) fn new(port: u16, token: Token) -> Self {
        Self { hosts: [format!("127.0.0.1:{port}"), format!("localhost:{port}")], token }
    }

    /// Decides about a request.
    pub(super) fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Denied> {
        if method != Method::GET {
            return Err(Denied::Method);
        }
        let mut hosts = headers.get_all(header::HOST).iter();
        let is_own = hosts.next().is_some_and(|host| self.hosts.iter().any(|own| host == own.as_str()));
        if uri.authority().is_some() || !is_own || hosts.next().is_some() {
            return Err(Denied::Host);
        }
        // A link to the page may be anywhere: the page itself says nothing. All else is for the page.
        let is_ours = |site: &HeaderValue| site == "same-origin" || site == "none";
        if uri.path() != "/" && !headers.get(FETCH_SITE).is_none_or(is_ours) {
            return Err(Denied::Site);
        }
        if uri.path().starts_with(API) && !self.has_token(headers) {
            return Err(Denied::Token);
        }
        Ok(())
    }

    fn has_token(&self, headers: &HeaderMap) -> bool {
        let shown = headers.get(TOKEN_HEADER).map(HeaderValue::as_bytes).unwrap_or_default();
        shown.ct_eq(self.token.text().as_bytes()).into()
    }
}

impl Denied {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host => StatusCode::MISDIRECTED_REQUEST,
            Self::Site => StatusCode::FORBIDDEN,
            Self::Token => StatusCode::UNAUTHORIZED,
        }
    }
}

/// What a browser must hold to, on every answer.
pub(super) const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (header::X_FRAME_OPTIONS, "DENY"),
];

/// What needs the token begins with this.
pub(super) const API: &str = "/api/";
/// Other origins cannot send it, since nothing here allows them to.
const TOKEN_HEADER: &str = "x-nebula-page-token";
const FETCH_SITE: &str = "sec-fetch-site";

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn check(method: Method, uri: &str, lines: &[(&'static str, &str)]) -> Result<(), Denied> {
        let guard = Guard::new(4711, Token(Zeroizing::new(SECRET.to_owned())));
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        guard.check(&method, &uri.parse().unwrap(), &headers)
    }

    #[test]
    fn an_answer_needs_the_token_and_the_page_itself_does_not() {
        let host = ("host", "127.0.0.1:4711");
        assert_eq!(check(Method::GET, "/", &[host]), Ok(()));
        assert_eq!(check(Method::GET, "/api/flows?port=1", &[host, (TOKEN_HEADER, SECRET)]), Ok(()));
        for wrong in ["", "0123456789abcdeF", "0123456789abcde", "0123456789abcdef0"] {
            assert_eq!(check(Method::GET, "/api/flows", &[host, (TOKEN_HEADER, wrong)]), Err(Denied::Token));
        }
        assert_eq!(check(Method::GET, "/api/flows", &[host]), Err(Denied::Token));
        assert_eq!(check(Method::GET, "/api/", &[host, ("cookie", SECRET)]), Err(Denied::Token));
    }

    #[test]
    fn nothing_is_answered_under_another_name_or_to_another_site_or_method() {
        let token = (TOKEN_HEADER, SECRET);
        for host in ["evil.example:4711", "127.0.0.1", "127.0.0.1:4712", "127.0.0.1:4711.evil.example", "[::1]:4711"] {
            assert_eq!(check(Method::GET, "/", &[("host", host), token]), Err(Denied::Host), "{host}");
        }
        let host = ("host", "localhost:4711");
        assert_eq!(check(Method::GET, "/", &[token]), Err(Denied::Host), "there is none");
        assert_eq!(check(Method::GET, "/", &[host, ("host", "evil.example")]), Err(Denied::Host));
        assert_eq!(check(Method::GET, "http://evil.example/", &[host]), Err(Denied::Host));
        for (site, said) in [("cross-site", Err(Denied::Site)), ("same-site", Err(Denied::Site)), ("none", Ok(()))] {
            assert_eq!(check(Method::GET, "/api/nodes", &[host, token, (FETCH_SITE, site)]), said, "{site}");
        }
        assert_eq!(check(Method::GET, "/", &[host, (FETCH_SITE, "cross-site")]), Ok(()), "a link may be anywhere");
        for method in [Method::POST, Method::HEAD, Method::OPTIONS, Method::PUT] {
            assert_eq!(check(method, "/api/nodes", &[host, token]), Err(Denied::Method));
        }
    }

    #[test]
    fn each_token_is_another_and_none_is_printed_by_accident() {
        let (one, other) = (Token::generate().unwrap(), Token::generate().unwrap());
        assert!(one.text().len() == 64 && one.text().bytes().all(|byte| byte.is_ascii_hexdigit()));
        assert_ne!(one.text(), other.text());
        let text = one.text().to_owned();
        assert!(!format!("{:?}", Guard::new(1, one)).contains(&text));
    }
}
