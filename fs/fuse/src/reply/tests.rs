use std::sync::Mutex;

use zerocopy::FromZeros;

use super::*;

/// What was sent: the error, and the body.
struct Sent(Mutex<Vec<(i32, Vec<u8>)>>, Meter);

impl Channel for Sent {
    fn answer(&self, header: OutHeader, body: [&[u8]; 2]) -> io::Result<()> {
        let body = body.concat();
        assert_eq!((header.len as usize, header.unique), (16 + body.len(), 8));
        self.0.lock().unwrap().push((header.error, body));
        Ok(())
    }

    fn meter(&self) -> &Meter {
        &self.1
    }
}

fn sent(answer: impl FnOnce(Reply)) -> (i32, Vec<u8>) {
    let sent = Arc::new(Sent(Mutex::default(), Meter::new(opcode::KINDS)));
    let asked = InHeader { unique: 8, opcode: opcode::GETATTR, ..InHeader::new_zeroed() };
    answer(Reply::new(sent.clone(), &asked));
    let counted = sent.meter().read(opcode::GETATTR as usize);
    assert_eq!((counted.begun, counted.buckets.iter().sum::<u64>()), (1, 1));
    let mut all = std::mem::take(&mut *sent.0.lock().unwrap());
    assert_eq!(all.len(), 1, "each request is answered once");
    all.pop().unwrap()
}

#[test]
fn a_reply_that_is_dropped_is_an_error() {
    assert_eq!(sent(drop), (-5, vec![]));
}

#[test]
fn errors_are_those_that_the_kernel_takes() {
    for (errno, expected) in [(2, -2), (511, -511), (512, -5), (i32::MAX, -5), (-1, -5)] {
        assert_eq!(sent(|reply| reply.error(errno)).0, expected, "{errno}");
    }
}

#[test]
fn a_value_is_its_length_or_itself_or_too_long() {
    assert_eq!(sent(|reply| reply.value(b"abc", 0)), (0, vec![3, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(sent(|reply| reply.value(b"abc", 3)), (0, b"abc".to_vec()));
    assert_eq!(sent(|reply| reply.value(b"abc", 2)), (-34, vec![]));
}

#[test]
fn lengths_of_bodies_are_those_that_the_kernel_asks_for() {
    let times = Times { entry: Duration::from_secs(1), attributes: Duration::new(2, 3) };
    let attr = Attr { ino: 5, ..Attr::default() };
    let len = |answer: &dyn Fn(Reply)| sent(answer).1.len();
    assert_eq!(len(&|reply| reply.entry(&attr, times)), 128);
    assert_eq!(len(&|reply| reply.attributes(&attr, times)), 104);
    assert_eq!(len(&|reply| reply.statx(&attr, Time::default(), times)), 288);
    assert_eq!(len(&|reply| reply.created(&attr, times, 1, OpenFlags::KEEP_CACHE)), 144);
    assert_eq!(len(&|reply| reply.opened(1, OpenFlags::empty())), 16);
    assert_eq!(len(&|reply| reply.written(1)), 8);
    assert_eq!(len(&|reply| reply.copied(1 << 40, true)), 8);
    assert_eq!(len(&|reply| reply.copied(1, false)), 8);
    assert_eq!(len(&|reply| reply.statfs(&Statfs::default())), 80);
    assert_eq!(len(&|reply| reply.offset(1)), 8);
    assert_eq!(len(&|reply| reply.ioctl(3, b"abcd")), 16 + 4);
}

#[test]
fn numbers_of_devices_are_split_as_the_kernel_packs_them() {
    let times = Times { entry: Duration::ZERO, attributes: Duration::ZERO };
    // Device 259:65537, packed.
    let rdev = 65537_u32 & 0xff | 259 << 8 | (65537 & !0xff) << 12;
    let out = statx_out(&Attr { rdev, ..Attr::default() }, Time::default(), times);
    assert_eq!((out.stat.rdev_major, out.stat.rdev_minor), (259, 65537));
}
