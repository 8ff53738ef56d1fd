//! The objects of a large cluster, as a real API server shows them: pods of Deployments with all that a kubelet and
//! the controllers write, each about 4 KiB of JSON, nodes with their images, namespaces, and network policies.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nebula_cert::directory::Member;
use serde_json::{Value, json};

/// Nodes of the cluster. The agent's is the first one.
pub(super) const NODES: u32 = 91;
pub(super) const NAMESPACES: u32 = 100;
/// Pods of the agent's node, as many as a kubelet takes.
pub(super) const OWN: u32 = 110;
const APPS: u32 = 37;
/// A certificate that is valid for long.
const UNTIL: i64 = 4_000_000_000;

pub(super) fn node_name(node: u32) -> String {
    format!("node-{node:02}")
}

pub(super) fn space(namespace: u32) -> String {
    format!("space-{namespace:02}")
}

/// The application of a pod as long as nobody changes it.
pub(super) fn app(pod: u32) -> String {
    format!("app-{}", pod % APPS)
}

fn name(pod: u32) -> String {
    format!("{}-7d9f8c6b5d-{pod:05}", app(pod))
}

fn uid(of: u32, kind: u32) -> String {
    format!("{:08x}-5d0e-4b7c-9{kind:03x}-{:012x}", of.wrapping_mul(2_654_435_761), u64::from(of) + 0x00ab_cdef_0000)
}

/// Number of the node of a pod, and the pod's number there.
fn place(pod: u32) -> (u32, u32) {
    match pod.checked_sub(OWN) {
        None => (1, pod),
        Some(other) => (2 + other % (NODES - 1), other / (NODES - 1)),
    }
}

/// The addresses of a pod, out of the ranges of its node.
pub(super) fn addresses(pod: u32) -> [IpAddr; 2] {
    let (node, number) = place(pod);
    let (node, last) = (node as u16, 2 + number as u16);
    let first = Ipv4Addr::new(10, 244, node as u8, last as u8);
    [first.into(), Ipv6Addr::new(0xfd00, 0x10, 0x244, node, 0, 0, 0, last).into()]
}

/// What the CA's directory says of a pod.
pub(super) fn member(pod: u32) -> Member {
    Member {
        addresses: addresses(pod).to_vec(),
        namespace: space(pod % NAMESPACES),
        name: name(pod),
        service_account: "default".to_owned(),
        node: node_name(place(pod).0),
        uid: uid(pod, 1),
        until: UNTIL,
    }
}

/// A pod with this label `app`.
pub(super) fn pod(pod: u32, app: &str) -> Value {
    let [first, second] = addresses(pod);
    let (node, started) = (node_name(place(pod).0), "2026-03-04T05:06:07Z");
    let containers = [container("main", "registry.example.com/shop/backend:v1.27.3", 8080), proxy()];
    let statuses = ["main", "proxy"].map(|name| {
        let id = format!("containerd://{:064x}", u128::from(pod) * 7_919 + name.len() as u128);
        json!({"name": name, "ready": true, "started": true, "restartCount": 0, "containerID": id, "lastState": {},
            "image": "registry.example.com/shop/backend:v1.27.3", "state": {"running": {"startedAt": started}},
            "imageID": "registry.example.com/shop/backend@sha256:0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c"})
    });
    let conditions = ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"]
        .map(|kind| json!({"type": kind, "status": "True", "lastProbeTime": null, "lastTransitionTime": started}));
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {
            "name": name(pod), "generateName": "backend-7d9f8c6b5d-", "namespace": space(pod % NAMESPACES),
            "uid": uid(pod, 1), "creationTimestamp": started,
            "labels": {"app": app, "pod-name": name(pod), "pod-template-hash": "7d9f8c6b5d"},
            "annotations": {"kubectl.kubernetes.io/restartedAt": started, "prometheus.io/scrape": "true",
                "prometheus.io/port": "9090"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "backend-7d9f8c6b5d",
                "uid": uid(pod, 2), "controller": true, "blockOwnerDeletion": true}],
            "managedFields": managed_fields(started),
        },
        "spec": {
            "volumes": [
                {"name": "config", "configMap": {"name": "backend", "defaultMode": 420}},
                {"name": "scratch", "emptyDir": {}},
                {"name": "kube-api-access-x7k2p", "projected": {"defaultMode": 420, "sources": [
                    {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}]}}],
            "containers": containers, "restartPolicy": "Always", "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst", "serviceAccountName": "default", "serviceAccount": "default",
            "nodeName": node, "securityContext": {}, "schedulerName": "default-scheduler",
            "tolerations": [
                {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
                    "tolerationSeconds": 300},
                {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute",
                    "tolerationSeconds": 300}],
            "priority": 0, "enableServiceLinks": true, "preemptionPolicy": "PreemptLowerPriority",
        },
        "status": {
            "phase": "Running", "conditions": conditions, "hostIP": node_address(place(pod).0).to_string(),
            "podIP": first.to_string(), "podIPs": [{"ip": first.to_string()}, {"ip": second.to_string()}],
            "startTime": started, "containerStatuses": statuses, "qosClass": "Burstable",
        },
    })
}

