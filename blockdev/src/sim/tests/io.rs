use zerocopy::little_endian::{U32, U64};

use super::super::status;
use super::host::{DATA, ENTRIES, Host, flush, prps, transfer, with_cid};
use crate::spec::Status;
use crate::spec::{NSID_ALL, PSDT_SGL, SglDescriptor, Sqe, admin, nvm, reg, sgl};
use crate::transport::Transport;

fn descriptor(kind: u8, address: u64, len: u32) -> SglDescriptor {
    SglDescriptor { address: U64::new(address), len: U32::new(len), kind, ..SglDescriptor::default() }
}

/// A command whose data pointer is this descriptor.
fn sgl_command(first: SglDescriptor) -> Sqe {
    let second = u64::from(first.len.get()) | u64::from(first.kind) << 56;
    Sqe { flags: PSDT_SGL, ..prps(first.address.get(), second) }
}

#[test]
fn data_is_found_by_one_prp_by_two_and_by_lists() {
    let mut host = Host::new("");
    let pages = |first: u64, count: u64| (first..first + count).map(|page| DATA + page * 4096).collect::<Vec<_>>();
    // The list is at page 100; its last entry before the end of a page leads on.
    host.store(100 * 4096, &pages(1, 7));
    host.store(101 * 4096 - 24, &[DATA + 4096, DATA + 2 * 4096, DATA + 102 * 4096]);
    host.store(102 * 4096, &pages(3, 5));
    let cases = [
        (1, prps(DATA, 0)),
        (7, prps(DATA + 512, 0)),
        (8, prps(DATA + 512, DATA + 4096)),
        (16, prps(DATA, DATA + 4096)),
        (24, prps(DATA, DATA + 100 * 4096)),
        (64, prps(DATA, DATA + 100 * 4096)),
        (60, prps(DATA + 2048, DATA + 100 * 4096)),
        (64, prps(DATA, DATA + 101 * 4096 - 24)),
    ];
    for (number, (blocks, pointer)) in cases.into_iter().enumerate() {
        let (byte, len) = (number as u8 + 1, blocks as usize * 512);
        let start = (pointer.dptr[0].get() - DATA) as usize;
        host.fill(0, 0xee, 8 * 4096);
        host.fill(start, byte, len);
        assert_eq!(host.io(transfer(nvm::WRITE, 0, blocks, pointer)), Status::SUCCESS, "case {number}");
        host.fill(0, 0, 8 * 4096);
        assert_eq!(host.io(transfer(nvm::READ, 0, blocks, pointer)), Status::SUCCESS);
        let mut expected = vec![0; 8 * 4096];
        expected[start..start + len].fill(byte);
        assert!(host.bytes(0, 8 * 4096) == expected, "case {number}: just these bytes are read");
        assert!(host.sim.contents(1, false)[..len].iter().all(|read| *read == byte), "case {number}");
    }
    assert_eq!(host.sim.dma_faults(), []);
}

