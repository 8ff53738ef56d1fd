//! The file of the cluster table: which of its versions is used.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use nebula_cni_contract::cluster_table::{self, Layout, MAX_BYTES, Table};
use nebula_linux::errno;
use nebula_linux::mapped_file::MappedFile;
use nix::libc;

/// A table in memory that all instances of the node share.
#[derive(Debug)]
pub(crate) struct MappedTable {
    bytes: MappedFile,
    layout: Layout,
    written: Option<Duration>,
}

impl MappedTable {
    pub(crate) fn version(&self) -> u64 {
        self.layout.version()
    }

    pub(crate) fn contents(&self) -> Table<'_> {
        self.layout.table(&self.bytes)
    }

    pub(crate) fn counts(&self) -> [u32; 4] {
        self.contents().counts()
    }

    /// When it was written (since the Unix epoch).
    pub(crate) fn written(&self) -> Option<Duration> {
        self.written
    }
}

/// The file and its folder, which is opened once: folders above it may be inaccessible to the user that this program
/// switches to.
#[derive(Debug)]
pub(crate) struct TableFile {
    folder: PathBuf,
    name: OsString,
    /// `None`: there was no such folder when this program started.
    opened: Option<File>,
    /// The file that was looked at last.
    seen: Option<Stamp>,
    problem: Option<String>,
}

/// Tells a file from the one that replaces it.
type Stamp = [i64; 5];

