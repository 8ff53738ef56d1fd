//! Files as one tar.gz. A tar of POSIX (ustar) is a block of 512 bytes for each file, its bytes, and two empty blocks.

use std::collections::BTreeMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

/// Packs files below the folder `nebula-bundle`. Names have at most 80 bytes, and are made by this program.
pub(super) fn pack(files: &BTreeMap<String, Vec<u8>>, now: i64) -> io::Result<Vec<u8>> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    for (name, bytes) in files {
        packed.write_all(&header(name, bytes.len(), now)?)?;
        packed.write_all(bytes)?;
        packed.write_all(&[0; BLOCK][..(BLOCK - bytes.len() % BLOCK) % BLOCK])?;
    }
    packed.write_all(&[0; 2 * BLOCK])?;
    packed.finish()
}

fn header(name: &str, length: usize, now: i64) -> io::Result<[u8; BLOCK]> {
    let path = format!("{FOLDER}/{name}");
    if path.len() > MOST_OF_NAME || length as u64 > MOST_OF_LENGTH {
        return Err(io::Error::other(format!("{name} does not fit into a tar")));
    }
    let mut block = [0; BLOCK];
    let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
    put(0, path.as_bytes());
    // Octal, as everything in it.
    put(100, b"0000600\0");
    put(108, b"0000000\0");
    put(116, b"0000000\0");
    put(124, format!("{length:011o}\0").as_bytes());
    put(136, format!("{:011o}\0", u64::try_from(now).unwrap_or_default() & MOST_OF_LENGTH).as_bytes());
    // The sum is taken with spaces in its own place.
    put(148, b"        ");
    put(156, b"0");
    put(257, b"ustar\x0000");
    let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Ok(block)
}

const FOLDER: &str = "nebula-bundle";
const BLOCK: usize = 512;
const MOST_OF_NAME: usize = 100;
/// Eleven octal digits.
const MOST_OF_LENGTH: u64 = 0o77_777_777_777;

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_by_tar_and_private() {
        let names = ["a.txt", "logs/agent-1.log", "empty", "block"];
        let bytes = [b"one\n".to_vec(), vec![b'x'; 100_000], Vec::new(), vec![b'y'; BLOCK]];
        let files: BTreeMap<String, Vec<u8>> = names.iter().map(|name| (*name).to_owned()).zip(bytes).collect();
        let folder = tempfile::tempdir().unwrap();
        let archive = folder.path().join("x.tar.gz");
        std::fs::write(&archive, pack(&files, 1_790_000_000).unwrap()).unwrap();
        let done = Command::new("tar").arg("-xzpf").arg(&archive).arg("-C").arg(folder.path()).status().unwrap();
        assert!(done.success());
        for (name, bytes) in &files {
            let path = folder.path().join(FOLDER).join(name);
            assert_eq!(&std::fs::read(&path).unwrap(), bytes, "{name}");
            let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
            assert_eq!(mode & 0o777, 0o600, "{name}");
        }
        let long = BTreeMap::from([("x".repeat(100), Vec::new())]);
        assert!(pack(&long, 0).unwrap_err().to_string().contains("does not fit"));
    }
}
