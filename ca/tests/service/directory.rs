//! The directory as an agent reads it.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nebula_cert::{
    directory::{DIRECTORY_PATH, Directory},
    issuance::{Pod, Proof, Request},
};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::running::{Ca, Caller, code, key, pod, refused, verified};

/// An agent with its token.
pub(crate) struct Reader {
    pub(crate) caller: Caller,
    pub(crate) token: String,
}

impl Reader {
    pub(crate) fn new(caller: &Caller, token: &str) -> Self {
        Self { caller: caller.clone(), token: token.trim().to_owned() }
    }

    pub(crate) fn ask(&self, query: &str) -> Result<Directory, (u16, String)> {
        let (status, body) = self.caller.get_with_token(&format!("{DIRECTORY_PATH}?{query}"), &self.token);
        if status == 200 { Ok(serde_json::from_str(&body).unwrap()) } else { Err((status, code(&body))) }
    }

    pub(crate) fn since(&self, version: &str) -> Directory {
        self.ask(&format!("since={version}")).unwrap()
    }

    /// Waits for news, for at most 20 seconds.
    pub(crate) fn wait(&self, version: &str) -> Directory {
        self.ask(&format!("since={version}&wait=20")).unwrap()
    }
}

pub(crate) fn uids(directory: &Directory) -> Vec<&str> {
    directory.pods.iter().map(|pod| pod.uid.as_str()).collect()
}

#[test]
fn an_agent_learns_who_joins_and_who_leaves() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    let agent = Reader::new(&service.caller, &token);
    let empty = agent.ask("").unwrap();
    assert!(empty.full && empty.pods.is_empty() && empty.next.is_none());

    let certificate = verified(&service.caller.pod(&token, pod(7), &key()).unwrap());
    let one = agent.wait(&empty.version);
    assert!(!one.full && one.gone.is_empty());
    let member = &one.pods[0];
    assert_eq!((member.namespace.as_str(), member.name.as_str()), ("shop", "web-7"));
    assert_eq!((member.uid.clone(), member.until), (pod(7).uid, certificate.not_after()));
    assert_eq!(member.addresses, [certificate.networks()[0].addr()]);
    assert_eq!(member.node, "at 127.0.0.1");

    let host = ca.token("edge", "10.42.0.9/16", &[]);
    service.caller.enrol(&host, &key()).unwrap();
    let two = agent.wait(&one.version);
    assert_eq!((uids(&two), two.pods[0].namespace.as_str()), (vec!["host edge"], ""));

    let asked = Instant::now();
    let released = thread::scope(|scope| {
        let waiting = scope.spawn(|| agent.wait(&two.version));
        thread::sleep(Duration::from_millis(300));
        service.caller.release(Proof::Node { token: token.clone(), pod: pod(7) }).unwrap();
        waiting.join().unwrap()
    });
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
    assert_eq!((released.gone.clone(), released.pods.len()), (vec![pod(7).uid], 0));

    ca.output("certificate revoke", &["edge"]);
    assert_eq!(agent.wait(&released.version).gone, ["host edge"]);
    assert!(agent.ask("").unwrap().pods.is_empty());
}

#[test]
fn a_renewal_wakes_nobody_and_is_told_at_the_end_of_the_wait() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    let agent = Reader::new(&service.caller, &token);
    service.caller.pod(&token, pod(7), &key()).unwrap();
    let known = agent.ask("").unwrap();
    thread::sleep(Duration::from_secs(1));
    service.caller.pod(&token, pod(7), &key()).unwrap();
    let asked = Instant::now();
    let later = agent.ask(&format!("since={}&wait=2", known.version)).unwrap();
    assert!(asked.elapsed() >= Duration::from_secs(2), "{:?}", asked.elapsed());
    assert!(later.pods[0].until > known.pods[0].until);
    let nothing = agent.since(&later.version);
    assert_eq!((nothing.version.as_str(), nothing.pods.len(), nothing.full), (later.version.as_str(), 0, false));
}

