//! `kubectl nebula policy`: what network policies say of a flow, and which ones would allow what pods were seen to do.

pub(crate) mod suggest;
pub(crate) mod test;
