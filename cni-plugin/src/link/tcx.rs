//! Programs of eBPF on a link that no list of queueing disciplines shows: they are attached by tcx (Linux 6.6). As in
//! one of those, a program sees a frame before nf_tables does, and may send it elsewhere (bpf(2)).
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;

use nix::libc;

/// How many programs see the frames of a link of the calling thread's network namespace, in both directions.
///
/// # Errors
/// Returns the kernel's error. The count is 0 on a kernel without tcx, and for a caller that may not query the kernel
/// (in a user namespace of its own): that caller could not have attached a program either.
pub(super) fn programs(index: u32) -> io::Result<u32> {
    [INGRESS, EGRESS].into_iter().map(|direction| count(index, direction)).sum()
}

fn count(index: u32, direction: u32) -> io::Result<u32> {
    let mut query = Query { index, direction, ..Query::default() };
    // SAFETY: the call passes the structure's length, and the kernel accesses no other memory: the pointers in it, by
    // which a caller may request lists, are null.
    let answer =
        unsafe { libc::syscall(libc::SYS_bpf, PROG_QUERY, std::ptr::from_mut(&mut query), size_of::<Query>()) };
    if answer == 0 {
        return Ok(query.count);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A kernel without tcx, without the call, or for which the caller has no rights.
        Some(libc::EINVAL | libc::ENOSYS | libc::EPERM) => Ok(0),
        _ => Err(error),
    }
}

/// The part of union `bpf_attr` for this call.
#[repr(C, align(8))]
#[derive(Default)]
struct Query {
    index: u32,
    direction: u32,
    query_flags: u32,
    attach_flags: u32,
    programs: u64,
    count: u32,
    padding: u32,
    program_flags: u64,
    links: u64,
    link_flags: u64,
    revision: u64,
}

// linux/bpf.h: BPF_PROG_QUERY; BPF_TCX_INGRESS, BPF_TCX_EGRESS.
const PROG_QUERY: libc::c_long = 16;
const INGRESS: u32 = 46;
const EGRESS: u32 = 47;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_link_has_no_program() {
        assert_eq!(programs(1).unwrap(), 0);
    }

    #[test]
    fn the_kernel_is_given_what_it_expects() {
        assert_eq!(size_of::<Query>(), 64);
    }
}
