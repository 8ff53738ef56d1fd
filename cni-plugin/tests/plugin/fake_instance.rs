//! A stand-in for `nebula-cni-instance`: this test binary itself, called by a script that the harness writes. Keys in
//! the tunnel's configuration, which the plugin passes on unread, tell it what to do.

use std::io::Write;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, process, thread};

use nebula_cni_contract::launch::LaunchSpec;
use serde_json::{Value, json};

/// Name of the test that acts as the instance.
pub(crate) const TEST: &str = "fake_instance::serves_when_it_is_launched";

#[test]
fn serves_when_it_is_launched() {
    let arguments: Vec<String> = env::args().collect();
    if let Some(at) = arguments.iter().position(|a| a == "--launch") {
        run(Path::new(&arguments[at + 1]));
    }
}

/// Value for the key "fakeStartError".
pub(crate) fn refused(message: &str) -> Value {
    json!({"start_error": "refused", "code": "wrong_node", "message": message})
}

fn run(launch: &Path) {
    let spec: LaunchSpec = serde_json::from_slice(&fs::read(launch).unwrap()).unwrap();
    let key = |name: &str| spec.nebula.get(name).and_then(Value::as_str).map(str::to_owned);
    if let Some(path) = key("fakeReport") {
        fs::write(path, report().to_string()).unwrap();
    }
    if let Some(line) = key("fakeStderr") {
        eprintln!("{line}\n");
    }
    if let Some(status) = key("fakeStatus") {
        notify(&format!("STATUS={status}"));
    }
    if let Some(error) = spec.nebula.get("fakeStartError") {
        notify(&format!("STATUS={error}"));
    }
    if let Some(stale) = key("fakeStaleToken")
        && fs::read_to_string(&spec.ca.token_file).is_ok_and(|token| token == stale)
    {
        fs::write(spec.ca.token_file.with_extension("refused"), "").unwrap();
        notify(&format!(
            "STATUS={}",
            json!({"start_error": "refused", "code": "token_rejected", "message": "it is gone"})
        ));
        process::exit(3);
    }
    match key("fake").as_deref() {
        Some("exit") => process::exit(3),
        Some("hang") => live(launch),
        _ => {}
    }
    let overlay = spec.nebula.get("fakeOverlay").cloned().unwrap_or_else(|| json!([]));
    let status = json!({"pid": process::id(), "uid": spec.target.pod.uid, "state": "running", "overlay": overlay,
        "init_overdue": spec.nebula.get("fakeInitOverdue").is_some(), "certificate": {"not_after": 4_000_000_000_i64}});
    // Left behind by an instance that was killed.
    let _ = fs::remove_file(&spec.status_socket);
    let listener = UnixListener::bind(&spec.status_socket).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(status.to_string().as_bytes());
        }
    });
    notify("READY=1\nSTATUS=serving");
    if let Some(path) = key("fakeFlood") {
        flood_once_there_is(Path::new(&path));
    }
    live(launch);
}

// Runs until it is stopped, or until its test ends and removes the state directory.
fn live(launch: &Path) -> ! {
    let state_dir = launch.parent().and_then(Path::parent).unwrap();
    for _ in 0..600 {
        thread::sleep(Duration::from_millis(100));
        if !state_dir.parent().unwrap().exists() {
            break;
        }
    }
    process::exit(0)
}

fn flood_once_there_is(path: &Path) {
    while !path.exists() {
        thread::sleep(Duration::from_millis(10));
    }
    for _ in 0..30_000 {
        // The log reaches its size limit at some point; a real instance ignores that as well.
        let _ = std::io::stderr().write_all(&[b"x".repeat(99), b"\n".to_vec()].concat());
    }
    fs::remove_file(path).unwrap();
}

fn notify(text: &str) {
    let socket = UnixDatagram::unbound().unwrap();
    // Nobody waits for an instance that was restarted.
    let Some(path) = env::var_os("NOTIFY_SOCKET") else { return };
    socket.send_to(text.as_bytes(), path).unwrap();
}

fn report() -> Value {
    let files: Vec<PathBuf> =
        fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| fs::read_link(e.unwrap().path()).ok()).collect();
    let session = nix::unistd::getsid(None).unwrap().as_raw();
    json!({"files": files, "cwd": env::current_dir().unwrap(), "session": session, "pid": process::id(),
        "environment": env::vars().map(|(k, _)| k).collect::<Vec<_>>()})
}
