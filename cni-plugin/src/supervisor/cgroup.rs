//! A control group for each instance, if the machine allows it: otherwise the instance would be accounted, and perhaps
//! killed, together with the container runtime that called the plugin. The group also limits the instance's memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::request::Key;

/// The groups of one instance: usually one, but two on machines with a cgroup2 tree whose memory controller is in the
/// version 1 hierarchy.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Directories of the groups, to be joined in this order.
    pub(super) folders: Vec<PathBuf>,
    /// Why a requested memory limit could not be set.
    pub(super) unlimited: Option<String>,
}

/// Creates the groups of an attachment; none if there is no writable cgroup tree.
#[must_use]
pub(super) fn create(key: &Key, memory_limit: Option<u64>) -> Groups {
    create_below(Path::new(TREE), key, memory_limit)
}

fn create_below(tree: &Path, key: &Key, memory_limit: Option<u64>) -> Groups {
    let unified = unified(tree).and_then(|root| make(&root, key).ok().map(|folder| (root, folder)));
    let mut groups = Groups { folders: unified.iter().map(|(_, folder)| folder.clone()).collect(), unlimited: None };
    let Some(limit) = memory_limit else { return groups };
    let version_1 = tree.join(MEMORY);
    let limited = match &unified {
        Some((root, folder)) if has_word(&root.join("cgroup.controllers"), MEMORY) => {
            limit_unified(root, folder, limit)
        }
        _ if version_1.join(LIMIT_1).exists() => make(&version_1, key).and_then(|folder| {
            limit_version_1(&folder, limit)?;
            groups.folders.push(folder);
            Ok(())
        }),
        _ => Err(io::Error::other("this machine has no memory controller for control groups")),
    };
    groups.unlimited = limited.err().map(|error| error.to_string());
    groups
}

/// Removes the groups and returns whether all are gone. A group that still contains a process stays.
#[must_use]
pub fn remove(key: &Key) -> bool {
    folders(Path::new(TREE), key).into_iter().fold(true, |gone, group| {
        let _ = fs::remove_dir(&group);
        if let Some(network) = group.parent() {
            let _ = fs::remove_dir(network);
            let _ = network.parent().map(fs::remove_dir);
        }
        gone && !group.exists()
    })
}

/// How many times the kernel's OOM killer killed a process of the attachment.
pub(super) fn memory_kills(key: &Key) -> u64 {
    let files = folders(Path::new(TREE), key).into_iter().flat_map(|group| EVENTS.map(|name| group.join(name)));
    let counted = files.filter_map(|file| fs::read_to_string(file).ok()).filter_map(|text| kills_in(&text));
    counted.max().unwrap_or(0)
}

fn kills_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Paths of the groups of an attachment, whether or not they exist.
fn folders(tree: &Path, key: &Key) -> Vec<PathBuf> {
    unified(tree).into_iter().chain([tree.join(MEMORY)]).map(|root| path(&root, key)).collect()
}

fn unified(tree: &Path) -> Option<PathBuf> {
    // On machines with both hierarchies, the cgroup2 tree is in the second place.
    [tree.to_owned(), tree.join("unified")].into_iter().find(|root| root.join("cgroup.controllers").exists())
}

fn path(root: &Path, key: &Key) -> PathBuf {
    root.join(OURS).join(&key.network).join(format!("{}-{}", key.container_id, key.ifname))
}

fn make(root: &Path, key: &Key) -> io::Result<PathBuf> {
    let group = path(root, key);
    // Retry once, because a concurrent removal of the network's last group may have removed the parent.
    fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group))?;
    Ok(group)
}

fn limit_unified(root: &Path, group: &Path, limit: u64) -> io::Result<()> {
    // Every group on the path must delegate the controller. Skip those that already do: each write takes a lock that is
    // shared with every other group on the machine.
    let above: Vec<&Path> = group.ancestors().skip(1).take_while(|folder| folder.starts_with(root)).collect();
    for folder in above.into_iter().rev() {
        let control = folder.join("cgroup.subtree_control");
        if !has_word(&control, MEMORY) {
            write(&control, "+memory")?;
        }
    }
    write(&group.join("memory.max"), &limit.to_string())?;
    // Keys must never be swapped out. Older kernels, and those without swap, lack these files.
    for (file, value) in [("memory.swap.max", "0"), ("memory.oom.group", "1")] {
        let _ = fs::write(group.join(file), value);
    }
    Ok(())
}

fn limit_version_1(group: &Path, limit: u64) -> io::Result<()> {
    write(&group.join(LIMIT_1), &limit.to_string())?;
    // The limit for memory plus swap; the file is missing if the kernel does not account swap.
    let _ = fs::write(group.join("memory.memsw.limit_in_bytes"), limit.to_string());
    Ok(())
}

fn write(file: &Path, text: &str) -> io::Result<()> {
    fs::write(file, text).map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", file.display())))
}

fn has_word(file: &Path, word: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|found| found == word))
}

const TREE: &str = "/sys/fs/cgroup";
const OURS: &str = "nebula-cni";
const MEMORY: &str = "memory";
const LIMIT_1: &str = "memory.limit_in_bytes";
// Files with the OOM counters in version 2 and version 1.
const EVENTS: [&str; 2] = ["memory.events", "memory.oom_control"];

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() }
    }

    /// Creates a directory that looks like the root of a hierarchy.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = dir.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        dir
    }

    #[test]
    fn the_memory_controller_is_handed_down_and_the_group_limited() {
        let tree = tree(&[("cgroup.controllers", "cpu memory pids"), ("cgroup.subtree_control", "cpu memory")]);
        let groups = create_below(tree.path(), &key(), Some(32 << 20));
        let group = tree.path().join("nebula-cni/net/c-eth0");
        assert_eq!((groups.folders, groups.unlimited), (vec![group.clone()], None));
        let read = |file: &str| fs::read_to_string(tree.path().join(file)).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "cpu memory", "what is there already is not written again");
        assert_eq!(read("nebula-cni/cgroup.subtree_control"), "+memory");
        assert_eq!(read("nebula-cni/net/cgroup.subtree_control"), "+memory");
        assert_eq!(fs::read_to_string(group.join("memory.max")).unwrap(), "33554432");
    }

    #[test]
    fn with_both_hierarchies_the_one_with_the_controller_limits() {
        let tree = tree(&[("unified/cgroup.controllers", ""), ("memory/memory.limit_in_bytes", "9")]);
        let groups = create_below(tree.path(), &key(), Some(32 << 20));
        let [unified, memory] = ["unified", "memory"].map(|root| tree.path().join(root).join("nebula-cni/net/c-eth0"));
        assert_eq!((groups.folders, groups.unlimited), (vec![unified, memory.clone()], None));
        assert_eq!(fs::read_to_string(memory.join(LIMIT_1)).unwrap(), "33554432");
    }

    #[test]
    fn without_a_controller_the_group_is_made_and_the_reason_told() {
        let tree = tree(&[("cgroup.controllers", "cpu")]);
        let groups = create_below(tree.path(), &key(), Some(32 << 20));
        assert!(groups.folders.len() == 1 && groups.unlimited.unwrap().contains("no memory controller"));
        assert!(create_below(tree.path(), &key(), None).unlimited.is_none());
        assert!(create_below(Path::new("/nonexistent"), &key(), None).folders.is_empty());
    }

    #[test]
    fn kills_are_read_from_either_version() {
        assert_eq!(kills_in("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 1\n"), Some(2));
        assert_eq!(kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(kills_in("oom_kill_disable 0\nunder_oom 0\n"), None);
    }
}
