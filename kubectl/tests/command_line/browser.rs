//! A headless chromium, steered over a pair of pipes by its DevTools protocol.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command};

use base64::Engine;
use serde_json::{Value, json};

pub(crate) struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    calls: u64,
    session: Option<String>,
    /// What the browser reported meanwhile.
    pub(crate) events: Vec<Value>,
}

impl Browser {
    /// Starts it with one empty tab. It can only use `folder`, and ends after some minutes whatever happens.
    pub(crate) fn start(folder: &Path) -> Self {
        let pipes = ["to", "from"].map(|name| folder.join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().unwrap().success());
        let options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-dev-shm-usage --hide-scrollbars \
            --disable-background-networking --disable-component-update --remote-debugging-pipe";
        let script = format!(
            "exec timeout --kill-after=5 300 chromium {options} --user-data-dir=\"$1/browser\" about:blank \
             3<\"$2\" 4>\"$3\""
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).arg(folder).args(&pipes).env("HOME", folder);
        let log = File::create(folder.join("browser.log")).unwrap();
        let child = command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap();
        // Opens in the same order as the shell.
        let to = File::options().write(true).open(&pipes[0]).unwrap();
        let from = BufReader::new(File::open(&pipes[1]).unwrap());
        let mut browser = Self { child, to, from, calls: 0, session: None, events: Vec::new() };
        browser.open_tab();
        browser
    }

    /// Goes on in a new tab.
    pub(crate) fn open_tab(&mut self) {
        self.session = None;
        let target = self.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = self.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        self.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
    }

    /// Calls a method, and waits for its result.
    pub(crate) fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.calls += 1;
        let mut message = json!({"id": self.calls, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(message.to_string().as_bytes()).unwrap();
        self.to.write_all(&[0]).unwrap();
        loop {
            let mut bytes = Vec::new();
            self.from.read_until(0, &mut bytes).unwrap();
            assert_eq!(bytes.pop(), Some(0), "the browser ended during {method}");
            let mut message: Value = serde_json::from_slice(&bytes).unwrap();
            if message["id"] != self.calls {
                self.events.push(message);
                continue;
            }
            assert!(message["error"].is_null(), "{method}: {message}");
            return message["result"].take();
        }
    }

    /// The value of an expression, of a promise when it is kept.
    pub(crate) fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let mut answer = self.call("Runtime.evaluate", parameters);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {answer}");
        answer["result"]["value"].take()
    }

    /// Waits until a condition holds. Returns how long the page has been there then, in milliseconds.
    pub(crate) fn wait(&mut self, condition: &str) -> f64 {
        let look = format!(
            "new Promise((done) => {{ \
               const look = () => ({condition}) ? done(performance.now()) : setTimeout(look, 10); look(); }})"
        );
        self.value(&look).as_f64().unwrap()
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Tab" => (9, ""),
            "Enter" => (13, "\r"),
            " " => (32, " "),
            other => panic!("unknown key {other}"),
        };
        let event = json!({"key": key, "code": if key == " " { "Space" } else { key }, "windowsVirtualKeyCode": code});
        let mut down = event.clone();
        down["type"] = if text.is_empty() { "rawKeyDown" } else { "keyDown" }.into();
        down["text"] = text.into();
        self.call("Input.dispatchKeyEvent", down);
        let mut up = event;
        up["type"] = "keyUp".into();
        self.call("Input.dispatchKeyEvent", up);
    }

    /// Presses Tab until a condition holds for the focused element, which `one` names.
    pub(crate) fn tab_to(&mut self, condition: &str) {
        for _ in 0..400 {
            self.press("Tab");
            if self.value(&format!("((one) => Boolean({condition}))(document.activeElement)")) == true {
                return;
            }
        }
        panic!("no key leads to {condition}");
    }

    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    pub(crate) fn window(&mut self, width: u32, height: u32, scheme: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features);
    }

    pub(crate) fn picture(&mut self, file: &Path) {
        let answer = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let bytes = base64::prelude::BASE64_STANDARD.decode(answer["data"].as_str().unwrap()).unwrap();
        std::fs::write(file, bytes).unwrap();
    }

    /// Errors and violations of the Content-Security-Policy that the browser reported.
    pub(crate) fn errors(&self) -> Vec<&Value> {
        let is_error = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => event["params"]["type"] == "error",
            Some("Log.entryAdded") => event["params"]["entry"]["level"] == "error",
            _ => false,
        };
        self.events.iter().filter(is_error).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let close = json!({"id": self.calls + 1, "method": "Browser.close"}).to_string() + "\0";
        let _ = self.to.write_all(close.as_bytes());
        let _ = self.child.wait();
    }
}
