//! What this node chooses for captured pods: the endpoints that are not enrolled, of Services that have others beside
//! them.

use std::io;
use std::net::IpAddr;

use nebula_cni_plugin::link::capture_rules;
use nebula_cni_plugin::link::service_choice::{self, Choice};

/// Keeps the kernel's rules as the table says.
#[derive(Debug, Default)]
pub struct ServiceChoices<R = NodeRules> {
    rules: R,
    wanted: Wanted,
    /// What was written last, and the handle of the table that it made; `None` if that failed or nothing was written.
    written: Option<(Wanted, Option<u64>)>,
    /// Whether the last attempt failed, which is said once.
    has_failed: bool,
}

/// Addresses of the node's captured pods, and the choices.
type Wanted = (Vec<IpAddr>, Vec<Choice>);

/// The kernel's rules.
pub trait Rules: Send {
    /// Whether there are captured pods on the node.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn are_needed(&self) -> io::Result<bool>;

    /// The handle of the table with the rules; `None` if there is none.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn handle(&self) -> io::Result<Option<u64>>;

    /// Replaces the rules.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    fn replace(&self, pods: &[IpAddr], choices: &[Choice]) -> io::Result<()>;
}

/// The rules in the kernel of this node.
#[derive(Debug, Default)]
pub struct NodeRules;

impl Rules for NodeRules {
    fn are_needed(&self) -> io::Result<bool> {
        Ok(capture_rules::tables_with_clear_sets()?.is_some())
    }

    fn handle(&self) -> io::Result<Option<u64>> {
        service_choice::handle()
    }

    fn replace(&self, pods: &[IpAddr], choices: &[Choice]) -> io::Result<()> {
        service_choice::replace(pods, choices)
    }
}

impl<R: Rules> ServiceChoices<R> {
    /// Makes these choices the only ones.
    pub fn replace(&mut self, pods: Vec<IpAddr>, choices: Vec<Choice>) {
        self.wanted = (pods, choices);
        self.look();
    }

    /// Writes the rules if they are not there: the first captured pod came, somebody flushed them, or the last
    /// attempt failed.
    pub fn look(&mut self) {
        match self.try_look() {
            Ok(()) => self.has_failed = false,
            Err(error) if !std::mem::replace(&mut self.has_failed, true) => {
                tracing::warn!(%error, "cannot keep kube-proxy from choosing enrolled endpoints of Services that have others: \
                    some connections of captured pods to those time out");
            }
            Err(_) => {}
        }
    }

    fn try_look(&mut self) -> io::Result<()> {
        // The plugin takes the rules away with the last captured pod.
        let is_needed = self.rules.are_needed()?;
        let (pods, choices) = if is_needed { (&self.wanted.0[..], &self.wanted.1[..]) } else { (&[][..], &[][..]) };
        let present = self.rules.handle()?;
        let is_there = match &self.written {
            Some((written, handle)) => (&written.0[..], &written.1[..]) == (pods, choices) && *handle == present,
            // Of an agent before this one.
            None => false,
        };
        if is_there {
            return Ok(());
        }
        self.written = None;
        self.rules.replace(pods, choices)?;
        self.written = Some(((pods.to_vec(), choices.to_vec()), self.rules.handle()?));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    /// A kernel, with the number of choices of each replacement.
    #[derive(Default)]
    struct Kernel {
        has_pods: Cell<bool>,
        refuses: Cell<bool>,
        handle: Cell<Option<u64>>,
        replaced: RefCell<Vec<usize>>,
    }

    impl Rules for Kernel {
        fn are_needed(&self) -> io::Result<bool> {
            Ok(self.has_pods.get())
        }

        fn handle(&self) -> io::Result<Option<u64>> {
            Ok(self.handle.get())
        }

        fn replace(&self, _: &[IpAddr], choices: &[Choice]) -> io::Result<()> {
            self.replaced.borrow_mut().push(choices.len());
            if self.refuses.get() {
                return Err(io::Error::other("no"));
            }
            self.handle.set((!choices.is_empty()).then(|| 7 + self.replaced.borrow().len() as u64));
            Ok(())
        }
    }

    #[test]
    fn the_kernel_has_the_choices_while_there_are_captured_pods() {
        let choice = |port| Choice {
            service: ([10, 96, 0, 1], port).into(),
            protocol: 6,
            by_client: false,
            endpoints: vec![([10, 0, 0, 9], 80).into()],
        };
        let pods = || vec![IpAddr::from([10, 0, 0, 1])];
        let mut choices = ServiceChoices::<Kernel>::default();
        let mut replaced: Vec<usize> = Vec::new();
        let mut is = |choices: &ServiceChoices<Kernel>, more: &[usize], why: &str| {
            replaced.extend(more);
            assert_eq!(*choices.rules.replaced.borrow(), replaced, "{why}");
        };
        choices.replace(pods(), vec![choice(80)]);
        is(&choices, &[0], "what an agent before left goes");
        choices.rules.has_pods.set(true);
        choices.look();
        choices.look();
        choices.replace(pods(), vec![choice(80)]);
        is(&choices, &[1], "once");
        choices.replace(pods(), vec![choice(80), choice(81)]);
        choices.rules.handle.set(None);
        choices.look();
        is(&choices, &[2, 2], "somebody flushed them");
        choices.rules.refuses.set(true);
        choices.replace(pods(), vec![choice(80)]);
        choices.rules.refuses.set(false);
        choices.look();
        is(&choices, &[1, 1], "again after a failure");
        choices.rules.has_pods.set(false);
        choices.look();
        choices.look();
        is(&choices, &[0], "with the last pod they go");
    }
}
