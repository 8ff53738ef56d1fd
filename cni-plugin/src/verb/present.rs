//! Shows an instance the token of its own pod, in place of an init container that has ended: an instance that was
//! started again would wait for one forever. The kubelet keeps the pod's projected volumes, and renews the tokens in
//! them, for as long as the pod is there.

use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use nebula_cni_contract::handoff::{self, Hello, MAX_MESSAGE_BYTES, MAX_TOKEN_BYTES, NAME, Receipt, Word};
use nebula_cni_contract::instance_status::Status;
use nebula_cni_contract::launch::{Flow, LaunchSpec};
use nebula_cni_contract::netns::in_namespace;
use nix::sys::socket::{getsockopt, sockopt};
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::attachment::files::Files;
use crate::attachment::record::Record;
use crate::host::Host;
use crate::reply::{Error, code};
use crate::verb::refresh::read_launch;

/// Where this node's pods have their tokens, and which token is for the CA.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Directories that may be the kubelet's.
    pub kubelet: &'a [&'a Path],
    /// Whether to look for another directory of a kubelet, in which volumes of the pod are mounted.
    pub finds_kubelet: bool,
    /// Audience of the CA's tokens.
    pub audience: &'a str,
}

/// Shows the instance of an attachment the token of its pod, and waits until it has the certificate.
///
/// # Errors
/// Code 3 if there is no such attachment; code 117 if the pod's token cannot help it; code 101 if another process
/// listens in place of the instance; if it got no certificate in time, code 102 with what the CA says, or code 103
/// where the CA was not reached.
pub fn run(files: &Files, tokens: Tokens<'_>, host: &Host<'_>) -> Result<(), Error> {
    let record = Record::of(files)?;
    let pod = &record.target.pod;
    let named = |code, why: String| Error::new(code, format!("pod {}/{}: {why}", pod.namespace, pod.name));
    let unreadable = |why: &dyn std::fmt::Display| named(code::IO, format!("cannot read its launch contract: {why}"));
    let text = read_launch(&files.launch()).map_err(|error| unreadable(&error))?;
    let launch = LaunchSpec::parse(&text).map_err(|why| unreadable(&why))?;
    if launch.flow != Flow::Init {
        return Err(named(code::INIT_OVERDUE, "its instance waits for no token of the pod".to_owned()));
    }
    let volumes = |kubelet: &&Path| kubelet.join("pods").join(&pod.uid).join(PROJECTED);
    let mounted = if tokens.finds_kubelet { mounted(&pod.uid) } else { Vec::new() };
    let mut folders = tokens.kubelet.iter().map(volumes).chain(mounted);
    let token = folders.find_map(|folder| find_token(&folder, tokens.audience, &pod.uid)).ok_or_else(|| {
        let why = format!(
            "none of its projected volumes has a token for the audience {:?} (looked for pods in {:?}{}): delete the pod",
            tokens.audience,
            tokens.kubelet,
            if tokens.finds_kubelet { " and for mounts of its volumes" } else { "" }
        );
        named(code::INIT_OVERDUE, why)
    })?;
    let unreachable =
        |error: io::Error| named(code::INSTANCE_UNREACHABLE, format!("cannot reach its instance: {error}"));
    let instance = Status::ask(&record.status_socket).map_err(unreachable)?.pid;
    let netns = host.namespaces.open(&record.target.netns).map_err(unreachable)?;
    if netns.id != record.target.netns_id {
        return Err(named(code::NETNS, "it has another network namespace than its tunnel".to_owned()));
    }
    let stream =
        in_namespace(&netns.file, || UnixStream::connect_addr(&handoff::address(NAME)?)).map_err(unreachable)?;
    // The kernel recorded the listener's credentials at listen(2). A program of the pod could listen there since the
    // instance before this one ended.
    let listener = getsockopt(&stream, sockopt::PeerCredentials).map_err(|errno| unreachable(errno.into()))?;
    if instance != Some(listener.pid()) {
        let why = format!("process {} listens in place of its instance", listener.pid());
        return Err(named(code::INSTANCE_UNREACHABLE, why));
    }
    match converse(stream, &token) {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => {
            let is_denied = Status::ask(&record.status_socket).is_ok_and(|status| status.denied);
            Err(named(if is_denied { code::IDENTITY_DENIED } else { code::IDENTITY_UNAVAILABLE }, reason))
        }
        Err(error) => Err(unreachable(error)),
    }
}

