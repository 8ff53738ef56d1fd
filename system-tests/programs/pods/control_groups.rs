//! Tunnels outlive whoever attached or repaired them: the container of a node agent ends with its control groups and
//! everything in them.

use std::fs;
use std::time::Duration;

use crate::container::Container;
use crate::world::cluster::{Cluster, Node, alive, binary, gone_within};
use crate::world::run;

const SOON: Duration = Duration::from_secs(20);

fn pid(node: &Node, pod: &str) -> u64 {
    node.status(pod)["pid"].as_u64().unwrap()
}

#[test]
#[ignore = "needs root, network namespaces, control groups and a release build"]
fn a_tunnel_goes_on_when_the_groups_of_whoever_attached_or_repaired_it_are_killed() {
    let mut cluster = Cluster::new();
    let (one, two) = (cluster.node("n1", "1.0.0"), cluster.node("n2", "1.0.0"));
    two.add_pods(&mut cluster.world, &["b"]);
    let far = two.overlay("b");
    cluster.world.namespace("a");
    let agent = Container::new();
    let attached = agent.around(&one.chain_command(&cluster.world, "add", "a")).output().unwrap();
    assert!(attached.status.success(), "{}{}", String::from_utf8_lossy(&attached.stdout), cluster.world.all_logs());
    let first = pid(&one, "a");
    cluster.world.ping("a", &far, SOON);
    agent.kill();
    assert!(alive(first), "{}", fs::read_to_string(format!("/proc/{first}/cgroup")).unwrap_or_default());
    // No second try: nothing of the tunnel is gone.
    cluster.world.run("a", &["ping", "-c1", "-W5", &far]);

    run("kill", &["-9", &first.to_string()]);
    assert!(gone_within(first, SOON));
    let (plugin, state) = (binary("nebula-cni-plugin"), one.dir.join("state"));
    let net = format!("--net=/run/netns/{}", cluster.world.namespace_of("n1"));
    let repaired = agent.command("nsenter").arg(net).arg(plugin).arg("reconcile").arg(state).output().unwrap();
    assert!(repaired.status.success(), "{}", String::from_utf8_lossy(&repaired.stderr));
    cluster.world.ping("a", &far, SOON);
    let second = pid(&one, "a");
    assert_ne!(first, second);
    agent.kill();
    assert!(alive(second), "{}", fs::read_to_string(format!("/proc/{second}/cgroup")).unwrap_or_default());
    cluster.world.run("a", &["ping", "-c1", "-W5", &far]);
    assert_eq!(pid(&one, "a"), second);
    one.delete_pods(&cluster.world, &["a"]);
    two.delete_pods(&cluster.world, &["b"]);
    assert_eq!((one.leftovers(), two.leftovers()), (Vec::new(), Vec::new()));
}
