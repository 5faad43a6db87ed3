use std::os::fd::AsFd;

use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

use super::super::status;
use super::host::{DATA, ENTRIES, Host, flush, prps, transfer, with_cid};
use crate::spec::Status;
use crate::spec::identify::{IdentifyController, IdentifyNamespace};
use crate::spec::log::{ErrorEntry, SmartLog};
use crate::spec::{Cap, NSID_ALL, NSSR_MAGIC, Sqe, admin, cc, cns, csts, feature, log_page, nvm, reg};
use crate::transport::Transport;

#[test]
fn the_registers_say_what_was_asked_for() {
    let mut host = Host::off(",entries=32,dstrd=2,io-queues=3");
    let cap = Cap(host.sim.read64(reg::CAP));
    assert_eq!((cap.max_queue_entries(), cap.doorbell_stride(), cap.timeout_ms()), (32, 16, 500));
    assert!(cap.nvm_command_set() && cap.subsystem_reset());
    assert_eq!((cap.min_page(), cap.max_page()), (4096, 65536));
    assert_eq!(host.sim.registers_len(), 8192);
    assert_eq!((host.status(), host.sim.read32(reg::CC)), (0, 0));
    host.configure();
    assert_eq!(host.sim.read64(reg::ASQ), 0x10_0000);
}

#[test]
fn enabling_with_wrong_settings_is_fatal_until_the_next_time() {
    type Break = fn(&Host);
    let wrong: [Break; 5] = [
        |host| host.sim.write64(reg::ASQ, 0x10_0010),
        |host| host.sim.write64(reg::ACQ, 0x10_1800),
        |host| host.sim.write32(reg::AQA, 0),
        |host| host.sim.write32(reg::CC, 5 << cc::MPS_SHIFT),
        |host| host.sim.write32(reg::CC, 1 << 4),
    ];
    for (number, wrong) in wrong.into_iter().enumerate() {
        let mut host = Host::off("");
        host.configure();
        wrong(&host);
        host.sim.write32(reg::CC, host.sim.read32(reg::CC) | cc::EN);
        assert_eq!(host.status(), csts::CFS, "mistake {number}");
        host.disable();
        assert_eq!(host.status(), 0);
        host.enable();
    }
}

#[test]
fn queues_that_cannot_be_reached_are_fatal() {
    let mut host = Host::off("");
    host.configure();
    host.sim.write64(reg::ASQ, 0x100_0000);
    host.sim.write32(reg::CC, cc::EN);
    assert_eq!(host.status(), csts::RDY);
    host.send(0, flush());
    assert_eq!(host.status(), csts::RDY | csts::CFS);
    assert_eq!(host.sim.dma_faults().len(), 1);
    host.disable();
    host.enable();
}

#[test]
fn shutdown_and_resets_end_what_was() {
    let mut host = Host::new("");
    host.fill(0, 7, 512);
    assert_eq!(host.io(transfer(nvm::WRITE, 0, 1, prps(DATA, 0))), Status::SUCCESS);
    assert!(host.sim.contents(1, true)[..512] == [0; 512] && host.sim.contents(1, false)[..512] == [7; 512]);
    host.sim.write32(reg::CC, host.sim.read32(reg::CC) | cc::SHN_NORMAL);
    assert_eq!(host.status(), csts::RDY | csts::SHST_COMPLETE);
    assert!(host.sim.contents(1, true)[..512] == [7; 512], "a shutdown writes the cache back");
    host.send(1, flush());
    assert!(host.poll(1).is_none(), "nothing is done any more");
    host.disable();
    assert_eq!(host.status(), 0);

    host.enable();
    host.create_io_queues();
    host.sim.write32(reg::NSSR, NSSR_MAGIC);
    assert_eq!((host.status(), host.sim.read32(reg::CC)), (csts::NSSRO, 0));
    host.sim.write32(reg::CSTS, csts::NSSRO);
    host.enable();
    host.sim.reset().expect("a reset");
    assert_eq!((host.status(), host.sim.read64(reg::ASQ)), (0, 0));
}

