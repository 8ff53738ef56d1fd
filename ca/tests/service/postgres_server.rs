//! A PostgreSQL of Debian with a data folder of its own, reached by a socket in it.

use std::{
    fs,
    os::unix::{fs::chown, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// A running server; ended when dropped.
pub(crate) struct PostgresServer {
    child: Child,
    folder: TempDir,
}

impl PostgresServer {
    pub(crate) fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("nebula-pg-").tempdir_in("/tmp").unwrap();
        let owner = unprivileged();
        if let Some((user, group)) = owner {
            chown(folder.path(), Some(user), Some(group)).unwrap();
        }
        let data = folder.path().join("data");
        let program = |name: &str| {
            let mut command = Command::new(binaries().join(name));
            // It refuses to run as root.
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
        let child = program("postgres")
            .arg("-D")
            .arg(&data)
            .args(["-c", "listen_addresses=", "-c", "fsync=off", "-k"])
            .arg(folder.path())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let server = Self { child, folder };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !server.is_ready() {
            assert!(Instant::now() < deadline, "{}", fs::read_to_string(server.folder.path().join("log")).unwrap());
            thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// How to reach it.
    pub(crate) fn database(&self) -> String {
        format!("host={} user=ca dbname=postgres", self.folder.path().display())
    }

    /// Runs a statement, beside the database that services use.
    pub(crate) fn run(&self, statement: &str) -> String {
        run(&self.database().replace("dbname=postgres", "dbname=template1"), statement)
    }

    /// Runs a statement in the database that services use.
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
        // Its children end with it; nothing in its folder is needed any more.
        let _ = Command::new("kill").args(["-QUIT", &self.child.id().to_string()]).status();
        let _ = self.child.wait();
    }
}

/// Runs a statement in a database.
pub(crate) fn run(database: &str, statement: &str) -> String {
    let run = Command::new(binaries().join("psql")).args(["-qAt", "-d", database, "-c", statement]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8(run.stdout).unwrap()
}

/// Somebody else than root, if this is root.
fn unprivileged() -> Option<(u32, u32)> {
    let id = |options: &[&str]| {
        let output = Command::new("id").args(options).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse::<u32>().unwrap()
    };
    (id(&["-u"]) == 0).then(|| (id(&["-u", "postgres"]), id(&["-g", "postgres"])))
}

/// The newest release that is installed.
fn binaries() -> PathBuf {
    let mut found: Vec<PathBuf> = fs::read_dir(Path::new("/usr/lib/postgresql"))
        .expect("the Debian package postgresql is needed")
        .map(|entry| entry.unwrap().path().join("bin"))
        .collect();
    found.sort();
    found.pop().expect("the Debian package postgresql is needed")
}
