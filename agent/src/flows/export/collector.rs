//! A collector, asked by OTLP over HTTP with protobuf: it is what OpenTelemetry recommends, passes proxies of every
//! kind, and the client is the one that the agent has for its CA.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nebula_cert::client;
use nebula_cni_contract::flow_records::FlowRecord;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceResponse;
use prost::Message;
use ureq::http::{HeaderMap, header};

use super::headers::Headers;
use super::otlp::Encoder;
use super::{OtlpExport, SendError, Sent, Sink};
use crate::durable;
use crate::flows::now_ms;
use crate::host_root::HostRoot;

/// One collector.
pub(super) struct Collector {
    settings: OtlpExport,
    url: String,
    /// Where nodes have roots, for a collector whose roots are not configured.
    of_node: Vec<PathBuf>,
    node: Option<String>,
    within: Duration,
    client: Option<Client>,
    encoder: Encoder,
}

/// What was made of the files of the settings.
struct Client {
    agent: ureq::Agent,
    headers: Headers,
    /// When they had changed.
    changed: Vec<Option<SystemTime>>,
}

impl Collector {
    pub(super) fn new(settings: OtlpExport, host: &HostRoot, node: Option<&str>) -> Self {
        let url = format!("{}/v1/logs", settings.endpoint.trim_end_matches('/'));
        let of_node = ROOTS_OF_NODES.iter().map(|path| host.resolve(Path::new(path))).collect();
        Self {
            settings,
            url,
            of_node,
            node: node.map(str::to_owned),
            within: WITHIN,
            client: None,
            encoder: Encoder::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// The client for the files of the settings as they are now.
    fn client(&mut self) -> Result<Client, SendError> {
        let files = [&self.settings.headers, &self.settings.roots];
        let time = |path: &PathBuf| fs::metadata(path).and_then(|file| file.modified()).ok();
        let changed: Vec<_> = files.into_iter().flatten().map(time).collect();
        match self.client.take() {
            Some(client) if client.changed == changed => Ok(client),
            _ => Ok(Client { agent: self.agent()?, headers: self.headers()?, changed }),
        }
    }

    fn headers(&self) -> Result<Headers, SendError> {
        let Some(path) = &self.settings.headers else { return Ok(Headers::default()) };
        Headers::read(path).map_err(|error| setting(path, &error))
    }

    fn agent(&self) -> Result<ureq::Agent, SendError> {
        let is_https = self.url.starts_with("https:");
        let roots = if is_https { self.roots()? } else { Vec::new() };
        let tls = client::tls(roots, Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let config = client::config(tls, concat!("nebula-cni-agent/", env!("CARGO_PKG_VERSION")))
            .https_only(is_https)
            .timeout_connect(Some(CONNECT_WITHIN))
            .timeout_global(Some(self.within))
            .max_idle_connections(1)
            .build();
        Ok(client::agent(config, None))
    }

    fn roots(&self) -> Result<Vec<ureq::tls::Certificate<'static>>, SendError> {
        let of_node = || self.of_node.iter().find(|path| path.exists());
        let Some(path) = self.settings.roots.as_ref().or_else(of_node) else {
            let why = "the node has no TLS roots; name those of the collector";
            return Err(SendError::Setting { path: PathBuf::from(ROOTS_OF_NODES[0]), why: why.to_owned() });
        };
        let pem = durable::read_bounded(path, MAX_ROOTS).map_err(|error| setting(path, &error))?;
        client::roots(&pem).map_err(|error| setting(path, &error))
    }
}

fn setting(path: &Path, why: &dyn std::error::Error) -> SendError {
    SendError::Setting { path: path.to_owned(), why: why.to_string() }
}

impl Sink for Collector {
    fn place(&self) -> String {
        self.url.clone()
    }

    fn send(&mut self, records: &[FlowRecord]) -> Result<Sent, SendError> {
        let client = self.client()?;
        let client = self.client.insert(client);
        let mut request = client.agent.post(&self.url).header(header::CONTENT_TYPE, PROTOBUF);
        for (name, value) in client.headers.iter() {
            request = request.header(name, value);
        }
        let body = self.encoder.request(records, self.node.as_deref(), now_ms());
        let mut answer = request.send(body).map_err(|error| SendError::NoAnswer(Box::new(error)))?;
        let status = answer.status().as_u16();
        match status {
            200..=299 => {}
            429 | 502 | 503 | 504 => return Err(SendError::Busy { status, after: retry_after(answer.headers()) }),
            // Nobody who takes records answers so; and secret headers go to no other host.
            300..=399 => return Err(SendError::NotOtlp { status }),
            _ => return Err(SendError::Refused { status }),
        }
        let not_otlp = || SendError::NotOtlp { status };
        let kind = answer.headers().get(header::CONTENT_TYPE).map(|kind| kind.as_bytes().to_vec());
        let read = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_vec().map_err(|_| not_otlp())?;
        if read.is_empty() {
            return Ok(Sent::default());
        }
        // The page of a proxy is no answer, also not where it happens to be readable as one.
        if !kind.is_some_and(|kind| kind.starts_with(PROTOBUF.as_bytes())) {
            return Err(not_otlp());
        }
        let read = ExportLogsServiceResponse::decode(&read[..]).map_err(|_| not_otlp())?;
        let rejected = read.partial_success.unwrap_or_default().rejected_log_records;
        Ok(Sent { rejected: rejected.max(0).cast_unsigned() })
    }
}

/// Seconds; a date is left to our own backoff.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

const PROTOBUF: &str = "application/x-protobuf";
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
const WITHIN: Duration = Duration::from_secs(10);
const MAX_ANSWER: u64 = 64 << 10;
const MAX_ROOTS: u64 = 2 << 20;
const ROOTS_OF_NODES: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem"];
