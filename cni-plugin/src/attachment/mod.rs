//! What the plugin keeps on disk for each attachment.

pub mod lock;
pub mod queue;
pub mod record;
pub mod released;
pub mod restarts;
pub mod room;
pub mod sibling;
