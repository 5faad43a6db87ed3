//! Messages to the registration socket: bytes, numbers of descriptors and connections at random.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use gpunvme_abi::{Command, Register, Unregister, get_text};
use gpunvme_tests::attack::Attacker;
use gpunvme_tests::direct::info;
use gpunvme_tests::random::Random;
use rustix::net::{RecvFlags, Shutdown};
use zerocopy::IntoBytes;

use super::{any, carry_on, descriptors, noise, number};
use crate::registration::{message, send, try_connect};

/// Connections that are kept at a time: more than a user may have.
const CONNECTIONS: u64 = 80;

pub fn fuzz_messages(attacker: &mut Attacker) {
    let theirs: u64 = attacker.hear().parse().unwrap();
    let path = get_text(&info(attacker.root()).socket);
    let file = File::create(attacker.path(format!("messages-{}", std::process::id()))).unwrap();
    let root = attacker.path("");
    let mut connections: Vec<OwnedFd> = Vec::new();
    carry_on(attacker, |random| {
        if random.below(4) == 0 || connections.is_empty() {
            // The daemon may not want to hear this user now.
            match try_connect(&path, Duration::from_millis(50)) {
                Ok(socket) => connections.push(socket),
                Err(_) if connections.is_empty() => return,
                Err(_) => {}
            }
        }
        let at = random.below(connections.len() as u64) as usize;
        let socket = &connections[at];
        let bytes = match random.below(8) {
            0 => noise_of(random),
            1 => message(Command::Unregister, Unregister { buffer: theirs, ..Unregister::default() }.as_bytes()),
            2 => message(Command::ALL[random.below(10) as usize], &noise(random, 100)),
            3 => Vec::new(),
            _ => {
                let len = if random.below(2) == 0 { 4096 } else { number(random) };
                message(Command::Register, Register { fd: -1, len, ..Register::default() }.as_bytes())
            }
        };
        let count = [0, 1, 1, 1, 2, 5, 253][random.below(7) as usize];
        let fds: Vec<OwnedFd> = if count > 5 {
            let one = descriptors::any(random, &root, &file);
            (0..count).map(|_| one.try_clone().unwrap()).collect()
        } else {
            (0..count).map(|_| descriptors::any(random, &root, &file)).collect()
        };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let _ = send(socket, &bytes, &fds);
        if random.below(2) == 0 {
            let _ = rustix::net::recv(socket, &mut [0; 256], RecvFlags::DONTWAIT);
        }
        match random.below(16) {
            0 => drop(rustix::net::shutdown(socket, Shutdown::Read)),
            1 => drop(rustix::net::shutdown(socket, Shutdown::Write)),
            2..5 => drop(connections.swap_remove(at)),
            _ => {}
        }
        if connections.len() as u64 > CONNECTIONS {
            connections.remove(0);
        }
    });
}

fn noise_of(random: &mut Random) -> Vec<u8> {
    let len = [0, 1, 7, 8, 64, 1024, 1025, 60_000][random.below(8) as usize];
    let mut bytes = noise(random, len);
    if let Some(first) = bytes.first_mut() {
        *first = any(random) as u8;
    }
    bytes
}
