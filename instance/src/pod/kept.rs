//! The certificate and key of a pod for the next instance, which goes on with them: without asking the CA, and in flow
//! "init" without an init container, which has long ended. They are in memory only, in a file without a name, and never
//! on a disk. The instance that takes over reads the file of the one before; systemd's descriptor store holds it while
//! the unit lives, for one that starts again.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use aws_lc_rs::digest::{Context, Digest, SHA256, digest};
use nebula_cert::issuance::{MAX_REPLY, Reply, Trust};
use nebula_cert::{Identity, PrivateKey, UnixTime};
use nebula_enrolment::ca_client::{Issued, accept};
use nebula_linux::errno;
use nebula_linux::store::Store;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

/// The file.
#[derive(Debug)]
pub(crate) struct Kept(File);

#[derive(Serialize, Deserialize)]
struct Contents {
    /// PEM of the private key.
    key: String,
    /// The CA's answer, with the trust that it announced last.
    reply: Reply,
}

impl Kept {
    /// Goes on with the file that the last instance left in the service manager's store, or makes one and stores it.
    ///
    /// # Errors
    /// Returns an error if no file can be made.
    pub(crate) fn open(store: &mut Store) -> io::Result<Self> {
        if let Some(file) = store.adopt(IDENTITY, only_file) {
            return Ok(Self(file));
        }
        let file = File::from(memfd_create(IDENTITY, MFdFlags::MFD_CLOEXEC)?);
        store.keep(IDENTITY, &[file.as_fd()]);
        Ok(Self(file))
    }

    /// The file of the instance from which this one takes over, to be read only: that one may still write it, and hold
    /// it afterwards.
    pub(crate) fn of(handed_over: OwnedFd) -> Self {
        Self(handed_over.into())
    }

    /// A duplicate of the file.
    ///
    /// # Errors
    /// Returns an error if there is no descriptor left.
    pub(crate) fn file(&self) -> io::Result<File> {
        self.0.try_clone()
    }

    /// What the previous instance had, if it is still valid.
    pub(crate) fn take(&self, now: UnixTime) -> Option<Issued> {
        let contents = self.read()?;
        let key = PrivateKey::from_pem(contents.key.as_bytes()).ok()?;
        let issued = accept(&contents.reply, key, now).inspect_err(|error| {
            tracing::info!(%error, "The certificate of the previous instance is of no use any more");
        });
        issued.ok()
    }

    /// Keeps a certificate.
    pub(crate) fn put(&mut self, identity: &Identity, reply: Reply) {
        self.write(&Contents { key: identity.private_key().to_pem().to_string(), reply });
    }

    /// Keeps the trust beside the certificate, so that nobody who is blocked is accepted after a restart.
    pub(crate) fn put_trust(&mut self, trust: &Trust) {
        let Some(mut contents) = self.read() else { return };
        let reply = &mut contents.reply;
        let has_key = trust.renewal_key.is_none() || trust.renewal_key == reply.renewal_key;
        if has_key
            && (&reply.ca, &reply.blocklist, &reply.lighthouses) == (&trust.ca, &trust.blocklist, &trust.lighthouses)
        {
            return;
        }
        (reply.ca, reply.blocklist) = (trust.ca.clone(), trust.blocklist.clone());
        reply.lighthouses = trust.lighthouses.clone();
        reply.renewal_key = trust.renewal_key.clone().or_else(|| reply.renewal_key.take());
        self.write(&contents);
    }

    fn read(&self) -> Option<Contents> {
        let length = usize::try_from(self.0.metadata().ok()?.len()).ok()?.min(HEADER_BYTES + MAX_CONTENTS);
        let mut bytes = Zeroizing::new(vec![0; length]);
        // The offset is shared with whoever else has the file open.
        self.0.read_exact_at(&mut bytes, 0).ok()?;
        let (hash, rest) = bytes.split_at_checked(HASH_BYTES)?;
        let (length, rest) = rest.split_at_checked(LENGTH_BYTES)?;
        let length = usize::try_from(u64::from_le_bytes(length.try_into().ok()?)).ok()?;
        let text = rest.get(..length)?;
        // An instance that was killed while it wrote leaves anything.
        (digest(&SHA256, text).as_ref() == hash).then(|| serde_json::from_slice(text).ok())?
    }

    fn write(&mut self, contents: &Contents) {
        if let Err(error) = self.try_write(contents) {
            tracing::error!(error = errno::text(&error), "The certificate is not kept for the next instance");
        }
    }

