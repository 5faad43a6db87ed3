//! A controller's view of what the driver made, and a model of the limits.
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::NoPeerToPeer;
use crate::nvme::dma::Dma;
use crate::transport::Transport;

const BLOCK: usize = 512;
const PAGE: u64 = 4096;
const REGION: usize = 128 << 10;

/// Memory that a controller could reach, and no controller.
struct NoController;

impl Transport for NoController {
    fn name(&self) -> &str {
        "no controller"
    }
    fn registers_len(&self) -> usize {
        0
    }
    fn read32(&self, _: usize) -> u32 {
        unreachable!("there are no registers")
    }
    fn write32(&self, _: usize, _: u32) {
        unreachable!("there are no registers")
    }
    fn read64(&self, _: usize) -> u64 {
        unreachable!("there are no registers")
    }
    fn write64(&self, _: usize, _: u64) {
        unreachable!("there are no registers")
    }
    fn iova_ranges(&self) -> Vec<RangeInclusive<u64>> {
        vec![0..=u64::MAX >> 16]
    }
    #[allow(unsafe_code)]
    unsafe fn map(&self, _: *mut u8, _: usize, _: u64, _: bool) -> Result<()> {
        Ok(())
    }
    fn unmap(&self, _: u64, _: usize) -> Result<()> {
        Ok(())
    }
    fn peer_to_peer(&self) -> std::result::Result<(), NoPeerToPeer> {
        Ok(())
    }
    fn max_interrupts(&self) -> u32 {
        0
    }
    fn set_interrupts(&self, _: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(())
    }
    fn release_requested(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn bus_error(&self) -> Option<&crate::transport::event::Event> {
        None
    }

    fn reset(&self) -> Result<()> {
        Ok(())
    }
}

/// Reads a command's memory as a controller does (Base 4.1.1 and 4.1.2): the address of every
/// byte, dword by dword.
fn walk(data: &DataPointer, len: u64, memory: &DmaMemory) -> Vec<u64> {
    let mut dwords = Vec::new();
    let mut add = |start: u64, len: u64| dwords.extend((start..start + len).step_by(4));
    let list = |iova: u64| (iova - memory.iova(0)) as usize;
    if data.sgl {
        let descriptor = |words: [U64; 2]| SglDescriptor::read_from_bytes(words.as_bytes()).expect("16 bytes");
        let first = descriptor(data.dptr.map(U64::new));
        if first.kind == sgl::DATA_BLOCK {
            add(first.address.get(), first.len.get().into());
        } else {
            assert_eq!((first.kind, first.len.get() as usize % DESCRIPTOR), (sgl::LAST_SEGMENT, 0));
            for n in 0..first.len.get() as usize / DESCRIPTOR {
                let block: SglDescriptor = memory.read(list(first.address.get()) + n * DESCRIPTOR);
                assert_eq!(block.kind, sgl::DATA_BLOCK);
                add(block.address.get(), block.len.get().into());
            }
        }
        return dwords;
    }
    let mut left = len;
    let first = (PAGE - data.dptr[0] % PAGE).min(left);
    add(data.dptr[0], first);
    left -= first;
    let mut entry = data.dptr[1];
    if left > 0 && left <= PAGE {
        assert_eq!(entry % PAGE, 0);
        add(entry, left);
        return dwords;
    }
    while left > 0 {
        let value = memory.read::<U64>(list(entry)).get();
        assert_eq!(value % PAGE, 0, "only the first PRP has an offset");
        // The last entry of a page of the list points to more of it, where more is needed.
        if entry % PAGE == PAGE - 8 && left > PAGE {
            entry = value;
            continue;
        }
        add(value, left.min(PAGE));
        left -= left.min(PAGE);
        entry += 8;
    }
    dwords
}

fn limits(mdts_pages: u32, sgl: bool, block: u64) -> Limits {
    let mdts = (mdts_pages > 0).then(|| PAGE << (mdts_pages - 1));
    Limits::new(block, PAGE, mdts, sgl, 128 << 10)
}

fn dma() -> Arc<Dma> {
    Dma::new(Arc::new(NoController), PAGE)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn commands_name_the_requests_memory_in_order_within_all_limits(
        pieces in proptest::collection::vec((0..3usize, 0..30usize, 1..30usize, 0..8usize), 1..10),
        unit in prop_oneof![Just(4usize), Just(BLOCK), Just(4096)],
        mdts in 0..8u32,
        sgl in any::<bool>(),
        block in prop_oneof![Just(512u64), Just(4096)],
    ) {
        let dma = dma();
        let regions: Vec<_> = (0..3).map(|_| Region::allocate(REGION).expect("memory")).collect();
        // The third is not mapped.
        regions[..2].iter().for_each(|region| dma.map(region).expect("room"));
        let mut spans: Vec<Span> = pieces
            .iter()
            .map(|(region, start, len, grow)| regions[*region].span(start * unit..(start + (len << grow)) * unit))
            .filter(|span| span.offset + span.len <= REGION)
            .collect();
        // The request is made of whole blocks.
        let total: usize = spans.iter().map(|span| span.len).sum();
        let fill = total.next_multiple_of(block as usize) - total;
        spans.push(regions[0].span(0..fill + block as usize));
        let total = (total + fill) as u64 + block;

        let limits = limits(mdts, sgl, block);
        let list = dma.allocate(limits.list_len() * 3).expect("memory");
        let place = List { memory: &list, offset: limits.list_len() };
        let (mut cursor, mut named, mut entries) = (Cursor::default(), Vec::new(), Vec::new());
        let mut commands = 0;
        let mut bounced_directly_reachable = 0;
        while cursor.done < total {
            let mut memory = Vec::new();
            let cut = cut(&limits, &spans, &cursor, |region| dma.address(region), &mut memory);
            let (Cut::Direct(len) | Cut::Bounce(len)) = cut;
            prop_assert!(len > 0 && len % block == 0 && len <= limits.max_transfer.max(limits.bounce));
            let mut expected = Vec::new();
            cursor.walk(&spans, len as usize, |span, offset, range| {
                expected.extend((offset..offset + range.len()).step_by(4).map(|at| (Arc::as_ptr(&span.region), at)));
                Ok(())
            }).expect("nothing fails");
            prop_assert_eq!(expected.len() as u64 * 4, len);
            match cut {
                Cut::Direct(_) => {
                    let data = describe(&limits, &memory, &place, &mut entries);
                    prop_assert!(sgl || !data.sgl);
                    let addresses: Vec<u64> = expected.iter().map(|(region, at)| {
                        let region = regions.iter().find(|other| Arc::as_ptr(other) == *region).expect("one of ours");
                        dma.address(region).expect("direct memory is mapped") + *at as u64
                    }).collect();
                    prop_assert_eq!(walk(&data, len, &list), addresses);
                }
                Cut::Bounce(_) => {
                    let mapped = expected.iter().all(|(region, _)| !std::ptr::eq(*region, Arc::as_ptr(&regions[2])));
                    prop_assert!(len <= limits.bounce);
                    // Mapped memory goes by way of a bounce buffer a block at a time at most.
                    if mapped {
                        prop_assert_eq!(len, block);
                        bounced_directly_reachable += 1;
                    }
                }
            }
            named.extend(expected);
            cursor.advance(&spans, len);
            commands += 1;
        }
        prop_assert_eq!(cursor.done, total);
        prop_assert_eq!(named.len() as u64 * 4, total);
        // Blocks whose memory is in one piece, or joined at block boundaries, are never copied.
        if unit as u64 >= block {
            prop_assert_eq!(bounced_directly_reachable, 0);
        }
        prop_assert!(commands as u64 <= total / block);
        regions[..2].iter().for_each(|region| dma.unmap(region).expect("it was mapped"));
    }
}

#[test]
fn large_transfers_chain_their_lists_and_stay_within_what_qemu_takes() {
    let dma = dma();
    let region = Region::allocate(16 << 20).expect("memory");
    dma.map(&region).expect("room");
    let limits = limits(0, false, 512);
    assert_eq!((limits.max_transfer, limits.list_len()), (4 << 20, 8192));
    let list = dma.allocate(limits.list_len()).expect("memory");
    let place = List { memory: &list, offset: 0 };
    let address = |region: &Region| dma.address(region);
    let (mut memory, mut entries) = (Vec::new(), Vec::new());
    let mut largest = BTreeMap::new();
    for offset in [0, 512, 4092] {
        let span = [region.span(offset..offset + (8 << 20))];
        let Cut::Direct(len) = cut(&limits, &span, &Cursor::default(), address, &mut memory) else { panic!("it is mapped") };
        let data = describe(&limits, &memory, &place, &mut entries);
        assert_eq!(walk(&data, len, &list).len() as u64 * 4, len);
        largest.insert(offset, len);
    }
    // 1024 pages, of which the first may be cut short.
    assert_eq!(largest, BTreeMap::from([(0, 4 << 20), (512, (4 << 20) - 512), (4092, (4 << 20) - 4096)]));
    dma.unmap(&region).expect("it was mapped");
}

#[test]
fn lists_are_as_small_as_the_controllers_transfers() {
    // MDTS of one page: two PRPs, but room for SGL descriptors.
    assert_eq!(limits(1, true, 512).list_len(), SMALLEST_LIST);
    // 128 KiB: 33 pages.
    assert_eq!(limits(6, false, 512).list_len(), 256);
    // 1 MiB: 257 pages, half a page of entries.
    assert_eq!(limits(9, false, 512).list_len(), 2048);
    // 2 MiB: 513 pages, a page of entries exactly.
    assert_eq!(limits(10, false, 512).list_len(), 4096);
    assert_eq!(limits(11, false, 512).list_len(), 8192);
}