/// Returns why there is no certificate, or `None` if there is one.
fn converse(mut stream: UnixStream, token: &Zeroizing<String>) -> io::Result<Option<String>> {
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(&handoff::line(&Hello { token: String::clone(token) })?)?;
    let mut reader = BufReader::new(&stream);
    let mut reason = "the instance gave no reason".to_owned();
    for _ in 0..MAX_REASONS {
        match handoff::read(&mut reader, MAX_MESSAGE_BYTES) {
            Ok(Some(Word::Delivery(_))) => {
                // Certificate and CAs are no secrets, and nobody here needs them.
                let receipt = handoff::line(&Receipt { refused: None })?;
                let _ = (&stream).write_all(&receipt);
                return Ok(None);
            }
            Ok(Some(Word::Reason(told))) => reason = told,
            Ok(None) => break,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(Some(reason))
}

/// Where the node has projected volumes of the pod mounted, whatever the root directory of its kubelet is.
fn mounted(uid: &str) -> Vec<PathBuf> {
    let mut text = String::new();
    let read = File::open("/proc/self/mountinfo").and_then(|file| file.take(MAX_MOUNTS).read_to_string(&mut text));
    if read.is_ok() { projected(&text, uid) } else { Vec::new() }
}

fn projected(mounts: &str, uid: &str) -> Vec<PathBuf> {
    let end = format!("/pods/{uid}/{PROJECTED}");
    // The fifth field is the mount point: the folder of one volume.
    let points = mounts.lines().filter_map(|line| Path::new(line.split(' ').nth(4)?).parent());
    let mut folders: Vec<PathBuf> =
        points.filter(|folder| folder.to_str().is_some_and(|folder| folder.ends_with(&end))).map(Into::into).collect();
    folders.sort();
    folders.dedup();
    folders
}

/// The pod's token for this audience, out of its projected volumes.
fn find_token(folder: &Path, audience: &str, uid: &str) -> Option<Zeroizing<String>> {
    let files_of = |folder: PathBuf| {
        let entries = fs::read_dir(folder).into_iter().flatten().take(MAX_FILES);
        entries.filter_map(|entry| Some(entry.ok()?.path()))
    };
    files_of(folder.to_owned()).flat_map(files_of).filter_map(|path| read_token(&path)).find(|token| {
        let claims = claims(token);
        claims.is_some_and(|claims| claims.aud.iter().any(|of| of == audience) && claims.kubernetes.pod.uid == uid)
    })
}

fn read_token(path: &Path) -> Option<Zeroizing<String>> {
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut text = Zeroizing::new(String::with_capacity(MAX_TOKEN_BYTES + 1));
    File::open(path).ok()?.take(MAX_TOKEN_BYTES as u64 + 1).read_to_string(&mut text).ok()?;
    let token = Zeroizing::new(text.trim().to_owned());
    handoff::is_token(&token).then_some(token)
}

/// What a service-account token says about itself (RFC 7519). Only the API server can tell whether it is true.
#[derive(Deserialize)]
struct Claims {
    #[serde(default)]
    aud: Vec<String>,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
struct Kubernetes {
    pod: Bound,
}

#[derive(Deserialize)]
struct Bound {
    uid: String,
}

fn claims(token: &str) -> Option<Claims> {
    let payload = token.split('.').nth(1)?;
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).ok()?).ok()
}

// The instance asks the CA at once when somebody shows a token, and again after at most this time.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
const MAX_REASONS: usize = 8;
const MAX_FILES: usize = 64;
// Of the list of mounts. A node with a thousand pods has some megabytes.
const MAX_MOUNTS: u64 = 16 << 20;
const PROJECTED: &str = "volumes/kubernetes.io~projected";

#[cfg(test)]
mod tests {
    use super::*;

    fn token(aud: &str, uid: &str) -> String {
        let payload =
            format!(r#"{{"aud":["{aud}"],"kubernetes.io":{{"namespace":"shop","pod":{{"name":"p","uid":"{uid}"}}}}}}"#);
        format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(payload))
    }

    #[test]
    fn volumes_are_found_below_any_root_of_a_kubelet() {
        let mounts = "31 1 8:1 / / rw - ext4 /dev/root rw\n\
            40 31 0:50 / /data/kubelet/pods/u-1/volumes/kubernetes.io~projected/nebula rw - tmpfs tmpfs rw\n\
            41 31 0:51 / /data/kubelet/pods/u-1/volumes/kubernetes.io~projected/api rw - tmpfs tmpfs rw\n\
            42 31 0:52 / /data/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/nebula rw - tmpfs tmpfs rw\n\
            43 31 0:53 / /data/kubelet/pods/u-12/volumes/kubernetes.io~projected/nebula rw - tmpfs tmpfs rw\nodd\n";
        let folder = "/data/kubelet/pods/u-1/volumes/kubernetes.io~projected";
        assert_eq!(projected(mounts, "u-1"), [Path::new(folder)]);
        assert!(projected(mounts, "1").is_empty() && projected(mounts, "").is_empty());
    }

    #[test]
    fn only_the_pod_s_own_token_for_the_ca_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let [api, other, ours] = ["kube-api-access-x", "other", "nebula"].map(|name| dir.path().join(name));
        for volume in [&api, &other, &ours] {
            fs::create_dir_all(volume.join("..data")).unwrap();
        }
        let put = |volume: &Path, text: &str| {
            fs::write(volume.join("..data/token"), text).unwrap();
            let _ = std::os::unix::fs::symlink("..data/token", volume.join("token"));
        };
        put(&api, &token("https://kubernetes.default.svc", "u1"));
        put(&other, &token("nebula-ca", "u2"));
        assert!(find_token(dir.path(), "nebula-ca", "u1").is_none());
        assert!(find_token(&dir.path().join("none"), "nebula-ca", "u1").is_none());
        for bad in ["", "no token", &"x".repeat(MAX_TOKEN_BYTES + 1), "a.b.c", "e30.e30.e30"] {
            put(&ours, bad);
            assert!(find_token(dir.path(), "nebula-ca", "u1").is_none(), "{bad}");
        }
        put(&ours, &format!("{}\n", token("nebula-ca", "u1")));
        assert_eq!(find_token(dir.path(), "nebula-ca", "u1").unwrap().as_str(), token("nebula-ca", "u1"));
    }
}