/// Why the file that is there is not used.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error("{}", errno::text(.0))]
    File(#[from] io::Error),
    #[error(transparent)]
    Contents(#[from] cluster_table::Error),
    #[error("its version is 0, which no table has")]
    NoVersion,
    #[error("it is older (version {found}) than the one in use ({used}), which stays in use")]
    Older { found: u64, used: u64 },
}

impl TableFile {
    pub(crate) fn new(path: &Path) -> Self {
        let folder = path.parent().unwrap_or_else(|| Path::new("/")).to_owned();
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(&folder);
        let problem = opened.as_ref().err().map(|error| {
            format!(
                "{}: {}: this instance must be started again once it is there",
                folder.display(),
                errno::text(error)
            )
        });
        let name = path.file_name().unwrap_or_default().to_owned();
        Self { folder, name, opened: opened.ok(), seen: None, problem }
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Why the file that is there is not used.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// The table, if it was replaced since the last call and is a newer one than version `used`.
    pub(crate) fn read_newer(&mut self, used: Option<u64>) -> Option<MappedTable> {
        let folder = self.opened.as_ref()?;
        let opened = MappedFile::open_at(folder, &self.name).and_then(|file| Ok((stamp(&file)?, file)));
        let seen = opened.as_ref().ok().map(|(stamp, _)| *stamp);
        if seen.is_some() && seen == self.seen {
            return None;
        }
        self.seen = seen;
        let read = opened.map_err(Unusable::File).and_then(|(_, file)| read(&file, used));
        match read {
            Ok(table) => {
                self.problem = None;
                table
            }
            Err(unusable) => {
                if matches!(unusable, Unusable::File(_)) {
                    // It may be readable the next time.
                    self.seen = None;
                }
                let problem = format!("{}: {unusable}", self.folder.join(&self.name).display());
                if self.problem.as_ref() != Some(&problem) {
                    tracing::warn!(error = problem, "The cluster table cannot be used");
                }
                self.problem = Some(problem);
                None
            }
        }
    }
}

/// `None`: it is the version in use.
fn read(file: &File, used: Option<u64>) -> Result<Option<MappedTable>, Unusable> {
    let bytes = MappedFile::map(file, MAX_BYTES)?;
    let layout = Layout::read(&bytes)?;
    match (layout.version(), used) {
        (0, _) => Err(Unusable::NoVersion),
        (found, Some(used)) if found < used => Err(Unusable::Older { found, used }),
        (found, Some(used)) if found == used => Ok(None),
        _ => {
            let written = file.metadata()?.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            Ok(Some(MappedTable { bytes, layout, written }))
        }
    }
}

fn stamp(file: &File) -> io::Result<Stamp> {
    let found = file.metadata()?;
    let (device, inode) = (found.dev().cast_signed(), found.ino().cast_signed());
    Ok([device, inode, found.size().cast_signed(), found.ctime(), found.ctime_nsec()])
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs::Permissions;
    use std::net::IpAddr;
    use std::os::unix::fs::PermissionsExt;

    use nebula_cni_contract::cluster_table::{Builder, Found};
    use nebula_cni_contract::launch::Capture;

    use super::*;

    pub(crate) fn spec(folder: &tempfile::TempDir) -> Capture {
        serde_json::from_value(serde_json::json!({
            "ranges": ["10.244.0.0/16", "fd00:244::/48"],
            "services": ["10.96.0.0/16"],
            "sources": ["10.244.1.7", "fd00:244::7"],
            "table": folder.path().join("table"),
        }))
        .unwrap()
    }

    /// As the agent does it.
    pub(crate) fn write(folder: &tempfile::TempDir, bytes: &[u8]) {
        let new = folder.path().join("new");
        std::fs::write(&new, bytes).unwrap();
        std::fs::set_permissions(&new, Permissions::from_mode(0o644)).unwrap();
        std::fs::rename(new, folder.path().join("table")).unwrap();
    }

    const POD: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 244, 1, 1));

    fn table(version: u64) -> Vec<u8> {
        let mut builder = Builder::new();
        builder.pod(POD, version * 10);
        builder.finish(version)
    }

    fn file() -> (tempfile::TempDir, TableFile) {
        let folder = tempfile::tempdir().unwrap();
        let file = TableFile::new(&folder.path().join("table"));
        (folder, file)
    }

    #[test]
    fn each_newer_table_is_read_once() {
        let (folder, mut file) = file();
        assert!(file.read_newer(None).is_none());
        assert!(file.problem().unwrap().contains("no such file"), "{:?}", file.problem());
        write(&folder, &table(1));
        let one = file.read_newer(None).unwrap();
        assert_eq!((one.version(), file.problem()), (1, None));
        assert!(one.written().is_some());
        assert!(file.read_newer(Some(1)).is_none());
        write(&folder, &table(1));
        assert!(file.read_newer(Some(1)).is_none(), "the same once more");
        write(&folder, &table(2));
        let two = file.read_newer(Some(1)).unwrap();
        let of = |table: &MappedTable| table.contents().find(POD, 80, 6);
        assert_eq!(of(&two), Found::Enrolled { incarnation: 20 });
        assert_eq!(of(&one), Found::Enrolled { incarnation: 10 }, "the version before stays as it was");
    }

    #[test]
    fn a_broken_an_older_or_a_missing_table_is_not_used_and_the_reason_is_said() {
        let (folder, mut file) = file();
        write(&folder, &table(7));
        assert!(file.read_newer(None).is_some());
        let whole = table(8);
        let mut of_another_format = whole.clone();
        of_another_format[10] = 1;
        for (bytes, reason) in [
            (&b"nonsense"[..], "not a cluster table"),
            (&whole[..whole.len() - 1], "truncated"),
            (&of_another_format, "format is version 1"),
            (&table(6), "older (version 6) than the one in use (7)"),
            (&table(0), "version is 0"),
        ] {
            write(&folder, bytes);
            assert!(file.read_newer(Some(7)).is_none(), "{reason}");
            assert!(file.problem().unwrap().contains(reason), "{:?}", file.problem());
        }
        std::fs::remove_file(folder.path().join("table")).unwrap();
        assert!(file.read_newer(Some(7)).is_none());
        assert!(file.problem().unwrap().contains("no such file"));
        write(&folder, &whole);
        assert!(file.read_newer(Some(7)).is_some());
        assert_eq!(file.problem(), None);
    }

    #[test]
    fn a_table_is_whole_however_often_it_is_replaced_while_it_is_read() {
        let (folder, mut file) = file();
        write(&folder, &table(1));
        std::thread::scope(|scope| {
            scope.spawn(|| (2..500).for_each(|version| write(&folder, &table(version))));
            let mut used = None;
            while used != Some(499) {
                let Some(new) = file.read_newer(used) else { continue };
                assert!(Some(new.version()) > used);
                let incarnation = new.version() * 10;
                assert_eq!(new.contents().find(POD, 80, 6), Found::Enrolled { incarnation });
                used = Some(new.version());
            }
        });
        assert_eq!(file.problem(), None);
    }

    #[test]
    fn a_missing_folder_is_said() {
        let (folder, _) = file();
        let mut file = TableFile::new(&folder.path().join("cluster/table"));
        assert!(file.read_newer(None).is_none());
        assert!(file.problem().unwrap().contains("started again"), "{:?}", file.problem());
    }
}
