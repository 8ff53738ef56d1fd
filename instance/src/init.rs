//! The init container's side of the hand-off: sends the pod's token, receives the certificate and writes it.

use std::fs::{DirBuilder, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nebula_cert::{CaPool, Certificate, durable};
use nebula_linux::clock::{now, unix_now};
use nebula_linux::errno;
use nix::sys::socket::{getsockopt, sockopt};
use zeroize::Zeroizing;

use crate::handoff::{self, Delivery, Hello, MAX_MESSAGE_BYTES, MAX_TOKEN_BYTES, NAME, Receipt, Word};

/// Options of the program.
#[derive(Debug, Clone)]
pub struct Settings {
    /// File with the pod's projected service-account token.
    pub token_file: PathBuf,
    /// Folder for `host.crt` and `ca.crt`.
    pub out_dir: PathBuf,
    /// How long to wait for a certificate.
    pub deadline: Duration,
}

/// Why the pod has no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The token file is unusable.
    #[error("token file {}: {cause}", path.display())]
    Token {
        /// Path.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// A process other than the pod's instance listens on the socket.
    #[error(
        "the socket {NAME} is held by user {user} and not by this node: a program of the pod pretends to be its instance"
    )]
    Impostor {
        /// Its user id, as seen in this container.
        user: u32,
    },
    /// No certificate arrived in time.
    #[error("no certificate within {} s: {reason}", after.as_secs())]
    Deadline {
        /// How long it waited.
        after: Duration,
        /// The last reason that the instance gave, or that none listens.
        reason: String,
    },
    /// The certificate arrived but could not be written.
    #[error("cannot write the certificate to {}: {cause}", path.display())]
    Write {
        /// Folder.
        path: PathBuf,
        /// Why not.
        cause: String,
    },
}

/// Waits for the certificate and writes it. Returns the certificate's name.
///
/// # Errors
/// See [`Error`].
pub fn run(settings: &Settings) -> Result<String, Error> {
    Init { settings, name: NAME, node: Node::of_this_container(), until: now() + settings.deadline, reason: None }.run()
}

struct Init<'a> {
    settings: &'a Settings,
    name: &'a str,
    node: Node,
    until: Instant,
    /// The last reason that the instance gave.
    reason: Option<String>,
}

/// How the node's root user appears in this container.
#[derive(Debug, Clone, Copy)]
struct Node {
    user: u32,
    /// Whether the node's processes have process ids here, which is so only if the pod shares the node's pid namespace.
    has_process_ids: bool,
}

impl Node {
    fn of_this_container() -> Self {
        let is_initial = |kind: &str, inode: u64| {
            std::fs::metadata(format!("/proc/self/ns/{kind}")).is_ok_and(|namespace| namespace.ino() == inode)
        };
        Self {
            user: if is_initial("user", INITIAL_USER_NAMESPACE_INODE) { 0 } else { OVERFLOW_UID },
            has_process_ids: is_initial("pid", INITIAL_PID_NAMESPACE_INODE),
        }
    }
}

