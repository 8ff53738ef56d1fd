//! The init container's end of the hand-off: listens in the pod, gives the pod's token, takes the certificate, writes it.

use std::convert::Infallible;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use nebula_cert::{CaPool, Certificate, Identity, PrivateKey};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use zeroize::Zeroizing;

use crate::daemon::unix_now;
use crate::errno;
use crate::handoff::{self, DELIVERY_PATH, Delivery, MAX_DELIVERY, MAX_REASON, MAX_TOKEN, REASON_PATH, TOKEN_PATH};

/// What init is told.
#[derive(Debug, Clone)]
pub struct Settings {
    /// File with the pod's projected service-account token.
    pub token_file: PathBuf,
    /// Folder for `host.crt`, `ca.crt` and, if it comes, `host.key`.
    pub out_dir: PathBuf,
    /// Port on 127.0.0.1.
    pub port: u16,
    /// How long to wait for a certificate.
    pub deadline: Duration,
}

/// Why the pod has no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The token file is no use.
    #[error("token file {}: {cause}", path.display())]
    Token {
        /// Path.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// The port cannot be used.
    #[error("cannot listen on 127.0.0.1:{port}: {cause}")]
    Listen {
        /// Port.
        port: u16,
        /// Why not.
        cause: String,
    },
    /// Nothing came in time.
    #[error("no certificate within {} s: {reason}", after.as_secs())]
    Deadline {
        /// How long it waited.
        after: Duration,
        /// What the instance said last, or that it said nothing.
        reason: String,
    },
    /// The certificate came and could not be written.
    #[error("cannot write the certificate to {}: {cause}", path.display())]
    Write {
        /// Folder.
        path: PathBuf,
        /// Why not.
        cause: String,
    },
    /// No event loop.
    #[error("cannot start: {0}")]
    Start(String),
}

/// Waits for the certificate and writes it. Returns its name.
///
/// # Errors
/// See [`Error`].
pub fn run(settings: &Settings) -> Result<String, Error> {
    // Said at once, and not only when somebody asks: a missing volume is the most likely mistake.
    read_token(&settings.token_file)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| Error::Start(errno::text(&error)))?;
    runtime.block_on(serve(settings))
}

/// What all connections share.
struct Desk {
    settings: Settings,
    /// Outcome of the delivery.
    outcome: Mutex<Option<Result<String, Error>>>,
    done: Notify,
    reason: Mutex<Option<String>>,
}

async fn serve(settings: &Settings) -> Result<String, Error> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, settings.port));
    let refused = |error: io::Error| Error::Listen { port: settings.port, cause: errno::text(&error) };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let desk = Arc::new(Desk {
        settings: settings.clone(),
        outcome: Mutex::new(None),
        done: Notify::new(),
        reason: Mutex::new(None),
    });
    let slots = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let accepting = async {
        loop {
            // The semaphore is never closed.
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let desk = Arc::clone(&desk);
                    tokio::spawn(async move {
                        connection(stream, desk).await;
                        drop(slot);
                    });
                }
                Err(_) => tokio::time::sleep(AFTER_FAILED_ACCEPT).await,
            }
        }
    };
    tokio::select! {
        () = accepting => {}
        () = desk.done.notified() => {
            // The instance shall hear that it was taken.
            tokio::time::sleep(LAST_ANSWER).await;
        }
        () = tokio::time::sleep(settings.deadline) => {}
    }
    let outcome = desk.outcome.lock().unwrap_or_else(PoisonError::into_inner).take();
    outcome.unwrap_or_else(|| {
        let reason = desk.reason.lock().unwrap_or_else(PoisonError::into_inner).take();
        let reason = reason.unwrap_or_else(|| NOBODY_CAME.to_owned());
        Err(Error::Deadline { after: settings.deadline, reason })
    })
}

