//! Memory of every kind that CUDA's users have, registered and not, in every way of cuFile.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;

use cudarc::driver::sys;
use gpunvme_tests::cuda::{Pinned, every_kind, own_stream};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::software_cuda::with_software_cuda;
use gpunvme_tests::{needs_mount, scratch_dir, tree};

use crate::batches::{self, Batch};
use crate::files::{MIB, open};
use crate::library::{BatchEvent, BatchRequest, COMPLETE, OK, gpu, in_use, refused};
use crate::streams::{self, Numbers};

#[test]
fn memory_of_every_kind_is_registered_and_used() {
    needs_mount!();
    with_software_cuda("", || {
        let (volume, elsewhere, cufile) = (Mounted::new(), scratch_dir(), in_use());
        // SAFETY: no other thread of this process reads the environment yet.
        unsafe { std::env::set_var("GPUNVME_CUFILE_REAL", "off") };
        let len = 4 * MIB;
        let (data, stream) = (tree::pattern(1, len), own_stream(gpu()));
        let files = [volume.path("file"), elsewhere.path().join("file")].map(|path| {
            fs::write(&path, &data).unwrap();
            let file = open(&path);
            let handle = cufile.register(&file).unwrap();
            let by_calls = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            (path, by_calls, file, handle)
        });
        let copies = gpu().stream().unwrap();
        let mut pinned = Pinned::new(gpu(), len);
        for memory in every_kind(gpu(), len) {
            let (kind, base) = (memory.kind, memory.address());
            // Not registered, registered, and taken back.
            for turn in 0..3 {
                if turn == 1 {
                    assert_eq!(cufile.add_buffer(base, len), OK, "{kind}");
                    assert_eq!(cufile.add_buffer(base + 4096, 4096), refused(5023), "{kind}");
                }
                for (path, by_calls, _, handle) in &files {
                    // Across the pieces of what is mapped in several.
                    let (at, part) = (MIB as i64 + 13, 2 * MIB);
                    pinned.put(&copies, base, &vec![turn; len]);
                    assert_eq!(cufile.read(*handle, base, part, 77, at), part as isize, "{kind}");
                    let found = pinned.get(&copies, base + at as u64, part);
                    assert!(found == &data[77..77 + part], "{kind}, {}", path.display());
                    assert_eq!(cufile.write(*handle, base, 5000, 3, at), 5000, "{kind}");
                    let mut written = [0; 5000];
                    by_calls.read_exact_at(&mut written, 3).unwrap();
                    assert!(written[..] == data[77..5077], "{kind}");
                    by_calls.write_all_at(&data[3..5003], 3).unwrap();

                    // By a batch, and in the order of a stream.
                    let batch = Batch::new(2);
                    let request = batches::read(*handle, base, 99, at, 1);
                    assert_eq!(batch.submit(&[BatchRequest { size: part, ..request }]), OK, "{kind}");
                    let event = BatchEvent { cookie: 1, status: COMPLETE, result: part as isize };
                    assert_eq!(batch.take(1, 2, None), [event], "{kind}");
                    let mut numbers = Numbers::new(part, 55, 0);
                    assert_eq!(streams::read(*handle, base, &mut numbers, stream), OK, "{kind}");
                    {
                        let _entered = gpu().enter().unwrap();
                        // SAFETY: it is a stream of the test's.
                        assert_eq!(unsafe { sys::cuStreamSynchronize(stream as sys::CUstream) } as u32, 0);
                    }
                    assert_eq!(numbers.done, part as isize, "{kind}");
                    // What the batch read behind what the stream read.
                    assert!(pinned.get(&copies, base, part) == &data[55..55 + part], "{kind}");
                    let behind = 99 + part - at as usize;
                    let found = pinned.get(&copies, base + part as u64, at as usize);
                    assert!(found == &data[behind..behind + at as usize], "{kind}");
                }
                if turn == 1 {
                    assert_eq!(cufile.remove_buffer(base), OK, "{kind}");
                    assert_eq!(cufile.remove_buffer(base), refused(5024), "{kind}");
                }
            }
            // Behind host memory may be more of it.
            let is_gpus = ["cuMemAlloc", "cuMemAllocAsync", "cuMemMap", "cuMemMap, several"].contains(&kind);
            assert!(!is_gpus || cufile.add_buffer(base, 64 * MIB) == refused(5014), "{kind}: more than there is");
            // It may be freed while files are registered: nothing refers to it any more.
            drop(memory);
        }
    });
}
