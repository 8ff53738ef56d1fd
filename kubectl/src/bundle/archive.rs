//! Files as one tar.gz.

use std::collections::BTreeMap;
use std::io;

use flate2::Compression;
use flate2::write::GzEncoder;

/// Packs files below the folder `nebula-bundle`. Names are made by this program.
pub(super) fn pack(files: &BTreeMap<String, Vec<u8>>, now: i64) -> io::Result<Vec<u8>> {
    let mut packed = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, bytes) in files {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o600);
        header.set_size(bytes.len() as u64);
        header.set_mtime(u64::try_from(now).unwrap_or_default());
        packed.append_data(&mut header, format!("{FOLDER}/{name}"), &bytes[..])?;
    }
    packed.into_inner()?.finish()
}

const FOLDER: &str = "nebula-bundle";

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_by_tar_and_private() {
        let names = ["a.txt", "logs/agent-1.log", "empty", "block"];
        let bytes = [b"one\n".to_vec(), vec![b'x'; 100_000], Vec::new(), vec![b'y'; 512]];
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
    }
}
