//! Joins consecutive packets of a flow into a super-packet (GRO).

#[derive(Debug, Default)]
pub(super) struct Coalescer {
    tcp: bool,
    udp: bool,
}

impl Coalescer {
    pub(super) fn set_enabled(&mut self, tcp: bool, udp: bool) {
        (self.tcp, self.udp) = (tcp, udp);
    }
    pub(super) fn release_memory(&mut self) {}
}
