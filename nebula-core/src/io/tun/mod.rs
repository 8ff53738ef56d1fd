//! Tun device: queues, offload negotiation, packets in and out.
#![allow(unsafe_code)]

mod adopted;
mod vnet_header;

use std::ffi::{c_int, c_short, c_uint};
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::forward::Offload;
use crate::io::region::Region;

const DEVICE: &str = "/dev/net/tun";
// Documentation/admin-guide/devices.txt.
const TUN_MAJOR: u64 = 10;
const TUN_MINOR: u64 = 200;

/// An open tun device with one descriptor per queue. Closing the last descriptor removes the device, unless it is a
/// persistent one that was there before.
#[derive(Debug)]
pub struct Tun {
    name: String,
    queues: Vec<Queue>,
    offloads: TunOffloads,
}

/// Offloads that a tun device and its kernel agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TunOffloads {
    /// Super-packets of TCP and UDP.
    TcpAndUdp,
    /// Super-packets of TCP only (kernels before 6.2).
    Tcp,
    /// Single packets with finished checksums.
    None,
}

impl TunOffloads {
    const LADDER: [Self; 3] = [Self::TcpAndUdp, Self::Tcp, Self::None];

    fn flags(self) -> c_uint {
        let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
        match self {
            Self::TcpAndUdp => tcp | libc::TUN_F_USO4 | libc::TUN_F_USO6,
            Self::Tcp => tcp,
            Self::None => 0,
        }
    }
}

mod ioctl {
    use std::ffi::c_int;

    // The kernel's number says int, but the argument is a struct ifreq.
    nix::ioctl_write_ptr_bad!(set_interface, nix::request_code_write!(b'T', 202, size_of::<c_int>()), libc::ifreq);
    nix::ioctl_read_bad!(interface, nix::request_code_read!(b'T', 210, size_of::<c_int>()), libc::ifreq);
    nix::ioctl_write_int_bad!(set_offload, nix::request_code_write!(b'T', 208, size_of::<c_int>()));
    nix::ioctl_write_ptr!(set_header_len, b'T', 216, c_int);
    nix::ioctl_none!(namespace, b'T', 227);
}

impl Tun {
    /// Creates a device in the network namespace of the calling thread. An empty name lets the kernel choose one. The
    /// device is down and has no address.
    ///
    /// A persistent tun device of this name that nobody uses, as networkd, NetworkManager or `ip tuntap` make one, is
    /// used as it is and stays at the end; one that was made without `multi_queue` has one queue.
    ///
    /// # Errors
    /// Returns an error if permission or tun support is missing, or if the name is taken or unusable.
    pub fn create(name: &str, queues: usize, offloads: bool) -> io::Result<Self> {
        if name.len() >= libc::IFNAMSIZ {
            let text = format!("interface name {name:?} is longer than {} characters", libc::IFNAMSIZ - 1);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let base = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let wanted = if queues > 1 { base | libc::IFF_MULTI_QUEUE } else { base };
        let ladder = if offloads { &TunOffloads::LADDER[..] } else { &[TunOffloads::None] };
        let (first, name, flags) = match open_queue(name, wanted | libc::IFF_TUN_EXCL) {
            Ok((first, name)) => (first, name, wanted),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => adopt(name, wanted).ok_or(error)?,
            Err(error) => return Err(error),
        };
        let mut opened = vec![first];
        while opened.len() < queues && flags & libc::IFF_MULTI_QUEUE != 0 {
            opened.push(open_queue(&name, flags)?.0);
        }
        Self::negotiate(opened, name, ladder)
    }

    /// A stand-in for a device, for measurements and tests without the kernel's: each packet of `socket`
    /// (`SOCK_SEQPACKET`) is one read or write of a queue, virtio-net header first. All offloads are on.
    ///
    /// # Errors
    /// Returns the system's error.
    #[cfg(feature = "simulator")]
    pub fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let queues = vec![Queue { fd: socket }];
        Ok(Self { name: "socket".to_owned(), queues, offloads: TunOffloads::TcpAndUdp })
    }

    /// Length of super-packet at which a device of this MTU works best: sealed, it fills exactly one send, while a
    /// longer one would leave a remainder that costs as much as a full one. `None`: the MTU is too large for
    /// super-packets.
    #[must_use]
    pub fn best_super_packet(mtu: u32) -> Option<u32> {
        let segments = MAX_RUN / mtu.saturating_add(SEALING);
        (segments > 1 && mtu > HEADERS).then(|| segments * (mtu - HEADERS) + RESERVED)
    }

    /// Device name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Offloads that the kernel agreed to.
    #[must_use]
    pub fn offloads(&self) -> TunOffloads {
        self.offloads
    }

