//! Attacks on ownership: no process can use the buffers and rings of another.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use gpunvme_abi::{Command, Segment, Transfer, Unregister};
use gpunvme_tests::attack::{self, Attack, Attacker, NOBODY, RunningAttack, STRANGER};
use gpunvme_tests::direct::{Buffer, call, call_plain};
use gpunvme_tests::{attacks, needs_mount};

pub const ATTACKS: &[(&str, Attack)] = attacks![use_the_buffers_of_others];

/// Names of buffers are numbers, and the neighbours of one's own are easily guessed.
fn use_the_buffers_of_others(attacker: &mut Attacker) {
    let file = File::open(attacker.path("file")).unwrap();
    let theirs: u64 = attacker.hear().parse().unwrap();
    for id in theirs - 2..=theirs + 2 {
        let mut transfer = Transfer { buffer: id, descriptor: file.as_raw_fd(), segments: 1, ..Transfer::default() };
        let mut segments = [Segment { file_offset: 0, buffer_offset: 0, len: 4096 }];
        let error = call(&file, Command::Read, &mut transfer, &mut segments).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        let mut unregister = Unregister { buffer: id, ..Unregister::default() };
        let error = call_plain(&file, Command::Unregister, &mut unregister).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}

#[test]
fn a_buffer_is_of_no_use_to_other_processes() {
    needs_mount!();
    let volume = attack::volume("");
    fs::write(volume.path("file"), [7; 4096]).unwrap();
    fs::set_permissions(volume.path("file"), PermissionsExt::from_mode(0o666)).unwrap();
    let file = File::open(volume.path("file")).unwrap();
    let buffer = Buffer::new(&file, 4096);
    for user in [NOBODY, STRANGER, 0] {
        let mut attack = RunningAttack::begin(&volume, user, "use_the_buffers_of_others");
        attack.say(buffer.id);
        attack.end();
    }
    assert_eq!(buffer.get(0, 4096), [0; 4096]);
    assert_eq!(buffer.read(&file, 0, 4096).unwrap().bytes, 4096);
    buffer.unregister(&file).unwrap();
}
