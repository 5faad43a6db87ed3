//! Faults on demand: which commands of the software controller go wrong, when, and how. The first
//! fault that matches a command decides. As made, a fault hits every command of its kind, from the
//! first, for ever.
//!
//! In a DEVICE string: `fault=EFFECT[:on=KIND][:lba=FIRST-LAST][:skip=N][:times=N][:one-in=N]`, as
//! often as wanted, for example `fault=status=0x281:on=read:lba=100-199:times=1`.
use std::ops::RangeInclusive;
use std::time::Duration;

use super::random::Random;
use crate::device_name::duration;
use crate::spec::{admin, nvm};

/// What a [`Fault`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// Every I/O command (`io`; what a DEVICE string means if it says nothing).
    Io,
    /// `read`
    Read,
    /// `write`
    Write,
    /// `flush`
    Flush,
    /// `write-zeroes`
    WriteZeroes,
    /// Dataset Management (`deallocate`).
    Deallocate,
    /// Every admin command (`admin`).
    Admin,
    /// Identify (`identify`).
    Identify,
    /// The commands that make queues (`create`).
    CreateQueue,
    /// Set Features (`set-features`).
    SetFeatures,
    /// Get Log Page (`log-page`).
    LogPage,
    /// Abort (`abort`).
    Abort,
    /// Setting CC.EN (`enable`). Lost, delayed or fatal.
    Enable,
    /// Clearing CC.EN (`disable`). Lost.
    Disable,
    /// Shutdown by CC.SHN (`shutdown`). Lost.
    Shutdown,
}

/// Something that happens at the controller.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event<'a> {
    Io { opcode: u8, blocks: Option<&'a RangeInclusive<u64>> },
    Admin(u8),
    Enable,
    Disable,
    Shutdown,
}

impl On {
    fn matches(self, event: Event<'_>) -> bool {
        match event {
            Event::Io { opcode, .. } => match self {
                On::Io => true,
                On::Read => opcode == nvm::READ,
                On::Write => opcode == nvm::WRITE,
                On::Flush => opcode == nvm::FLUSH,
                On::WriteZeroes => opcode == nvm::WRITE_ZEROES,
                On::Deallocate => opcode == nvm::DATASET_MANAGEMENT,
                _ => false,
            },
            Event::Admin(opcode) => match self {
                On::Admin => opcode != admin::ASYNC_EVENT,
                On::Identify => opcode == admin::IDENTIFY,
                On::CreateQueue => matches!(opcode, admin::CREATE_CQ | admin::CREATE_SQ),
                On::SetFeatures => opcode == admin::SET_FEATURES,
                On::LogPage => opcode == admin::GET_LOG_PAGE,
                On::Abort => opcode == admin::ABORT,
                _ => false,
            },
            Event::Enable => self == On::Enable,
            Event::Disable => self == On::Disable,
            Event::Shutdown => self == On::Shutdown,
        }
    }

    fn parse(word: &str) -> Option<Self> {
        Some(match word {
            "io" => On::Io,
            "read" => On::Read,
            "write" => On::Write,
            "flush" => On::Flush,
            "write-zeroes" => On::WriteZeroes,
            "deallocate" => On::Deallocate,
            "admin" => On::Admin,
            "identify" => On::Identify,
            "create" => On::CreateQueue,
            "set-features" => On::SetFeatures,
            "log-page" => On::LogPage,
            "abort" => On::Abort,
            "enable" => On::Enable,
            "disable" => On::Disable,
            "shutdown" => On::Shutdown,
            _ => return None,
        })
    }
}

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The command does nothing and fails with this status code type and code (`status=0x281`).
    Status(u8, u8),
    /// It is done this much later (`delay=250ms`). It can be aborted meanwhile.
    Delay(Duration),
    /// It is done when [`super::SimController::release`] is called (`hold`). It can be aborted
    /// before.
    Hold,
    /// It never comes back, nor can it be aborted; but it may still be done: at
    /// [`super::SimController::release`] (`lose`).
    Lose,
    /// It is done, but its completion never comes (`lose-completion`).
    LoseCompletion,
    /// Its completion comes after those of the commands behind it (`reorder`).
    Reorder,
    /// Its completion comes twice (`duplicate`).
    Duplicate,
    /// A completion of a command that was never sent comes before its own (`bogus`).
    Bogus,
    /// The controller fails (CSTS.CFS) and does nothing until it is reset (`fatal`).
    Fatal,
    /// The controller is reset by something else than its driver, as after an error of the bus
    /// (`reset`).
    Reset,
    /// The controller is pulled out: registers read as all ones, for good (`vanish`).
    Vanish,
    /// Power is cut, before the command is done, until [`super::SimController::power_on`]
    /// (`power-cut`).
    PowerCut,
}

