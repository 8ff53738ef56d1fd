//! `nebula-cni-agent`.

use clap::Parser;

/// Prepares a Kubernetes node for Nebula, and keeps its pods protected.
#[derive(Parser)]
#[command(version)]
struct Options {}

fn main() {
    Options::parse();
}
