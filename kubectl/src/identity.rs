//! The ServiceAccount as which agents or the CA are asked. Its token is for them alone and lasts ten minutes:
//! credentials of the user never leave the API server.

use std::str::FromStr;

use serde_json::json;
use zeroize::Zeroizing;

use crate::cli::Place;
use crate::cluster::{Cluster, ClusterError, is_name};

/// What the asking is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// To look at one namespace, or at all.
    Viewer,
    /// To look at what belongs to no namespace.
    ClusterViewer,
    /// To change something.
    Operator,
    /// To change something of one namespace, or of all.
    NamespaceOperator,
}

/// A ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    namespace: String,
    name: String,
}

/// A text that names no ServiceAccount.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is NAMESPACE/NAME")]
pub struct NoAccount;

impl FromStr for Account {
    type Err = NoAccount;

    fn from_str(text: &str) -> Result<Self, NoAccount> {
        let (namespace, name) = text.split_once('/').ok_or(NoAccount)?;
        let is_good = is_name(namespace) && is_name(name);
        is_good.then(|| Self { namespace: namespace.to_owned(), name: name.to_owned() }).ok_or(NoAccount)
    }
}

impl Account {
    /// The account that is asked for, or that of the role. `namespace` is what is looked at; `None`: all.
    #[must_use]
    pub fn choose(place: &Place, namespace: Option<&str>, role: Role) -> Self {
        if let Some(account) = &place.service_account {
            return account.clone();
        }
        let is_operator = matches!(role, Role::Operator | Role::NamespaceOperator);
        let name = if is_operator { "nebula-operator" } else { "nebula-viewer" };
        let own = namespace.filter(|_| matches!(role, Role::Viewer | Role::NamespaceOperator));
        Self { namespace: own.unwrap_or(&place.system_namespace).to_owned(), name: name.to_owned() }
    }

    /// The account of the same name for all namespaces, if this one is for a single one and was not asked for.
    #[must_use]
    pub fn wider(&self, place: &Place) -> Option<Self> {
        let wider = Self { namespace: place.system_namespace.clone(), name: self.name.clone() };
        (place.service_account.is_none() && *self != wider).then_some(wider)
    }

    /// The account of [`Account::choose`] and a token of it. Who may use the one for all namespaces needs none in each
    /// of them.
    ///
    /// # Errors
    /// Says why there is no token of the first account.
    pub async fn with_token(
        cluster: &Cluster,
        place: &Place,
        namespace: Option<&str>,
        role: Role,
        audience: &str,
    ) -> Result<(Self, Zeroizing<String>), ClusterError> {
        let account = Self::choose(place, namespace, role);
        let error = match account.token(cluster, audience).await {
            Ok(token) => return Ok((account, token)),
            Err(error) => error,
        };
        let Some(wider) = account.wider(place) else { return Err(error) };
        let token = wider.token(cluster, audience).await.map_err(|_| error)?;
        Ok((wider, token))
    }

    /// The name of its user.
    #[must_use]
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }

    /// Asks the API server for a token that is for this audience.
    ///
    /// # Errors
    /// Says what RBAC forbids, or that there is no such account, and what would help.
    pub async fn token(&self, cluster: &Cluster, audience: &str) -> Result<Zeroizing<String>, ClusterError> {
        let Self { namespace, name } = self;
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let request = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": LIFE}});
        let answer = cluster.post(&path, &request).await.map_err(|error| match error.status() {
            Some(404) => error.hint(format!(
                "there is no ServiceAccount {name} in namespace {namespace}. With the right to make one: \
                 kubectl create serviceaccount -n {namespace} {name} && kubectl create rolebinding -n {namespace} {name} \
                 --clusterrole={name} --serviceaccount={namespace}:{name}; or name another one with --service-account"
            )),
            Some(403) => error.hint(format!(
                "you may not create serviceaccounts/token of {namespace}/{name}. Whoever administers the namespace gives it: \
                 kubectl create role -n {namespace} {name}-token --verb=create --resource=serviceaccounts/token \
                 --resource-name={name} && kubectl create rolebinding -n {namespace} {name}-token --role={name}-token --user=YOU"
            )),
            _ => error,
        })?;
        let token = answer["status"]["token"].as_str().map(str::to_owned);
        token.map(Zeroizing::new).ok_or_else(|| ClusterError::odd(&path))
    }
}

const LIFE: u32 = 600;

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    fn chosen(arguments: &[&str], namespace: Option<&str>, role: Role) -> String {
        let cli = Cli::try_parse_from([&["x", "pods"], arguments].concat()).unwrap();
        let account = Account::choose(&cli.place, namespace, role);
        format!("{}/{}", account.namespace, account.name)
    }

    #[test]
    fn the_account_is_that_of_the_namespace_or_of_the_release() {
        assert_eq!(chosen(&[], Some("shop"), Role::Viewer), "shop/nebula-viewer");
        assert_eq!(chosen(&[], None, Role::Viewer), "nebula-system/nebula-viewer");
        assert_eq!(chosen(&[], Some("shop"), Role::ClusterViewer), "nebula-system/nebula-viewer");
        assert_eq!(chosen(&["--system-namespace", "n"], Some("shop"), Role::Operator), "n/nebula-operator");
        assert_eq!(chosen(&["--service-account", "a/b"], Some("shop"), Role::Viewer), "a/b");
        assert_eq!(chosen(&[], Some("shop"), Role::NamespaceOperator), "shop/nebula-operator");
        assert_eq!(chosen(&[], None, Role::NamespaceOperator), "nebula-system/nebula-operator");
        let wider = |arguments: &[&str], namespace: Option<&str>, role: Role| {
            let cli = Cli::try_parse_from([&["x", "pods"], arguments].concat()).unwrap();
            Account::choose(&cli.place, namespace, role).wider(&cli.place).map(|account| account.namespace)
        };
        assert_eq!(wider(&[], Some("shop"), Role::Viewer).as_deref(), Some("nebula-system"));
        assert_eq!(wider(&[], None, Role::Viewer), None);
        assert_eq!(wider(&[], Some("shop"), Role::Operator), None);
        assert_eq!(wider(&[], Some("shop"), Role::NamespaceOperator).as_deref(), Some("nebula-system"));
        assert_eq!(wider(&["--service-account", "shop/nebula-viewer"], Some("shop"), Role::Viewer), None);
        for bad in ["a", "a/", "/b", "a/b/c", "A/b", "../b"] {
            assert_eq!(bad.parse::<Account>(), Err(NoAccount), "{bad}");
        }
    }
}
