//! A control group for each instance, if the machine allows it: otherwise the instance would be accounted, and
//! perhaps killed, together with the container runtime or the agent that called the plugin. The group also limits the
//! instance's memory. In the hierarchies of version 1 in which the instance needs no group of its own, it joins the
//! root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::request::Key;

/// The groups of one instance, one in each hierarchy. With version 2 alone that is one.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Directories of the groups, to be joined in this order.
    pub(super) folders: Vec<PathBuf>,
    /// The one of version 2 among them.
    pub(super) unified: Option<PathBuf>,
    /// Why a requested memory limit could not be set.
    pub(super) unlimited: Option<String>,
}

impl Groups {
    /// Those that a process joins which is made in the group of version 2.
    pub(super) fn others(&self) -> Vec<PathBuf> {
        self.folders.iter().filter(|folder| self.unified.as_ref() != Some(folder)).cloned().collect()
    }
}

/// Creates the groups of an attachment; none if there is no writable cgroup tree.
#[must_use]
pub(super) fn create(key: &Key, memory_limit: Option<u64>) -> Groups {
    create_below(Path::new(TREE), key, memory_limit)
}

fn create_below(tree: &Path, key: &Key, memory_limit: Option<u64>) -> Groups {
    let unified = unified(tree).and_then(|root| make(&root, key).ok().map(|folder| (root, folder)));
    let mut folders = roots_of_version_1(tree);
    folders.extend(unified.iter().map(|(_, folder)| folder.clone()));
    let of_version_2 = unified.as_ref().map(|(_, folder)| folder.clone());
    let mut groups = Groups { folders, unified: of_version_2, unlimited: None };
    let Some(limit) = memory_limit else { return groups };
    let version_1 = tree.join(MEMORY);
    let limited = match &unified {
        Some((root, folder)) if has_word(&root.join("cgroup.controllers"), MEMORY) => {
            limit_unified(root, folder, limit)
        }
        _ if version_1.join(LIMIT_1).exists() => make(&version_1, key).and_then(|folder| {
            limit_version_1(&folder, limit)?;
            // Joined after the root, so the process is out of the caller's group even if this one refuses it.
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

/// Whether a group of systemd's, named by its path below the tree, has neither members nor groups below it.
#[must_use]
pub(super) fn is_empty(group: &str) -> bool {
    is_empty_below(Path::new(TREE), group)
}

fn is_empty_below(tree: &Path, group: &str) -> bool {
    // The trees in which systemd makes its groups, of version 2, of both, and of version 1.
    [tree.to_owned(), tree.join("unified"), tree.join("systemd")].iter().all(|root| {
        let folder = root.join(group.trim_start_matches('/'));
        let has_groups =
            fs::read_dir(&folder).is_ok_and(|mut all| all.any(|one| one.is_ok_and(|one| one.path().is_dir())));
        let has_members = fs::read_to_string(folder.join("cgroup.procs")).is_ok_and(|members| !members.is_empty());
        !has_groups && !has_members
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

/// Roots of the version 1 hierarchies. A runtime ends a container by the members of its group in any one of them, so an
/// instance must leave them all. Groups of our own would gain nothing, and those of `cpuset` take no member before each
/// level has processors and memory nodes.
fn roots_of_version_1(tree: &Path) -> Vec<PathBuf> {
    if tree.join("cgroup.controllers").exists() {
        return Vec::new();
    }
    let Ok(entries) = fs::read_dir(tree) else { return Vec::new() };
    // Links such as `cpu` to `cpu,cpuacct` are other names of the same hierarchy.
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut roots: Vec<PathBuf> =
        folders.map(|entry| entry.path()).filter(|root| root.join("tasks").exists()).collect();
    roots.sort();
    roots
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
        let files = ["unified/cgroup.controllers", "memory/memory.limit_in_bytes", "memory/tasks"];
        let tree = tree(&files.map(|file| (file, "")));
        let groups = create_below(tree.path(), &key(), Some(32 << 20));
        let [unified, memory] = ["unified", "memory"].map(|root| tree.path().join(root).join("nebula-cni/net/c-eth0"));
        let root = tree.path().join("memory");
        assert_eq!((groups.folders, groups.unlimited), (vec![root, unified, memory.clone()], None));
        assert_eq!(fs::read_to_string(memory.join(LIMIT_1)).unwrap(), "33554432");
    }

    #[test]
    fn every_hierarchy_of_version_1_is_left_with_and_without_a_limit() {
        let tree = tree(&["cpu,cpuacct/tasks", "devices/tasks", "systemd/tasks", "empty/file"].map(|file| (file, "")));
        std::os::unix::fs::symlink("cpu,cpuacct", tree.path().join("cpu")).unwrap();
        let roots = ["cpu,cpuacct", "devices", "systemd"].map(|root| tree.path().join(root)).to_vec();
        assert_eq!(create_below(tree.path(), &key(), None).folders, roots);
        let limited = create_below(tree.path(), &key(), Some(32 << 20));
        assert_eq!((limited.folders, limited.unlimited.is_some()), (roots, true));
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
    fn a_group_with_members_or_groups_below_is_not_empty() {
        let tree = tree(&[
            ("a.slice/cgroup.procs", ""),
            ("unified/b.slice/cgroup.procs", "7\n"),
            ("systemd/c.slice/d.slice/cgroup.procs", ""),
        ]);
        for (group, empty) in [("/a.slice", true), ("/b.slice", false), ("/c.slice", false), ("/c.slice/d.slice", true)]
        {
            assert_eq!(is_empty_below(tree.path(), group), empty, "{group}");
        }
    }

    #[test]
    fn kills_are_read_from_either_version() {
        assert_eq!(kills_in("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 1\n"), Some(2));
        assert_eq!(kills_in("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(kills_in("oom_kill_disable 0\nunder_oom 0\n"), None);
    }
}
