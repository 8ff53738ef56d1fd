//! What can fail under captured pods, at random, and its repair.

use std::collections::BTreeMap;
use std::process::Command;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::town::{API, CAPTURED, DB, ENDPOINTS, Town};
use crate::world::chaos::Random;

/// Something that fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// The instance of a pod is killed.
    Instance,
    /// The plugin is killed while it restarts an instance.
    Plugin,
    /// Another program takes over from the instance of a pod.
    Upgrade,
    /// The plugin is killed meanwhile.
    BrokenUpgrade,
    Ca,
    Lighthouse,
    TableRemoved,
    /// The table is replaced with another one, or with nonsense.
    TableReplaced,
}

impl Fault {
    pub(super) fn random(random: &mut Random) -> Self {
        use Fault::{BrokenUpgrade, Ca, Instance, Lighthouse, Plugin, TableRemoved, TableReplaced, Upgrade};
        const ALL: [Fault; 12] = [
            Instance,
            Instance,
            Instance,
            Plugin,
            Plugin,
            Upgrade,
            Upgrade,
            BrokenUpgrade,
            Ca,
            Lighthouse,
            TableRemoved,
            TableReplaced,
        ];
        ALL[random.below(ALL.len())]
    }
}

/// How often each of them has happened.
#[derive(Debug, Default)]
pub(super) struct Faults(BTreeMap<Fault, usize>);

impl Faults {
    pub(super) fn count(&self) -> usize {
        self.0.values().sum()
    }

    /// Counts only what was there to fail.
    pub(super) fn happen(&mut self, fault: Fault, town: &mut Town, random: &mut Random) {
        let pod = CAPTURED[random.below(CAPTURED.len())];
        let has_happened = match fault {
            Fault::Instance => town.kill_instance(pod),
            Fault::Plugin => {
                town.kill_instance(pod);
                end_plugin(&mut town.reconcile(pod.node.into()), Duration::from_millis(random.below(80) as u64))
            }
            // One that has no certificate just now goes on as it is.
            Fault::Upgrade => town.upgrade(pod).status().expect("it runs").success(),
            Fault::BrokenUpgrade => end_plugin(&mut town.upgrade(pod), Duration::from_millis(random.below(120) as u64)),
            Fault::Ca => end_daemon(town, "control"),
            Fault::Lighthouse => end_daemon(town, "lighthouse"),
            Fault::TableRemoved => {
                town.remove_table();
                true
            }
            Fault::TableReplaced => {
                match [&[DB][..], &[API], &[], &ENDPOINTS].get(random.below(5)) {
                    Some(endpoints) => town.write_table(endpoints),
                    None => town.put_table(b"nonsense"),
                }
                true
            }
        };
        *self.0.entry(fault).or_default() += usize::from(has_happened);
    }

    /// Starts again what was killed.
    pub(super) fn repair(&self, town: &mut Town) {
        if !town.world().has_daemon("control") {
            town.cluster.start_ca();
        }
        if !town.world().has_daemon("lighthouse") {
            town.cluster.start_lighthouse(4242);
        }
        town.write_table(&ENDPOINTS);
        town.restart_instances();
    }
}

/// Kills the plugin while it works; `false` if it was done before.
fn end_plugin(work: &mut Command, after: Duration) -> bool {
    let mut plugin = work.spawn().expect("it runs");
    thread::sleep(after);
    let is_running = plugin.try_wait().expect("its state").is_none();
    plugin.kill().expect("it was not waited for");
    plugin.wait().expect("it ends");
    is_running
}

fn end_daemon(town: &mut Town, name: &str) -> bool {
    let is_running = town.world().has_daemon(name);
    town.cluster.world.stop(name, Signal::SIGKILL);
    is_running
}
