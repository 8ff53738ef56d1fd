//! Rendezvous: ask lighthouses where peers are, tell them where this node is, answer for others.

mod allow_list;
mod candidates;
mod server;