impl Init<'_> {
    fn run(mut self) -> Result<String, Error> {
        loop {
            // Read again for each attempt, because the kubelet replaces it.
            let token = read_token(&self.settings.token_file)?;
            if let Some(stream) = self.connect()?
                && let Some(name) = self.converse(&stream, &token)?
            {
                return Ok(name);
            }
            if now() >= self.until {
                let reason = self.reason.unwrap_or_else(|| NO_INSTANCE.to_owned());
                return Err(Error::Deadline { after: self.settings.deadline, reason });
            }
            sleep(RETRY_INTERVAL.min(self.left()));
        }
    }

    /// Connects to the instance, if it listens.
    fn connect(&self) -> Result<Option<UnixStream>, Error> {
        let connected = handoff::address(self.name).and_then(|address| UnixStream::connect_addr(&address));
        let Ok(stream) = connected else { return Ok(None) };
        // The kernel recorded the listener's credentials at listen(2).
        let Ok(listener) = getsockopt(&stream, sockopt::PeerCredentials) else { return Ok(None) };
        let is_outside = self.node.has_process_ids || listener.pid() == 0;
        if listener.uid() != self.node.user || !is_outside {
            return Err(Error::Impostor { user: listener.uid() });
        }
        Ok(Some(stream))
    }

    /// Runs until the instance disconnects, time runs out, or the certificate has arrived.
    fn converse(&mut self, mut stream: &UnixStream, token: &Zeroizing<String>) -> Result<Option<String>, Error> {
        let hello = handoff::line(&Hello { token: String::clone(token) });
        if hello.and_then(|hello| stream.write_all(&hello)).is_err() {
            return Ok(None);
        }
        let mut reader = BufReader::new(stream);
        loop {
            let left = self.left();
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return Ok(None);
            }
            let delivery = match handoff::read(&mut reader, MAX_MESSAGE_BYTES) {
                Ok(Some(Word::Reason(reason))) => {
                    self.note(&reason);
                    continue;
                }
                Ok(Some(Word::Delivery(delivery))) => delivery,
                Ok(None) | Err(_) => return Ok(None),
            };
            let taken = self.take(&delivery);
            let refused = match &taken {
                Ok(Ok(_)) => None,
                Ok(Err(cause)) => Some(cause.to_string()),
                Err(error) => Some(error.to_string()),
            };
            let receipt = handoff::line(&Receipt { refused });
            // The certificate has been written, whether or not the instance receives this.
            let _ = receipt.and_then(|receipt| stream.write_all(&receipt));
            return match taken? {
                Ok(name) => Ok(Some(name)),
                Err(cause) => {
                    self.note(&format!("refused a delivery: {cause}"));
                    Ok(None)
                }
            };
        }
    }

    fn take(&self, delivery: &Delivery) -> Result<Result<String, Unusable>, Error> {
        let name = match check(delivery) {
            Ok(name) => name,
            Err(cause) => return Ok(Err(cause)),
        };
        let path = &self.settings.out_dir;
        let failed = |error: io::Error| Error::Write { path: path.clone(), cause: errno::text(&error) };
        write(path, delivery).map_err(failed).map(|()| Ok(name))
    }

    fn note(&mut self, reason: &str) {
        let line = nebula_cert::visible(reason).into_owned();
        if self.reason.as_ref() != Some(&line) {
            eprintln!("nebula-cni-init: no certificate yet: {line}");
            self.reason = Some(line);
        }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(now())
    }
}

fn read_token(path: &Path) -> Result<Zeroizing<String>, Error> {
    let refuse = |cause: String| Error::Token { path: path.to_owned(), cause };
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN_BYTES + 1));
    let file = File::open(path).map_err(|error| refuse(errno::text(&error)))?;
    let read = file.take(MAX_TOKEN_BYTES as u64 + 1).read_to_string(&mut text);
    read.map_err(|error| refuse(errno::text(&error)))?;
    let token = Zeroizing::new(text.trim().to_owned());
    if handoff::is_token(&token) { Ok(token) } else { Err(refuse("there is no token in it".to_owned())) }
}

/// Why a delivery was refused.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("certificate: {0}")]
    Certificate(#[source] nebula_cert::Error),
    #[error("CA bundle: {0}")]
    Bundle(#[source] nebula_cert::Error),
    #[error(transparent)]
    Unverified(nebula_cert::Error),
}

/// Checks that the files of a delivery match each other. Returns the certificate's name.
fn check(delivery: &Delivery) -> Result<String, Unusable> {
    let certificates = Certificate::bundle_from_pem(delivery.certificate.as_bytes());
    let certificates = certificates.map_err(Unusable::Certificate)?;
    let pool = CaPool::from_pem(delivery.ca.as_bytes()).map_err(Unusable::Bundle)?;
    let mut name = String::new();
    for certificate in &certificates {
        let verified = pool.verify(certificate.clone(), unix_now()).map_err(Unusable::Unverified)?;
        name = verified.name().to_owned();
    }
    Ok(name)
}

/// Writes the files. Each is complete or absent, and the certificate comes last: once it exists, so do the others.
fn write(folder: &Path, delivery: &Delivery) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o750).create(folder)?;
    write_file(&folder.join("ca.crt"), delivery.ca.as_bytes())?;
    write_file(&folder.join("host.crt"), delivery.certificate.as_bytes())
}

fn write_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    durable::replace_alone(path, FILE_MODE, &mut &*bytes, |_| Ok(()))
}

const NO_INSTANCE: &str = "no instance of this pod listens on this node; is the pod enrolled, does the plugin on this node \
                            have \"flow\": \"init\", and are plugin and init container of the same release?";
