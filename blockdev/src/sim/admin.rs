//! Admin commands (Base 5): queues, features, Identify, logs, Abort, Format and shadow doorbells,
//! each refused with the status that the specification has for what is wrong with it.
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromZeros, IntoBytes};

use super::controller::{Controller, VERSION};
use super::events::{LIMIT, Raised};
use super::logs::{ERRORS, FIRMWARE};
use super::options::Sgls;
use super::queues::{CompletionQueue, Shadow, SubmissionQueue};
use super::{data, status};
use crate::spec::Status;
use crate::spec::identify::{IdentifyController, IdentifyNamespace, IdentifyNvmController, oacs, oncs, sgls};
use crate::spec::{NSID_ALL, Sqe, admin, async_event, cns, feature};

/// Sizes of a logical block, by LBA format.
const FORMATS: [u64; 2] = [512, 4096];
/// A queue lies in one piece of memory.
const CONTIGUOUS: u32 = 1;
const INTERRUPTS: u32 = 1 << 1;
/// Features that are there and change nothing here (Base figure 317): arbitration, power
/// management, error recovery, interrupt coalescing, interrupt vector configuration, write
/// atomicity.
const INERT_FEATURES: [u8; 6] = [0x01, 0x02, 0x05, 0x08, 0x09, 0x0a];

/// Dword 0 of the completion; `None` where the completion comes some day.
type Done = Result<Option<u32>, Status>;

impl Controller {
    pub(super) fn admin(&mut self, sqe: &Sqe) -> Done {
        // Neither fused nor with SGLs, which admin commands over PCI Express never have.
        if sqe.flags != 0 {
            return Err(status::INVALID_FIELD);
        }
        let done = |result: Result<(), Status>| result.map(|()| Some(0));
        match sqe.opcode {
            admin::CREATE_CQ => done(self.create_cq(sqe)),
            admin::CREATE_SQ => done(self.create_sq(sqe)),
            admin::DELETE_CQ => done(self.delete_cq(sqe)),
            admin::DELETE_SQ => done(self.delete_sq(sqe)),
            admin::IDENTIFY => done(self.identify(sqe)),
            admin::GET_LOG_PAGE => done(self.get_log_page(sqe)),
            admin::SET_FEATURES => self.set_features(sqe).map(Some),
            admin::GET_FEATURES => self.get_features(sqe).map(Some),
            admin::ABORT => Ok(Some(self.abort(sqe))),
            admin::ASYNC_EVENT => self.request_event(sqe.cid.get()).map(|()| None),
            admin::FORMAT_NVM => done(self.format(sqe)),
            admin::DOORBELL_BUFFER_CONFIG if self.options.shadow_doorbells => done(self.configure_shadow(sqe)),
            _ => Err(status::INVALID_OPCODE),
        }
    }

