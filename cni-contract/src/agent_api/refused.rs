//! Why an agent does not answer.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What an agent sends with a status of 4xx or 5xx.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refused {
    /// Why, for people.
    pub error: String,
    /// The permission that is lacking, if that is why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacking: Option<Lacking>,
}

/// A permission that RBAC does not give.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Lacking {
    /// The user that the token belongs to, such as `system:serviceaccount:shop:nebula-viewer`.
    pub user: String,
    /// The verb, such as `get`.
    pub verb: String,
    /// The resource in [`GROUP`](super::GROUP), such as `flows`.
    pub resource: String,
    /// The namespace; `None`: the whole cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { user, verb, resource, namespace } = self;
        write!(f, "{user} may not {verb} {resource}.{} ", super::GROUP)?;
        match namespace {
            Some(namespace) => write!(f, "in namespace {namespace}"),
            None => f.write_str("in the whole cluster"),
        }
    }
}

impl Lacking {
    /// The user as NAMESPACE and NAME of a ServiceAccount, if it is one.
    #[must_use]
    pub fn service_account(&self) -> Option<(&str, &str)> {
        self.user.strip_prefix("system:serviceaccount:")?.split_once(':')
    }

    /// The command that gives the permission, for ServiceAccounts.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        let (of, name) = self.service_account()?;
        let role = if self.verb == "get" { "nebula-viewer" } else { "nebula-operator" };
        Some(match &self.namespace {
            Some(namespace) => format!(
                "kubectl create rolebinding -n {namespace} {role} --clusterrole={role} --serviceaccount={of}:{name}"
            ),
            None => format!(
                "kubectl create clusterrolebinding {of}-{name} --clusterrole={role} --serviceaccount={of}:{name}"
            ),
        })
    }
}