#[test]
fn malformed_commands_are_refused_by_the_name_of_the_mistake() {
    let mut host = Host::new(",mdts=1,namespaces=2");
    host.store(4096, &[DATA + 8192 + 8, DATA]);
    let one = prps(DATA, 0);
    for (command, expected) in [
        (transfer(nvm::READ, 0, 1, prps(DATA + 2, 0)), status::PRP_OFFSET_INVALID),
        (transfer(nvm::READ, 0, 9, prps(DATA, DATA + 512)), status::PRP_OFFSET_INVALID),
        (transfer(nvm::READ, 0, 16, prps(DATA + 512, DATA + 4100)), status::PRP_OFFSET_INVALID),
        (transfer(nvm::READ, 0, 16, prps(DATA + 512, DATA + 4096)), status::PRP_OFFSET_INVALID),
        (transfer(nvm::READ, 0, 17, one), status::INVALID_FIELD), // MDTS is two pages
        (transfer(nvm::READ, 32768, 1, one), status::LBA_OUT_OF_RANGE),
        (transfer(nvm::WRITE, 32767, 2, one), status::LBA_OUT_OF_RANGE),
        (transfer(nvm::READ, u64::MAX, 2, one), status::LBA_OUT_OF_RANGE),
        (Sqe { nsid: U32::new(0), ..transfer(nvm::READ, 0, 1, one) }, status::INVALID_NAMESPACE),
        (Sqe { nsid: U32::new(3), ..transfer(nvm::READ, 0, 1, one) }, status::INVALID_NAMESPACE),
        (Sqe { nsid: U32::new(NSID_ALL), ..transfer(nvm::READ, 0, 1, one) }, status::INVALID_NAMESPACE),
        (Sqe { nsid: U32::new(NSID_ALL), ..flush() }, Status::SUCCESS),
        (Sqe { flags: 1, ..transfer(nvm::READ, 0, 1, one) }, status::INVALID_FIELD),
        (Sqe { flags: 3 << 6, ..transfer(nvm::READ, 0, 1, one) }, status::INVALID_FIELD),
        (transfer(0x7c, 0, 1, one), status::INVALID_OPCODE),
        (transfer(nvm::READ, 0, 1, prps(0x5000, 0)), status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(host.io(command), expected, "{command:?}");
    }
    assert_eq!(host.sim.dma_faults().len(), 1, "the last of them");
}

#[test]
fn sgls_say_where_data_is_and_what_is_wrong_with_them() {
    let mut host = Host::new("");
    let block = |offset: u64, len: u32| descriptor(sgl::DATA_BLOCK, DATA + offset, len);
    let segment = |kind, offset: u64, count: u32| descriptor(kind, DATA + offset, count * 16);
    let (list, more) = (0x80000, 0x81000);
    host.store_sgl(list, &[block(1, 500), block(9000, 12), segment(sgl::LAST_SEGMENT, more as u64, 1)]);
    host.store_sgl(more, &[block(4096, 512)]);
    host.fill(1, 1, 500);
    host.fill(9000, 2, 12);
    host.fill(4096, 3, 512);
    let command = |opcode, blocks, first| transfer(opcode, 0, blocks, sgl_command(first));
    assert_eq!(host.io(command(nvm::WRITE, 2, segment(sgl::SEGMENT, list as u64, 3))), Status::SUCCESS);
    assert!(host.sim.contents(1, false)[..1024] == [[1; 500].as_slice(), &[2; 12], &[3; 512]].concat());
    assert_eq!(host.io(command(nvm::READ, 2, block(20000, 1024))), Status::SUCCESS);
    assert!(host.bytes(20000, 1024) == [[1; 500].as_slice(), &[2; 12], &[3; 512]].concat());

    host.store_sgl(0x90000, &[segment(sgl::SEGMENT, more as u64, 1), block(0, 512)]);
    host.store_sgl(0x91000, &[block(0, 512), segment(sgl::LAST_SEGMENT, more as u64, 1)]);
    host.store_sgl(0x92000, &[segment(sgl::SEGMENT, 0x92000, 1)]);
    for (first, expected) in [
        (block(0, 511), status::SGL_LENGTH_INVALID),
        (block(0, 513), status::SGL_LENGTH_INVALID),
        (descriptor(sgl::BIT_BUCKET, 0, 512), status::SGL_TYPE_INVALID),
        (descriptor(0x01, DATA, 512), status::SGL_TYPE_INVALID),
        (segment(sgl::LAST_SEGMENT, 0x90000, 0), status::INVALID_SGL_SEGMENT),
        (descriptor(sgl::LAST_SEGMENT, DATA + 0x81000, 17), status::INVALID_SGL_SEGMENT),
        (segment(sgl::SEGMENT, 0x90000, 2), status::INVALID_SGL_SEGMENT),
        (segment(sgl::LAST_SEGMENT, 0x91000, 2), status::INVALID_SGL_SEGMENT),
        (segment(sgl::SEGMENT, more as u64, 1), status::INVALID_SGL_SEGMENT),
        (segment(sgl::SEGMENT, 0x92000, 1), status::INVALID_SGL_COUNT),
        (descriptor(sgl::LAST_SEGMENT, 0x5000, 16), status::DATA_TRANSFER_ERROR),
    ] {
        assert_eq!(host.io(command(nvm::READ, 1, first)), expected, "{first:?}");
    }
    let mut none = Host::new(",sgls=none");
    assert_eq!(none.io(command(nvm::READ, 1, block(0, 512))), status::INVALID_FIELD);
    let mut dword = Host::new(",sgls=dword");
    assert_eq!(dword.io(command(nvm::READ, 1, block(1, 512))), status::SGL_GRANULARITY_INVALID);
    assert_eq!(dword.io(command(nvm::READ, 1, block(4, 512))), Status::SUCCESS);
}

#[test]
fn zeroes_are_written_and_ranges_deallocated() {
    let mut host = Host::new(",lba=4096");
    host.fill(0, 5, 16 * 4096);
    let list: Vec<u64> = (1..16).map(|page| DATA + page * 4096).collect();
    host.store(0x80000, &list);
    assert_eq!(host.io(transfer(nvm::WRITE, 0, 16, prps(DATA, DATA + 0x80000))), Status::SUCCESS);
    assert_eq!(host.io(flush()), Status::SUCCESS);
    assert_eq!(host.io(transfer(nvm::WRITE_ZEROES, 2, 3, Sqe::default())), Status::SUCCESS);
    // Attributes and blocks, then the first block.
    host.store(0, &[1 << 32, 8, 2 << 32, 10, 1 << 32, 4096]);
    let deallocate = |ranges: u32, attributes| Sqe {
        opcode: nvm::DATASET_MANAGEMENT,
        nsid: U32::new(1),
        cdw10: U32::new(ranges - 1),
        cdw11: U32::new(attributes),
        ..prps(DATA, 0)
    };
    assert_eq!(host.io(deallocate(2, 1)), Status::SUCCESS);
    let zeroed = |host: &Host, durable| {
        let contents = host.sim.contents(1, durable);
        (0..16).filter(|block| contents[block * 4096..(block + 1) * 4096].iter().all(|byte| *byte == 0)).collect::<Vec<_>>()
    };
    assert_eq!(zeroed(&host, false), [2, 3, 4], "a hint changes nothing");
    assert_eq!(host.io(deallocate(2, nvm::DEALLOCATE)), Status::SUCCESS);
    assert_eq!(zeroed(&host, false), [2, 3, 4, 8, 10, 11]);
    assert!(zeroed(&host, true).is_empty(), "only the cache knows");
    assert_eq!(host.io(flush()), Status::SUCCESS);
    assert_eq!(zeroed(&host, true), [2, 3, 4, 8, 10, 11]);
    assert_eq!(host.io(deallocate(3, nvm::DEALLOCATE)), status::LBA_OUT_OF_RANGE);
    assert_eq!(host.io(transfer(nvm::WRITE_ZEROES, 4095, 2, Sqe::default())), status::LBA_OUT_OF_RANGE);
}

#[test]
fn the_cache_loses_what_was_not_made_durable() {
    let mut outcomes = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let mut host = Host::new(&format!(",seed={seed}"));
        let write = |lba, flags| {
            let command = transfer(nvm::WRITE, lba, 8, prps(DATA, 0));
            Sqe { cdw12: U32::new(command.cdw12.get() | flags), ..command }
        };
        host.fill(0, 1, 4096);
        assert_eq!(host.io(write(0, 0)), Status::SUCCESS);
        assert_eq!(host.io(flush()), Status::SUCCESS);
        assert_eq!(host.io(write(8, nvm::FUA)), Status::SUCCESS);
        for byte in [2, 3] {
            host.fill(0, byte, 4096);
            assert_eq!(host.io(write(0, 0)), Status::SUCCESS);
        }
        assert!(host.sim.contents(1, false)[..4096] == [3; 4096]);
        host.sim.power_cut();
        assert_eq!((host.status(), host.sim.read64(reg::CAP)), (u32::MAX, u64::MAX));
        host.sim.power_on();
        let contents = host.sim.contents(1, false);
        assert!(contents == host.sim.contents(1, true) && contents[4096..8192] == [1; 4096]);
        let mut kinds: Vec<u8> = contents[..4096].chunks(512).map(|block| block[0]).collect();
        assert!(contents[..4096].chunks(512).all(|block| block.iter().all(|byte| *byte == block[0])), "blocks are not torn");
        kinds.sort_unstable();
        kinds.dedup();
        outcomes.insert(kinds);
        host.enable();
    }
    let seen = |kinds: &[u8]| assert!(outcomes.contains(kinds), "{kinds:?} in {outcomes:?}");
    seen(&[1]); // lost
    seen(&[3]); // kept
    seen(&[1, 3]); // torn
    seen(&[2]); // an older version
}

