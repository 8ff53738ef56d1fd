//! The messages of the container runtime interface (CRI v1, `runtime.v1`) that the agent uses, with the fields that it
//! reads. Numbers and types are those of the interface's `api.proto`; unknown fields are skipped.

use std::collections::HashMap;

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StatusRequest {
    #[prost(bool, tag = "1")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<RuntimeStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RuntimeStatus {
    #[prost(message, repeated, tag = "1")]
    pub(super) conditions: Vec<RuntimeCondition>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RuntimeCondition {
    #[prost(string, tag = "1")]
    pub(super) kind: String,
    #[prost(bool, tag = "2")]
    pub(super) status: bool,
    #[prost(string, tag = "3")]
    pub(super) reason: String,
    #[prost(string, tag = "4")]
    pub(super) message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ListPodSandboxRequest {}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ListPodSandboxResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) items: Vec<PodSandbox>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandbox {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(message, optional, tag = "2")]
    pub(super) metadata: Option<PodSandboxMetadata>,
    /// 0: ready, 1: not ready.
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(map = "string, string", tag = "5")]
    pub(super) labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "6")]
    pub(super) annotations: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "2")]
    pub(super) uid: String,
    #[prost(string, tag = "3")]
    pub(super) namespace: String,
    #[prost(uint32, tag = "4")]
    pub(super) attempt: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxStatusRequest {
    #[prost(string, tag = "1")]
    pub(super) pod_sandbox_id: String,
    #[prost(bool, tag = "2")]
    pub(super) verbose: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxStatusResponse {
    #[prost(message, optional, tag = "1")]
    pub(super) status: Option<PodSandboxStatus>,
    #[prost(map = "string, string", tag = "2")]
    pub(super) info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct PodSandboxStatus {
    #[prost(string, tag = "1")]
    pub(super) id: String,
    #[prost(message, optional, tag = "2")]
    pub(super) metadata: Option<PodSandboxMetadata>,
    #[prost(int32, tag = "3")]
    pub(super) state: i32,
    #[prost(message, optional, tag = "6")]
    pub(super) linux: Option<LinuxPodSandboxStatus>,
    #[prost(map = "string, string", tag = "7")]
    pub(super) labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "8")]
    pub(super) annotations: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LinuxPodSandboxStatus {
    #[prost(message, optional, tag = "1")]
    pub(super) namespaces: Option<Namespaces>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Namespaces {
    #[prost(message, optional, tag = "2")]
    pub(super) options: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct NamespaceOption {
    /// 0: the pod's own, 2: the node's.
    #[prost(int32, tag = "1")]
    pub(super) network: i32,
}
