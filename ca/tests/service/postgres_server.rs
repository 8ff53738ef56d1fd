//! Debian's PostgreSQL with its own data directory, reached through a socket in that directory.

use std::{
    fs,
    net::TcpListener,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// A running server; stopped when dropped.
pub(crate) struct PostgresServer {
    child: Child,
    folder: TempDir,
    /// Port on loopback; 0 if it does not listen there.
    port: u16,
}

/// A server's certificate and key, in PEM.
pub(crate) struct TlsFiles {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl PostgresServer {
    pub(crate) fn start() -> Self {
        Self::start_as(None)
    }

    /// Also listens on loopback, where it requires TLS and a password.
    pub(crate) fn start_with_tls(files: &TlsFiles) -> Self {
        let server = Self::start_as(Some(files));
        server.query(&format!("alter user ca password '{PASSWORD}'"));
        server
    }

    fn start_as(tls: Option<&TlsFiles>) -> Self {
        let folder = tempfile::Builder::new().prefix("nebula-pg-").tempdir_in("/tmp").unwrap();
        let owner = unprivileged();
        if let Some((user, group)) = owner {
            chown(folder.path(), Some(user), Some(group)).unwrap();
        }
        let data = folder.path().join("data");
        let program = |name: &str| {
            let mut command = Command::new(binaries().join(name));
            // PostgreSQL refuses to run as root.
            if let Some((user, group)) = owner {
                command.uid(user).gid(group);
            }
            command.current_dir(folder.path()).env_clear().env("LC_ALL", "C").env("PATH", "/usr/bin:/bin");
            command.stdin(Stdio::null());
            command
        };
        let made = program("initdb").args(["-A", "trust", "-U", "ca", "-N", "-D"]).arg(&data).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut postgres = program("postgres");
        let mut port = 0;
        match tls {
            None => drop(postgres.args(["-c", "listen_addresses="])),
            Some(files) => {
                port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
                fs::write(data.join("pg_hba.conf"), "local all all trust\nhostssl all all all scram-sha-256\n")
                    .unwrap();
                for (name, text) in [("server.crt", &files.certificate), ("server.key", &files.key)] {
                    fs::write(data.join(name), text).unwrap();
                    fs::set_permissions(data.join(name), fs::Permissions::from_mode(0o600)).unwrap();
                    if let Some((user, group)) = owner {
                        chown(data.join(name), Some(user), Some(group)).unwrap();
                    }
                }
                postgres.args(["-c", "listen_addresses=127.0.0.1", "-c", "ssl=on", "-p", &port.to_string()]);
            }
        }
        let child = postgres
            .arg("-D")
            .arg(&data)
            .args(["-c", "fsync=off", "-k"])
            .arg(folder.path())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let server = Self { child, folder, port };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !server.is_ready() {
            assert!(Instant::now() < deadline, "{}", fs::read_to_string(server.folder.path().join("log")).unwrap());
            thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// Connection string for the unix socket.
    pub(crate) fn database(&self) -> String {
        let port = if self.port == 0 { String::new() } else { format!(" port={}", self.port) };
        format!("host={} user=ca dbname=postgres{port}", self.folder.path().display())
    }

    /// Connection URL for TCP.
    pub(crate) fn url(&self) -> String {
        format!("postgres://ca:{PASSWORD}@127.0.0.1:{}/postgres", self.port)
    }

    /// Runs a statement in another database than the one that the services use.
    pub(crate) fn run(&self, statement: &str) -> String {
        run(&self.database().replace("dbname=postgres", "dbname=template1"), statement)
    }

    /// Runs a statement in the database that the services use.
    pub(crate) fn query(&self, statement: &str) -> String {
        run(&self.database(), statement)
    }

    fn is_ready(&self) -> bool {
        let ready = Command::new(binaries().join("pg_isready")).args(["-q", "-d", &self.database()]).status();
        ready.is_ok_and(|status| status.success())
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        // Its children end with it, and its data is no longer needed.
        let _ = Command::new("kill").args(["-QUIT", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}

const PASSWORD: &str = "correct-horse";

/// Runs a statement in a database.
pub(crate) fn run(database: &str, statement: &str) -> String {
    let run = Command::new(binaries().join("psql")).args(["-qAt", "-d", database, "-c", statement]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

/// User and group IDs of `postgres`, if this process runs as root.
fn unprivileged() -> Option<(u32, u32)> {
    let id = |options: &[&str]| {
        let output = Command::new("id").args(options).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse::<u32>().unwrap()
    };
    (id(&["-u"]) == 0).then(|| (id(&["-u", "postgres"]), id(&["-g", "postgres"])))
}

/// Programs of the newest installed release.
fn binaries() -> PathBuf {
    let mut found: Vec<PathBuf> = fs::read_dir(Path::new("/usr/lib/postgresql"))
        .expect("the Debian package postgresql is needed")
        .map(|entry| entry.unwrap().path().join("bin"))
        .collect();
    found.sort();
    found.pop().expect("the Debian package postgresql is needed")
}
