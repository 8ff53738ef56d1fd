//! A collector in the process of the test: it reads OTLP over HTTP with the generated types of the protocol, and
//! answers what the test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsPartialSuccess, ExportLogsServiceRequest, ExportLogsServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use prost::Message;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// Listens until the process ends.
pub(super) struct Receiver {
    pub(super) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    answer: Arc<Mutex<Answer>>,
}

/// A request.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    /// Its first line and its headers.
    pub(super) head: String,
    pub(super) request: ExportLogsServiceRequest,
}

/// What a request is answered with.
#[derive(Debug, Clone)]
pub(super) enum Answer {
    /// All of it is taken.
    Taken,
    /// All but this number of records.
    Rejected(i64),
    /// A status, and further headers.
    Status(u16, &'static str),
    /// These bytes.
    Raw(Vec<u8>),
    /// Nothing, and the connection stays open.
    Nothing,
}

impl Receiver {
    pub(super) fn new() -> Self {
        Self::on("127.0.0.1:0".parse().unwrap(), None)
    }

    /// At an address, with TLS if it has a configuration for it.
    pub(super) fn on(address: SocketAddr, tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let (asked, answer) = (Arc::new(Mutex::default()), Arc::new(Mutex::new(Answer::Taken)));
        let receiver = Self { address, asked: Arc::clone(&asked), answer: Arc::clone(&answer) };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (asked, answer, tls) = (Arc::clone(&asked), Arc::clone(&answer), tls.clone());
                std::thread::spawn(move || match tls {
                    None => converse(stream, &asked, &answer),
                    Some(tls) => {
                        converse(StreamOwned::new(ServerConnection::new(tls).unwrap(), stream), &asked, &answer)
                    }
                });
            }
        });
        receiver
    }

    pub(super) fn answer(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    /// The requests since it was asked last.
    pub(super) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.asked.lock().unwrap())
    }
}

impl Asked {
    pub(super) fn records(&self) -> Vec<&LogRecord> {
        self.request.resource_logs[0].scope_logs[0].log_records.iter().collect()
    }

    /// Numbers of the records in the store.
    pub(super) fn numbers(&self) -> Vec<i64> {
        let number = |record: &&LogRecord| match attribute(&record.attributes, "nebula.flow.number") {
            Some(Value::IntValue(number)) => *number,
            other => panic!("{other:?}"),
        };
        self.records().iter().map(number).collect()
    }
}

pub(super) fn attribute<'a>(all: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    all.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn converse(stream: impl Read + Write, asked: &Mutex<Vec<Asked>>, answer: &Mutex<Answer>) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let length =
            head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ").map(str::to_owned));
        let mut body = vec![0; length.unwrap().parse().unwrap()];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        let request = ExportLogsServiceRequest::decode(&body[..]).unwrap();
        asked.lock().unwrap().push(Asked { head, request });
        let said = answer.lock().unwrap().clone();
        let taken = |rejected_log_records| {
            let partial = ExportLogsPartialSuccess { rejected_log_records, error_message: "too old".to_owned() };
            let partial_success = Some(partial).filter(|_| rejected_log_records > 0);
            let body = ExportLogsServiceResponse { partial_success }.encode_to_vec();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length:";
            [format!("{head} {}\r\n\r\n", body.len()).into_bytes(), body].concat()
        };
        let bytes = match said {
            Answer::Taken => taken(0),
            Answer::Rejected(records) => taken(records),
            Answer::Status(status, headers) => {
                format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: 0\r\n\r\n").into_bytes()
            }
            Answer::Raw(bytes) => bytes,
            Answer::Nothing => {
                std::thread::sleep(std::time::Duration::from_secs(60));
                return;
            }
        };
        let is_raw = bytes.starts_with(b"HTTP/1.1") && !bytes.ends_with(b"\0");
        if stream.get_mut().write_all(&bytes).and_then(|()| stream.get_mut().flush()).is_err() || !is_raw {
            return;
        }
    }
}

/// An address where nobody listens.
pub(super) fn nobody() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}
