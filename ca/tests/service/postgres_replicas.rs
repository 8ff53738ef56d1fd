//! Several services on one PostgreSQL server.

use std::{
    collections::{HashMap, HashSet},
    fs,
    os::unix::fs::{PermissionsExt, chown},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nebula_cert::issuance::{CERTIFICATE_PATH, Proof, Request, Trust};
use serde_json::Value;

use crate::{
    directory::{Reader, uids},
    postgres_server::PostgresServer,
    postgres_tls::Authority,
    running::{Ca, key, pod, refused, verified},
};

/// Two directories of one CA that share a database.
fn replicas(server: &PostgresServer, policy: &str) -> [Ca; 2] {
    let one = Ca::init();
    fs::write(one.file("policy.jsonc"), policy).unwrap();
    fs::write(one.file("database.url"), server.database()).unwrap();
    // The ledger is in the database: the empty one that `init` made is not missed, and not made again.
    fs::remove_file(one.file("store.redb")).unwrap();
    // The first start creates the renewal key, which the replicas share like all other keys.
    one.serve().stop();
    let two = Ca::copy_of(&one);
    assert!(!two.file("store.redb").exists());
    [one, two]
}

const POOL: &str = r#"{"pods": {"overlay": ["10.42.0.0/20"], "address": "pool"}}"#;

#[test]
#[ignore = "needs the Debian package postgresql"]
fn two_services_at_once_allot_no_address_twice_also_when_one_is_killed() {
    let server = PostgresServer::start();
    let [one, two] = replicas(&server, POOL);
    let (first, second) = (one.serve(), two.serve());
    let (next, token) = (Arc::new(AtomicU16::new(1)), one.text("node.token"));
    let askers: Vec<_> = [&first, &second, &first, &second]
        .map(|service| {
            let (caller, next, token) = (service.caller.clone(), Arc::clone(&next), token.clone());
            thread::spawn(move || {
                let mut received = Vec::new();
                while let number @ ..=400 = next.fetch_add(1, Ordering::Relaxed) {
                    let proof = Proof::Node { token: token.clone(), pod: pod(number) };
                    let request = serde_json::to_vec(&Request { public_key: key().public_pem(), proof }).unwrap();
                    let Ok((200, body)) = caller.post(CERTIFICATE_PATH, &request) else { return received };
                    received.push(verified(&serde_json::from_str(&body).unwrap()));
                }
                received
            })
        })
        .into();
    let deadline = Instant::now() + Duration::from_secs(30);
    while next.load(Ordering::Relaxed) < 100 {
        assert!(Instant::now() < deadline, "nothing is issued");
        thread::sleep(Duration::from_millis(5));
    }
    first.kill();
    let received: Vec<_> = askers.into_iter().flat_map(|asker| asker.join().unwrap()).collect();
    assert!(received.len() > 300, "{} certificates", received.len());

    let mut holders: HashMap<_, String> = HashMap::new();
    for certificate in &received {
        let address = certificate.networks()[0].addr();
        if let Some(other) = holders.insert(address, certificate.name().to_owned()) {
            assert_eq!(other, certificate.name(), "{address} was given to both");
        }
    }
    let listed = two.json("certificate list", &[]);
    let ledger: HashSet<&str> =
        listed.as_array().unwrap().iter().map(|issued| issued["fingerprint"].as_str().unwrap()).collect();
    for certificate in &received {
        assert!(
            ledger.contains(certificate.fingerprint().to_string().as_str()),
            "{} is not in the ledger",
            certificate.name()
        );
    }
    let mut addresses = HashMap::new();
    for issued in listed.as_array().unwrap() {
        let name = addresses.entry(issued["networks"][0].to_string()).or_insert_with(|| issued["name"].clone());
        assert_eq!(name, &issued["name"], "two names have one address");
    }
    // The killed service is restarted and sees what the other one did meanwhile.
    let again = one.serve();
    let name = received[0].name();
    let number: u16 = name.trim_start_matches("web-").split('.').next().unwrap().parse().unwrap();
    let renewed = verified(&again.caller.pod(&token, pod(number), &key()).unwrap());
    assert_eq!(renewed.networks(), received[0].networks());
}

/// Files as the chart mounts them from a Secret, a ConfigMap and an emptyDir: owned by another user, readable through
/// the group, in a writable directory.
#[test]
#[ignore = "needs root and the Debian package postgresql"]
fn replicas_run_as_the_chart_runs_them() {
    let authority = Authority::new();
    let server = PostgresServer::start_with_tls(&authority.sign("127.0.0.1"));
    let made = Ca::init();
    fs::write(made.file("database.crt"), &authority.certificate).unwrap();
    let values = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/nebula/values.yaml");
    let values: Value = serde_saphyr::from_str(&fs::read_to_string(values).unwrap()).unwrap();
    let mut files: Vec<&str> =
        values["ca"]["database"]["files"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    files.extend(["policy.jsonc", "database.crt"]);
    let replicas = [0, 1].map(|_| {
        let pod = Ca::empty();
        fs::create_dir(pod.file("")).unwrap();
        let root = pod.file("database.crt").display().to_string();
        let url = format!("{}?sslmode=verify-full&sslrootcert={root}", server.url());
        fs::write(made.file("database.url"), url).unwrap();
        for file in &files {
            fs::copy(made.file(file), pod.file(file)).unwrap();
            fs::set_permissions(pod.file(file), fs::Permissions::from_mode(0o440)).unwrap();
            chown(pod.file(file), Some(0), Some(GROUP)).unwrap();
        }
        for folder in [pod.file(""), pod.file("..")] {
            fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
        }
        pod
    });
    let group = GROUP.to_string();
    let services = [0, 1].map(|at| {
        replicas[at].serve_under(&["setpriv", "--reuid", &group, "--regid", &group, "--clear-groups", "--no-new-privs"])
    });
    let token = replicas[0].token("edge", "10.42.0.9/16", &[]);
    let holder = key();
    let reply = services[1].caller.enrol(&token, &holder).unwrap();
    // Any replica can renew, because they share the renewal key.
    let next = key();
    let (public_key, renewal_key) = (next.public_pem(), reply.renewal_key.clone().unwrap());
    let now = nebula_ca::now();
    let proof = Proof::of_certificate(&verified(&reply), &holder, &renewal_key, Some(&public_key), now).unwrap();
    services[0].caller.request(&Request { public_key, proof }).unwrap();
    for service in services {
        let log = service.stop();
        assert!(!log.contains("can read this secret"), "{log}");
    }
}

const GROUP: u32 = 65532;

#[test]
#[ignore = "needs the Debian package postgresql"]
fn whoever_writes_to_the_database_makes_tokens_within_the_limits_of_the_ca() {
    let server = PostgresServer::start();
    let [one, _] = replicas(&server, r#"{"hosts": {"longest_life": "365d"}}"#);
    let service = one.serve();
    let token = one.token("edge", "10.42.0.9/16", &[]);
    let change = r#"update nebula_ca set record = jsonb_set(jsonb_set(record::jsonb, '{name}', '"admin"'), '{life}', '99999999')::text
        where record like '%"edge"%'"#;
    server.query(change);
    let certificate = verified(&service.caller.enrol(&token, &key()).unwrap());
    assert_eq!(certificate.name(), "admin", "the ledger is believed");
    assert!(certificate.not_after() <= nebula_ca::now() + 365 * 86_400, "but not beyond the policy");
    // A damaged record is refused and does not stop the service.
    let other = one.token("other", "10.42.0.10/16", &[]);
    server.query(r#"update nebula_ca set record = 'x' where record like '%"other"%'"#);
    assert_eq!(service.caller.enrol(&other, &key()).map(|reply| reply.certificate), refused(500, "internal"));
    assert_eq!(service.caller.get("/healthz", "").0, 200);
}

#[test]
#[ignore = "needs the Debian package postgresql"]
fn what_one_service_does_the_other_knows() {
    let server = PostgresServer::start();
    let [one, two] = replicas(&server, r#"{"pods": {"overlay": ["10.42.0.0/16"]}}"#);
    let (first, second) = (one.serve(), two.serve());
    let token = one.token("edge", "10.42.0.9/16", &[]);
    let (holder, thief) = (key(), key());
    let reply = first.caller.enrol(&token, &holder).unwrap();
    assert_eq!(second.caller.enrol(&token, &holder).unwrap().certificate, reply.certificate);
    assert_eq!(second.caller.enrol(&token, &thief).map(|reply| reply.certificate), refused(409, "token_used"));

    // Possession tags and ETags from one replica are valid for the other.
    let present = verified(&reply);
    let public_key = thief.public_pem();
    let renewal_key = reply.renewal_key.unwrap();
    let proof = Proof::of_certificate(&present, &holder, &renewal_key, Some(&public_key), nebula_ca::now()).unwrap();
    second.caller.request(&Request { public_key, proof }).unwrap();
    let (_, tag, _) = first.caller.get("/v1/trust", "");
    assert_eq!(second.caller.get("/v1/trust", &tag).0, 304);
    let follower = {
        let (caller, tag) = (second.caller.clone(), tag.clone());
        thread::spawn(move || (caller.get("/v1/trust?wait=30", &tag), Instant::now()))
    };
    thread::sleep(Duration::from_millis(300));
    let revoked = Instant::now();
    one.output("certificate revoke", &[&present.fingerprint().to_string()]);
    let ((status, _, body), heard) = follower.join().unwrap();
    let trust: Trust = serde_json::from_str(&body).unwrap();
    assert_eq!((status, trust.blocklist), (200, vec![present.fingerprint().to_string()]));
    assert!(heard.duration_since(revoked) < Duration::from_secs(4));
}

#[test]
#[cfg(feature = "kubernetes")]
#[ignore = "needs the Debian package postgresql"]
fn a_revocation_at_one_replica_is_published_by_the_other_which_knows_of_it() {
    use crate::{fake_cluster::FakeCluster, revocation};
    let cluster = FakeCluster::start("1.36.2");
    revocation::users(&cluster);
    let server = PostgresServer::start();
    let [one, two] = replicas(&server, &revocation::policy(&cluster).to_string());
    let (first, second) = (one.serve(), two.serve());
    let name = revocation::web().name;
    cluster.add_pod(&name, &revocation::web().uid, |_| {});
    let reply = first.caller.pod(&cluster.agent_token(), revocation::web(), &key()).unwrap();
    let fingerprint = verified(&reply).fingerprint().to_string();
    let request = revocation::of_pod("shop", &name);
    let revoked = second.caller.revoke(revocation::SHOP, &request).unwrap();
    assert_eq!((revoked.new, revoked.spread.published_within, revoked.spread.is_partial), (1, 1, true));
    let began = Instant::now();
    while !first.caller.get("/v1/trust", "").2.contains(&fingerprint) {
        assert!(began.elapsed() < Duration::from_secs(4), "the other replica publishes it");
        thread::sleep(Duration::from_millis(50));
    }
    let again = first.caller.revoke(revocation::SHOP, &request).unwrap();
    assert_eq!((again.new, again.total), (0, 1), "it was revoked before");
}

#[test]
#[ignore = "needs the Debian package postgresql"]
fn the_directory_is_one_whatever_replica_is_asked() {
    let server = PostgresServer::start();
    let [one, two] = replicas(&server, r#"{"pods": {"overlay": ["10.42.0.0/16"]}}"#);
    let (first, second) = (one.serve(), two.serve());
    let token = one.text("node.token");
    let [at_first, at_second] = [&first, &second].map(|service| Reader::new(&service.caller, &token));
    let empty = at_first.ask("").unwrap();
    assert_eq!(at_second.ask("").unwrap().version, empty.version);
    let tell = |reader: &Reader, version: &str, change: &dyn Fn()| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| (reader.wait(version), Instant::now()));
            thread::sleep(Duration::from_millis(300));
            change();
            let changed = Instant::now();
            let (answer, heard) = waiting.join().unwrap();
            let late = heard.saturating_duration_since(changed);
            assert!(late < Duration::from_secs(1), "{late:?}");
            answer
        })
    };
    let joined = tell(&at_second, &empty.version, &|| drop(first.caller.pod(&token, pod(7), &key()).unwrap()));
    assert_eq!(uids(&joined), [pod(7).uid]);
    // The version of one replica goes on at the other.
    let proof = || Proof::Node { token: token.clone(), pod: pod(7) };
    let gone = tell(&at_first, &joined.version, &|| drop(second.caller.release(proof()).unwrap()));
    assert_eq!((gone.full, gone.gone), (false, vec![pod(7).uid]));
    // A replica that was away follows, and has the same versions.
    first.kill();
    second.caller.pod(&token, pod(8), &key()).unwrap();
    let again = one.serve();
    let delta = Reader::new(&again.caller, &token).since(&joined.version);
    assert_eq!((delta.full, uids(&delta), delta.gone.clone()), (false, vec![pod(8).uid.as_str()], vec![pod(7).uid]));
    assert_eq!(delta.version, at_second.since(&joined.version).version);
}

#[test]
#[cfg(feature = "kubernetes")]
#[ignore = "needs the Debian package postgresql"]
fn a_lighthouse_that_enrols_at_one_replica_is_announced_by_the_other() {
    use crate::{fake_cluster::FakeCluster, lighthouses};
    let cluster = FakeCluster::start("1.36.2");
    lighthouses::add(&cluster, "lh-0", "l-1", "192.0.2.7");
    let server = PostgresServer::start();
    let [one, two] = replicas(&server, &lighthouses::policy(&cluster).to_string());
    let (first, second) = (one.serve(), two.serve());
    let (_, tag, _) = second.caller.get("/v1/trust", "");
    let follower = {
        let caller = second.caller.clone();
        thread::spawn(move || (caller.get("/v1/trust?wait=30", &tag), Instant::now()))
    };
    thread::sleep(Duration::from_millis(300));
    let enrolled = Instant::now();
    lighthouses::enrol(&first.caller, "l-1", None).unwrap();
    let ((status, _, body), heard) = follower.join().unwrap();
    assert!(status == 200 && body.contains("192.0.2.7:4242"), "{body}");
    assert!(heard.duration_since(enrolled) < Duration::from_secs(4));
    assert_eq!(first.caller.get("/v1/trust", "").1, second.caller.get("/v1/trust", "").1, "one ETag");
    // It moves, and enrols at the other one.
    lighthouses::add(&cluster, "lh-0", "l-2", "192.0.2.8");
    lighthouses::enrol(&second.caller, "l-2", None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(4);
    while !lighthouses::announced(&first.caller).to_string().contains("192.0.2.8:4242") {
        assert!(Instant::now() < deadline);
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
#[ignore = "needs the Debian package postgresql"]
fn a_database_that_goes_away_stops_issuing_until_it_is_back() {
    let server = PostgresServer::start();
    let [one, _] = replicas(&server, POOL);
    let service = one.serve();
    let ask = |number| service.caller.pod(&one.text("node.token"), pod(number), &key()).map(|reply| reply.certificate);
    ask(1).unwrap();
    server.run("alter database postgres allow_connections false");
    server.run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'nebula-ca'");
    assert_eq!(ask(2), refused(500, "internal"));
    assert_eq!(service.caller.get("/readyz", "").0, 503);
    server.run("alter database postgres allow_connections true");
    ask(2).unwrap();
    let listed: Value = one.json("certificate list", &[]);
    assert_eq!(listed.as_array().unwrap().len(), 2);
}
