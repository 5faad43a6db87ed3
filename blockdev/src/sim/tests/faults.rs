use std::time::Duration;

use zerocopy::little_endian::U32;

use super::super::{Effect, Fault, On, status};
use super::host::{DATA, Host, flush, prps, transfer, with_cid};
use crate::spec::Status;
use crate::spec::{Cqe, Sqe, admin, cc, csts, nvm, reg};
use crate::transport::Transport;

fn read(cid: u16) -> Sqe {
    with_cid(cid, transfer(nvm::READ, 0, 1, prps(DATA, 0)))
}

fn told(completion: Cqe) -> (u16, Status) {
    (completion.cid.get(), Status::from_completion(completion.status.get()))
}

fn abort(cid: u16) -> Sqe {
    Sqe { opcode: admin::ABORT, cdw10: U32::new(u32::from(cid) << 16 | 1), ..Sqe::default() }
}

#[test]
fn commands_fail_as_they_are_told_to() {
    let mut host = Host::new(",fault=status=0x281:on=read:lba=0-0:times=1");
    assert_eq!(host.io(transfer(nvm::READ, 1, 1, prps(DATA, 0))), Status::SUCCESS);
    assert_eq!(host.io(read(1)), status::UNRECOVERED_READ);
    assert_eq!(host.io(read(1)), Status::SUCCESS);
    assert_eq!(host.sim.hits(), 1);
}

#[test]
fn held_commands_are_done_when_released_and_can_be_aborted() {
    let mut host = Host::new("");
    host.sim.inject(Fault::new(On::Read, Effect::Hold).times(2));
    host.send(1, read(1));
    host.send(1, read(2));
    assert_eq!(host.run(1, with_cid(1, flush())), (status::ID_CONFLICT, 0));
    assert_eq!((host.sim.stalled(), host.admin(abort(3))), (2, (Status::SUCCESS, 1)));
    assert_eq!(host.admin(abort(2)), (Status::SUCCESS, 0));
    assert_eq!(told(host.wait(1)), (2, status::ABORT_REQUESTED));
    host.sim.release();
    assert_eq!(told(host.wait(1)), (1, Status::SUCCESS));

    host.sim.inject(Fault::new(On::Read, Effect::Delay(Duration::from_millis(20))).once());
    host.send(1, read(5));
    assert_eq!(host.io(with_cid(6, flush())), Status::SUCCESS, "others go first");
    assert_eq!(told(host.wait(1)), (5, Status::SUCCESS), "it comes by itself");

    host.sim.inject(Fault::new(On::Read, Effect::Hold).once());
    host.send(1, read(7));
    assert_eq!(host.create(admin::DELETE_SQ, 1, 0, 0, 0), Status::SUCCESS);
    assert_eq!(told(host.wait(1)), (7, status::SQ_DELETED));
}

#[test]
fn lost_commands_do_not_come_back_but_may_still_be_done() {
    let mut host = Host::new("");
    host.sim.inject(Fault::new(On::Write, Effect::Lose).once());
    host.fill(0, 9, 512);
    host.send(1, with_cid(1, transfer(nvm::WRITE, 0, 1, prps(DATA, 0))));
    assert_eq!((host.poll(1).is_none(), host.admin(abort(1)).1), (true, 1));
    host.sim.release();
    assert!(host.poll(1).is_none() && host.sim.contents(1, false)[0] == 9);
    host.sim.inject(Fault::new(On::Write, Effect::LoseCompletion).once());
    host.send(1, with_cid(2, transfer(nvm::WRITE, 1, 1, prps(DATA, 0))));
    assert!(host.poll(1).is_none() && host.sim.contents(1, false)[512] == 9);
}

#[test]
fn a_late_command_meets_the_iommu() {
    let mut host = Host::new("");
    host.sim.inject(Fault::new(On::Read, Effect::Hold));
    host.fill(0, 4, 512);
    host.send(1, read(1));
    host.sim.unmap(DATA, super::host::DATA_LEN).expect("unmapped");
    assert_eq!(host.sim.unmapped_in_flight(), 1);
    host.sim.release();
    assert_eq!(told(host.wait(1)), (1, status::DATA_TRANSFER_ERROR));
    assert_eq!((host.sim.dma_faults().len(), host.bytes(0, 512)), (1, vec![4; 512]));
}

#[test]
fn completions_come_twice_late_or_for_nothing() {
    let mut host = Host::new("");
    host.sim.inject(Fault::new(On::Read, Effect::Duplicate).once());
    host.sim.inject(Fault::new(On::Read, Effect::Bogus).once());
    host.send(1, read(1));
    assert_eq!((told(host.wait(1)), told(host.wait(1))), ((1, Status::SUCCESS), (1, Status::SUCCESS)));
    host.send(1, read(2));
    assert_eq!((told(host.wait(1)).0, told(host.wait(1))), (!2, (2, Status::SUCCESS)));
}

#[test]
fn a_fatal_controller_recovers_by_a_reset_and_a_vanished_one_does_not() {
    let mut host = Host::new("");
    host.sim.inject(Fault::new(On::Read, Effect::Fatal).once());
    host.send(1, read(1));
    assert_eq!((host.status(), host.poll(1).is_none()), (csts::RDY | csts::CFS, true));
    host.disable();
    host.enable();
    host.create_io_queues();
    assert_eq!(host.io(read(1)), Status::SUCCESS);
    host.sim.inject(Fault::new(On::Read, Effect::Vanish).once());
    host.send(1, read(1));
    host.sim.reset().expect("a reset");
    assert_eq!((host.status(), host.sim.read32(reg::VS)), (u32::MAX, u32::MAX));
}

#[test]
fn the_controller_hangs_on_its_way_up_and_down() {
    let mut host = Host::off(",fault=lose:on=enable:times=1,fault=lose:on=disable:times=1,fault=lose:on=shutdown");
    host.configure();
    host.sim.write32(reg::CC, cc::EN);
    assert_eq!(host.status(), 0, "it never gets ready");
    host.sim.write32(reg::CC, 0);
    host.sim.reset().expect("a reset");
    host.enable();
    host.sim.write32(reg::CC, cc::EN | cc::SHN_NORMAL);
    assert_eq!(host.status() & csts::SHST_MASK, csts::SHST_OCCURRING);
    host.disable();
    assert_eq!(host.status(), 0);
    host.sim.inject(Fault::new(On::Enable, Effect::Fatal).once());
    host.configure();
    host.sim.write32(reg::CC, cc::EN);
    assert_eq!(host.status(), csts::CFS);
}