const FILE_MODE: u32 = 0o640;
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
// Inodes of the initial namespaces (linux/proc_ns.h), and the overflow UID, which stands for users unknown in a
// namespace.
const INITIAL_USER_NAMESPACE_INODE: u64 = 0xefff_fffd;
const INITIAL_PID_NAMESPACE_INODE: u64 = 0xefff_fffc;
const OVERFLOW_UID: u32 = 65_534;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handoff::server::HandoffServer;
    use crate::handoff::server::tests::serve;
    use nebula_cert::{Curve, PrivateKey, SigningKey, Template};
    use std::os::unix::fs::PermissionsExt;

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
        Credentials { delivery: Delivery { certificate, ca: ca.to_pem() }, folder }
    }

    fn changed(delivery: &Delivery, change: impl FnOnce(&mut Delivery)) -> Delivery {
        let mut delivery = delivery.clone();
        change(&mut delivery);
        delivery
    }

    fn settings(folder: &Path, deadline: Duration) -> Settings {
        Settings { token_file: folder.join("token"), out_dir: folder.join("out"), deadline }
    }

    fn socket(test: &str) -> String {
        format!("nebula-test/{}/{test}", std::process::id())
    }

    fn init(settings: &Settings, socket: &str) -> Result<String, Error> {
        // Tests need not run as root.
        let node = Node { user: nix::unistd::getuid().as_raw(), has_process_ids: true };
        Init { settings, name: socket, node, until: now() + settings.deadline, reason: None }.run()
    }

    fn token(server: &HandoffServer) -> String {
        for _ in 0..1000 {
            if let Ok(token) = server.token(&mut Vec::new()) {
                return token.to_string();
            }
            sleep(Duration::from_millis(10));
        }
        panic!("init does not come");
    }

    #[test]
    fn the_token_goes_out_the_certificate_comes_in_and_init_ends() {
        let Credentials { delivery, folder } = credentials();
        let settings = settings(folder.path(), Duration::from_secs(60));
        let (out, socket) = (settings.out_dir.clone(), socket("out"));
        let running = std::thread::spawn({
            let (settings, socket) = (settings.clone(), socket.clone());
            move || init(&settings, &socket)
        });
        // Init waits until the instance listens.
        let server = serve(&socket);
        assert_eq!(token(&server), "header.claims.signature");
        server.explain("the CA\nis away");
        server.deliver(delivery.clone());
        assert_eq!(running.join().unwrap().unwrap(), "web");
        let mut names: Vec<_> = std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["ca.crt", "host.crt"]);
        assert_eq!(std::fs::read_to_string(out.join("host.crt")).unwrap(), delivery.certificate);
        assert_eq!(std::fs::metadata(out.join("host.crt")).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(init(&settings, &socket).unwrap(), "web", "the kubelet may run it again");
    }

    #[test]
    fn a_certificate_of_another_ca_is_refused_and_one_of_ours_is_written_for_owner_and_group() {
        let Credentials { delivery, folder } = credentials();
        let out = folder.path().join("out");
        assert_eq!(check(&delivery).unwrap(), "web");
        write(&out, &delivery).unwrap();
        assert_eq!(std::fs::metadata(out.join("ca.crt")).unwrap().permissions().mode() & 0o777, 0o640);
        let stranger = credentials().delivery.ca.clone();
        assert!(check(&changed(&delivery, |delivery| delivery.ca = stranger)).is_err());
    }

    #[test]
    fn nothing_by_the_deadline_is_an_error_with_the_last_reason_and_nothing_is_written() {
        let Credentials { delivery, folder } = credentials();
        let (settings, socket) = (settings(folder.path(), Duration::from_secs(2)), socket("deadline"));
        let server = serve(&socket);
        let out = settings.out_dir.clone();
        let running = std::thread::spawn({
            let socket = socket.clone();
            move || init(&settings, &socket)
        });
        token(&server);
        server.explain("the CA is away");
        let error = running.join().unwrap().unwrap_err().to_string();
        assert_eq!(error, "no certificate within 2 s: the CA is away");
        assert!(!out.exists());
        // A delivery that does not match is not written either.
        let settings = self::settings(folder.path(), Duration::from_secs(2));
        let running = std::thread::spawn(move || init(&settings, &socket));
        token(&server);
        server.deliver(changed(&delivery, |delivery| "none".clone_into(&mut delivery.certificate)));
        let error = running.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("refused a delivery: certificate"), "{error}");
        assert!(!out.exists());
    }

    #[test]
    fn somebody_else_who_listens_gets_no_token() {
        let Credentials { folder, .. } = credentials();
        let (settings, socket) = (settings(folder.path(), Duration::from_secs(60)), socket("impostor"));
        let server = serve(&socket);
        for node in [
            Node { user: nix::unistd::getuid().as_raw() + 1, has_process_ids: true },
            Node { user: nix::unistd::getuid().as_raw(), has_process_ids: false },
        ] {
            let until = now() + settings.deadline;
            let init = Init { settings: &settings, name: &socket, node, until, reason: None };
            assert!(matches!(init.run(), Err(Error::Impostor { .. })));
        }
        assert!(server.token(&mut Vec::new()).is_err());
    }

    #[test]
    fn a_pod_whose_instance_never_comes_is_told_what_to_look_at() {
        let Credentials { folder, .. } = credentials();
        let error = init(&settings(folder.path(), Duration::from_millis(50)), &socket("nobody")).unwrap_err();
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
