//! The ABI between applications and the daemon: ioctl commands, their structures, the memory of a
//! ring, and the messages of the registration socket.
//!
//! It guards what programs compiled today and daemons built years later must agree on, byte for
//! byte. `docs/reference/ioctl.md` describes it for people who write neither;
//! `client/include/gpunvme_abi.h` is the same thing in C, and a test compares the two.
//!
//! Rules:
//! - Linux restricts ioctls on FUSE files (`fs/fuse/ioctl.c`): the kernel copies exactly
//!   `_IOC_SIZE(cmd)` bytes in and back out, follows no pointer and translates no fd. Everything
//!   is therefore inline, at most [`MAX_SIZE`] bytes.
//! - A command is `_IOWR('G', nr, size)`. For [`Resolve`] and [`Transfer`] the size is that of the
//!   header plus the entries that follow it, so that a call with one segment copies about a
//!   hundred bytes and not 16 KiB.
//! - Every structure is little-endian, has no implicit padding, and begins with a version and
//!   flags. Reserved fields must be zero and unknown flags are refused, so that both can get a
//!   meaning later. Fields marked *out* are ignored on the way in.
//! - When a command fails the ioctl returns the errno, and the out fields say more where there is
//!   more to say ([`Register::reason`], [`Transfer::reason`], [`Transfer::failed_segment`]).

#![deny(unsafe_code)]

mod codes;
mod command;
mod decode;
mod flags;
pub mod ring;
#[allow(unsafe_code)]
mod ring_memory;
mod structures;
mod wire;

pub use codes::{Reason, Route};
pub use command::{Command, Direction};
pub use decode::{Claim, DecodeError, Request, TransferRequest, decode};
pub use flags::*;
pub use ring_memory::RingMemory;
pub use structures::*;

#[cfg(target_endian = "big")]
compile_error!("the ABI is little-endian, and nothing here swaps bytes");
