//! A client of a registry, for tests: it does what the lines on stdin say, and prints the numbers
//! that came of it.
//!
//! - `memfd main`, `memfd thread`: makes a memfd on the main thread, or on a new one, which stays;
//!   prints the thread and the descriptor;
//! - `connect PATH`: registers a memfd over the registration socket at PATH, and keeps the
//!   connection; prints the status and the buffer.

use std::os::fd::{AsFd, IntoRawFd};
use std::path::Path;

use gpunvme_tests::registrant::{LEN, connect, memfd, register_over};
use rustix::fs::SealFlags;

fn main() {
    let mut sockets = Vec::new();
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["memfd", "main"] => answer_memfd(),
            // The thread stays: it is the one that will be said to have called.
            ["memfd", "thread"] => {
                std::thread::spawn(|| {
                    answer_memfd();
                    loop {
                        std::thread::park();
                    }
                });
            }
            ["connect", path] => {
                let socket = connect(Path::new(path));
                let (status, reply) = register_over(&socket, memfd(LEN, SealFlags::SHRINK).as_fd());
                sockets.push(socket);
                println!("{status} {}", reply.buffer);
            }
            _ => panic!("unknown command {line}"),
        }
    }
}

fn answer_memfd() {
    let fd = memfd(LEN, SealFlags::SHRINK).into_raw_fd();
    println!("{} {fd}", rustix::thread::gettid().as_raw_nonzero());
}
