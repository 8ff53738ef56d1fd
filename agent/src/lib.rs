//! The node agent: prepares a Kubernetes node for the plugin, proves that the runtime uses it, and keeps every enrolled
//! pod of the node protected (`nebula-cni-agent`, a DaemonSet).
