//! The identities page, rendered in a browser.

use std::{collections::HashSet, fs::File, io::BufReader, path::Path, process::Command};

use crate::running::{Ca, key, pod};

#[test]
#[ignore = "needs the Debian package chromium"]
fn a_browser_shows_the_identities() {
    let ca = Ca::init();
    let service = ca.serve_with_options(&["--status-listen", "127.0.0.1:0"]);
    for number in 1..=6 {
        service.caller.pod(&ca.text("node.token"), pod(number), &key()).unwrap();
    }
    let hostile = ca.token("<script>document.title='x'</script>", "10.42.9.9/16", &["--groups", "<img src=x>,edge"]);
    service.caller.enrol(&hostile, &key()).unwrap();
    ca.output("certificate revoke", &["web-6.shop.pod"]);
    let folder = tempfile::tempdir().unwrap();
    let picture = std::env::var_os("NEBULA_CA_PICTURE").map_or_else(|| folder.path().join("page.png"), Into::into);
    let url = service.status.clone().unwrap();

    let dom = browse(folder.path(), &["--dump-dom", &url]);
    for number in 1..=6 {
        assert!(dom.contains(&format!("<td>web-{number}.shop.pod</td>")), "{dom}");
    }
    assert!(dom.contains("<title>nebula-ca - identities</title>"), "a script ran");
    assert!(dom.contains("&lt;script&gt;") && !dom.contains("<script") && !dom.contains("<img"), "{dom}");
    assert!(dom.contains("blocked</span>"));

    let to = format!("--screenshot={}", picture.display());
    browse(folder.path(), &["--window-size=1280,720", "--hide-scrollbars", &to, &url]);
    let (width, height, pixels) = read_picture(&picture);
    assert_eq!((width, height), (1280, 720));
    let background = pixels[0];
    let drawn = pixels.iter().filter(|pixel| **pixel != background).count();
    let colours: HashSet<_> = pixels.iter().collect();
    assert!(drawn * 50 > pixels.len(), "only {drawn} pixels are drawn");
    assert!(colours.len() > 50, "only {} colours: the style was not applied", colours.len());
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
