//! What goes to stdout: results are passed on unchanged, errors are JSON objects with a code (CNI result and error
//! types).

use std::fmt;

use serde::Serialize;

/// Versions of the CNI specification that this plugin supports, oldest first. Plugin lists began with 0.3.0, but
/// runtimes chain plugins with the older versions as well, using the older result format.
pub const SUPPORTED: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The version of the reply if the request names none that we support.
pub const NEWEST: &str = SUPPORTED[SUPPORTED.len() - 1];

/// Whether we support `version` and it is not older than `least`.
#[must_use]
pub fn speaks(version: &str, least: &str) -> bool {
    let place = |v: &str| SUPPORTED.iter().position(|s| *s == v);
    matches!((place(version), place(least)), (Some(version), Some(least)) if version >= least)
}

/// Error codes: the specification's below 100, ours above.
pub mod code {
    /// The version of the configuration is not supported, or too old for the verb.
    pub const VERSION: u32 = 1;
    /// No such attachment.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// A CNI_* variable is missing or malformed.
    pub const ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO: u32 = 5;
    /// Stdin, or a result in it, cannot be decoded.
    pub const CONTENT: u32 = 6;
    /// The network configuration is wrong.
    pub const CONFIG: u32 = 7;
    /// CNI_NETNS is not a network namespace of a container.
    pub const NETNS: u32 = 8;
    /// The runtime should try again later.
    pub const TRY_AGAIN: u32 = 11;
    /// STATUS: no ADD can succeed on this node.
    pub const NOT_AVAILABLE: u32 = 50;
    /// The pod's instance is not running or does not answer.
    pub const INSTANCE_UNREACHABLE: u32 = 101;
    /// The CA service refused the pod.
    pub const IDENTITY_DENIED: u32 = 102;
    /// The CA service could not be reached.
    pub const IDENTITY_UNAVAILABLE: u32 = 103;
    /// The instance ended before it was ready.
    pub const INSTANCE_FAILED: u32 = 105;
    /// The instance was not ready in time.
    pub const DEADLINE: u32 = 107;
    /// The API server knows no such pod.
    pub const NO_SUCH_POD: u32 = 108;
    /// The API server knows another pod of that name.
    pub const OTHER_POD: u32 = 109;
    /// The certificate holds no address of the same family as the pod's.
    pub const ADDRESS: u32 = 110;
    /// The tun device in the pod is missing or not as recorded.
    pub const DEVICE: u32 = 111;
    /// The labels of the pod or its namespace could not be read from the API server.
    pub const LABELS_UNAVAILABLE: u32 = 114;
    /// The pod has no certificate, because none of its init containers asked for one.
    pub const INIT_OVERDUE: u32 = 117;
    /// The CA service cannot be used as configured: a file, the URL, or the service's TLS certificate is wrong.
    pub const CA_UNUSABLE: u32 = 116;
    /// The CA service refuses the node's token, and the node agent wrote no other one in time.
    pub const NODE_TOKEN: u32 = 119;
    /// No instance served the pod after an upgrade, and the old program was started.
    pub const INSTANCE_LOST: u32 = 120;
    /// The new instance of an upgrade took over and ended, and the old program has taken over again.
    pub const INSTANCE_ROLLED_BACK: u32 = 121;
    /// The pod cannot be isolated, or is no longer isolated.
    pub const ISOLATION: u32 = 115;
    /// The pod's traffic cannot be captured, or is no longer captured.
    pub const CAPTURE: u32 = 118;
    /// The node's route to a renumbered pod is missing.
    pub const HOST_ROUTE: u32 = 113;
    /// The pod's certificate is no longer valid.
    pub const CERTIFICATE_EXPIRED: u32 = 112;
    /// All addresses of a range are taken.
    pub const NO_ADDRESS: u32 = 122;
}

/// An error, which runtimes show to users as `msg; details`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// One of [`code`].
    pub code: u32,
    /// One line: what failed, for which object, and why.
    pub msg: String,
    /// What to do about it, or what the instance reported.
    pub details: String,
}

impl Error {
    /// An error without details.
    #[must_use]
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// Sets the details.
    #[must_use]
    pub fn details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Adds that undoing what had been done failed, too.
    #[must_use]
    pub fn also(self, undo: &Self) -> Self {
        let details = [self.details.as_str(), &format!("and undoing it failed: {undo}")].join("; ");
        self.details(details.trim_start_matches("; "))
    }

    /// The error object for stdout. `version` is that of the request.
    #[must_use]
    pub fn to_json(&self, version: &str) -> String {
        #[derive(Serialize)]
        struct Object<'a> {
            #[serde(rename = "cniVersion")]
            version: &'a str,
            code: u32,
            msg: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            details: &'a str,
        }
        let version = if speaks(version, SUPPORTED[0]) { version } else { NEWEST };
        let object = Object { version, code: self.code, msg: &self.msg, details: &self.details };
        serde_json::to_string(&object).unwrap_or_else(|_| format!(r#"{{"code":{},"msg":"unprintable"}}"#, self.code))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.msg, self.code)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, ": {}", self.details) }
    }
}

impl std::error::Error for Error {}

/// The reply to VERSION.
#[must_use]
pub fn version(asked: Option<&str>) -> String {
    let asked = serde_json::Value::from(asked.unwrap_or(NEWEST));
    let supported = serde_json::Value::from(SUPPORTED.to_vec());
    format!(r#"{{"cniVersion":{asked},"supportedVersions":{supported}}}"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_the_version_of_the_request_if_we_speak_it() {
        let error = Error::new(code::CONFIG, "bad \"x\"");
        assert_eq!(error.to_json("0.3.1"), r#"{"cniVersion":"0.3.1","code":7,"msg":"bad \"x\""}"#);
        assert_eq!(
            error.details("fix it").to_json("9.9"),
            r#"{"cniVersion":"1.1.0","code":7,"msg":"bad \"x\"","details":"fix it"}"#
        );
    }

    #[test]
    fn version_order_is_the_order_of_the_specification() {
        assert!(speaks("1.0.0", "0.4.0"));
        assert!(speaks("0.4.0", "0.4.0"));
        assert!(!speaks("0.3.1", "0.4.0"));
        assert!(!speaks("0.2.0", "0.3.0"));
        assert!(!speaks("1.2.0", "0.3.0"));
    }
}
