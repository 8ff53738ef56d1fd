//! What a program gives back to the system when its driver has less to do.

use nebula_core::io::Idle;
use nebula_linux::memory;

/// For [`nebula_core::io::Options::on_idle`]: frees memory that a driver's control thread no longer needs.
pub(crate) fn release(idle: Idle) {
    match idle {
        Idle::ControlWorkOver => {
            memory::release_program_pages();
            // Tables that shrank, and everything held for handshakes without an answer.
            memory::release_free_heap();
            memory::release_stack();
        }
        // On a host with a hundred pods, the list takes hundreds of KiB for a moment.
        Idle::InterfacesListed => memory::release_free_heap(),
        _ => {}
    }
}