async fn connection(stream: TcpStream, desk: Arc<Desk>) {
    let service = service_fn(move |request| {
        let desk = Arc::clone(&desk);
        async move { Ok::<_, Infallible>(desk.answer(request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WITHIN)
        .max_buf_size(LONGEST_HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // A caller that went away is no fault.
    let _ = tokio::time::timeout(REQUEST_WITHIN, connection).await;
}

impl Desk {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        match (request.method(), request.uri().path()) {
            (&Method::GET, TOKEN_PATH) => match read_token(&self.settings.token_file) {
                Ok(token) => text(StatusCode::OK, token.as_bytes().to_vec()),
                Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            },
            (&Method::POST, DELIVERY_PATH) => match body(request, MAX_DELIVERY).await {
                Some(body) => self.take(&body),
                None => text(StatusCode::PAYLOAD_TOO_LARGE, "too long, or cut short"),
            },
            (&Method::POST, REASON_PATH) => match body(request, MAX_REASON).await {
                Some(body) => {
                    self.note(&body);
                    text(StatusCode::NO_CONTENT, "")
                }
                None => text(StatusCode::PAYLOAD_TOO_LARGE, "too long, or cut short"),
            },
            _ => text(StatusCode::NOT_FOUND, ""),
        }
    }

    fn take(&self, body: &[u8]) -> Response<Full<Bytes>> {
        let checked = serde_json::from_slice::<Delivery>(body).map_err(|_| "not a delivery".to_owned());
        let (delivery, name) = match checked.and_then(|delivery| check(&delivery).map(|name| (delivery, name))) {
            Ok(checked) => checked,
            Err(cause) => {
                eprintln!("nebula-cni-init: refused a delivery: {cause}");
                return text(StatusCode::BAD_REQUEST, cause);
            }
        };
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if !matches!(*outcome, Some(Ok(_))) {
            let path = self.settings.out_dir.clone();
            let written = write(&path, &delivery);
            *outcome = Some(written.map(|()| name).map_err(|error| Error::Write { path, cause: errno::text(&error) }));
            self.done.notify_one();
        }
        match &*outcome {
            Some(Err(error)) => text(StatusCode::INSUFFICIENT_STORAGE, error.to_string()),
            _ => text(StatusCode::NO_CONTENT, ""),
        }
    }

    fn note(&self, body: &[u8]) {
        let line: String =
            String::from_utf8_lossy(body).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let mut reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if reason.as_ref() != Some(&line) {
            eprintln!("nebula-cni-init: no certificate yet: {line}");
            *reason = Some(line);
        }
    }
}

async fn body(request: Request<Incoming>, limit: usize) -> Option<Zeroizing<Vec<u8>>> {
    let collected = Limited::new(request.into_body(), limit).collect().await.ok()?;
    Some(Zeroizing::new(collected.to_bytes().to_vec()))
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response
}

fn read_token(path: &Path) -> Result<Zeroizing<String>, Error> {
    let refuse = |cause: String| Error::Token { path: path.to_owned(), cause };
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN + 1));
    let file = File::open(path).map_err(|error| refuse(errno::text(&error)))?;
    let read = file.take(MAX_TOKEN as u64 + 1).read_to_string(&mut text);
    read.map_err(|error| refuse(errno::text(&error)))?;
    let token = Zeroizing::new(text.trim().to_owned());
    if handoff::is_token(&token) { Ok(token) } else { Err(refuse("there is no token in it".to_owned())) }
}

/// Anybody in the pod can reach the port: what is written must at least fit together. Returns the certificate's name.
fn check(delivery: &Delivery) -> Result<String, String> {
    let certificates = Certificate::bundle_from_pem(delivery.certificate.as_bytes());
    let certificates = certificates.map_err(|error| format!("certificate: {error}"))?;
    let pool = CaPool::from_pem(delivery.ca.as_bytes()).map_err(|error| format!("CA bundle: {error}"))?;
    let mut name = String::new();
    for certificate in &certificates {
        let verified = pool.verify(certificate.clone(), unix_now()).map_err(|error| error.to_string())?;
        name = verified.name().to_owned();
    }
    if let Some(key) = &delivery.key {
        let key = PrivateKey::from_pem(key.as_bytes()).map_err(|error| format!("key: {error}"))?;
        Identity::new(certificates, key).map_err(|error| format!("key: {error}"))?;
    }
    Ok(name)
}

/// Each file is complete or not there, and the certificate comes last: who sees it sees the others as well.
fn write(folder: &Path, delivery: &Delivery) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
    let key = folder.join("host.key");
    match &delivery.key {
        Some(pem) => write_file(&key, pem.as_bytes())?,
        // Of an earlier run: it does not belong to this certificate.
        None => match std::fs::remove_file(&key) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        },
    }
    write_file(&folder.join("ca.crt"), delivery.ca.as_bytes())?;
    write_file(&folder.join("host.crt"), delivery.certificate.as_bytes())?;
    File::open(folder)?.sync_all()
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let beside = path.with_extension("new");
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&beside)?;
    // Whatever the umask of the image says.
    file.set_permissions(std::fs::Permissions::from_mode(MODE))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

const NOBODY_CAME: &str = "the pod's instance on this node did not ask for the token; is the pod enrolled, and does \
                           the plugin on this node have \"flow\": \"init\"?";
