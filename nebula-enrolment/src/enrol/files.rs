//! The files of an enrolled host: key, certificate, trust bundle, and the CA service to renew at.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use nebula_cert::issuance::Lighthouses;
use nebula_cert::{Identity, durable};
use nebula_cni_contract::format;
use nebula_cni_contract::launch::CaAccess;
use nebula_config::{ANNOUNCED, Announced, usable_lighthouses};
use serde::{Deserialize, Serialize};

use super::Error;
use super::kubernetes::Workload;

/// The folder with all files of one enrolment. Only the key in it is secret.
#[derive(Debug, Clone)]
pub struct Files {
    folder: PathBuf,
    /// Takes the place of the one that is remembered.
    blocklist_dir: Option<PathBuf>,
}

/// Contents of `enrolment.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Enrolment {
    version: u32,
    /// URL of the CA service, whose TLS certificate is in [`TLS`].
    url: String,
    /// Present if a pod enrolled here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kubernetes: Option<Workload>,
    /// As [`Files::with_blocklist_dir`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blocklist_dir: Option<PathBuf>,
    /// Those of the last certificate: it may be gone when the host enrols again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    networks: Vec<IpNet>,
}

impl Files {
    /// Names the files in `folder`; nothing is read yet.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), blocklist_dir: None }
    }

    /// Also keeps whom the CA blocks in a folder of configurations, for a daemon that knows no `pki.enrolment`. It is
    /// remembered with the CA service.
    #[must_use]
    pub fn with_blocklist_dir(self, folder: Option<PathBuf>) -> Self {
        Self { blocklist_dir: folder, ..self }
    }

    /// The folder itself.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn key(&self) -> PathBuf {
        self.folder.join("host.key")
    }

    /// The next key, while the certificate is being replaced.
    pub(super) fn next_key(&self) -> PathBuf {
        self.folder.join("host.key.next")
    }

    /// The host's certificate.
    #[must_use]
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("host.crt")
    }

    pub(super) fn ca(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    pub(super) fn tls(&self) -> PathBuf {
        self.folder.join(TLS)
    }

    /// The file that the configuration names as `pki.enrolment`.
    #[must_use]
    pub fn enrolment(&self) -> PathBuf {
        self.folder.join(ENROLMENT)
    }

    pub(super) fn make_folder(&self) -> Result<(), Error> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder).map_err(failed("make", &self.folder))
    }

    /// Reads which CA service this host enrolled with.
    ///
    /// # Errors
    /// Returns an error if there is no such file, or another version wrote it.
    pub fn remembered(&self) -> Result<CaAccess, Error> {
        let Enrolment { url, kubernetes, .. } = self.read_enrolment()?;
        Ok(match kubernetes {
            Some(Workload { token_file, tls_ca_file, server_name, .. }) => {
                CaAccess { url, tls_ca_file, token_file, server_name }
            }
            None => CaAccess { url, tls_ca_file: self.tls(), token_file: PathBuf::new(), server_name: None },
        })
    }

    /// How the pod that enrolled here proves its identity; `None` for a host.
    ///
    /// # Errors
    /// Returns an error if `enrolment.json` was written by another version.
    pub fn workload(&self) -> Result<Option<Workload>, Error> {
        if self.enrolment().exists() { self.read_enrolment().map(|enrolment| enrolment.kubernetes) } else { Ok(None) }
    }

    fn read_enrolment(&self) -> Result<Enrolment, Error> {
        let path = self.enrolment();
        let mut text = String::new();
        let file = File::open(&path).map_err(failed("read", &path))?;
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(failed("read", &path))?;
        let broken = |cause: String| Error::Enrolment { path: path.clone(), cause };
        format::read(text.as_bytes(), VERSION).map_err(|why| broken(why.to_string()))
    }

    /// Saves the URL of the CA service and how this pod proves its identity.
    pub(super) fn remember_workload(&self, url: &str, workload: &Workload) -> Result<(), Error> {
        self.write_enrolment(url, Some(workload.clone()))
    }

    /// Saves the URL of the CA service and the TLS certificate that authenticates it.
    pub(super) fn remember(&self, access: &CaAccess) -> Result<(), Error> {
        if access.tls_ca_file != self.tls() {
            let mut pem = Vec::new();
            let file = File::open(&access.tls_ca_file).map_err(failed("read", &access.tls_ca_file))?;
            file.take(MAX_FILE_BYTES).read_to_end(&mut pem).map_err(failed("read", &access.tls_ca_file))?;
            self.write_changed(&self.tls(), &pem)?;
        }
        self.write_enrolment(&access.url, None)
    }

    fn write_enrolment(&self, url: &str, kubernetes: Option<Workload>) -> Result<(), Error> {
        self.put_enrolment(url, kubernetes, self.networks())
    }

    fn put_enrolment(&self, url: &str, kubernetes: Option<Workload>, networks: Vec<IpNet>) -> Result<(), Error> {
        let blocklist_dir = self.blocklist_dir();
        let enrolment = Enrolment { version: VERSION, url: url.to_owned(), kubernetes, blocklist_dir, networks };
        let text = serde_json::to_string(&enrolment).unwrap_or_default();
        self.write_changed(&self.enrolment(), format!("{text}\n").as_bytes()).map(drop)
    }

    /// Saves the URL of the CA service and the TLS certificate that it showed (PEM).
    pub(super) fn remember_shown(&self, url: &str, certificate: &str) -> Result<(), Error> {
        self.write_changed(&self.tls(), certificate.as_bytes())?;
        self.write_enrolment(url, None)
    }

    /// Remembers the folder of [`Files::with_blocklist_dir`], if the CA service is remembered.
    pub(super) fn remember_blocklist_dir(&self) -> Result<(), Error> {
        if self.blocklist_dir.is_none() || !self.enrolment().exists() {
            return Ok(());
        }
        let Enrolment { url, kubernetes, .. } = self.read_enrolment()?;
        self.write_enrolment(&url, kubernetes)
    }

    /// Overlay addresses of the last certificate, as far as they are remembered.
    pub(super) fn networks(&self) -> Vec<IpNet> {
        self.read_enrolment().map(|enrolment| enrolment.networks).unwrap_or_default()
    }

    /// Remembers the overlay addresses, if the CA service is remembered.
    pub(super) fn remember_networks(&self, networks: &[IpNet]) -> Result<(), Error> {
        if !self.enrolment().exists() {
            return Ok(());
        }
        let Enrolment { url, kubernetes, .. } = self.read_enrolment()?;
        self.put_enrolment(&url, kubernetes, networks.to_vec())
    }

    fn blocklist_dir(&self) -> Option<PathBuf> {
        self.blocklist_dir.clone().or_else(|| self.read_enrolment().ok()?.blocklist_dir)
    }

    /// Locks the folder until the result is dropped, so that no other program renews at the same time.
    ///
    /// # Errors
    /// Returns an error if there is no such folder.
    pub fn lock(&self) -> Result<File, Error> {
        let folder = File::open(&self.folder).map_err(failed("open", &self.folder))?;
        folder.lock().map_err(failed("lock", &self.folder))?;
        Ok(folder)
    }

    /// Reads certificate and key.
    ///
    /// # Errors
    /// Returns an error if they cannot be read or do not match.
    pub fn identity(&self) -> Result<Identity, Error> {
        Identity::read(self.certificate(), self.key()).map_err(Error::Nothing)
    }

    /// Completes a renewal that was interrupted between writing the certificate and renaming the key.
    ///
    /// # Errors
    /// Returns an error if the key cannot be renamed.
    pub fn complete(&self) -> Result<(), Error> {
        if Identity::read(self.certificate(), self.next_key()).is_ok() {
            std::fs::rename(self.next_key(), self.key()).map_err(failed("write", &self.key()))?;
        }
        Ok(())
    }

    /// Writes the trust bundle, the blocklist and the announced lighthouses from a CA answer. Returns whether anything
    /// changed.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn write_trust(
        &self,
        bundle: &str,
        blocklist: Vec<String>,
        lighthouses: Lighthouses,
        own: &[IpNet],
    ) -> Result<bool, Error> {
        let announced = announced(blocklist, lighthouses, own);
        let mut differs = false;
        for (path, text) in [(self.ca(), bundle), (self.folder.join(ANNOUNCED), announced.as_str())] {
            differs |= self.write_changed(&path, text.as_bytes())?;
        }
        Ok(differs)
    }

    /// Whether [`Files::write_trust`] would change anything.
    pub(super) fn trust_differs(
        &self,
        bundle: &str,
        blocklist: Vec<String>,
        lighthouses: Lighthouses,
        own: &[IpNet],
    ) -> bool {
        let announced = announced(blocklist, lighthouses, own);
        let is_there = |path: PathBuf, text: &str| std::fs::read(path).is_ok_and(|present| present == text.as_bytes());
        !is_there(self.ca(), bundle) || !is_there(self.folder.join(ANNOUNCED), &announced)
    }

    /// The lighthouses that the CA announced last.
    #[must_use]
    pub fn lighthouses(&self) -> Lighthouses {
        self.announced().unwrap_or_default().lighthouses
    }

    /// What the CA announced last; `None` if that cannot be read.
    fn announced(&self) -> Option<Announced> {
        let text = std::fs::read_to_string(self.folder.join(ANNOUNCED)).ok()?;
        Announced::parse(&text).ok()
    }

    /// Writes whom the CA blocks into the folder of [`Files::with_blocklist_dir`], for a daemon that merges the files
    /// there. Returns the file if it changed.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn share_blocklist(&self) -> Result<Option<PathBuf>, Error> {
        let Some((path, text)) = self.shared_blocklist() else { return Ok(None) };
        Ok(self.write_changed(&path, text.as_bytes())?.then_some(path))
    }

    /// Whether [`Files::share_blocklist`] would change anything.
    #[must_use]
    pub fn shared_blocklist_differs(&self) -> bool {
        self.shared_blocklist().is_some_and(|(path, text)| std::fs::read(path).ok() != Some(text.into_bytes()))
    }

    /// The file and what belongs into it. What cannot be read is no reason to let a blocked host in again.
    fn shared_blocklist(&self) -> Option<(PathBuf, String)> {
        let (folder, announced) = (self.blocklist_dir()?, self.announced()?);
        let blocklist = announced.blocklist.iter().map(|fingerprint| format!("\n    - {fingerprint:?}"));
        let blocklist = if announced.blocklist.is_empty() { " []".to_owned() } else { blocklist.collect() };
        let text = format!("# Written by nebula-enrol: whom the CA blocks.\npki:\n  blocklist:{blocklist}\n");
        Some((folder.join(SHARED_BLOCKLIST), text))
    }

    /// Checks that this process may replace these files.
    ///
    /// # Errors
    /// Returns the system's error if it may not.
    pub fn check_writable(&self) -> Result<(), Error> {
        let path = self.folder.join(".writable");
        OpenOptions::new().write(true).create(true).truncate(true).open(&path).map_err(failed("write", &path))?;
        std::fs::remove_file(&path).map_err(failed("remove", &path))
    }

    /// Writes a file that is not secret, unless it already has this content. Returns whether it changed.
    fn write_changed(&self, path: &Path, bytes: &[u8]) -> Result<bool, Error> {
        if std::fs::read(path).is_ok_and(|present| present == bytes) {
            return Ok(false);
        }
        self.write(path, bytes, 0o644).map(|()| true)
    }

    /// Writes the certificate, and moves its key in place at once: between the two, [`Files::complete`] is needed.
    pub(super) fn write_pair(&self, certificate: &[u8]) -> Result<(), Error> {
        let (path, next, key) = (self.certificate(), self.next_key(), self.key());
        durable::replace_pair(&path, 0o644, &mut &*certificate, (&next, &key)).map_err(failed("write", &path))
    }

    pub(super) fn write(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<(), Error> {
        durable::replace_alone(path, mode, &mut &*bytes, |_| Ok(())).map_err(failed("write", path))
    }
}

