//! netkit devices, which few kernels have (`CONFIG_NETKIT`, from Linux 6.7 on): in a part of its own.

use super::{Laid, NETKIT, PRIMARIES, Rules};

#[test]
#[ignore = "needs root, network namespaces and netkit devices"]
fn on_a_netkit_device_isolation_and_capture_are_refused_with_the_reason() {
    let primary = PRIMARIES.iter().find(|primary| primary.name == NETKIT).unwrap();
    let Rules::Refused(why) = primary.rules else { panic!("there can be no rules") };
    Laid::isolated(primary).is_refused(primary, 115, why);
    Laid::captured(primary).is_refused(primary, 118, why);
}
