//! The node as the verbs see it: clock, network namespaces, supervisors and so on, each behind a small trait so that
//! verbs can be tested.

use std::path::PathBuf;

use nebula_cni_contract::clock::Clock;
use nebula_cni_contract::labels::LabelSource;
use nebula_cni_contract::netns::Namespaces;

use crate::link::capture::Captures;
use crate::link::guard::Guards;
use crate::link::host_route::Routes;
use crate::link::pod_link::Links;
use crate::supervisor::Supervisor;
use crate::supervisor::kind::Kind;

/// Everything a verb may touch besides files.
pub struct Host<'a> {
    /// Clock.
    pub clock: &'a dyn Clock,
    /// Network namespaces.
    pub namespaces: &'a dyn Namespaces,
    /// Supervisor that starts instances as processes of its own.
    pub direct: &'a dyn Supervisor,
    /// Supervisor that starts instances as systemd units.
    pub systemd: &'a dyn Supervisor,
    /// The node's routes.
    pub routes: &'a dyn Routes,
    /// The node's ends of the pods' links.
    pub links: &'a dyn Links,
    /// The rules on those links.
    pub guards: &'a dyn Guards,
    /// What sends captured traffic to the tunnel, and the rules that go with it.
    pub captures: &'a dyn Captures,
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
