//! What the plugin keeps on disk of each attachment.

pub mod lock;
pub mod record;
pub mod room;