#[test]
fn versions_outlive_the_service_and_those_of_another_ledger_count_for_nothing() {
    let ca = Ca::init();
    let token = ca.text("node.token");
    let service = ca.serve();
    service.caller.pod(&token, pod(1), &key()).unwrap();
    let known = Reader::new(&service.caller, &token).ask("").unwrap();
    service.caller.pod(&token, pod(2), &key()).unwrap();
    service.kill();
    let service = ca.serve();
    let agent = Reader::new(&service.caller, &token);
    let delta = agent.since(&known.version);
    assert_eq!((delta.full, uids(&delta)), (false, vec![pod(2).uid.as_str()]));
    let (_, number) = known.version.split_once('-').unwrap();
    for unknown in ["0-1", "", "x", &format!("0000000000000000-{number}")] {
        let answer = agent.since(unknown);
        assert_eq!((answer.full, answer.pods.len()), (true, 2), "{unknown}");
    }
    // What is revoked while no service runs is gone as well.
    service.kill();
    ca.output("certificate revoke", &["web-1.shop.pod"]);
    let service = ca.serve();
    assert_eq!(Reader::new(&service.caller, &token).since(&delta.version).gone, [pod(1).uid]);
}

#[test]
fn whoever_lets_its_certificate_expire_is_gone() {
    let ca = Ca::init();
    fs::write(ca.file("policy.jsonc"), r#"{"pods": {"overlay": ["10.42.0.0/16"], "life": "3s"}}"#).unwrap();
    let service = ca.serve();
    let token = ca.text("node.token");
    service.caller.pod(&token, pod(1), &key()).unwrap();
    let agent = Reader::new(&service.caller, &token);
    let known = agent.ask("").unwrap();
    assert_eq!(known.pods.len(), 1);
    let gone = agent.wait(&known.version);
    assert!(nebula_ca::now() > known.pods[0].until);
    assert_eq!((gone.full, gone.gone), (false, vec![pod(1).uid]));
    service.kill();
    let service = ca.serve();
    let agent = Reader::new(&service.caller, &token);
    assert_eq!(agent.since(&known.version).gone, [pod(1).uid], "after a restart, too");
}

#[test]
fn a_reused_address_changes_its_owner_at_once() {
    let ca = Ca::init();
    let policy = r#"{"pods": {"overlay": ["10.244.0.0/16"], "address": "same"}}"#;
    fs::write(ca.file("policy.jsonc"), policy).unwrap();
    let service = ca.serve();
    let token = ca.text("node.token");
    let agent = Reader::new(&service.caller, &token);
    service.caller.pod(&token, pod(7), &key()).unwrap();
    let known = agent.ask("").unwrap();
    let next = Pod { address: pod(7).address, ..pod(8) };
    service.caller.pod(&token, next, &key()).unwrap();
    let delta = agent.wait(&known.version);
    assert_eq!((delta.gone.clone(), uids(&delta)), (vec![pod(7).uid], vec![pod(8).uid.as_str()]));
    assert_eq!(delta.pods[0].addresses, [pod(7).address]);
    let all = agent.ask("").unwrap();
    assert_eq!(uids(&all), [pod(8).uid.as_str()], "one owner");
}

#[test]
fn both_addresses_of_a_pod_are_in_its_certificate_and_in_the_directory() {
    let ca = Ca::init();
    let policy = r#"{"pods": {"overlay": ["10.244.0.0/16", "fd00:244::/56"], "address": "same"}}"#;
    fs::write(ca.file("policy.jsonc"), policy).unwrap();
    let service = ca.serve();
    let token = ca.text("node.token");
    let both = Pod { other_address: Some("fd00:244::7".parse().unwrap()), ..pod(7) };
    let certificate = verified(&service.caller.pod(&token, both, &key()).unwrap());
    let networks: Vec<String> = certificate.networks().iter().map(ToString::to_string).collect();
    assert_eq!(networks, ["10.244.0.7/16", "fd00:244::7/56"]);
    // An earlier plugin sends one.
    let body = format!(
        r#"{{"public_key": {:?}, "proof": {{"type": "node", "token": {:?}, "pod": {{"namespace": "shop",
            "name": "web-8", "uid": "u-8", "address": "10.244.0.8"}}}}}}"#,
        key().public_pem(),
        token.trim()
    );
    assert_eq!(service.caller.post("/v1/certificate", body.as_bytes()).unwrap().0, 200);
    let agent = Reader::new(&service.caller, &token);
    let known = agent.ask("").unwrap();
    let addresses: Vec<usize> = known.pods.iter().map(|pod| pod.addresses.len()).collect();
    assert_eq!(addresses, [2, 1]);
    // Somebody else gets one of the two: the first pod is gone as a whole.
    let next = Pod { address: "fd00:244::7".parse().unwrap(), ..pod(9) };
    service.caller.pod(&token, next, &key()).unwrap();
    let delta = agent.wait(&known.version);
    assert_eq!((delta.gone.clone(), uids(&delta)), (vec![pod(7).uid], vec![pod(9).uid.as_str()]));
    let same_family = Pod { other_address: Some("10.244.0.77".parse().unwrap()), ..pod(10) };
    let answer = service.caller.pod(&token, same_family, &key()).map(|reply| reply.certificate);
    assert_eq!(answer, refused(400, "invalid_pod"));
}

