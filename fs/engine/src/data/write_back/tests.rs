use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use gpunvme_blockdev::{BlockDevice, Io};
use gpunvme_blockdev_testing::MemoryDevice;

use crate::data::{Filesystem, Inline, Options, system_time};
use crate::volume::{Context, NewNode, VolumeOptions};
use crate::volume::{FormatOptions, format};

const ROOT: u64 = 1;
const ROOM: usize = 1 << 20;

fn filesystem() -> Arc<Filesystem> {
    let device: Arc<dyn BlockDevice> = MemoryDevice::new(64 << 20);
    let options = FormatOptions { label: String::new(), uuid: [7; 16], hash_key: [9; 16], now: system_time(), owner: (0, 0) };
    format(&device, &options).unwrap();
    let volume = VolumeOptions { read_only: false, cache: 16 << 20, discard: false };
    Filesystem::open(Io::inline(device).unwrap(), Options { volume, write_buffer: ROOM }, Arc::new(Inline)).unwrap()
}

fn create(fs: &Arc<Filesystem>, name: &[u8]) -> u64 {
    let new = NewNode { mode: libc::S_IFREG | 0o644, umask: 0, rdev: 0, target: &[] };
    let context = Context { uid: 0, gid: 0, now: system_time() };
    fs.wait(|| fs.create(&context, ROOT, name, &new)).unwrap().ino
}

/// There may be thousands of those: all that were written in the last second or two.
#[test]
fn who_needs_room_in_the_write_buffer_does_not_look_at_files_that_are_clean() {
    let fs = filesystem();
    let (clean, dirty) = (create(&fs, b"clean"), create(&fs, b"dirty"));
    fs.wait(|| fs.write(clean, 0, b"written", system_time())).unwrap();
    fs.write_back().unwrap();
    let file = fs.files.find(clean).expect("it was written a moment ago");
    let state = file.state.lock();
    assert_eq!(state.buffer.dirty, 0);
    let (end, ended) = mpsc::channel();
    let writer = thread::spawn({
        let fs = fs.clone();
        move || {
            let piece = vec![7; ROOM / 8];
            for number in 0..32 {
                fs.wait(|| fs.write(dirty, (number * piece.len()) as u64, &piece, system_time())).unwrap();
            }
            end.send(()).unwrap();
        }
    });
    let ended = ended.recv_timeout(Duration::from_secs(20));
    drop(state);
    drop(file);
    writer.join().unwrap();
    assert!(ended.is_ok(), "the writer waited for a clean file");
    fs.flush_all().unwrap();
    fs.close().unwrap();
}

#[test]
fn a_file_is_on_the_list_of_dirty_ones_once_and_leaves_it_when_it_is_written_back() {
    let fs = filesystem();
    let files = [create(&fs, b"first"), create(&fs, b"second")];
    for _ in 0..3 {
        files.iter().for_each(|file| fs.wait(|| fs.write(*file, 0, b"again", system_time())).unwrap());
    }
    assert_eq!(fs.files.dirty(), 2);
    fs.write_back().unwrap();
    assert_eq!(fs.files.dirty(), 0);
    fs.wait(|| fs.write(files[1], 4096, b"later", system_time())).unwrap();
    assert_eq!(fs.next_dirty().expect("it is dirty again").ino, files[1]);
    fs.flush_all().unwrap();
    assert!(fs.next_dirty().is_none());
    fs.close().unwrap();
}