    /// What does not fit takes the place of what is there, too: an older blocklist must not come back.
    fn try_write(&mut self, contents: &Contents) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(0))?;
        // Until everything is there, nothing is valid.
        self.0.write_all(&[0; HEADER_BYTES])?;
        let mut text = TextWriter::new(&self.0);
        serde_json::to_writer(&mut text, contents)?;
        let (length, hash) = text.finish()?;
        self.0.seek(SeekFrom::Start(0))?;
        self.0.write_all(&[hash.as_ref(), &length.to_le_bytes()].concat())
    }
}

/// Writes a text to a file in small parts: one of its size would stay a part of each pod's private memory.
struct TextWriter<'a> {
    file: &'a File,
    hash: Context,
    length: usize,
    part: Zeroizing<Vec<u8>>,
}

impl<'a> TextWriter<'a> {
    fn new(file: &'a File) -> Self {
        Self { file, hash: Context::new(&SHA256), length: 0, part: Zeroizing::new(Vec::with_capacity(PART_BYTES)) }
    }

    /// Returns the length and the hash of the text.
    fn finish(mut self) -> io::Result<(u64, Digest)> {
        self.flush()?;
        Ok((self.length as u64, self.hash.finish()))
    }
}

impl Write for TextWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = PART_BYTES - self.part.len();
        let taken = bytes.len().min(room);
        self.part.extend_from_slice(&bytes[..taken]);
        self.length += taken;
        if self.length > MAX_CONTENTS {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if self.part.len() == PART_BYTES {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.hash.update(&self.part);
        self.file.write_all(&self.part)?;
        self.part.clear();
        Ok(())
    }
}

impl Drop for Contents {
    fn drop(&mut self) {
        self.key.zeroize();
    }
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Contents(redacted)")
    }
}

fn only_file(mut kept: Vec<OwnedFd>) -> io::Result<File> {
    match (kept.pop().map(File::from), kept.is_empty()) {
        (Some(file), true) if file.metadata()?.is_file() => Ok(file),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not one regular file")),
    }
}

/// The name of the file in the store.
pub(crate) const IDENTITY: &str = "identity";
const HASH_BYTES: usize = 32;
const LENGTH_BYTES: usize = 8;
const HEADER_BYTES: usize = HASH_BYTES + LENGTH_BYTES;
const PART_BYTES: usize = 1024;
// The longest answer of a CA, whose texts may become longer by escapes.
const MAX_CONTENTS: usize = 2 * MAX_REPLY;

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, SigningKey, Template};

    use super::*;

    fn identity_and_reply() -> (Identity, Reply) {
        let signer = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = Template { public_key: signer.public_key(), ..Template::new("ca", 1_000..=9_000) };
        let ca = ca.self_sign(&signer).unwrap();
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let networks = vec!["10.42.0.7/16".parse().unwrap()];
        let template = Template { networks, public_key: key.public_key(), ..Template::new("web", 2_000..=8_000) };
        let certificate = template.sign(&ca, &signer).unwrap();
        let reply = Reply {
            certificate: certificate.to_pem(),
            ca: ca.to_pem(),
            blocklist: Vec::new(),
            renewal_key: None,
            lighthouses: Default::default(),
        };
        (Identity::new(vec![certificate], key).unwrap(), reply)
    }

    fn kept(file: &File) -> Kept {
        Kept(file.try_clone().unwrap())
    }

    #[test]
    fn of_the_store_only_one_regular_file_is_used() {
        let file = |path: &str| OwnedFd::from(File::open(path).unwrap());
        assert!(only_file(vec![file("/proc/self/exe")]).is_ok());
        assert!(only_file(vec![file("/dev/null")]).is_err());
        assert!(only_file(vec![file("/proc/self/exe"), file("/proc/self/exe")]).is_err());
        assert!(only_file(Vec::new()).is_err());
    }

    #[test]
    fn the_next_instance_finds_what_was_put_last_and_nothing_that_is_torn_or_over() {
        let file = tempfile::tempfile().unwrap();
        assert!(kept(&file).take(0).is_none(), "an empty file");
        let (identity, reply) = identity_and_reply();
        let now = identity.primary().not_before() + 1;
        kept(&file).put(&identity, reply.clone());
        let issued = kept(&file).take(now).unwrap();
        assert_eq!(issued.identity.primary().fingerprint(), identity.primary().fingerprint());
        assert!(kept(&file).take(identity.primary().not_after() + 1).is_none(), "it has expired");

        // Blocked meanwhile.
        let mut first = kept(&file);
        let blocklist = vec![identity.primary().fingerprint().to_string()];
        first.put_trust(&Trust { ca: reply.ca, blocklist, renewal_key: None, lighthouses: Default::default() });
        assert!(kept(&file).take(now).is_none());

        let mut torn = file.try_clone().unwrap();
        torn.seek(SeekFrom::Start(60)).unwrap();
        torn.write_all(b"torn").unwrap();
        assert!(kept(&file).take(now).is_none());
    }
}