    /// Turns all offloads off, as `create` does on request.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn disable_offloads(&mut self) -> io::Result<()> {
        for queue in &self.queues {
            // SAFETY: as in `negotiate`.
            unsafe { ioctl::set_offload(queue.fd.as_raw_fd(), 0) }?;
        }
        self.offloads = TunOffloads::None;
        Ok(())
    }

    /// Duplicates a descriptor of the device, which exists until this is closed, too.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn hold(&self) -> io::Result<OwnedFd> {
        let queue = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        queue.fd.try_clone()
    }

    /// The descriptors, to pass duplicates of them to another process.
    pub fn queues(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().map(AsFd::as_fd)
    }

    /// The descriptors, to pass them to another process.
    #[must_use]
    pub fn into_queues(self) -> Vec<OwnedFd> {
        self.queues.into_iter().map(|queue| queue.fd).collect()
    }

    pub(super) fn take_queues(self) -> Vec<Queue> {
        self.queues
    }

    fn negotiate(queues: Vec<OwnedFd>, name: String, ladder: &[TunOffloads]) -> io::Result<Self> {
        let header_len = vnet_header::LEN as c_int;
        for queue in &queues {
            // SAFETY: the descriptor is an attached tun queue and the kernel reads one int.
            unsafe { ioctl::set_header_len(queue.as_raw_fd(), &raw const header_len) }?;
            let flags = OFlag::from_bits_retain(fcntl(queue, FcntlArg::F_GETFL)?);
            fcntl(queue, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let agreed = ladder.iter().copied().find(|rung| {
            // Offloads belong to the device, but each queue accepts them.
            queues.iter().all(|queue| {
                // SAFETY: the descriptor is an attached tun queue; the argument is a number.
                unsafe { ioctl::set_offload(queue.as_raw_fd(), rung.flags() as c_int) }.is_ok()
            })
        });
        let queues = queues.into_iter().map(|fd| Queue { fd }).collect();
        // A kernel that refuses even "none" has nothing turned on.
        Ok(Self { name, queues, offloads: agreed.unwrap_or(TunOffloads::None) })
    }
}

/// Attaches to a persistent device that nobody else uses, with the flags that it takes.
fn adopt(name: &str, wanted: c_int) -> Option<(OwnedFd, String, c_int)> {
    // The kernel takes a device only with or without several queues, as it was made. Where it has one queue, it
    // refuses a second user itself.
    [wanted, wanted ^ libc::IFF_MULTI_QUEUE].into_iter().find_map(|flags| {
        if flags & libc::IFF_MULTI_QUEUE != 0 && is_running(name) {
            return None;
        }
        let (fd, name) = open_queue(name, flags).ok()?;
        adopted::is_persistent(&fd).is_ok_and(|is_persistent| is_persistent).then_some((fd, name, flags))
    })
}

/// Whether a device is up and has a carrier, which a tun device has while a process has it open.
fn is_running(name: &str) -> bool {
    let mut links = getifaddrs().into_iter().flatten();
    links.any(|link| link.interface_name == name && link.flags.contains(InterfaceFlags::IFF_LOWER_UP))
}

/// Opens the device of the driver, and makes it where it is missing and may be made: some containers have the right and
/// not the file.
fn open_driver() -> nix::Result<OwnedFd> {
    let open = || open(DEVICE, OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK, Mode::empty());
    open().or_else(|errno| {
        if errno != Errno::ENOENT {
            return Err(errno);
        }
        let _ = std::fs::create_dir_all("/dev/net");
        mknod(DEVICE, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(TUN_MAJOR, TUN_MINOR))
            .map_err(|_| errno)?;
        open()
    })
}

fn open_queue(name: &str, flags: c_int) -> io::Result<(OwnedFd, String)> {
    let fd = open_driver().map_err(|errno| {
        let help = match errno {
            Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => {
                "the tun module is not loaded (modprobe tun), or the device is missing in this container"
            }
            Errno::EACCES | Errno::EPERM => "run as root, or let the container use the device",
            Errno::ENOSYS => "the filter of system calls of this container forbids openat(2)",
            _ => "is the tun module loaded?",
        };
        io::Error::new(io::Error::from(errno).kind(), format!("cannot open {DEVICE}: {errno}: {help}"))
    })?;
    let request = interface_request(name, flags);
    // SAFETY: the descriptor is open, and the kernel reads and updates one ifreq that is alive.
    unsafe { ioctl::set_interface(fd.as_raw_fd(), &raw const request) }.map_err(|errno| {
        let help = match errno {
            Errno::EBUSY => "an interface of this name exists already, and is no persistent tun device that is free",
            Errno::EPERM => "CAP_NET_ADMIN is needed in this network namespace, and ioctl(2) must be allowed",
            Errno::ENOSYS => "the filter of system calls of this container forbids ioctl(2)",
            Errno::EINVAL => "not a usable interface name, or a device of another kind has it",
            _ => "the kernel refused",
        };
        let text = format!("cannot create tun interface {name:?}: {errno}: {help}");
        io::Error::new(io::Error::from(errno).kind(), text)
    })?;
    let mut attached = interface_request("", 0);
    // SAFETY: as above; asked again because the request was passed as read-only.
    unsafe { ioctl::interface(fd.as_raw_fd(), &raw mut attached) }?;
    Ok((fd, interface_name(&attached)))
}

fn interface_request(name: &str, flags: c_int) -> libc::ifreq {
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero.
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    request.ifr_ifru.ifru_flags = flags as c_short;
    request
}

fn interface_name(request: &libc::ifreq) -> String {
    let bytes: Vec<u8> =
        request.ifr_name.iter().map(|&byte| byte.to_ne_bytes()[0]).take_while(|&byte| byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// One queue of a tun device; any thread may read, any may write.
#[derive(Debug)]
pub(super) struct Queue {
    fd: OwnedFd,
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Result of one read.
#[derive(Debug)]
pub(super) enum Read<'a> {
    /// An overlay packet.
    Packet(&'a mut [u8], Offload),
    /// A packet that contradicts its virtio-net header.
    Contradictory,
    /// Nothing to read at the moment.
    Dry,
}

/// Buffer for one packet and its virtio-net header.
#[derive(Debug)]
pub(super) struct ReadBuffer(Region);

impl ReadBuffer {
    // The packet begins on a cache line.
    const PACKET: usize = 64;
    // The largest super-packet of a tun device has 64 KiB plus an IPv6 header.
    const LEN: usize = 68 << 10;

    pub(super) fn new() -> io::Result<Self> {
        Region::new(Self::LEN).map(Self)
    }

    /// Releases memory that a burst touched.
    pub(super) fn release(&mut self) {
        self.0.release();
    }
}

impl Queue {
    /// Reads one (super-)packet.
    pub(super) fn read<'a>(&self, buffer: &'a mut ReadBuffer) -> io::Result<Read<'a>> {
        let memory = &mut buffer.0[ReadBuffer::PACKET - vnet_header::LEN..];
        let len = match nix::unistd::read(&self.fd, memory) {
            Ok(len) => len,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Read::Dry),
            Err(errno) => return Err(errno.into()),
        };
        let Some((header, packet)) = memory[..len].split_first_chunk_mut() else { return Ok(Read::Contradictory) };
        Ok(match vnet_header::parse(header, packet) {
            Some(offload) => Read::Packet(packet, offload),
            None => Read::Contradictory,
        })
    }

    /// Writes one (super-)packet made of `head` and ranges of `payload`. `header_len` is the length of the IP and
    /// transport headers together.
    pub(super) fn write(
        &self,
        offload: &Offload,
        header_len: u16,
        head: &[u8],
        payload: &[u8],
        pieces: &[Range<usize>],
    ) -> Result<(), Errno> {
        let empty: &[u8] = &[];
        let mut slices = [IoSlice::new(empty); 2 + MAX_PIECES];
        if pieces.len() > MAX_PIECES {
            return Err(Errno::EMSGSIZE);
        }
        for (slice, piece) in slices[2..].iter_mut().zip(pieces) {
            *slice = IoSlice::new(payload.get(piece.clone()).ok_or(Errno::EFAULT)?);
        }
        // A packet delivered as received has its headers in the first piece.
        let first = if head.is_empty() { &slices[2] } else { &IoSlice::new(head) };
        let header = vnet_header::build(offload, header_len, first).ok_or(Errno::EINVAL)?;
        slices[0] = IoSlice::new(&header);
        slices[1] = IoSlice::new(head);
        nix::sys::uio::writev(&self.fd, &slices[..2 + pieces.len()]).map(|_| ())
    }
}

// Maximum length of one UDP send, as in `Lane`.
const MAX_RUN: u32 = 65_000;
// Nebula's header and the tag.
const SEALING: u32 = 32;
// IPv4 and TCP headers with timestamps, which a super-packet has only once.
const HEADERS: u32 = 52;
// Linux reserves this much of the limit for headers of all layers.
const RESERVED: u32 = 400;

/// More pieces than a super-packet can have: it holds at most 64 KiB and joined segments are not small.
pub(super) const MAX_PIECES: usize = 128;

#[cfg(test)]
mod tests;
