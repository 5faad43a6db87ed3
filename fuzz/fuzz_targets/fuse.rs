//! Messages of the kernel: they become requests or are refused. The input is whether SETXATTR has
//! its longer form, then a message without its length.
#![no_main]

use gpunvme_fuse::{Decoder, Message};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((form, rest)) = bytes.split_first() else { return };
    // The length is right, or the fuzzer would never get past it.
    let len = (rest.len() + 4) as u32;
    let message = [&len.to_ne_bytes()[..], rest].concat();
    if let Ok(Message::Forgets(forgets)) = (Decoder { setxattr_ext: form & 1 == 1 }).message(&message) {
        assert!(forgets.count() <= rest.len() / 8);
    }
});