    /// Checks what both kinds of queue have in common: identifier, entries and base address.
    fn new_queue(&self, sqe: &Sqe, exists: bool) -> Result<(u16, u32, u64), Status> {
        let (id, entries) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) + 1);
        let base = sqe.dptr[0].get();
        if id == 0 || id > self.options.io_queues || exists {
            return Err(status::INVALID_QUEUE_ID);
        }
        if entries < 2 || entries > self.options.entries {
            return Err(status::INVALID_QUEUE_SIZE);
        }
        if sqe.cdw11.get() & CONTIGUOUS == 0 {
            return Err(status::INVALID_FIELD); // CAP.CQR
        }
        if !base.is_multiple_of(self.page()) {
            return Err(status::PRP_OFFSET_INVALID);
        }
        Ok((id, entries, base))
    }

    /// Where the shadow of a doorbell is, counted from the first doorbell.
    fn shadow_of(&self, number: u64) -> Shadow {
        let offset = number * self.stride() as u64;
        self.shadow.map(|(values, event_indexes)| (values + offset, event_indexes + offset))
    }

    fn create_cq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let (id, entries, base) = self.new_queue(sqe, self.cqs.contains_key(&(sqe.cdw10.get() as u16)))?;
        let vector = (sqe.cdw11.get() >> 16) as u16;
        let interrupts = sqe.cdw11.get() & INTERRUPTS != 0;
        if interrupts && u32::from(vector) >= self.options.vectors {
            return Err(status::INVALID_VECTOR);
        }
        let queue = CompletionQueue::new(base, entries, interrupts.then_some(vector), self.shadow_of(2 * u64::from(id) + 1));
        self.cqs.insert(id, queue);
        Ok(())
    }

    fn create_sq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let cq = (sqe.cdw11.get() >> 16) as u16;
        if cq == 0 {
            return Err(status::INVALID_QUEUE_ID);
        }
        if !self.cqs.contains_key(&cq) {
            return Err(status::CQ_INVALID);
        }
        let (id, entries, base) = self.new_queue(sqe, self.sqs.contains_key(&(sqe.cdw10.get() as u16)))?;
        self.sqs.insert(id, SubmissionQueue::new(base, entries, cq, self.shadow_of(2 * u64::from(id))));
        Ok(())
    }

    fn delete_sq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let id = sqe.cdw10.get() as u16;
        if id == 0 || !self.sqs.contains_key(&id) {
            return Err(status::INVALID_QUEUE_ID);
        }
        // What is in flight is over, and says so.
        let ended: Vec<_> = self.stalled.extract_if(.., |stalled| stalled.sq == id).collect();
        for stalled in ended.iter().filter(|stalled| stalled.is_abortable()) {
            self.complete(id, stalled.sqe.cid.get(), status::SQ_DELETED, 0);
        }
        self.sqs.remove(&id);
        Ok(())
    }

    fn delete_cq(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let id = sqe.cdw10.get() as u16;
        if id == 0 || !self.cqs.contains_key(&id) {
            return Err(status::INVALID_QUEUE_ID);
        }
        if self.sqs.values().any(|queue| queue.cq == id) {
            return Err(status::INVALID_QUEUE_DELETION);
        }
        self.cqs.remove(&id);
        Ok(())
    }

    /// Gives the driver data that it asked for.
    fn answer(&self, sqe: &Sqe, bytes: &[u8]) -> Result<(), Status> {
        let mut rest = bytes;
        for (iova, len) in data::locate(&self.iommu, sqe, bytes.len(), self.page(), Sgls::None)? {
            let (part, behind) = rest.split_at(len);
            self.iommu.write_bytes(iova, part).map_err(|_| status::DATA_TRANSFER_ERROR)?;
            rest = behind;
        }
        Ok(())
    }

    fn identify(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let nsid = sqe.nsid.get();
        match sqe.cdw10.get() as u8 {
            cns::CONTROLLER => self.answer(sqe, self.identify_controller().as_bytes()),
            cns::NAMESPACE => {
                let namespace = self.namespace(nsid)?;
                self.answer(sqe, self.identify_namespace(namespace).as_bytes())
            }
            cns::ACTIVE_NAMESPACES => {
                if nsid >= NSID_ALL - 1 {
                    return Err(status::INVALID_NAMESPACE);
                }
                let active = (nsid + 1..=self.namespaces.len() as u32).flat_map(u32::to_le_bytes);
                let mut list: Vec<u8> = active.collect();
                list.resize(4096, 0);
                self.answer(sqe, &list)
            }
            cns::DESCRIPTORS => {
                let namespace = self.namespace(nsid)?;
                let identity = self.identify_namespace(namespace);
                let mut list = vec![0; 4096];
                list[..4].copy_from_slice(&[1, 8, 0, 0]); // an EUI-64 of 8 bytes
                list[4..12].copy_from_slice(&identity.eui64);
                list[12..16].copy_from_slice(&[2, 16, 0, 0]); // an NGUID of 16 bytes
                list[16..32].copy_from_slice(&identity.nguid);
                self.answer(sqe, &list)
            }
            cns::COMMAND_SET_CONTROLLER if sqe.cdw11.get() >> 24 == 0 => {
                let mut identity = IdentifyNvmController::new_zeroed();
                identity.dmrsl = U32::new(self.options.dmrsl);
                self.answer(sqe, identity.as_bytes())
            }
            _ => Err(status::INVALID_FIELD),
        }
    }

    fn identify_controller(&self) -> IdentifyController {
        let mut identity = IdentifyController::new_zeroed();
        let text = |field: &mut [u8], text: &[u8]| {
            field.fill(b' ');
            field[..text.len()].copy_from_slice(text);
        };
        text(&mut identity.sn, b"SIM0");
        text(&mut identity.mn, b"gpunvme software controller");
        identity.fr = *FIRMWARE;
        identity.mdts = self.options.mdts;
        identity.ver = U32::new(VERSION);
        identity.rtd3e = U32::new(self.options.rtd3e);
        identity.oaes = U32::new(async_event::NAMESPACE_CHANGED);
        identity.cntrltype = 1; // an I/O controller
        let shadow = if self.options.shadow_doorbells { oacs::DOORBELL_BUFFER } else { 0 };
        identity.oacs = U16::new(oacs::FORMAT | shadow);
        (identity.acl, identity.aerl, identity.elpe) = (3, LIMIT - 1, (ERRORS - 1) as u8);
        (identity.wctemp, identity.cctemp) = (U16::new(343), U16::new(353));
        identity.tnvmcap = U128::new(self.namespaces.iter().map(|medium| u128::from(medium.len())).sum());
        (identity.sqes, identity.cqes) = (0x66, 0x44);
        identity.nn = U32::new(self.namespaces.len() as u32);
        identity.oncs = U16::new(oncs::DATASET_MANAGEMENT | oncs::WRITE_ZEROES);
        // Bits 2:1: a flush may go to all namespaces.
        identity.vwc = u8::from(self.options.volatile_cache) | 3 << 1;
        identity.sgls = U32::new(match self.options.sgls {
            Sgls::None => 0,
            Sgls::Dword => sgls::DWORDS,
            Sgls::Byte => sgls::BYTES,
        });
        let nqn = b"nqn.2014-08.org.nvmexpress:uuid:73696d00-0000-4000-8000-000000000000";
        identity.subnqn[..nqn.len()].copy_from_slice(nqn);
        identity
    }

    fn identify_namespace(&self, namespace: usize) -> IdentifyNamespace {
        let medium = &self.namespaces[namespace];
        let mut identity = IdentifyNamespace::new_zeroed();
        let blocks = U64::new(medium.len() / medium.block());
        (identity.nsze, identity.ncap, identity.nuse) = (blocks, blocks, blocks);
        identity.nlbaf = FORMATS.len() as u8 - 1;
        identity.flbas = FORMATS.iter().position(|block| *block == medium.block()).expect("one of the formats") as u8;
        identity.dlfeat = 1;
        identity.nvmcap = U128::new(medium.len().into());
        identity.nsattr = u8::from(self.read_only);
        (identity.nguid[0], identity.eui64[0]) = (0x53, 0x53);
        (identity.nguid[15], identity.eui64[7]) = (namespace as u8 + 1, namespace as u8 + 1);
        for (format, block) in identity.lbaf.iter_mut().zip(FORMATS) {
            format.lbads = block.ilog2() as u8;
        }
        identity
    }

    fn get_log_page(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let (low, high) = (sqe.cdw10.get() >> 16, sqe.cdw11.get() & 0xffff);
        let len = ((u64::from(high) << 16 | u64::from(low)) + 1) * 4;
        let offset = u64::from(sqe.cdw13.get()) << 32 | u64::from(sqe.cdw12.get());
        let page = self.log_page(sqe.cdw10.get() as u8, sqe.cdw10.get() >> 15 & 1 == 1)?;
        if offset % 4 != 0 || offset > page.len() as u64 || len > 1 << 20 {
            return Err(status::INVALID_FIELD);
        }
        let mut bytes = page[offset as usize..].to_vec();
        bytes.resize(len as usize, 0);
        self.answer(sqe, &bytes)
    }

    fn set_features(&mut self, sqe: &Sqe) -> Result<u32, Status> {
        let value = sqe.cdw11.get();
        if sqe.cdw10.get() >> 31 == 1 {
            return Err(status::NOT_SAVEABLE);
        }
        match sqe.cdw10.get() as u8 {
            feature::NUMBER_OF_QUEUES => {
                if value & 0xffff == 0xffff || value >> 16 == 0xffff {
                    return Err(status::INVALID_FIELD);
                }
                if self.sqs.len() > 1 || self.cqs.len() > 1 {
                    return Err(status::SEQUENCE_ERROR);
                }
                Ok(self.granted())
            }
            feature::VOLATILE_WRITE_CACHE if self.options.volatile_cache => {
                self.write_cache = value & 1 == 1;
                Ok(0)
            }
            feature::ASYNC_EVENT_CONFIG => {
                self.events.enabled = value;
                Ok(0)
            }
            feature::TEMPERATURE_THRESHOLD => {
                self.logs.threshold = value as u16;
                self.check_temperature();
                Ok(0)
            }
            inert if INERT_FEATURES.contains(&inert) => Ok(0),
            _ => Err(status::INVALID_FIELD),
        }
    }

    fn get_features(&mut self, sqe: &Sqe) -> Result<u32, Status> {
        match sqe.cdw10.get() as u8 {
            feature::NUMBER_OF_QUEUES => Ok(self.granted()),
            feature::VOLATILE_WRITE_CACHE if self.options.volatile_cache => Ok(self.write_cache.into()),
            feature::ASYNC_EVENT_CONFIG => Ok(self.events.enabled),
            feature::TEMPERATURE_THRESHOLD => Ok(self.logs.threshold.into()),
            inert if INERT_FEATURES.contains(&inert) => Ok(0),
            _ => Err(status::INVALID_FIELD),
        }
    }

    /// I/O queues, completion and submission, each counted from 0.
    fn granted(&self) -> u32 {
        let queues = u32::from(self.options.io_queues) - 1;
        queues << 16 | queues
    }

    /// It is now so warm.
    pub(super) fn check_temperature(&mut self) {
        if self.logs.temperature >= self.logs.threshold {
            self.raise(Raised::TEMPERATURE);
        }
    }

    /// Gives whether the command was not aborted (Base 5.1): only what is stalled can be.
    fn abort(&mut self, sqe: &Sqe) -> u32 {
        let (sq, cid) = (sqe.cdw10.get() as u16, (sqe.cdw10.get() >> 16) as u16);
        let named = |stalled: &super::queues::Stalled| stalled.sq == sq && stalled.sqe.cid.get() == cid;
        match self.stalled.iter().position(|stalled| named(stalled) && stalled.is_abortable()) {
            Some(at) => {
                self.stalled.remove(at);
                self.complete(sq, cid, status::ABORT_REQUESTED, 0);
                0
            }
            None => 1,
        }
    }

    fn format(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let (format, rest) = ((sqe.cdw10.get() & 0xf) as usize, sqe.cdw10.get() >> 4);
        let block = *FORMATS.get(format).ok_or(status::INVALID_FORMAT)?;
        // Metadata and protection information there are none; secure erase is no different from
        // erasing.
        if rest & 0x1f != 0 || rest >> 5 & 7 > 2 {
            return Err(status::INVALID_FIELD);
        }
        let namespaces = match sqe.nsid.get() {
            NSID_ALL => 0..self.namespaces.len(),
            nsid => self.namespace(nsid).map(|namespace| namespace..namespace + 1)?,
        };
        if self.read_only {
            return Err(status::WRITE_PROTECTED);
        }
        for namespace in namespaces {
            self.namespaces[namespace].format(block).map_err(|_| status::WRITE_FAULT)?;
            self.logs.changed.push(namespace as u32 + 1);
        }
        self.raise(Raised::NAMESPACE_CHANGED);
        Ok(())
    }

    /// Shadow doorbells (Base 5.8) of the queues that are made from now on.
    fn configure_shadow(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let [values, event_indexes] = [sqe.dptr[0].get(), sqe.dptr[1].get()];
        if values % self.page() != 0 || event_indexes % self.page() != 0 {
            return Err(status::PRP_OFFSET_INVALID);
        }
        self.shadow = Some((values, event_indexes));
        Ok(())
    }
}
