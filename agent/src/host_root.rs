//! The node's file system as the agent sees it: itself, or mounted in the agent's container.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

/// Where the node's root directory is. Paths in configuration and in answers of the runtime are the node's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostRoot(Option<PathBuf>);

impl HostRoot {
    /// `None`: the agent runs directly on the node.
    #[must_use]
    pub fn new(root: Option<PathBuf>) -> Self {
        Self(root)
    }

    /// The mount point of the node's root; `None` if the agent runs directly on the node.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// Translates a path of the node. Symbolic links are followed as the node would follow them: an absolute link (k3s
    /// has one among its directories for plugins) leads from the node's root, not from the container's. Parts that do
    /// not exist are kept as they are.
    #[must_use]
    pub fn resolve(&self, path: &Path) -> PathBuf {
        let Some(root) = &self.0 else { return path.to_owned() };
        let mut resolved = root.clone();
        let mut left: VecDeque<OsString> = parts(path);
        let mut links = 0;
        while let Some(part) = left.pop_front() {
            if part == ".." {
                if resolved != *root {
                    resolved.pop();
                }
                continue;
            }
            let next = resolved.join(&part);
            match std::fs::read_link(&next) {
                Ok(target) if links < MAX_LINKS => {
                    links += 1;
                    if target.is_absolute() {
                        resolved.clone_from(root);
                    }
                    let mut more = parts(&target);
                    more.append(&mut left);
                    left = more;
                }
                _ => resolved = next,
            }
        }
        resolved
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let part = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsString::from("..")),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().filter_map(part).collect()
}

// As many as the kernel follows.
const MAX_LINKS: usize = 40;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_where_the_node_would_follow_them() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("var/lib/k3s/data/abc/bin")).unwrap();
        symlink("/var/lib/k3s/data/abc", root.join("var/lib/k3s/data/current")).unwrap();
        symlink("../../../../../../etc", root.join("var/out")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let host = HostRoot::new(Some(root.clone()));
        assert_eq!(host.resolve(Path::new("/var/lib/k3s/data/current/bin")), root.join("var/lib/k3s/data/abc/bin"));
        assert_eq!(host.resolve(Path::new("/var/out/shadow")), root.join("etc/shadow"), "never outside the root");
        assert_eq!(host.resolve(Path::new("/../../etc")), root.join("etc"));
        assert_eq!(host.resolve(Path::new("/not/there")), root.join("not/there"));
        assert!(host.resolve(Path::new("/loop")).starts_with(&root));
        assert_eq!(HostRoot::default().resolve(Path::new("/opt/cni/bin")), Path::new("/opt/cni/bin"));
    }
}
