//! A control group of its own for each instance, where the machine lets us: otherwise the instance would be counted,
//! and perhaps ended, with the container runtime that called the plugin. The group also limits its memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::request::Key;

/// The groups of one instance: one, or two on machines where the version 1 hierarchy has the memory controller.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Folders, to be entered in this order.
    pub(super) folders: Vec<PathBuf>,
    /// Why its memory is not limited, though that was asked for.
    pub(super) unlimited: Option<String>,
}

/// Creates the groups of an attachment; none where there is no writable tree of them.
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

/// Removes the groups; fails silently while a process is in one.
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

/// How often the kernel ended a process of the attachment for want of memory.
pub(super) fn memory_kills(key: &Key) -> u64 {
    let files = folders(Path::new(TREE), key).into_iter().flat_map(|group| EVENTS.map(|name| group.join(name)));
    let counted = files.filter_map(|file| fs::read_to_string(file).ok()).filter_map(|text| kills_in(&text));
    counted.max().unwrap_or(0)
}

fn kills_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Where the groups of an attachment are, if there are any.
fn folders(tree: &Path, key: &Key) -> Vec<PathBuf> {
    unified(tree).into_iter().chain([tree.join(MEMORY)]).map(|root| path(&root, key)).collect()
}

fn unified(tree: &Path) -> Option<PathBuf> {
    // The second is the place of the cgroup2 tree on machines that have both hierarchies.
    [tree.to_owned(), tree.join("unified")].into_iter().find(|root| root.join("cgroup.controllers").exists())
}

fn path(root: &Path, key: &Key) -> PathBuf {
    root.join(OURS).join(&key.network).join(format!("{}-{}", key.container_id, key.ifname))
}

fn make(root: &Path, key: &Key) -> io::Result<PathBuf> {
    let group = path(root, key);
    // A concurrent removal of the network's last group may take the parent away once.
    fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group))?;
    Ok(group)
}

fn limit_unified(root: &Path, group: &Path, limit: u64) -> io::Result<()> {
    // Each group on the way hands the controller down; asking again would wait for every other group of the machine.
    let above: Vec<&Path> = group.ancestors().skip(1).take_while(|folder| folder.starts_with(root)).collect();
    for folder in above.into_iter().rev() {
        let control = folder.join("cgroup.subtree_control");
        if !has_word(&control, MEMORY) {
            write(&control, "+memory")?;
        }
    }
    write(&group.join("memory.max"), &limit.to_string())?;
    // Keys belong into no swap. Older kernels and those without swap have no such file.
    for (file, value) in [("memory.swap.max", "0"), ("memory.oom.group", "1")] {
        let _ = fs::write(group.join(file), value);
    }
    Ok(())
}

fn limit_version_1(group: &Path, limit: u64) -> io::Result<()> {
    write(&group.join(LIMIT_1), &limit.to_string())?;
    // Memory and swap together; the kernel may not count swap.
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
// Of version 2 and of version 1.
const EVENTS: [&str; 2] = ["memory.events", "memory.oom_control"];

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() }
    }

    /// A folder that looks like the top of a hierarchy.
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
