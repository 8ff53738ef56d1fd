//! The node agent under filters of system calls.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::json;

use super::{comes_true, end, heading, logged, misleads, rounds, serves_without_v6, spawn};
use crate::loopback::free_tcp_port;
use crate::world::cluster::binary;

/// An agent of a node without a runtime and a CA, which it says itself.
struct Node {
    dir: tempfile::TempDir,
    listen: SocketAddr,
}

impl Node {
    fn new(listen: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = free_tcp_port();
        let config = json!({
            "ca": {"url": "https://127.0.0.1:1"},
            "runtimeEndpoint": format!("unix://{}", dir.path().join("none.sock").display()),
            "confDirs": [dir.path()], "binDirs": [dir.path()],
            "listen": listen.replace("PORT", &port.to_string()),
            "entry": {"nebula": {}},
        });
        std::fs::write(dir.path().join("agent.json"), config.to_string()).unwrap();
        for name in ["token", "trust"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        Self { dir, listen: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    fn log(&self) -> std::path::PathBuf {
        self.dir.path().join("log")
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap()
    }

    fn command(&self) -> Command {
        let at = |name: &str| self.dir.path().join(name);
        let mut command = logged(&binary("nebula-cni-agent"), &self.log());
        command.arg("run").arg("--config").arg(at("agent.json")).arg("--token-file").arg(at("token"));
        command.arg("--trust-file").arg(at("trust")).current_dir(Path::new("/"));
        command
    }

    /// Whether it answers the kubelet.
    fn is_alive(&self) -> bool {
        let ask = || {
            let mut stream = TcpStream::connect(self.listen)?;
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            std::io::Result::Ok(text)
        };
        ask().is_ok_and(|text| text.starts_with("HTTP/1.1 200"))
    }
}

#[test]
#[ignore = "needs a build of the agent"]
fn without_one_kind_of_system_call_the_agent_answers_or_names_what_it_needs() {
    let node = Node::new("127.0.0.1:PORT");
    let mut complaints = Vec::new();
    for (word, errno, program) in rounds() {
        let mut child = spawn(&mut node.command(), program);
        let works = comes_true(&mut child, || node.is_alive());
        let code = end(&mut child);
        let said = node.said();
        if code.is_none() {
            complaints.push(format!("{}it does not end\n{said}", heading(word, errno)));
        } else if let Some(text) = misleads(&said) {
            complaints.push(format!("{}it says {text:?}\n{said}", heading(word, errno)));
        } else if !works && !said.to_lowercase().contains(&word.to_lowercase()) {
            complaints.push(format!("{}it does not answer, and does not say why\n{said}", heading(word, errno)));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
#[ignore = "needs a build of the agent"]
fn without_ipv6_in_the_kernel_the_agent_listens_on_ipv4() {
    let node = Node::new("[::]:PORT");
    let served = serves_without_v6(&mut node.command(), &[node.listen.port()]);
    assert_eq!(served, (true, Some(0)), "{}", node.said());
}