impl Effect {
    fn parse(word: &str) -> Option<Self> {
        Some(match word.split_once('=').unwrap_or((word, "")) {
            ("status", status) => {
                let status = u16::from_str_radix(status.strip_prefix("0x")?, 16).ok().filter(|status| *status < 0x800)?;
                Effect::Status((status >> 8) as u8, status as u8)
            }
            ("delay", time) => Effect::Delay(duration(time)?),
            ("hold", "") => Effect::Hold,
            ("lose", "") => Effect::Lose,
            ("lose-completion", "") => Effect::LoseCompletion,
            ("reorder", "") => Effect::Reorder,
            ("duplicate", "") => Effect::Duplicate,
            ("bogus", "") => Effect::Bogus,
            ("fatal", "") => Effect::Fatal,
            ("reset", "") => Effect::Reset,
            ("vanish", "") => Effect::Vanish,
            ("power-cut", "") => Effect::PowerCut,
            _ => return None,
        })
    }
}

/// Something that goes wrong, and when.
#[derive(Debug, Clone)]
pub struct Fault {
    on: On,
    effect: Effect,
    blocks: Option<RangeInclusive<u64>>,
    skip: u64,
    /// How often it still hits.
    times: u64,
    one_in: u64,
}

impl Fault {
    /// Hits everything of this kind.
    pub fn new(on: On, effect: Effect) -> Self {
        Self { on, effect, blocks: None, skip: 0, times: u64::MAX, one_in: 1 }
    }

    /// Only I/O commands that touch these logical blocks.
    pub fn within(self, blocks: RangeInclusive<u64>) -> Self {
        Self { blocks: Some(blocks), ..self }
    }

    /// Lets this many that it would hit pass first.
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }

    /// Hits so often at the most.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Hits once.
    pub fn once(self) -> Self {
        self.times(1)
    }

    /// Hits one in so many, by the controller's seed. Not 0.
    pub fn one_in(self, one_in: u64) -> Self {
        Self { one_in, ..self }
    }

    /// A fault as a DEVICE string gives it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(':');
        let mut fault = Fault::new(On::Io, Effect::parse(words.next()?)?);
        for word in words {
            let (name, value) = word.split_once('=')?;
            fault = match name {
                "on" => Self { on: On::parse(value)?, ..fault },
                "lba" => {
                    let (first, last) = value.split_once('-')?;
                    fault.within(first.parse().ok()?..=last.parse().ok()?)
                }
                "skip" => fault.after(value.parse().ok()?),
                "times" => fault.times(value.parse().ok()?),
                "one-in" => fault.one_in(value.parse().ok().filter(|one_in| *one_in > 0)?),
                _ => return None,
            };
        }
        Some(fault)
    }

    /// What it does to this event, if it is one that it waited for.
    pub(super) fn hit(&mut self, event: Event<'_>, random: &mut Random) -> Option<Effect> {
        let touches = match (&self.blocks, event) {
            (None, _) => true,
            (Some(of), Event::Io { blocks: Some(blocks), .. }) => of.start() <= blocks.end() && blocks.start() <= of.end(),
            (Some(_), _) => false,
        };
        if self.times == 0 || !self.on.matches(event) || !touches {
            return None;
        }
        if self.one_in > 1 && random.below(self.one_in) > 0 {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.times -= 1;
        Some(self.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_read_and_hits_what_it_says() {
        let mut random = Random::new(1);
        let mut fault = Fault::parse("status=0x281:on=read:lba=10-19:skip=1:times=2").expect("a fault");
        let mut hit = |opcode, first, last| fault.hit(Event::Io { opcode, blocks: Some(&(first..=last)) }, &mut random);
        assert_eq!(hit(nvm::WRITE, 10, 10), None);
        assert_eq!(hit(nvm::READ, 20, 29), None);
        assert_eq!(hit(nvm::READ, 0, 10), None, "it skips one");
        assert_eq!(hit(nvm::READ, 19, 30), Some(Effect::Status(2, 0x81)));
        assert_eq!(hit(nvm::READ, 0, 100), Some(Effect::Status(2, 0x81)));
        assert_eq!(hit(nvm::READ, 0, 100), None, "twice");
        for wrong in
            ["", "explode", "status=281", "status=0x800", "hold=1", "delay=soon", "hold:on=x", "hold:lba=5", "hold:one-in=0"]
        {
            assert!(Fault::parse(wrong).is_none(), "{wrong}");
        }
        assert_eq!(Fault::parse("lose:on=disable").map(|fault| (fault.on, fault.effect)), Some((On::Disable, Effect::Lose)));
    }
}