fn container(name: &str, image: &str, port: u16) -> Value {
    let env = [("LOG_LEVEL", "info"), ("DATABASE_HOST", "postgres.shop.svc"), ("FEATURES", "search,basket")];
    let env = env.map(|(name, value)| json!({"name": name, "value": value}));
    let mounts = json!([{"name": "config", "mountPath": "/etc/backend", "readOnly": true},
        {"name": "scratch", "mountPath": "/var/tmp"},
        {"name": "kube-api-access-x7k2p", "readOnly": true,
            "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}]);
    json!({"name": name, "image": image, "env": env, "volumeMounts": mounts,
        "ports": [{"name": "http", "containerPort": port, "protocol": "TCP"}],
        "resources": {"limits": {"memory": "512Mi"}, "requests": {"cpu": "100m", "memory": "256Mi"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": port, "scheme": "HTTP"}, "timeoutSeconds": 1,
            "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3},
        "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
        "imagePullPolicy": "IfNotPresent"})
}

fn proxy() -> Value {
    let mut proxy = container("proxy", "registry.example.com/mesh/proxy:v3.1.0", 9090);
    proxy["ports"][0]["name"] = "metrics".into();
    proxy
}

/// Which field belongs to whom, in the form in which servers keep it: as much text as the pod itself.
fn managed_fields(time: &str) -> Value {
    let of_status = json!({"f:status": {"f:conditions": {}, "f:containerStatuses": {}, "f:hostIP": {}, "f:phase": {},
        "f:podIP": {}, "f:podIPs": {".": {}, "k:{\"ip\":\"10.244.1.2\"}": {".": {}, "f:ip": {}}}, "f:startTime": {}}});
    let of_container = json!({".": {}, "f:env": {}, "f:image": {}, "f:imagePullPolicy": {}, "f:name": {},
        "f:ports": {}, "f:readinessProbe": {}, "f:resources": {}, "f:volumeMounts": {}});
    let of_metadata = json!({"f:annotations": {}, "f:generateName": {}, "f:labels": {}, "f:ownerReferences": {}});
    let of_spec = json!({"f:metadata": of_metadata,
        "f:spec": {"f:containers": {"k:{\"name\":\"main\"}": of_container, "k:{\"name\":\"proxy\"}": of_container},
            "f:dnsPolicy": {}, "f:restartPolicy": {}, "f:schedulerName": {}, "f:volumes": {}}});
    let of = |manager: &str, fields: Value| {
        json!({"manager": manager, "operation": "Update", "apiVersion": "v1", "time": time, "fieldsType": "FieldsV1",
            "fieldsV1": fields})
    };
    json!([of("kube-controller-manager", of_spec), of("kubelet", of_status)])
}

fn node_address(node: u32) -> Ipv4Addr {
    Ipv4Addr::new(192, 0, 2, 100 + node as u8)
}

pub(super) fn node(node: u32) -> Value {
    let ranges = [format!("10.244.{node}.0/24"), format!("fd00:10:244:{node:x}::/64")];
    let image = |n: u32| {
        let names = [
            format!("registry.example.com/team-{n}/program@sha256:{n:064x}"),
            format!("registry.example.com/team-{n}/program:v{n}"),
        ];
        json!({"names": names, "sizeBytes": 100_000_000 + n})
    };
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(|kind| {
        json!({"type": kind, "status": if kind == "Ready" { "True" } else { "False" }, "reason": "KubeletReady",
            "lastHeartbeatTime": "2026-03-04T05:06:07Z", "message": "kubelet is posting ready status"})
    });
    json!({
        "kind": "Node", "apiVersion": "v1",
        "metadata": {"name": node_name(node), "uid": uid(node, 3), "creationTimestamp": "2026-01-02T03:04:05Z",
            "labels": {"kubernetes.io/hostname": node_name(node), "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": format!("zone-{}", node % 3)},
            "managedFields": managed_fields("2026-03-04T05:06:07Z")},
        "spec": {"podCIDR": ranges[0], "podCIDRs": ranges},
        "status": {"addresses": [{"type": "InternalIP", "address": node_address(node).to_string()},
                {"type": "Hostname", "address": node_name(node)}],
            "conditions": conditions, "capacity": {"cpu": "16", "memory": "65805628Ki", "pods": "110"},
            "images": (0..30).map(image).collect::<Vec<_>>()},
    })
}

pub(super) fn namespace(namespace: u32) -> Value {
    let name = space(namespace);
    json!({"kind": "Namespace", "apiVersion": "v1",
        "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"},
        "metadata": {"name": name, "uid": uid(namespace, 4), "labels": {"kubernetes.io/metadata.name": name,
            "team": (namespace % 4).to_string()}}})
}

/// A policy for all pods of its namespace: only pods of one application reach them, at two ports.
pub(super) fn policy(policy: u32) -> Value {
    let ports = json!([{"protocol": "TCP", "port": "http"}, {"protocol": "TCP", "port": 9090}]);
    let peer = json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app(policy)}}});
    json!({
        "kind": "NetworkPolicy", "apiVersion": "networking.k8s.io/v1",
        "metadata": {"namespace": space(policy % NAMESPACES), "name": format!("allow-{}", policy / NAMESPACES),
            "uid": uid(policy, 5), "generation": 1, "creationTimestamp": "2026-02-03T04:05:06Z",
            "managedFields": managed_fields("2026-03-04T05:06:07Z")},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [peer], "ports": ports}]},
    })
}