#[test]
fn identify_tells_of_controller_and_namespaces() {
    let mut host = Host::new(",namespaces=3,lba=4096,mdts=5");
    let (status, bytes) = host.identify(cns::CONTROLLER, 0);
    let controller = IdentifyController::read_from_bytes(&bytes).expect("4096 bytes");
    assert_eq!((status, controller.mdts, controller.nn.get(), controller.vwc & 1), (Status::SUCCESS, 5, 3, 1));
    let (_, bytes) = host.identify(cns::NAMESPACE, 3);
    let namespace = IdentifyNamespace::read_from_bytes(&bytes).expect("4096 bytes");
    assert_eq!((namespace.nsze.get(), namespace.lbaf[namespace.format()].lbads), (4096, 12));
    let (_, bytes) = host.identify(cns::ACTIVE_NAMESPACES, 1);
    assert_eq!(bytes[..12], [2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0], "those behind the one that is named");
    let (_, bytes) = host.identify(cns::DESCRIPTORS, 2);
    assert_eq!((bytes[0], bytes[1], bytes[11]), (1, 8, 2));
    for (cns, nsid, expected) in [
        (cns::NAMESPACE, 4, status::INVALID_NAMESPACE),
        (cns::NAMESPACE, 0, status::INVALID_NAMESPACE),
        (cns::ACTIVE_NAMESPACES, NSID_ALL, status::INVALID_NAMESPACE),
        (0x77, 1, status::INVALID_FIELD),
    ] {
        assert_eq!(host.identify(cns, nsid).0, expected, "CNS {cns:#x} of {nsid}");
    }
    let misaligned = Sqe { opcode: admin::IDENTIFY, cdw10: U32::new(1), ..prps(DATA + 2, 0) };
    assert_eq!(host.admin(misaligned).0, status::PRP_OFFSET_INVALID);
    let unmapped = Sqe { opcode: admin::IDENTIFY, cdw10: U32::new(1), ..prps(0, 0) };
    assert_eq!(host.admin(unmapped).0, status::DATA_TRANSFER_ERROR);
    assert_eq!(host.admin(Sqe { opcode: 0x7f, ..Sqe::default() }).0, status::INVALID_OPCODE);
    assert_eq!(host.admin(Sqe { flags: 1 << 6, ..unmapped }).0, status::INVALID_FIELD, "no SGLs there");
}

#[test]
fn queues_are_made_and_deleted_in_order_or_refused() {
    let mut host = Host::new(",io-queues=2,entries=64,vectors=3");
    let interrupts = |vector: u32| vector << 16 | 3;
    for (opcode, id, entries, base, cdw11, expected) in [
        (admin::CREATE_CQ, 0, 8, DATA, 1, status::INVALID_QUEUE_ID),
        (admin::CREATE_CQ, 1, 8, DATA, 1, status::INVALID_QUEUE_ID),
        (admin::CREATE_CQ, 3, 8, DATA, 1, status::INVALID_QUEUE_ID),
        (admin::CREATE_CQ, 2, 1, DATA, 1, status::INVALID_QUEUE_SIZE),
        (admin::CREATE_CQ, 2, 65, DATA, 1, status::INVALID_QUEUE_SIZE),
        (admin::CREATE_CQ, 2, 8, DATA, 0, status::INVALID_FIELD),
        (admin::CREATE_CQ, 2, 8, DATA + 8, 1, status::PRP_OFFSET_INVALID),
        (admin::CREATE_CQ, 2, 8, DATA, interrupts(3), status::INVALID_VECTOR),
        (admin::CREATE_SQ, 2, 8, DATA, 2 << 16 | 1, status::CQ_INVALID),
        (admin::CREATE_SQ, 2, 8, DATA, 1, status::INVALID_QUEUE_ID),
        (admin::CREATE_SQ, 1, 8, DATA, 1 << 16 | 1, status::INVALID_QUEUE_ID),
        (admin::CREATE_SQ, 2, 65, DATA, 1 << 16 | 1, status::INVALID_QUEUE_SIZE),
        (admin::DELETE_CQ, 1, 0, 0, 0, status::INVALID_QUEUE_DELETION),
        (admin::DELETE_CQ, 0, 0, 0, 0, status::INVALID_QUEUE_ID),
        (admin::DELETE_SQ, 2, 0, 0, 0, status::INVALID_QUEUE_ID),
        (admin::DELETE_SQ, 1, 0, 0, 0, Status::SUCCESS),
        (admin::DELETE_CQ, 1, 0, 0, 0, Status::SUCCESS),
        (admin::CREATE_CQ, 1, 64, DATA, interrupts(2), Status::SUCCESS),
    ] {
        let status = host.create(opcode, id, entries, base, cdw11);
        assert_eq!(status, expected, "opcode {opcode:#x} of queue {id} with {entries} entries, {cdw11:#x}");
    }
}

