//! The page of the cluster: served to those with its token, and used in a browser.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};
use serde_json::{Value, json};

use super::browser::Browser;
use super::fake_cluster::command;
use super::fake_fleet::{FakeFleet, NODES};

/// The program while it serves, and the address that it printed.
struct Serving {
    child: Child,
    address: String,
}

impl Serving {
    fn start(fleet: &FakeFleet) -> Self {
        let mut command = command(fleet.folder.path(), &["page", "-A"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut address = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self { child, address: address.trim().to_owned() }
    }

    fn ask(&self, path: &str, headers: &str) -> String {
        let place = self.address.trim_start_matches("http://").split('/').next().unwrap();
        let mut stream = TcpStream::connect(place).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: {place}\r\nconnection: close\r\n{headers}\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn json(&self, path: &str) -> Value {
        let token = self.address.split_once("#token=").unwrap().1;
        let answer = self.ask(path, &format!("x-nebula-page-token: {token}\r\n"));
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Ctrl-C. Returns the exit code.
    fn interrupt(mut self) -> i32 {
        assert!(Command::new("kill").args(["-INT", &self.child.id().to_string()]).status().unwrap().success());
        self.child.wait().unwrap().code().unwrap()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_is_served_to_those_with_its_token_until_ctrl_c() {
    let fleet = FakeFleet::start().await;
    tokio::task::block_in_place(|| {
        let serving = Serving::start(&fleet);
        assert!(serving.address.starts_with("http://127.0.0.1:"), "{}", serving.address);
        assert!(serving.ask("/", "").contains("<title>Nebula</title>"));
        assert!(serving.ask("/api/nodes", "").starts_with("HTTP/1.1 401 "));
        assert_eq!(fleet.asked(), 0, "nobody has looked");
        let nodes = serving.json("/api/nodes");
        assert_eq!(nodes["nodes"].as_array().unwrap().len(), NODES as usize);
        let all_asked = || serving.json("/api/topology")["held"] == 20_000;
        let until = SystemClock.now() + Duration::from_secs(60);
        while !all_asked() {
            assert!(SystemClock.now() < until, "the agents have not been asked");
            std::thread::yield_now();
        }
        assert_eq!(serving.json("/api/identities")["rows"].as_array().unwrap().len(), 2000);
        let refused = serving.json("/api/flows?verdict=refused&namespace=shop");
        let records = refused["records"].as_array().unwrap();
        assert!(!records.is_empty() && records.iter().all(|record| record["verdict"] == "refused"), "{refused}");
        assert_eq!(serving.interrupt(), 0);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the Debian package chromium"]
async fn a_browser_shows_the_cluster() {
    let fleet = FakeFleet::start().await;
    tokio::task::block_in_place(|| {
        let serving = Serving::start(&fleet);
        let folder = tempfile::tempdir().unwrap();
        let pictures: PathBuf =
            std::env::var_os("NEBULA_PAGE_PICTURES").map_or_else(|| folder.path().into(), Into::into);
        let mut browser = Browser::start(folder.path());
        let violations = "window.violations = []; addEventListener('securitypolicyviolation', (one) => \
            violations.push(`${one.violatedDirective} ${one.blockedURI}`));";
        browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": violations}));
        browser.window(1280, 900, "light");
        let began = SystemClock.now();
        browser.call("Page.navigate", json!({"url": serving.address}));
        opens_fast(&mut browser);
        names_are_texts(&mut browser);
        search(&mut browser);
        by_keyboard(&mut browser);
        the_ca_and_its_end_are_shown(&mut browser);
        tables_have_heads(&mut browser);
        pictures_and_widths(&mut browser, &pictures);
        many_readers_ask_agents_no_more(&mut browser, &serving, &fleet, began);
        assert_eq!(browser.value("violations"), json!([]));
        assert_eq!(browser.errors(), Vec::<&Value>::new());
        assert_eq!(browser.value("document.title"), "Topology - Nebula");
        another_page_gets_nothing(&mut browser, &serving);
    });
}

const ROWS: &str = "document.querySelectorAll('section:not([hidden]) tbody tr').length";

fn open(browser: &mut Browser, view: &str) {
    browser.value(&format!("location.hash = '#{view}'"));
    let name = view.split('?').next().unwrap();
    browser.wait(&format!("!document.getElementById('view-{name}').hidden && {ROWS} > 0"));
}

fn opens_fast(browser: &mut Browser) {
    let shown = browser.wait(&format!("location.hash === '#topology' && {ROWS} > 0"));
    let paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? -1";
    let painted = browser.value(paint).as_f64().unwrap();
    eprintln!("first contentful paint after {painted:.0} ms, rows after {shown:.0} ms");
    assert!(painted > 0.0 && painted < 1000.0, "{painted} ms");
    assert_eq!(browser.value("location.href.includes('token')"), false);
}

fn names_are_texts(browser: &mut Browser) {
    open(browser, "identities");
    let all = "document.querySelector('#identities-table > button')";
    browser.wait(&format!("{all} && {all}.textContent.includes('of 2,000')"));
    browser.value("document.querySelector('#identities-tools [name=q]').value = 'onerror'");
    browser.value("document.getElementById('identities-tools').dispatchEvent(new Event('input'))");
    browser.wait(&format!("{ROWS} === 2"));
    let text = browser.value("document.getElementById('identities-table').innerText");
    let escaped = "<img src=x onerror=document.title='owned'>\\u{1b}[2J\\u{202e}edge";
    assert!(text.as_str().unwrap().contains(escaped), "{text}");
    assert_eq!(browser.value("document.querySelectorAll('img, [onerror]').length"), 0);
    browser.value("document.querySelector('#identities-tools [name=q]').value = ''");
}

fn search(browser: &mut Browser) {
    open(browser, "identities");
    browser.value("document.querySelector('#identities-tools [name=q]').focus()");
    browser.type_text("pod-1234");
    browser.wait(&format!("{ROWS} === 1"));
    assert_eq!(browser.value("document.querySelector('#identities-table tbody a').textContent"), "ns-34/pod-1234");
    let took = "(() => { const field = document.querySelector('#identities-tools [name=q]'); field.value = ''; \
        const began = performance.now(); field.dispatchEvent(new Event('input', { bubbles: true })); \
        document.body.offsetHeight; return performance.now() - began; })()";
    let took = browser.value(took).as_f64().unwrap();
    eprintln!("a search draws 100 rows of 2,000 identities in {took:.0} ms");
    assert!(took < 500.0, "{took} ms");
}

/// From the top of the page to filtered flows and back to their topology without a pointer.
fn by_keyboard(browser: &mut Browser) {
    browser.value("document.activeElement.blur(); location.hash = '#topology'");
    browser.wait(&format!("!document.getElementById('view-topology').hidden && {ROWS} > 0"));
    browser.call("Page.reload", json!({}));
    browser.wait(&format!("document.readyState === 'complete' && {ROWS} > 0"));
    browser.press("Tab");
    assert_eq!(browser.value("document.activeElement.id"), "skip", "the first stop");
    browser.press("Enter");
    assert_eq!(browser.value("document.activeElement.id"), "content");
    browser.press("Tab");
    assert_eq!(browser.value("document.getElementById('sums').contains(document.activeElement)"), true);
    browser.value("document.activeElement.blur(); document.getElementById('skip').focus()");
    browser.tab_to("one.hash === '#flows' && one.closest('nav')");
    browser.press("Enter");
    browser.wait(&format!("document.activeElement.id === 'h-flows' && {ROWS} === 100"));
    browser.tab_to("one.name === 'namespace'");
    browser.type_text("shop");
    browser.tab_to("one.name === 'port'");
    browser.type_text("443");
    browser.press("Enter");
    browser.wait("location.hash === '#flows?namespace=shop&port=443'");
    let row = "document.querySelectorAll('#flows-table tbody tr')";
    browser.wait(&format!(
        "[...{row}].every((row) => row.textContent.includes('shop/') && row.textContent.includes('443/'))"
    ));
    assert!(browser.value(ROWS).as_u64().unwrap() > 10);
    browser.tab_to("one.id === 'follow'");
    browser.press(" ");
    assert_eq!(browser.value("document.getElementById('follow').getAttribute('aria-pressed')"), "true");
    browser.press(" ");
    // Each stop of the way through the page can be seen.
    browser.value("document.activeElement.blur(); location.hash = '#topology?party=namespace/shop'");
    browser.wait("document.querySelector('#diagram a') && !document.getElementById('topology-party').hidden");
    browser.value("document.getElementById('skip').focus()");
    let outline = "((one) => one.matches('a.box') ? getComputedStyle(one.querySelector('rect')).strokeWidth \
        : getComputedStyle(one).outlineWidth)(document.activeElement)";
    let mut stops = 0;
    loop {
        browser.press("Tab");
        if browser.value("document.activeElement === document.body") == true || stops > 60 {
            break;
        }
        let (width, what) = (browser.value(outline), browser.value("document.activeElement.outerHTML.slice(0, 80)"));
        assert_eq!(width, "3px", "{what}");
        stops += 1;
    }
    assert!(stops > 20, "only {stops} stops");
    assert_eq!(browser.value("document.querySelectorAll('[tabindex]:not([tabindex=\"-1\"])').length"), 0);
}

/// One CA that all nodes trust, and the month in which it should be replaced has begun.
fn the_ca_and_its_end_are_shown(browser: &mut Browser) {
    open(browser, "expiry");
    let row =
        browser.value("[...document.querySelectorAll('#cas-table tbody tr')].map((row) => row.innerText).join('|')");
    let row = row.as_str().unwrap();
    assert!(row.contains("! in 20 d") && row.contains("cdcdcdcdcdcd") && !row.contains('|'), "{row}");
}

fn tables_have_heads(browser: &mut Browser) {
    for view in ["topology", "flows", "identities", "nodes", "expiry", "upgrades"] {
        open(browser, view);
        let heads = browser.value(
            "[...document.querySelectorAll('section:not([hidden]) table')].every((table) => table.caption.textContent \
             && table.querySelectorAll('th[scope=col]').length === table.rows[0].cells.length)",
        );
        assert_eq!(heads, true, "{view}");
        let labels = "[...document.querySelectorAll('input, select')].every((field) => field.labels.length === 1)";
        assert_eq!(browser.value(labels), true, "{view}");
    }
}

fn pictures_and_widths(browser: &mut Browser, pictures: &Path) {
    for (width, height) in [(1280, 900), (390, 844)] {
        for scheme in ["light", "dark"] {
            browser.window(width, height, scheme);
            for view in ["topology", "flows", "identities", "nodes", "expiry", "upgrades"] {
                open(browser, view);
                browser
                    .value("for (const one of document.querySelectorAll('details')) one.open = true; scrollTo(0, 0)");
                let widths = "JSON.stringify([document.documentElement.scrollWidth, \
                    Math.max(...[...document.querySelectorAll('body *:not(.skip)')]\
                    .map((one) => Math.ceil(one.getBoundingClientRect().right)))])";
                // The picture is drawn again after the window has another width.
                browser.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
                let text = browser.value(widths);
                let widths: Vec<u32> = serde_json::from_str(text.as_str().unwrap()).unwrap();
                assert!(widths.iter().all(|one| *one <= width), "{view} is {widths:?} wide in a window of {width}");
                browser.picture(&pictures.join(format!("{view}-{width}-{scheme}.png")));
            }
        }
    }
    open(browser, "topology");
}

/// The agents are asked once for all who look.
fn many_readers_ask_agents_no_more(browser: &mut Browser, serving: &Serving, fleet: &FakeFleet, began: Instant) {
    for _ in 0..50 {
        for path in ["/api/nodes", "/api/topology", "/api/flows", "/api/identities"] {
            assert!(serving.json(path)["now_ms"].is_number());
        }
    }
    // Nodes and records, each after a pause of 5 s for 40 agents.
    let rounds = usize::try_from(began.elapsed().as_secs() / 5 + 2).unwrap();
    assert!(fleet.asked() <= rounds * 2 * NODES as usize, "{} in {rounds} rounds", fleet.asked());
    browser.wait(&format!("{ROWS} > 0"));
}

/// Not even a page that knows the token.
fn another_page_gets_nothing(browser: &mut Browser, serving: &Serving) {
    let (place, token) = serving.address.split_once("/#token=").unwrap();
    browser.open_tab();
    for options in [json!({"headers": {"x-nebula-page-token": token}}), json!({"mode": "no-cors"}), json!({})] {
        let ask = format!("fetch('{place}/api/nodes', {options}).then((answer) => answer.type, (error) => error.name)");
        assert_eq!(browser.value(&ask), "TypeError", "{options}");
    }
}
