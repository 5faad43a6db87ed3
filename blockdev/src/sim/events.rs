//! Asynchronous events (Base 5.2). It guards that an event of a kind is reported once, until the
//! driver has read the log page that goes with it.
use std::collections::VecDeque;

use super::controller::Controller;
use super::status;
use crate::spec::Status;
use crate::spec::{async_event, log_page};

/// Requests that the driver may leave outstanding.
pub(super) const LIMIT: u8 = 4;

/// An event: its type, what it says, and the log page that goes with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Raised {
    kind: u8,
    info: u8,
    page: u8,
}

impl Raised {
    pub(super) const INVALID_DOORBELL: Self = Self { kind: 0, info: 0, page: log_page::ERROR };
    pub(super) const INVALID_DOORBELL_VALUE: Self = Self { kind: 0, info: 1, page: log_page::ERROR };
    pub(super) const TEMPERATURE: Self = Self { kind: 1, info: 1, page: log_page::SMART };
    pub(super) const NAMESPACE_CHANGED: Self = Self { kind: 2, info: 0, page: log_page::CHANGED_NAMESPACES };
}

#[derive(Default)]
pub(super) struct Events {
    /// Identifiers of the requests outstanding.
    pub(super) requests: VecDeque<u16>,
    raised: VecDeque<Raised>,
    /// Told, and not read up on yet.
    masked: Vec<u8>,
    /// The Async Event Configuration feature.
    pub(super) enabled: u32,
}

impl Controller {
    /// Something is worth telling, if the driver wants to know.
    pub(super) fn raise(&mut self, event: Raised) {
        let wanted = match event {
            Raised::TEMPERATURE => self.events.enabled & async_event::SMART_WARNINGS & 1 << 1 != 0,
            Raised::NAMESPACE_CHANGED => self.events.enabled & async_event::NAMESPACE_CHANGED != 0,
            _ => true,
        };
        if wanted && !self.events.raised.contains(&event) {
            self.events.raised.push_back(event);
        }
    }

    /// An Asynchronous Event Request came in.
    pub(super) fn request_event(&mut self, cid: u16) -> Result<(), Status> {
        if self.events.requests.len() > usize::from(LIMIT) - 1 {
            return Err(status::EVENT_LIMIT);
        }
        self.events.requests.push_back(cid);
        Ok(())
    }

    /// A log page was read.
    pub(super) fn unmask(&mut self, page: u8) {
        self.events.masked.retain(|masked| *masked != page);
    }

    /// Tells what there is to tell, behind the completions of the commands that led to it.
    pub(super) fn tell_events(&mut self) {
        let Events { requests, raised, masked, .. } = &mut self.events;
        let mut told = Vec::new();
        raised.retain(|event| {
            let tell = !masked.contains(&event.page) && !requests.is_empty();
            if tell {
                masked.push(event.page);
                told.extend(requests.pop_front().map(|cid| (cid, *event)));
            }
            !tell
        });
        for (cid, Raised { kind, info, page }) in told {
            self.complete(0, cid, Status::SUCCESS, u32::from(page) << 16 | u32::from(info) << 8 | u32::from(kind));
        }
    }
}