const MODE: u32 = 0o640;
const MOST_CONNECTIONS: usize = 8;
const LONGEST_HEAD: usize = 8 << 10;
const REQUEST_WITHIN: Duration = Duration::from_secs(10);
const AFTER_FAILED_ACCEPT: Duration = Duration::from_millis(100);
const LAST_ANSWER: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handoff::InitClient;
    use crate::netns::Foothold;
    use nebula_cert::{Curve, SigningKey, Template};

    struct Credentials {
        delivery: Delivery,
        folder: tempfile::TempDir,
    }

    fn credentials() -> Credentials {
        let (ca_key, key) =
            (SigningKey::generate(Curve::Curve25519).unwrap(), PrivateKey::generate(Curve::Curve25519).unwrap());
        let template = Template::new("ca", unix_now() - 60..=unix_now() + 3600);
        let ca = template.clone().self_sign(&ca_key).unwrap();
        let networks = vec!["10.0.0.1/8".parse().unwrap()];
        let host = Template { name: "web".into(), networks, public_key: key.public_key(), ..template };
        let certificate = host.sign(&ca, &ca_key).unwrap().to_pem();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "header.claims.signature\n").unwrap();
        let key = Some(key.to_pem().to_string());
        Credentials { delivery: Delivery { certificate, ca: ca.to_pem(), key }, folder }
    }

    fn changed(delivery: &Delivery, change: impl FnOnce(&mut Delivery)) -> Delivery {
        let mut delivery = delivery.clone();
        change(&mut delivery);
        delivery
    }

    fn settings(folder: &Path, deadline: Duration) -> Settings {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Settings { token_file: folder.join("token"), out_dir: folder.join("out"), port: free, deadline }
    }

    fn until_it_listens<T>(mut ask: impl FnMut() -> Result<T, handoff::Error>) -> Result<T, handoff::Error> {
        for _ in 0..1000 {
            match ask() {
                Err(handoff::Error::Nobody(_)) => std::thread::sleep(Duration::from_millis(10)),
                other => return other,
            }
        }
        panic!("init does not listen");
    }

    #[test]
    fn the_token_goes_out_the_certificate_comes_in_and_init_ends() {
        let Credentials { delivery, folder } = credentials();
        let settings = settings(folder.path(), Duration::from_secs(60));
        let client = InitClient::new(Foothold::Here, settings.port);
        std::fs::create_dir(&settings.out_dir).unwrap();
        std::fs::write(settings.out_dir.join("host.key"), "of an earlier run").unwrap();
        let (out, running) = (settings.out_dir.clone(), std::thread::spawn(move || run(&settings)));
        assert_eq!(*until_it_listens(|| client.token()).unwrap(), "header.claims.signature");
        client.explain("the CA\nis away").unwrap();
        let delivery = changed(&delivery, |delivery| delivery.key = None);
        client.deliver(&delivery).unwrap();
        assert_eq!(running.join().unwrap().unwrap(), "web");
        let mut names: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["ca.crt", "host.crt"]);
        assert_eq!(std::fs::read_to_string(out.join("host.crt")).unwrap(), delivery.certificate);
        assert_eq!(std::fs::metadata(out.join("host.crt")).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_key_that_belongs_to_the_certificate_is_written_and_another_is_refused() {
        let Credentials { delivery, folder } = credentials();
        let out = folder.path().join("out");
        assert_eq!(check(&delivery).unwrap(), "web");
        write(&out, &delivery).unwrap();
        assert_eq!(std::fs::metadata(out.join("host.key")).unwrap().permissions().mode() & 0o777, 0o640);
        let other = Some(PrivateKey::generate(Curve::Curve25519).unwrap().to_pem().to_string());
        assert!(check(&changed(&delivery, |delivery| delivery.key = other)).unwrap_err().starts_with("key: "));
        let stranger = credentials().delivery.ca.clone();
        assert!(check(&changed(&delivery, |delivery| delivery.ca = stranger)).is_err());
    }

    #[test]
    fn nothing_by_the_deadline_is_an_error_with_the_last_reason_and_nothing_is_written() {
        let Credentials { delivery, folder } = credentials();
        let settings = settings(folder.path(), Duration::from_secs(2));
        let client = InitClient::new(Foothold::Here, settings.port);
        let (out, running) = (settings.out_dir.clone(), std::thread::spawn(move || run(&settings)));
        until_it_listens(|| client.explain("the CA is away")).unwrap();
        let bad = changed(&delivery, |delivery| "none".clone_into(&mut delivery.certificate));
        assert!(matches!(client.deliver(&bad), Err(handoff::Error::Odd(_))));
        let error = running.join().unwrap().unwrap_err().to_string();
        assert_eq!(error, "no certificate within 2 s: the CA is away");
        assert!(!out.exists());
    }

    #[test]
    fn a_pod_whose_instance_never_comes_is_told_what_to_look_at() {
        let Credentials { folder, .. } = credentials();
        let error = run(&settings(folder.path(), Duration::from_millis(50))).unwrap_err();
        assert!(error.to_string().contains("\"flow\": \"init\""), "{error}");
    }

    #[test]
    fn a_missing_or_empty_token_is_said_at_once() {
        let Credentials { folder, .. } = credentials();
        let settings = settings(folder.path(), Duration::from_secs(60));
        std::fs::write(&settings.token_file, " \n").unwrap();
        assert!(run(&settings).unwrap_err().to_string().contains("there is no token in it"));
        std::fs::remove_file(&settings.token_file).unwrap();
        assert!(matches!(run(&settings), Err(Error::Token { .. })));
    }
}