#[test]
fn features_are_set_and_kept() {
    let mut host = Host::new(",io-queues=5");
    let mut set = |feature: u8, value: u32, save: u32| {
        let cdw10 = U32::new(save << 31 | u32::from(feature));
        let set = Sqe { opcode: admin::SET_FEATURES, cdw10, cdw11: U32::new(value), ..Sqe::default() };
        let get = Sqe { opcode: admin::GET_FEATURES, cdw10: U32::new(feature.into()), ..Sqe::default() };
        let status = host.admin(set).0;
        (status, host.admin(get).1)
    };
    assert_eq!(set(feature::VOLATILE_WRITE_CACHE, 0, 0), (Status::SUCCESS, 0));
    assert_eq!(set(feature::TEMPERATURE_THRESHOLD, 350, 0), (Status::SUCCESS, 350));
    assert_eq!(set(feature::NUMBER_OF_QUEUES, 0, 0), (status::SEQUENCE_ERROR, 4 << 16 | 4), "there are queues already");
    assert_eq!(set(feature::VOLATILE_WRITE_CACHE, 1, 1).0, status::NOT_SAVEABLE);
    assert_eq!(set(0x7e, 1, 0).0, status::INVALID_FIELD);
    host.disable();
    host.enable();
    let grant = Sqe { opcode: admin::SET_FEATURES, cdw10: U32::new(7), cdw11: U32::new(0xfffe_fffe), ..Sqe::default() };
    assert_eq!(host.admin(grant), (Status::SUCCESS, 4 << 16 | 4));
    assert_eq!(host.admin(Sqe { cdw11: U32::new(0xffff), ..grant }).0, status::INVALID_FIELD);
}

#[test]
fn logs_tell_of_errors_and_health() {
    let mut host = Host::new("");
    assert_eq!(host.io(transfer(nvm::READ, 1 << 40, 1, prps(DATA, 0))), status::LBA_OUT_OF_RANGE);
    assert_eq!(host.io(transfer(nvm::WRITE, 0, 8, prps(DATA, 0))), Status::SUCCESS);
    assert_eq!(host.log(log_page::ERROR, 128, false), Status::SUCCESS);
    let entry = ErrorEntry::read_from_bytes(&host.bytes(0, 64)).expect("64 bytes");
    assert_eq!((entry.error_count.get(), entry.sq_id.get()), (1, 1));
    assert_eq!(Status::from_completion(entry.status.get()), status::LBA_OUT_OF_RANGE);
    assert_eq!(host.bytes(64, 64), [0; 64], "there is one entry");
    assert_eq!(host.log(log_page::SMART, 512, false), Status::SUCCESS);
    let smart = SmartLog::read_from_bytes(&host.bytes(0, 512)).expect("512 bytes");
    assert_eq!((smart.host_writes.get(), smart.data_units_written.get(), smart.error_log_entries.get()), (1, 1, 1));
    assert_eq!(host.log(log_page::FIRMWARE_SLOT, 512, false), Status::SUCCESS);
    assert_eq!(host.log(0xc0, 512, false), status::INVALID_LOG_PAGE);
}