/// Contents of [`ANNOUNCED`].
fn announced(blocklist: Vec<String>, lighthouses: Lighthouses, own: &[IpNet]) -> String {
    let announced = Announced { blocklist, lighthouses: usable_lighthouses(lighthouses, own) };
    format!("{}\n", serde_json::to_string(&announced).unwrap_or_default())
}

pub(super) fn failed(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { verb, path, source }
}

/// Later by name than `config.yml`, though order means nothing: daemons append the lists of all files.
const SHARED_BLOCKLIST: &str = "nebula-enrol.yml";
const ENROLMENT: &str = "enrolment.json";
const TLS: &str = "ca-tls.crt";
const VERSION: u32 = 1;
const MAX_FILE_BYTES: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::recorded::hold;

    use super::*;

    #[test]
    fn a_pod_is_remembered_by_its_mounted_files() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path());
        assert_eq!(files.workload().unwrap(), None, "nobody enrolled here");
        let workload = Workload {
            token_file: "/t/token".into(),
            tls_ca_file: "/t/tls.crt".into(),
            port: None,
            gateway: true,
            server_name: Some("nebula-ca.nebula-system.svc".to_owned()),
        };
        files.remember_workload("https://ca:8443", &workload).unwrap();
        let known = files.remembered().unwrap();
        assert_eq!((known.token_file, known.tls_ca_file), (workload.token_file.clone(), workload.tls_ca_file.clone()));
        assert_eq!(files.workload().unwrap(), Some(workload));
    }

    #[test]
    fn what_is_remembered_is_no_secret_and_of_one_version() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path());
        let tls = folder.path().join("given.crt");
        std::fs::write(&tls, "a certificate").unwrap();
        let url = "https://ca.example:8443".to_owned();
        files
            .remember(&CaAccess { url: url.clone(), tls_ca_file: tls, token_file: "/secret".into(), server_name: None })
            .unwrap();
        let text = std::fs::read_to_string(files.enrolment()).unwrap();
        assert_eq!(text, "{\"version\":1,\"url\":\"https://ca.example:8443\"}\n");
        let known = files.remembered().unwrap();
        assert_eq!((known.url, known.tls_ca_file), (url, files.tls()));
        assert_eq!(std::fs::read_to_string(files.tls()).unwrap(), "a certificate");
        std::fs::write(files.enrolment(), text.replace('1', "2")).unwrap();
        let refused = files.remembered().unwrap_err().to_string();
        assert!(refused.contains("by a newer program (format 2, this one knows 1)"), "{refused}");
        files.remember_networks(&["10.42.0.7/16".parse().unwrap()]).unwrap_err();
        assert_eq!(std::fs::read_to_string(files.enrolment()).unwrap(), text.replace('1', "2"), "it is not replaced");
        std::fs::write(files.enrolment(), text.replacen('{', "{\"later\":[],", 1)).unwrap();
        assert_eq!(files.remembered().unwrap().url, "https://ca.example:8443");
    }

    #[test]
    fn what_each_release_remembers_of_an_enrolment_is_read_and_keeps_its_keys() {
        let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
        let release = env!("CARGO_PKG_VERSION");
        for file in ["enrolment-host.json", "enrolment-pod.json"] {
            hold::<Enrolment>(&documents, release, file).unwrap();
        }
        hold::<Announced>(&documents, release, "announced.json").unwrap();
    }

    #[test]
    fn a_blocklist_in_a_newer_format_does_not_empty_the_one_that_is_shared() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path()).with_blocklist_dir(Some(folder.path().to_owned()));
        std::fs::write(folder.path().join(ANNOUNCED), r#"{"blocklist":["aa"]}"#).unwrap();
        let shared = files.share_blocklist().unwrap().unwrap();
        std::fs::write(folder.path().join(ANNOUNCED), r#"{"version":2,"blocked":["aa","bb"]}"#).unwrap();
        assert_eq!(files.share_blocklist().unwrap(), None);
        assert!(std::fs::read_to_string(shared).unwrap().contains("aa"));
    }
}
