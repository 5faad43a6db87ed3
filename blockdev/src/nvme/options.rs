//! The driver's options, as a DEVICE string gives them: `vfio:0000:01:00.0,ns=2,depth=64`.
use std::time::Duration;

use crate::Result;
use crate::device_name::{DeviceName, duration};

/// How a queue's completions are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompletionMode {
    /// Looking all the time while commands are in flight.
    Poll,
    /// Sleeping until the controller interrupts.
    Interrupt,
    /// Looking for a moment, then sleeping.
    Adaptive,
}

/// The driver's own options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// `ns=N`: the namespace. Default 1.
    pub(crate) namespace: u32,
    /// `depth=N`: commands in flight in a queue, 1 to 65534. Default 256; less where the
    /// controller takes less.
    pub(crate) depth: u32,
    /// `queues=N`: the most I/O queues. Default: one a CPU, and four for threads with one of their
    /// own, at most 64.
    pub(crate) queues: u32,
    /// `completion=poll|interrupt|adaptive`. Default: adaptive.
    pub(crate) completion: CompletionMode,
    /// `timeout=SECONDS` (or `250ms`): when a command is given up for lost. Default 30 s.
    pub(crate) timeout: Duration,
    /// `sgl=on|off`: whether SGLs are used where the controller has them. Default: on.
    pub(crate) sgl: bool,
}

impl Options {
    /// Takes the driver's options out of a DEVICE string.
    pub(crate) fn take(name: &mut DeviceName<'_>) -> Result<Self> {
        let number =
            |range: std::ops::RangeInclusive<u32>| move |value: &str| value.parse().ok().filter(|number| range.contains(number));
        let cpus = std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u32);
        let completion = |value: &str| match value {
            "poll" => Some(CompletionMode::Poll),
            "interrupt" => Some(CompletionMode::Interrupt),
            "adaptive" => Some(CompletionMode::Adaptive),
            _ => None,
        };
        let switch = |value: &str| match value {
            "on" => Some(true),
            "off" => Some(false),
            _ => None,
        };
        Ok(Self {
            namespace: name.take_as("ns", "a namespace's number", number(1..=u32::MAX - 1))?.unwrap_or(1),
            depth: name.take_as("depth", "a number from 1 to 65534", number(1..=65534))?.unwrap_or(256),
            queues: name.take_as("queues", "a number from 1 to 65534", number(1..=65534))?.unwrap_or((cpus + 4).min(64)),
            completion: name
                .take_as("completion", "poll, interrupt or adaptive", completion)?
                .unwrap_or(CompletionMode::Adaptive),
            timeout: name.take_as("timeout", "seconds, or a number and ms", duration)?.unwrap_or(Duration::from_secs(30)),
            sgl: name.take_as("sgl", "on or off", switch)?.unwrap_or(true),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(device: &str) -> Result<(String, Options)> {
        let mut name = DeviceName::parse(device).expect("the backend is there");
        let options = Options::take(&mut name)?;
        name.finish()?;
        Ok((name.target.into(), options))
    }

    #[test]
    fn a_device_string_says_what_and_how() {
        let (target, options) = parse("vfio:0000:01:00.0").expect("no options");
        assert_eq!((target.as_str(), options.namespace, options.depth), ("0000:01:00.0", 1, 256));
        assert_eq!((options.completion, options.timeout, options.sgl), (CompletionMode::Adaptive, Duration::from_secs(30), true));
        let (_, options) = parse("vfio:x,sgl=off,ns=2,depth=8,queues=3,completion=poll,timeout=250ms").expect("all options");
        assert_eq!((options.namespace, options.depth, options.queues, options.sgl), (2, 8, 3, false));
        assert_eq!((options.completion, options.timeout), (CompletionMode::Poll, Duration::from_millis(250)));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (options, named) in [
            ("ns=0", "ns=0"),
            ("depth=65535", "depth=65535"),
            ("timeout=0", "timeout=0"),
            ("timeout=1.5", "timeout=1.5"),
            ("completion=", "completion="),
            ("sgl=maybe", "sgl=maybe"),
            ("colour=red", "colour"),
            ("ns=1,ns=2", "\"ns\""),
            ("", "\"\""),
        ] {
            let error = parse(&format!("vfio:x,{options}")).expect_err(options).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