#[test]
fn events_are_told_once_until_their_log_is_read() {
    let mut host = Host::new("");
    let request = |cid| with_cid(cid, Sqe { opcode: admin::ASYNC_EVENT, ..Sqe::default() });
    let configure = Sqe { opcode: admin::SET_FEATURES, cdw10: U32::new(0x0b), cdw11: U32::new(0x102), ..Sqe::default() };
    assert_eq!(host.admin(configure).0, Status::SUCCESS);
    (10..14).for_each(|cid| host.send(0, request(cid)));
    assert!(host.poll(0).is_none());
    assert_eq!(host.run(0, request(14)).0, status::EVENT_LIMIT);
    host.sim.set_temperature(400);
    let told = host.wait(0);
    assert_eq!((told.cid.get(), told.dw0.get()), (10, 0x02_0101));
    host.sim.set_temperature(401);
    assert!(host.poll(0).is_none(), "told once");
    assert_eq!(host.log(log_page::SMART, 512, true), Status::SUCCESS);
    assert!(host.poll(0).is_none(), "the log was read, but the event retained");
    assert_eq!(host.log(log_page::SMART, 512, false), Status::SUCCESS);
    assert_eq!((host.wait(0).cid.get(), host.bytes(0, 1)[0]), (11, 2));

    host.sim.write32(reg::sq_tail(9, 4), 1);
    assert_eq!(host.wait(0).dw0.get(), 0x01_0000, "a doorbell of no queue");
    assert_eq!(host.log(log_page::ERROR, 64, false), Status::SUCCESS);
    host.sim.write32(reg::sq_tail(1, 4), ENTRIES);
    assert_eq!(host.wait(0).dw0.get(), 0x01_0100, "a value that makes no sense");
}

#[test]
fn formatting_erases_and_changes_the_block() {
    let mut host = Host::new(",namespaces=2");
    host.fill(0, 3, 4096);
    assert_eq!(host.io(transfer(nvm::WRITE, 0, 8, prps(DATA, 0))), Status::SUCCESS);
    let format =
        |nsid: u32, cdw10: u32| Sqe { opcode: admin::FORMAT_NVM, nsid: U32::new(nsid), cdw10: U32::new(cdw10), ..Sqe::default() };
    assert_eq!(host.admin(format(1, 2)).0, status::INVALID_FORMAT);
    assert_eq!(host.admin(format(3, 1)).0, status::INVALID_NAMESPACE);
    assert_eq!(host.admin(format(1, 1 << 5 | 1)).0, status::INVALID_FIELD, "protection information");
    assert_eq!(host.admin(format(1, 1)).0, Status::SUCCESS);
    let identity = IdentifyNamespace::read_from_bytes(&host.identify(cns::NAMESPACE, 1).1).expect("4096 bytes");
    assert_eq!((identity.lbaf[identity.format()].lbads, identity.nsze.get()), (12, 4096));
    assert!(host.sim.contents(1, true).iter().all(|byte| *byte == 0));
    assert_eq!(host.log(log_page::CHANGED_NAMESPACES, 4096, false), Status::SUCCESS);
    assert_eq!(host.bytes(0, 8), [1, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn interrupts_are_signalled_for_queues_that_have_them() {
    let mut host = Host::new("");
    let events: Vec<_> =
        (0..2).map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).expect("an eventfd")).collect();
    host.sim.set_interrupts(&events.iter().map(|event| event.as_fd()).collect::<Vec<_>>()).expect("set up");
    let count = |event: usize| {
        let mut bytes = [0; 8];
        rustix::io::read(&events[event], &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
    };
    assert_eq!(host.create(admin::CREATE_CQ, 2, 8, DATA, 1 << 16 | 3), Status::SUCCESS);
    assert_eq!((count(0), count(1)), (1, 0), "the admin queue has vector 0");
    assert_eq!(host.create(admin::CREATE_SQ, 2, 8, DATA + 4096, 2 << 16 | 1), Status::SUCCESS);
    host.sim.write32(reg::sq_tail(2, 4), 1); // whatever command is there
    assert_eq!((count(0), count(1)), (1, 1));
    assert_eq!(host.io(flush()), Status::SUCCESS);
    assert_eq!((count(0), count(1)), (0, 0), "queue 1 was made without");
    host.sim.set_interrupts(&[]).expect("turned off");
}
