//! Renders certificates as a QR code, for phones.

use anyhow::Context as _;
use qrcode::{Color, EcLevel, QrCode};

/// Makes the image for `-out-qr`. Call it before any file is written, because text that is too long makes it fail.
pub(crate) fn wanted(path: &str, text: &str) -> anyhow::Result<Option<Vec<u8>>> {
    if path.is_empty() { Ok(None) } else { png(text).map(Some).context("error while generating qr code") }
}

/// A black-on-white PNG with five pixels per module and the quiet zone that readers need.
fn png(text: &str) -> anyhow::Result<Vec<u8>> {
    let code = QrCode::with_error_correction_level(text, EcLevel::M)
        .with_context(|| format!("{} bytes of certificates are too many for one code", text.len()))?;
    let modules = code.to_colors();
    let side = (code.width() + 2 * QUIET) * PIXELS;
    let is_dark = |x: usize, y: usize| {
        let at = |pixel: usize| (pixel / PIXELS).checked_sub(QUIET).filter(|&module| module < code.width());
        at(x).zip(at(y)).is_some_and(|(x, y)| modules.get(y * code.width() + x) == Some(&Color::Dark))
    };
    let pixels: Vec<u8> =
        (0..side * side).map(|pixel| if is_dark(pixel % side, pixel / side) { 0 } else { u8::MAX }).collect();
    let mut image = Vec::new();
    let mut encoder = png::Encoder::new(&mut image, side as u32, side as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    writer.finish()?;
    Ok(image)
}

const PIXELS: usize = 5;
// White modules around the code, as required by the standard.
const QUIET: usize = 4;
