//! Creates the directory of a new CA service: CA, TLS identity, node token and policy.

use ipnet::IpNet;
use nebula_cert::{Certificate, Curve, SigningKey, Template, UnixTime, Version};

use crate::{
    directory::{CA_CERTIFICATE, CA_KEY, Directory, FileError, NODE_TOKEN, POLICY, STORE, TLS_CERTIFICATE, TLS_KEY},
    proof::{certificate::RenewalKey, token},
    store::{Beginning, RedbStore, StoreError},
    tls,
};

/// Options for a new service.
#[derive(Debug, Clone)]
pub struct NewCa {
    /// Name of the CA certificate.
    pub name: String,
    /// Encoding of all certificates.
    pub version: Version,
    /// Curve of all keys.
    pub curve: Curve,
    /// Life of the CA certificate in seconds.
    pub life: i64,
    /// The only networks the CA may ever sign for; empty for no constraint.
    pub networks: Vec<IpNet>,
    /// Prefixes that pods get their addresses from.
    pub overlay: Vec<IpNet>,
    /// Host names and IP addresses under which clients reach the service.
    pub tls_names: Vec<String>,
}

/// Why no service was created.
#[derive(Debug, thiserror::Error)]
pub enum InitError {
    /// A file exists already.
    #[error(
        "{0} exists; nothing was changed. Use another directory, or move this CA away if it is not needed any more"
    )]
    Exists(String),
    /// A file cannot be created.
    #[error(transparent)]
    File(#[from] FileError),
    /// The CA certificate cannot be created.
    #[error("cannot make the CA certificate: {0}")]
    Certificate(#[from] nebula_cert::Error),
    /// The TLS certificate cannot be created.
    #[error("cannot make the TLS certificate; are the --tls-name values host names or IP addresses?")]
    Tls(#[from] rcgen::Error),
    /// The ledger cannot be created.
    #[error("cannot make the ledger")]
    Store(#[from] StoreError),
    /// The system's random generator failed.
    #[error("the system has no randomness: {0}")]
    Random(getrandom::Error),
    /// The options contradict each other.
    #[error("the resulting policy would not be valid: {0}")]
    Policy(#[from] crate::PolicyError),
}

impl NewCa {
    /// Creates everything, or fails before the first file is written. Existing files are never overwritten.
    ///
    /// # Errors
    /// Returns an error if any file of the service exists, or something cannot be created.
    pub fn make(self, directory: &Directory, now: UnixTime) -> Result<Certificate, InitError> {
        for name in [CA_CERTIFICATE, CA_KEY, TLS_CERTIFICATE, TLS_KEY, NODE_TOKEN, POLICY, STORE] {
            if directory.has(name) {
                return Err(InitError::Exists(directory.file(name).display().to_string()));
            }
        }
        let key = SigningKey::generate(self.curve)?;
        let template = Template {
            version: self.version,
            curve: self.curve,
            name: self.name,
            networks: self.networks,
            unsafe_networks: Vec::new(),
            groups: Vec::new(),
            not_before: now,
            not_after: now.saturating_add(self.life),
            public_key: key.public_key(),
        };
        let ca = template.self_sign(&key)?;
        let policy = policy_text(&self.overlay);
        crate::Policy::parse(&policy)?.check_against(&ca)?;
        let (tls_certificate, tls_key) = tls::generate(self.tls_names, now)?;
        let node_token = token::generate(token::NODE_PREFIX).map_err(InitError::Random)?;

        directory.make()?;
        directory.write_new(CA_KEY, &key.to_pem(), 0o600)?;
        directory.write_new(CA_CERTIFICATE, &ca.to_pem(), 0o644)?;
        directory.write_new(TLS_KEY, &tls_key, 0o600)?;
        directory.write_new(TLS_CERTIFICATE, &tls_certificate, 0o644)?;
        directory.write_new(NODE_TOKEN, &format!("{}\n", *node_token), 0o600)?;
        // A CA without its ledger does not serve for long.
        RedbStore::open_file(&directory.file(STORE), Beginning::Allowed)?;
        directory.write_new(POLICY, &policy, 0o644)?;
        // Create it here rather than at the first start, so that a copy of the directory for a replica is complete.
        RenewalKey::open(directory, self.curve)?;
        Ok(ca)
    }
}

/// The policy file of a new service; documents every key.
pub(crate) fn policy_text(overlay: &[IpNet]) -> String {
    let overlay: Vec<String> = overlay.iter().map(|prefix| format!("\"{}\"", prefix.trunc())).collect();
    POLICY_TEXT.replace("OVERLAY", &overlay.join(", "))
}

const POLICY_TEXT: &str = r#"// Policy of this CA: who gets which certificate. Read when nebula-ca starts, on SIGHUP and by `nebula-ca reload`.
// JSON; lines that start with // are comments. Misspelt keys are refused, and a file with a mistake changes nothing.
{
  // The API server that confirms pods. Without this section, a holder of the file node.token can describe any pod.
  // "kubernetes": {
  //   Service account of the node agent; only its tokens, bound to a pod on the node, vouch for pods there.
  //   "node_account": "nebula-system/nebula-cni-agent",
  //   Audience for which tokens must be made.
  //   "audience": "nebula-ca",
  //   Credentials for the API server. Default: those every pod gets. Needed rights: create tokenreviews, get and list pods,
  //   get nodes; unless pods.address is "pool" also watch pods, list and watch nodes: who has which address.
  //   "kubeconfig": "/etc/nebula-ca/kubeconfig",
  //   Whether a pod's address must be in the pod ranges of its node, where the node has any.
  //   "node_ranges": true,
  //   ConfigMap (namespace/name) into which the CA writes tls.crt and ca.crt, for all who must know whom to trust. Needed
  //   rights, in its namespace: get, patch and create configmaps of that name.
  //   "trust_config_map": "nebula-system/nebula-trust",
  //   Whether `kubectl nebula revoke` may revoke certificates, for those whom RBAC allows to delete
  //   certificates.nebula-cni. Needed right: create subjectaccessreviews.
  //   "revocation": false
  // },

  // Pods of a StatefulSet that are lighthouses, by their own tokens (needs "kubernetes"). Pod number N gets address N of
  // the network, counted from its first, which must be in pods.reserved; or give the first address alone. They are
  // announced beside hosts.lighthouses, at the addresses of their nodes.
  // "lighthouses": {
  //   "account": "nebula-system/nebula-lighthouse", "network": "10.42.255.0/24",
  //   "name": "lighthouse-{ordinal}", "groups": ["lighthouse"], "life": "24h", "port": 4242
  // },

  // What a pod gets that somebody vouched for. Without this section no pod gets anything.
  "pods": {
    // Name and groups of the certificate. {name}, {namespace} and {uid} are those of the pod; with a "kubernetes"
    // section also {service_account}, {node} and, in groups only, {label:KEY}: a group with a label the pod lacks is
    // left out. Labels are written by those who may create pods in the namespace.
    "name": "{name}.{namespace}.pod",
    "groups": ["ns:{namespace}"],

    // Where the overlay address comes from:
    //   "derive"  the pod address's host bits in each overlay prefix, or the pod's IPv4 address embedded in an
    //             IPv6 prefix of /96 or shorter. A pod that inherits a deleted pod's address inherits its overlay address.
    //   "pool"    the next free address of each overlay prefix; free again when the longest certificate has expired.
    //   "same"    the pod's own address, which must be in an overlay prefix.
    "address": "derive",

    // With "pool" and a "kubernetes" section: pods of StatefulSets have the address of the pod that had their name
    // before, for so long after that one's last certificate.
    // "stable": ["statefulsets"], "stable_for": "30d",

    // One address from each of these prefixes. They are the overlay networks of the certificates.
    "overlay": [OVERLAY],

    // Networks in which the primary CNI plugin gives addresses to pods. If given, pods from elsewhere are refused, and
    // it is checked that no two pod addresses can become one overlay address (mode "derive").
    "pod_networks": [],

    // Overlay addresses and networks no pod gets, for example those of lighthouses.
    "reserved": [],

    // Namespaces whose pods get certificates: only these, or with "except_namespaces" all but these. What pods have they renew,
    // whatever stands here. Default: all.
    // "namespaces": ["shop"],

    // What a node gets for a pod until the pod's init container shows the pod's own token (flow "init" of the plugin,
    // with "provisional": true): a certificate with the same name and address, these groups only, no networks behind
    // it. It is no proof for another one. Without this section there are none; {} means what stands here.
    // "provisional": {"groups": ["provisional"], "life": "10m"},

    // What some pods get besides. All rules that fit a pod apply; of several lives the shortest counts.
    // "rules": [
    //   {"namespaces": ["infra"], "service_accounts": ["gateway"], "labels": {"site": "a"},
    //    "groups": ["gateway"], "unsafe_networks": ["192.168.0.0/24"], "life": "1h"},
    //   {"namespaces": ["kube-system"], "refuse": true}
    // ],

    // Life of a pod's certificate; never longer than the CA's. Units: d, h, m, s.
    "life": "24h"
  },

  // What a host gets is written into its enrolment token (nebula-ca token create), within this limit.
  "hosts": {
    // Where the address comes from if the token names none: the next free one of each prefix. It is free again when the
    // token was not used in time, or the last certificate for it has expired.
    // "pool": ["10.42.200.0/24"],
    // The overlay networks that these are parts of; without them a pool is a network of its own.
    // "overlay": ["10.42.0.0/16"],
    // Addresses and networks of the pool no host gets.
    // "reserved": ["10.42.200.0/28"],

    // Lighthouses that hosts are told of: overlay address, then where it is reached.
    // "lighthouses": {"10.42.0.1": ["lighthouse.example:4242"]},

    // Longest life that a token may give to certificates (nebula-ca token create --life; default 7d). A host renews after
    // two thirds of it.
    "longest_life": "365d",

    // So long after its end a certificate that was not revoked still renews itself, with the same name and addresses,
    // which are kept meanwhile: the service may be away for that long. At most 30d; "0s": never.
    "renewal_grace": "7d"
  }
}
"#;
