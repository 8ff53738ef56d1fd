//! Devices whose queues were opened elsewhere: by another program, or by this one before it was started again.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::sys::stat::{fstat, stat};

use super::{Tun, TunOffloads, interface_name, interface_request, ioctl};

/// What the kernel says about a queue.
struct Attached {
    device: String,
    flags: c_int,
}

impl Tun {
    /// Adopts queues opened elsewhere (with IFF_VNET_HDR), and negotiates offloads again.
    ///
    /// # Errors
    /// Returns an error if a descriptor is not a tun queue, or if the queues belong to different devices.
    pub fn from_queues(queues: Vec<OwnedFd>) -> io::Result<Self> {
        let Attached { device, .. } = common_device(&queues)?;
        Self::negotiate(queues, device, &TunOffloads::LADDER)
    }

    /// Adopts queues of a former run of this program if they are all the queues of the device that [`Tun::create`]
    /// would make with these arguments in the network namespace of the calling thread, and negotiates offloads again.
    /// Packets that wait in the queues stay there.
    ///
    /// # Errors
    /// Returns an error that says what is different, or if the descriptors are not queues of one tun device.
    pub fn adopt(kept: Vec<OwnedFd>, name: &str, queues: usize, offloads: bool) -> io::Result<Self> {
        let device = Self::check_kept(&kept, name, queues)?;
        let ladder = if offloads { &TunOffloads::LADDER[..] } else { &[TunOffloads::None] };
        Self::negotiate(kept, device, ladder)
    }

    /// What [`Tun::adopt`] checks, without a change to the device; returns its name.
    ///
    /// # Errors
    /// The same as [`Tun::adopt`].
    pub fn check_kept(kept: &[OwnedFd], name: &str, queues: usize) -> io::Result<String> {
        // The kernel does not tell whether packets have IFF_NO_PI's four bytes in front: the bit also means
        // IFF_NOFILTER here. This program opens no queue that has them.
        let Attached { device, flags } = common_device(kept)?;
        if !could_be_named(&device, name) {
            return Err(invalid(format!("the device is {device}, and {name:?} is wanted")));
        }
        let (has_several, is_persistent) = (flags & libc::IFF_MULTI_QUEUE != 0, flags & libc::IFF_PERSIST != 0);
        // A persistent device is taken as somebody else made it.
        let wanted = if is_persistent && !has_several { 1 } else { queues.max(1) };
        if kept.len() != wanted || (has_several != (wanted > 1) && !is_persistent) {
            return Err(invalid(format!("{device} has {} queues, and {wanted} are wanted", kept.len())));
        }
        let own = stat("/proc/thread-self/ns/net")?;
        for queue in kept {
            // SAFETY: the descriptor is open, and the kernel answers with a new one.
            let namespace = unsafe { ioctl::namespace(queue.as_raw_fd()) }?;
            // SAFETY: the descriptor is new, so nobody else has it.
            let namespace = fstat(unsafe { OwnedFd::from_raw_fd(namespace) })?;
            if (namespace.st_dev, namespace.st_ino) != (own.st_dev, own.st_ino) {
                return Err(invalid(format!("{device} is in another network namespace")));
            }
        }
        Ok(device)
    }

    /// Whether the device stays when its last descriptor is closed.
    ///
    /// # Errors
    /// Returns an error if somebody removed the device.
    pub fn is_persistent(&self) -> io::Result<bool> {
        let first = self.queues.first().ok_or(io::ErrorKind::NotFound)?;
        is_persistent(first)
    }

    /// Name of the device that ends with this queue and the others that it has; `None` if it is a persistent one, or
    /// gone already.
    #[must_use]
    pub fn transient_device(queue: &impl AsFd) -> Option<String> {
        let Attached { device, flags } = attached(queue).ok()?;
        (flags & libc::IFF_PERSIST == 0).then_some(device)
    }
}

/// Whether the device of a queue stays when its last descriptor is closed.
pub(super) fn is_persistent(queue: &impl AsFd) -> io::Result<bool> {
    Ok(attached(queue)?.flags & libc::IFF_PERSIST != 0)
}

/// The device that all these queues belong to.
fn common_device(queues: &[OwnedFd]) -> io::Result<Attached> {
    let mut common: Option<Attached> = None;
    for (index, queue) in queues.iter().enumerate() {
        let this = attached(queue)
            .map_err(|error| invalid(format!("descriptor of queue {index} is not an attached tun queue: {error}")))?;
        if this.flags & libc::IFF_TUN == 0 || this.flags & libc::IFF_VNET_HDR == 0 {
            return Err(invalid(format!("queue {index} was opened without IFF_TUN or without IFF_VNET_HDR")));
        }
        if this.flags & libc::IFF_DETACH_QUEUE != 0 {
            return Err(invalid(format!("queue {index} of {} is detached", this.device)));
        }
        let first = common.get_or_insert_with(|| Attached { device: this.device.clone(), flags: this.flags });
        if first.device != this.device {
            return Err(invalid(format!(
                "queue {index} belongs to {}, the first one to {}",
                this.device, first.device
            )));
        }
    }
    common.ok_or_else(|| invalid("a tun device needs at least one queue".into()))
}

fn attached(queue: &impl AsFd) -> io::Result<Attached> {
    let mut request = interface_request("", 0);
    // SAFETY: the descriptor is open, and the kernel writes one ifreq to a live one.
    unsafe { ioctl::interface(queue.as_fd().as_raw_fd(), &raw mut request) }?;
    // SAFETY: TUNGETIFF fills the flags member.
    let flags = c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    Ok(Attached { device: interface_name(&request), flags })
}

/// Whether a device made with the name `wanted` could have this name: the kernel puts a number in the place of `%d`.
fn could_be_named(name: &str, wanted: &str) -> bool {
    let wanted = if wanted.is_empty() { "tun%d" } else { wanted };
    let Some((before, after)) = wanted.split_once("%d") else { return name == wanted };
    let number = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_the_kernel_completes_fits_what_it_makes_of_it() {
        for (name, wanted, expected) in [
            ("neb0", "neb0", true),
            ("neb1", "neb0", false),
            ("tun0", "", true),
            ("neb0", "", false),
            ("tun", "", false),
            ("tunx", "", false),
            ("neb12x", "neb%dx", true),
            ("neb12", "neb%dx", false),
        ] {
            assert_eq!(could_be_named(name, wanted), expected, "{name} {wanted}");
        }
    }
}
