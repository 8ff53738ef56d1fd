//! TCP and UDP over the Nebula overlay inside a program, without a device or privileges.

#![warn(missing_docs)]

pub mod stack;
pub mod tcp;
