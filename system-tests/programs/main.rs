//! Tests of the programs with real sockets, devices, kernels and runtimes: one file per subject, one program to link.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "these tests watch real processes on a real clock, and end at the first surprise"
)]

#[path = "../../../cni-plugin/tests/plugin/container.rs"]
mod container;
#[path = "../../../ca/tests/service/fake_cluster.rs"]
#[allow(dead_code, reason = "the tests of the CA use more of it")]
mod fake_cluster;
mod loopback;
#[path = "../../../cni-plugin/tests/plugin/service_manager.rs"]
mod service_manager;
mod world;

mod agent;
mod agent_cost;
mod agent_orders;
mod agent_repair;
mod agent_units;
mod ca_access;
mod capture_instance;
mod capture_speed;
mod captured;
mod causes;
mod chains;
mod changed_settings;
mod chaos;
mod command_line;
mod configurations;
#[cfg(feature = "ssh")]
mod console;
mod control;
mod control_groups;
mod credentials;
mod dns;
mod doctor;
mod emptied_state;
mod enrol_timer;
mod enrolment;
mod fake_ca;
mod faults;
mod firewall_matrix;
mod first_process;
mod forbidden_calls;
mod gateways;
mod group_relays;
mod hostile_names;
mod identities;
mod init_container;
mod interop;
mod isolation;
mod join;
mod join_watched;
mod joined_again;
mod kube_apiserver;
mod kube_capture;
mod kube_cluster;
mod kube_helm;
mod kube_labels;
mod kube_orders;
mod load;
mod log_fields;
mod log_flood;
mod measured_paths;
mod memory;
mod metrics;
mod no_ssh;
mod node_credential;
mod overlay_names;
mod packaging;
mod path_mtu;
mod paths;
mod pods;
mod privileges;
mod proxy;
mod recovery;
mod relays;
mod renewal;
mod rolling_swap;
mod runtime;
mod self_healing;
mod soak;
mod static_binaries;
mod supervised;
mod walls;
mod without_v6;