#[test]
fn only_agents_read_it() {
    let ca = Ca::init();
    let service = ca.serve();
    service.caller.pod(&ca.text("node.token"), pod(1), &key()).unwrap();
    let (status, _, body) = service.caller.get(DIRECTORY_PATH, "");
    assert_eq!((status, code(&body).as_str()), (401, "no_node_token"));
    let ask = |token: &str| Reader::new(&service.caller, token).ask("").map(|_| String::new());
    assert_eq!(ask("wrong"), refused(401, "bad_node_token"));
    let enrolment = ca.token("edge", "10.42.0.9/16", &[]);
    assert_eq!(ask(&enrolment), refused(401, "bad_node_token"));
    for _ in 0..30 {
        let _ = ask("wrong");
    }
    assert_eq!(ask("wrong"), refused(429, "too_many_failures"));
    assert!(ask(&ca.text("node.token")).is_ok());
    for bad in ["wait=x", "from=zz", "from=0"] {
        let answer = Reader::new(&service.caller, &ca.text("node.token")).ask(bad).map(|_| String::new());
        assert_eq!(answer, refused(400, "malformed_request"), "{bad}");
    }
    let logs = format!("{}{}", service.stop(), ca.text("audit.log"));
    assert!(!logs.contains(ca.text("node.token").trim()));
}

#[test]
fn one_node_has_only_so_many_answers_open_and_the_others_are_served() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    let agent = Reader::new(&service.caller, &token);
    let known = agent.ask("").unwrap().version;
    let query = format!("since={known}&wait=5");
    let outcomes: Vec<_> = thread::scope(|scope| {
        let all: Vec<_> = (0..40).map(|_| scope.spawn(|| agent.ask(&query).map(|_| ()))).collect();
        thread::sleep(Duration::from_millis(1_500));
        // Whoever enrols is not in the way of those who wait, nor they in its way.
        let began = Instant::now();
        service.caller.pod(&token, pod(1), &key()).unwrap();
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let (told, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((told.len(), refused.len()), (32, 8));
    assert!(refused.iter().all(|outcome| *outcome == Err((429, "too_many_answers".to_owned()))), "{refused:?}");
    assert_eq!(agent.since(&known).pods.len(), 1, "they are closed again");
}

#[test]
fn an_agent_that_reads_nothing_costs_one_answer() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    let agent = Reader::new(&service.caller, &token);
    thread::scope(|scope| {
        for part in 0..4 {
            let (caller, token) = (&service.caller, &token);
            scope.spawn(move || (0..75).for_each(|n| drop(caller.pod(token, pod(part * 75 + n + 1), &key()).unwrap())));
        }
    });
    let full = agent.ask("").unwrap();
    assert_eq!(full.pods.len(), 300);
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{}/status", service.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = resident();
    let lazy: Vec<_> = (0..3)
        .map(|_| {
            let mut stream = connect(&ca, service.address);
            let ask = format!(
                "GET {DIRECTORY_PATH} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\r\n",
                token.trim()
            );
            stream.sock.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
            // The service stops reading questions at some point.
            for _ in 0..300 {
                if stream.write_all(ask.as_bytes()).and_then(|()| stream.flush()).is_err() {
                    break;
                }
            }
            stream
        })
        .collect();
    thread::sleep(Duration::from_secs(1));
    let grown = resident().saturating_sub(before);
    assert!(grown < 10_000, "{grown} kB more");
    assert_eq!(agent.ask("").unwrap().pods.len(), 300);
    service
        .caller
        .request(&Request {
            public_key: key().public_pem(),
            proof: Proof::Node { token: token.clone(), pod: pod(1_000) },
        })
        .unwrap();
    // It reads at last, and gets what it asked for.
    for mut stream in lazy {
        let mut some = [0; 12];
        stream.sock.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.read_exact(&mut some).unwrap();
        assert_eq!(&some, b"HTTP/1.1 200");
    }
}

fn connect(ca: &Ca, address: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.text("tls.crt").as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_root_certificates(roots).with_no_client_auth();
    let connection = ClientConnection::new(Arc::new(tls), "localhost".try_into().unwrap()).unwrap();
    StreamOwned::new(connection, TcpStream::connect(address).unwrap())
}
