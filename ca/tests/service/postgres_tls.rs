//! TLS connections to PostgreSQL: a real server that accepts nothing else over TCP, with certificates made here.

use std::fs;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::{
    postgres_server::{PostgresServer, TlsFiles},
    running::{Ca, key, pod, verified},
};

/// A CA for database servers.
pub(crate) struct Authority {
    pub(crate) certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.self_signed(&key).unwrap().pem();
        Self { certificate, issuer: Issuer::new(parameters, key) }
    }

    pub(crate) fn sign(&self, name: &str) -> TlsFiles {
        let (parameters, key) = (CertificateParams::new(vec![name.to_owned()]).unwrap(), KeyPair::generate().unwrap());
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap().pem();
        TlsFiles { certificate, key: key.serialize_pem() }
    }
}

/// A CA whose ledger is in this database, and which trusts `authority`.
fn ca(server: &PostgresServer, authority: &Authority, mode: &str) -> Ca {
    let ca = Ca::init();
    fs::write(ca.file("database.crt"), &authority.certificate).unwrap();
    let mut url = server.url();
    if !mode.is_empty() {
        url += &format!("?{mode}&sslrootcert={}", ca.file("database.crt").display());
    }
    fs::write(ca.file("database.url"), url).unwrap();
    ca
}

fn refusal(ca: &Ca) -> String {
    ca.failure("serve", &["--listen", "127.0.0.1:0"])
}

#[test]
#[ignore = "needs the Debian package postgresql"]
fn the_ledger_is_reached_under_tls_and_only_where_the_servers_certificate_is_believed() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let server = PostgresServer::start_with_tls(&authority.sign("127.0.0.1"));

    let good = ca(&server, &authority, "sslmode=verify-full");
    let service = good.serve();
    verified(&service.caller.pod(&good.text("node.token"), pod(1), &key()).unwrap());
    let protected = "select bool_and(ssl) from pg_stat_ssl join pg_stat_activity using (pid) \
                     where application_name = 'nebula-ca'";
    assert_eq!(server.query(protected).trim(), "t");
    service.stop();

    let deceived = refusal(&ca(&server, &stranger, "sslmode=verify-full"));
    assert!(deceived.contains("PostgreSQL: ") && deceived.contains("invalid peer certificate"), "{deceived}");
    let plain = refusal(&ca(&server, &authority, ""));
    assert!(plain.contains("no encryption"), "{plain}");
}

#[test]
#[ignore = "needs the Debian package postgresql"]
fn another_name_in_the_servers_certificate_is_refused_unless_the_name_is_not_asked_for() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let server = PostgresServer::start_with_tls(&authority.sign("db.example"));
    let other = refusal(&ca(&server, &authority, "sslmode=verify-full"));
    assert!(other.contains("not valid for"), "{other}");
    let unnamed = refusal(&ca(&server, &stranger, "sslmode=require"));
    assert!(unnamed.contains("invalid peer certificate"), "{unnamed}");
    ca(&server, &authority, "sslmode=require").serve().stop();
}
