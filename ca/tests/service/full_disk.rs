//! A disk that runs full, and has free space again.

use std::{
    fs,
    io::Write,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::running::{Ca, key, pod};

/// A small disk, mounted where the CA's directory will be.
struct Disk(std::path::PathBuf);

impl Disk {
    fn mount(ca: &Ca) -> Self {
        let path = ca.file("").parent().unwrap().to_owned();
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m,mode=0700", "none"]).arg(&path).status();
        assert!(mounted.unwrap().success());
        Self(path)
    }

    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("ballast")).unwrap();
        for size in [65_536, 4_096, 1] {
            while file.write_all(&vec![b'x'; size]).is_ok() {}
        }
    }

    fn make_room(&self) {
        fs::remove_file(self.0.join("ballast")).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
#[ignore = "needs root: mounts a small disk"]
fn a_service_whose_disk_was_full_works_again_without_a_restart() {
    let ca = Ca::empty();
    let disk = Disk::mount(&ca);
    ca.output("init", &[]);
    let service = ca.serve();
    let token = ca.text("node.token");
    let mut number = 0;
    let mut ask = || {
        number += 1;
        service.caller.pod(&token, pod(number), &key()).map(|reply| reply.certificate).map_err(|(_, code)| code)
    };
    let before = ask().unwrap();
    for round in 0..3 {
        disk.fill();
        // The store file itself still has some free space.
        let deadline = Instant::now() + Duration::from_secs(60);
        while ask() != Err("internal".to_owned()) {
            assert!(Instant::now() < deadline, "round {round}: the disk is not full");
        }
        assert_eq!(service.caller.get("/readyz", "").0, 503, "round {round}");
        assert_eq!(service.caller.get("/healthz", "").0, 200, "round {round}: a restart would not help");
        disk.make_room();
        let start = Instant::now();
        while let Err(code) = ask() {
            assert!(start.elapsed() < Duration::from_secs(10), "round {round}: still {code}");
            thread::sleep(Duration::from_millis(50));
        }
        println!("round {round}: issued again after {:?}", start.elapsed());
        let deadline = Instant::now() + Duration::from_secs(10);
        while service.caller.get("/readyz", "").0 != 200 || service.caller.get("/v1/trust", "").0 != 200 {
            assert!(Instant::now() < deadline, "round {round}: not ready");
            thread::sleep(Duration::from_millis(50));
        }
    }
    // No issued certificate is lost, and almost all lines of the log are whole.
    let listed = ca.json("certificate list", &[]);
    assert!(listed.as_array().unwrap().iter().any(|issued| issued["pem"].as_str().unwrap().trim() == before.trim()));
    let audit = ca.text("audit.log");
    let whole = audit.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count();
    assert!(whole + 6 >= audit.lines().count(), "at most one torn line for each time that the disk was full");
    assert!(serde_json::from_str::<Value>(audit.lines().last().unwrap()).is_ok());
}
