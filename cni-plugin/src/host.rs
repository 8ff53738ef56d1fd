//! The node as the verbs see it: clock, network namespaces, supervisor. Each stands behind a small trait, so that a
//! verb is a function that can be tested.

use std::path::PathBuf;

use crate::clock::Clock;
use crate::enrolment::labels::LabelSource;
use crate::link::guard::Guards;
use crate::link::host_route::Routes;
use crate::link::pod_link::Links;
use crate::netns::Namespaces;
use crate::supervisor::Supervisor;
use crate::supervisor::kind::Kind;

/// Everything a verb may touch besides files.
pub struct Host<'a> {
    /// Time.
    pub clock: &'a dyn Clock,
    /// Network namespaces.
    pub namespaces: &'a dyn Namespaces,
    /// Instances as processes of the plugin's own making.
    pub direct: &'a dyn Supervisor,
    /// Instances as units of systemd.
    pub systemd: &'a dyn Supervisor,
    /// The node's routes.
    pub routes: &'a dyn Routes,
    /// Ends of pods' links on the node.
    pub links: &'a dyn Links,
    /// Rules of these.
    pub guards: &'a dyn Guards,
    /// Labels of pods and namespaces.
    pub labels: &'a dyn LabelSource,
    /// The directory of the plugin's own binary.
    pub plugin_dir: Option<PathBuf>,
}

impl<'a> Host<'a> {
    /// The supervisor of that kind.
    #[must_use]
    pub fn supervisor(&self, kind: Kind) -> &'a dyn Supervisor {
        match kind {
            Kind::Direct => self.direct,
            Kind::Systemd => self.systemd,
        }
    }
}
