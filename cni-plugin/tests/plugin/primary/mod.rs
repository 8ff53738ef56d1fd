//! The plugin as the first of its list, in network namespaces: a node, a host behind it, and pods.

mod addresses;
mod killed;
mod node;
mod reach;
mod verbs;
