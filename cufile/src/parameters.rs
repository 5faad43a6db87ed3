//! Parameters: what `cufile.json` would set, set by calls before the driver opens.
//!
//! They are kept and given back, and change nothing of how gpunvme moves bytes but the length of
//! batches. Like NVIDIA's library this one checks no range when they are set.

use crate::abi::{CONTROL_ALLOW_COMPAT, CONTROL_POLL};
use crate::failure::{Code, Result};
use crate::{driver, environment, fork, version};
use parking_lot::Mutex;

/// A number (`CUFileSizeTConfigParameter_t`) that is a property of the driver as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Size {
    MaxDirectIo = 5,
    MaxDeviceCache = 6,
    PerBufferCache = 7,
    MaxPinned = 8,
    Batch = 9,
    PollThreshold = 10,
    BatchTimeout = 11,
}

/// Each number: its value by default, and its limits where it has some. Sizes are in KiB, times in
/// milliseconds.
const SIZES: [(usize, Option<(usize, usize)>); 12] = [
    (0, None),
    (128, Some((1, 256))),
    (0, Some((0, 32))),
    (1024, Some((4, u32::MAX as usize))),
    (0, Some((0, 8))),
    (16384, Some((64, 16384))),
    (131_072, Some((0, u32::MAX as usize))),
    (1024, Some((64, 16384))),
    (33_554_432, Some((64, usize::MAX))),
    (128, Some((1, 256))),
    (4, Some((4, usize::MAX >> 10))),
    (5, Some((1, 1000))),
];

/// Places of switches (`CUFileBoolConfigParameter_t`).
const USE_POLL: usize = 0;
const ALLOW_COMPAT: usize = 1;
/// Those that are on by default.
const ON: [usize; 2] = [ALLOW_COMPAT, 6];
/// Switches of versions before 1.19, and all.
const SWITCHES: usize = 12;
const ALL_SWITCHES: usize = 14;

/// Places of texts (`CUFileStringConfigParameter_t`).
const LOG_FILE: usize = 1;
/// Texts of versions before 1.19, and all.
const TEXTS: usize = 3;
const ALL_TEXTS: usize = 4;

struct Values {
    sizes: [usize; SIZES.len()],
    switches: [bool; ALL_SWITCHES],
    texts: [Option<String>; ALL_TEXTS],
    posix_slabs: Vec<(usize, usize)>,
    gpu_slabs: Vec<(usize, usize)>,
}

static VALUES: Mutex<Option<Values>> = Mutex::new(None);

fn with<T>(use_them: impl FnOnce(&mut Values) -> T) -> T {
    use_them(VALUES.lock().get_or_insert_with(|| Values {
        sizes: SIZES.map(|(usual, _)| usual),
        switches: std::array::from_fn(|at| ON.contains(&at)),
        texts: [Some(String::new()), None, Some(String::new()), Some("DC_V1".into())],
        posix_slabs: Vec::new(),
        gpu_slabs: Vec::new(),
    }))
}

/// A number.
pub fn size(which: Size) -> usize {
    with(|values| values.sizes[which as usize])
}

/// What a number may be.
pub fn limits(which: Size) -> Option<(usize, usize)> {
    SIZES[which as usize].1
}

/// The switches that are properties of the driver.
pub fn control_flags() -> u32 {
    with(|values| {
        let flag = |at: usize, flag| if values.switches[at] { flag } else { 0 };
        flag(USE_POLL, CONTROL_POLL) | flag(ALLOW_COMPAT, CONTROL_ALLOW_COMPAT)
    })
}

fn known(which: u32, count: usize) -> Result<usize> {
    check_process()?;
    let which = which as usize;
    if which < count { Ok(which) } else { Err(Code::InvalidValue.into()) }
}

fn check_process() -> Result<()> {
    if fork::is_forked() { Err(Code::DriverNotInitialized.into()) } else { Ok(()) }
}

fn while_closed() -> Result<()> {
    check_process()?;
    if driver::is_open() { Err(Code::DriverAlreadyOpen.into()) } else { Ok(()) }
}

/// The number of a number, as C asks for it.
///
/// # Errors
/// [`Code::InvalidValue`] where there is none.
pub fn get_size(which: u32) -> Result<usize> {
    known(which, SIZES.len()).map(|at| with(|values| values.sizes[at]))
}

/// # Errors
/// [`Code::InvalidValue`] where there is none; [`Code::DriverAlreadyOpen`].
pub fn set_size(which: u32, value: usize) -> Result<()> {
    let at = known(which, SIZES.len())?;
    while_closed()?;
    with(|values| values.sizes[at] = value);
    Ok(())
}

/// What a number may be.
///
/// # Errors
/// [`Code::InvalidValue`] where there is none, or it has no limits.
pub fn get_limits(which: u32) -> Result<(usize, usize)> {
    Ok(SIZES[known(which, SIZES.len())?].1.ok_or(Code::InvalidValue)?)
}

fn switches() -> usize {
    if version::counts_vectors() { ALL_SWITCHES } else { SWITCHES }
}

/// # Errors
/// [`Code::InvalidValue`] where there is none.
pub fn get_switch(which: u32) -> Result<bool> {
    known(which, switches()).map(|at| with(|values| values.switches[at]))
}

/// # Errors
/// As [`set_size`].
pub fn set_switch(which: u32, value: bool) -> Result<()> {
    let at = known(which, switches())?;
    while_closed()?;
    with(|values| values.switches[at] = value);
    Ok(())
}

fn texts() -> usize {
    if version::counts_vectors() { ALL_TEXTS } else { TEXTS }
}

/// # Errors
/// [`Code::InvalidValue`] where there is none, or no value: of the log's path that of the
/// environment counts too.
pub fn get_text(which: u32) -> Result<String> {
    let at = known(which, texts())?;
    let of_environment = || environment::text("CUFILE_LOGFILE_PATH").filter(|_| at == LOG_FILE);
    Ok(with(|values| values.texts[at].clone()).or_else(of_environment).ok_or(Code::InvalidValue)?)
}

/// # Errors
/// As [`set_size`]; [`Code::InvalidValue`] also for an empty one.
pub fn set_text(which: u32, value: String) -> Result<()> {
    let at = known(which, texts())?;
    if value.is_empty() {
        return Err(Code::InvalidValue.into());
    }
    while_closed()?;
    with(|values| values.texts[at] = Some(value));
    Ok(())
}

/// Which list of buffer sizes.
#[derive(Clone, Copy)]
pub enum Slabs {
    Posix,
    Gpu,
}

fn slabs(values: &mut Values, which: Slabs) -> &mut Vec<(usize, usize)> {
    match which {
        Slabs::Posix => &mut values.posix_slabs,
        Slabs::Gpu => &mut values.gpu_slabs,
    }
}

/// Sizes in KiB, and how many of each.
///
/// # Errors
/// [`Code::DriverAlreadyOpen`].
pub fn set_slabs(which: Slabs, list: Vec<(usize, usize)>) -> Result<()> {
    while_closed()?;
    with(|values| *slabs(values, which) = list);
    Ok(())
}

/// The list, which has to have so many entries.
///
/// # Errors
/// [`Code::InvalidValue`] where it has not.
pub fn get_slabs(which: Slabs, len: usize) -> Result<Vec<(usize, usize)>> {
    check_process()?;
    let list = with(|values| slabs(values, which).clone());
    if list.len() == len { Ok(list) } else { Err(Code::InvalidValue.into()) }
}
