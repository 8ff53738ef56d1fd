//! Models of what lanes share, run in every interleaving (loom). `.ci/loom` runs them.

mod flows;
mod replay_window;
mod tunnels;

/// Runs `model` in every interleaving of its threads with at most `switches` preemptions: known bugs of such code show
/// with two, and each further one multiplies the number of interleavings.
pub(crate) fn check(switches: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(model);
}
