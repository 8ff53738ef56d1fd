//! What the plugin keeps on disk for each attachment.

pub mod files;
pub mod foreign;
pub mod lock;
pub mod queue;
pub mod record;
pub mod released;
pub mod restarts;
pub mod room;
pub mod shared;
pub mod sibling;
