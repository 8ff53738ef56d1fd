//! The identities page, rendered in a browser.

use std::{collections::HashSet, fs::File, io::BufReader, path::Path, process::Command};

use crate::running::{Ca, Service, key, pod};

/// A CA with 120 identities, some with a history, names that are markup, open tokens and refusals.
fn busy(ca: &Ca) -> Service {
    let service = ca.serve_with_options(&["--status-listen", "127.0.0.1:0"]);
    let node = ca.text("node.token");
    for number in 1..=118 {
        service.caller.pod(&node, pod(number), &key()).unwrap();
    }
    for _ in 0..3 {
        service.caller.pod(&node, pod(7), &key()).unwrap();
    }
    let hostile = ca.token("<script>document.title='x'</script>", "10.42.9.9/16", &["--groups", "<img src=x>,edge"]);
    service.caller.enrol(&hostile, &key()).unwrap();
    let long = ca.token(&"long-name-without-a-break-".repeat(4), "10.42.9.10/16", &[]);
    service.caller.enrol(&long, &key()).unwrap();
    ca.token("<b onclick=x>open</b>", "10.42.9.11/16", &["--groups", "many,groups,of,a,token,that,nobody,used,yet"]);
    service.caller.enrol("nebula-token-that-nobody-made", &key()).unwrap_err();
    ca.output("certificate revoke", &["web-6.shop.pod"]);
    service
}

#[test]
#[ignore = "needs the Debian package chromium"]
fn a_browser_shows_the_identities() {
    let ca = Ca::init();
    let service = busy(&ca);
    let folder = tempfile::tempdir().unwrap();
    let picture = std::env::var_os("NEBULA_CA_PICTURE").map_or_else(|| folder.path().join("page.png"), Into::into);
    let url = service.status.clone().unwrap();

    let dom = browse(folder.path(), &["--dump-dom", &url]);
    for number in 1..=118 {
        assert_eq!(dom.matches(&format!("<div>web-{number}.shop.pod</div>")).count(), 1, "{dom}");
    }
    assert!(dom.contains("<summary>3 earlier</summary>") && dom.contains("<b>1</b> open tokens"), "{dom}");
    assert!(dom.contains("<h2>Last refusals</h2>") && dom.contains("127.0.0.1</div>"), "{dom}");
    assert!(dom.contains("<title>nebula-ca - identities</title>"), "a script ran");
    assert!(dom.contains("&lt;script&gt;") && dom.contains("&lt;b onclick=x&gt;open"), "{dom}");
    assert!(!dom.contains("<script") && !dom.contains("<img") && !dom.contains("<b onclick"), "{dom}");
    assert!(dom.contains("blocked</span>"));

    let found = browse(folder.path(), &["--dump-dom", &format!("{url}?sort=name&q=WEB-7.shop")]);
    assert_eq!(found.matches("<div>web-").count(), 1, "{found}");
    assert!(
        found.contains("value=\"WEB-7.shop\"") && found.contains("href=\"?sort=expiry&amp;q=WEB-7.shop\""),
        "{found}"
    );

    let to = format!("--screenshot={}", picture.display());
    browse(folder.path(), &["--window-size=1280,720", "--hide-scrollbars", &to, &url]);
    let (width, height, pixels) = read_picture(&picture);
    assert_eq!((width, height), (1280, 720));
    let background = pixels[0];
    let drawn = pixels.iter().filter(|pixel| **pixel != background).count();
    let colours: HashSet<_> = pixels.iter().collect();
    assert!(drawn * 50 > pixels.len(), "only {drawn} pixels are drawn");
    assert!(colours.len() > 50, "only {} colours: the style was not applied", colours.len());

    for width in [390, 1280] {
        fits(folder.path(), &service.page(), width);
    }
}

/// Nothing of the page is wider than a window of this width, whatever is unfolded.
fn fits(folder: &Path, page: &str, width: u32) {
    let inside = page.replace('&', "&amp;").replace('"', "&quot;");
    // A headless browser has no window as narrow as a telephone, but a frame can be.
    let frame = format!(
        "<!doctype html><body style='margin:0'><iframe style='border:0' width={width} height=900 srcdoc=\"{inside}\"></iframe>\
         <script>onload = () => {{\
           const inside = document.querySelector('iframe').contentDocument;\
           for (const one of inside.querySelectorAll('details')) one.open = true;\
           const rights = [...inside.querySelectorAll('body *')].map(one => Math.ceil(one.getBoundingClientRect().right));\
           document.title = [inside.querySelectorAll('tr').length, inside.documentElement.scrollWidth, Math.max(...rights)].join();\
         }}</script>"
    );
    let file = folder.join(format!("frame-{width}.html"));
    std::fs::write(&file, frame).unwrap();
    let address = format!("file://{}", file.display());
    let dom = browse(folder, &["--window-size=1400,900", "--dump-dom", &address]);
    let title = dom.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next()).expect("a title");
    let numbers: Vec<u32> = title.split(',').map(|number| number.parse().unwrap()).collect();
    assert!(numbers[0] > 120, "rows: {title}");
    assert!(numbers[1] <= width && numbers[2] <= width, "the page is {title} wide in a window of {width}");
    if let Some(to) = std::env::var_os("NEBULA_CA_PICTURE") {
        let to = format!("--screenshot={}.{width}.png", to.display());
        browse(folder, &["--window-size=1400,900", &to, &address]);
    }
}

/// Standard output of a browser that can only use `folder`.
fn browse(folder: &Path, options: &[&str]) -> String {
    let output = Command::new("timeout")
        .args(["--kill-after=5", "100", "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"])
        .args(["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"])
        .arg(format!("--user-data-dir={}", folder.join("browser").display()))
        .args(options)
        .env("HOME", folder)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn read_picture(path: &Path) -> (u32, u32, Vec<[u8; 3]>) {
    let mut reader = png::Decoder::new(BufReader::new(File::open(path).unwrap())).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let samples = info.color_type.samples();
    let pixels =
        bytes[..info.buffer_size()].chunks_exact(samples).map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect();
    (info.width, info.height, pixels)
}
