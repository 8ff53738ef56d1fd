//! A real Kubernetes: API server, controllers, kubelets and containerd on two nodes.

mod apiserver;
mod capture;
mod helm;
mod kubectl;
mod nodes;
mod on_call;
mod orders;
mod policies;
mod primary;
mod revocation;
mod roll_out;
