//! What the plugin keeps on disk for each attachment.

pub mod lock;
pub mod record;
pub mod restarts;
pub mod room;
