//! Streams through the stack over hosts of the simulator: bad links, changing paths, peers that end.

mod crowd;
mod histories;
mod paths;
mod peers;
mod stream;
mod world;
