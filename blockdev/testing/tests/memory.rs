//! Images and devices in RAM.
use gpunvme_blockdev::{BlockDevice, Geometry, Io, Region, Request};
use gpunvme_blockdev_testing::{Image, MemoryDevice};
use proptest::prelude::*;

const LEN: usize = 3 << 20;

#[derive(Debug, Clone)]
enum Step {
    Write { offset: usize, len: usize, byte: u8 },
    Zero { offset: usize, len: usize },
    Snapshot,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..LEN, prop_oneof![1..10_000usize, 1..LEN]).prop_map(|(offset, len)| (offset, len.min(LEN - offset)));
    prop_oneof![
        4 => (range.clone(), any::<u8>()).prop_map(|((offset, len), byte)| Step::Write { offset, len, byte }),
        2 => range.prop_map(|(offset, len)| Step::Zero { offset, len }),
        1 => Just(Step::Snapshot),
    ]
}

fn contents(image: &Image) -> Vec<u8> {
    let mut bytes = vec![0xaa; LEN];
    image.read_at(0, &mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn an_image_is_an_array_of_bytes_and_snapshots_stay_as_they_were(steps in proptest::collection::vec(step(), 1..24)) {
        let mut image = Image::new(LEN as u64);
        let mut model = vec![0u8; LEN];
        let mut snapshots = Vec::new();
        for step in steps {
            match step {
                Step::Write { offset, len, byte } => {
                    image.write_at(offset as u64, &vec![byte; len]);
                    model[offset..offset + len].fill(byte);
                }
                Step::Zero { offset, len } => {
                    image.zero(offset as u64, len as u64);
                    model[offset..offset + len].fill(0);
                }
                Step::Snapshot => snapshots.push((image.clone(), model.clone())),
            }
        }
        snapshots.push((image, model));
        for (image, model) in &snapshots {
            prop_assert!(contents(image) == *model);
        }
    }
}

#[test]
fn a_terabyte_costs_what_was_written_to_it() {
    const TIB: u64 = 1 << 40;
    let device = MemoryDevice::new(TIB);
    let io = Io::inline(device.clone()).expect("io");
    let region = Region::allocate(4096).expect("memory");
    region.write_at(0, &[7; 4096]).expect("inside");
    io.run(vec![Request::write(TIB - 4096, vec![region.span(0..4096)], false)]).expect("written");
    // Were it not sparse, these would take minutes and all the memory there is.
    io.run(vec![Request::discard(0, TIB - 4096), Request::write_zeroes(0, TIB / 2)]).expect("discarded");
    let mut last = [0; 1];
    device.snapshot().read_at(TIB - 1, &mut last);
    assert_eq!(last, [7]);
}

#[test]
fn a_geometry_is_kept() {
    let geometry =
        Geometry { logical_block: 4096, memory_alignment: 4, discard: false, ..MemoryDevice::new(8192).geometry().clone() };
    let io = Io::inline(MemoryDevice::with_geometry(Image::new(8192), geometry)).expect("io");
    let region = Region::allocate(8192).expect("memory");
    io.run(vec![Request::read(0, vec![region.span(4..4100)])]).expect("memory aligned to 4 bytes is enough");
    io.run(vec![Request::read(512, vec![region.span(0..4096)])]).expect_err("not a whole block");
    io.run(vec![Request::discard(0, 4096)]).expect_err("no such command");
}
