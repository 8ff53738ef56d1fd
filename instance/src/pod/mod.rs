//! One pod's instance: enrolment, tunnel, isolation, status and renewals.

mod capture;
mod data_path;
mod device;
mod enrolment;
pub mod error;
mod events;
mod isolation;
mod kept;
pub mod kube_labels;
pub mod launch_file;
mod lighthouses;
mod predecessor;
pub mod status;
pub mod status_socket;
mod stored;
mod successor;
pub mod tunnel;
mod underlay;
