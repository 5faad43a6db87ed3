//! Messages of the kernel: they become requests or are refused. The input is whether SETXATTR has
//! its longer form, then a message without its length: as `/dev/fuse` delivers it, and as an entry
//! of a ring does, where what follows the header is both the first structure and the payload.
#![no_main]

use gpunvme_fuse::{Decoder, Message};
use libfuzzer_sys::fuzz_target;

/// Bytes of `struct fuse_in_header`.
const HEADER: usize = 40;

fuzz_target!(|bytes: &[u8]| {
    let Some((form, rest)) = bytes.split_first() else { return };
    let decoder = Decoder { setxattr_ext: form & 1 == 1 };
    // The length is right, or the fuzzer would never get past it.
    let len = (rest.len() + 4) as u32;
    let message = [&len.to_ne_bytes()[..], rest].concat();
    if let Ok(Message::Forgets(forgets)) = decoder.message(&message) {
        assert!(forgets.count() <= rest.len() / 8);
    }
    let (header, payload) = message.split_at(message.len().min(HEADER));
    if let Ok(message) = decoder.entry(&part(header), &part(payload), payload) {
        assert!(matches!(message, Message::Request(_) | Message::Destroy));
    }
});

/// One of the two parts of an entry's header.
fn part(bytes: &[u8]) -> [u8; 128] {
    let mut part = [0; 128];
    let len = bytes.len().min(128);
    part[..len].copy_from_slice(&bytes[..len]);
    part
}