#[test]
fn completions_wait_for_room_in_their_queue() {
    let mut host = Host::new("");
    let mut cids = Vec::new();
    for cid in 0..2 * ENTRIES as u16 {
        host.send(1, with_cid(cid, flush()));
    }
    while cids.len() < 2 * ENTRIES as usize {
        let before = cids.len();
        while let Some(completion) = host.poll(1) {
            cids.push(completion.cid.get());
        }
        assert!(cids.len() > before && cids.len() - before < ENTRIES as usize, "one entry stays free");
        host.acknowledge(1);
    }
    assert!(cids.is_sorted() && host.poll(1).is_none());
    assert_eq!(u32::from(host.sq_head), 2 * ENTRIES % ENTRIES);
}

#[test]
fn shadow_doorbells_replace_registers() {
    let mut host = Host::new(",dbbuf=on");
    let (values, indexes) = (0x40000, 0x41000);
    let config = |values: u64, indexes: u64| Sqe { opcode: admin::DOORBELL_BUFFER_CONFIG, ..prps(values, indexes) };
    assert_eq!(host.admin(config(DATA + 8, DATA)).0, status::PRP_OFFSET_INVALID);
    assert_eq!(host.admin(config(DATA + values, DATA + indexes)).0, Status::SUCCESS);
    assert_eq!(host.create(admin::CREATE_CQ, 2, 8, DATA, 1), Status::SUCCESS);
    assert_eq!(host.create(admin::CREATE_SQ, 2, 8, DATA + 4096, 2 << 16 | 1), Status::SUCCESS);
    // Two commands behind the shadow's back: what counts is the value in memory. Their opcode is
    // flush, of namespace 0.
    host.data.write_at(values as usize + 16, &[2, 0, 0, 0]).expect("inside");
    host.sim.write32(reg::sq_tail(2, 4), 1);
    assert_eq!(host.bytes(indexes as usize + 16, 4), [2, 0, 0, 0], "it knows of both");
    assert_eq!((host.bytes(14, 1)[0] & 1, host.bytes(30, 1)[0] & 1, host.bytes(46, 1)[0] & 1), (1, 1, 0));
    let mut without = Host::new("");
    assert_eq!(without.admin(config(DATA, DATA)).0, status::INVALID_OPCODE);
}
