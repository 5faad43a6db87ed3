//! The settings of the driver, from the environment: `SOFTWARE_CUDA=gpus=2,copy-takes=500`.

use std::path::PathBuf;
use std::time::Duration;

/// The settings. Each has its name in the environment beside it.
pub struct Settings {
    /// `gpus`: how many there are.
    pub gpus: usize,
    /// `version`: the driver API's, such as 12040.
    pub version: i32,
    /// `init`: the result of `cuInit`.
    pub init: Option<u32>,
    /// `memory`: bytes of each GPU.
    pub memory: u64,
    /// `copy-fails`: the copy, counted from 1, whose call fails with
    /// `CUDA_ERROR_ECC_UNCORRECTABLE`.
    pub copy_fails: Option<u64>,
    /// `wait-fails`: the wait for a word, counted from 1, whose call fails with
    /// `CUDA_ERROR_NOT_SUPPORTED`.
    pub wait_fails: Option<u64>,
    /// `query-fails`: the query of an event, counted from 1, whose call fails with
    /// `CUDA_ERROR_OUT_OF_MEMORY`, which ends no context.
    pub query_fails: Option<u64>,
    /// `copy-takes`: microseconds that a copy or a kernel takes at least.
    pub copy_takes: Duration,
    /// `copies-by-processor`: the most bytes that a call copies out of memory which is registered
    /// read-only itself, before it comes back.
    pub copies_by_processor: usize,
    /// `call-takes`: nanoseconds that a call takes at least which gives a stream something to do;
    /// on an H200 that is about 1200.
    pub call_takes: Duration,
    /// `dma-buf`: 0 where exports are refused.
    pub dma_buf: bool,
    /// `writes-ordering`: for whom GPUs order the writes of others (0, 100 or 200).
    pub writes_ordering: i32,
    /// `c2c`: 1 where processor and GPU are linked by NVLink-C2C.
    pub c2c: bool,
    /// `streams-reused`: 1 where a new stream gets the handle of one that was destroyed.
    pub streams_reused: bool,
    /// `bar`, as often as there are any: files that device memory lies in, one allocation each, and
    /// none elsewhere then. The memory behind a PCI device's resource file
    /// (`/sys/bus/pci/devices/ADDRESS/resource2`) is what other devices reach.
    pub bars: Vec<PathBuf>,
}

impl Settings {
    /// Reads them.
    ///
    /// # Panics
    /// Where there is no such setting: a test that asks for what does not exist proves nothing.
    pub fn from_environment() -> Settings {
        let mut settings = Settings {
            gpus: 1,
            version: 12_040,
            init: None,
            memory: 16 << 30,
            copy_fails: None,
            wait_fails: None,
            query_fails: None,
            copy_takes: Duration::ZERO,
            copies_by_processor: 16 << 10,
            call_takes: Duration::ZERO,
            dma_buf: true,
            writes_ordering: 100,
            c2c: false,
            streams_reused: false,
            bars: Vec::new(),
        };
        let text = std::env::var("SOFTWARE_CUDA").unwrap_or_default();
        for setting in text.split(',').filter(|setting| !setting.is_empty()) {
            let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
            if name == "bar" {
                settings.bars.push(value.into());
                continue;
            }
            let value: u64 = value.parse().unwrap_or_else(|_| panic!("SOFTWARE_CUDA: {setting:?} needs a number"));
            match name {
                "gpus" => settings.gpus = value as usize,
                "version" => settings.version = value as i32,
                "init" => settings.init = Some(value as u32),
                "memory" => settings.memory = value,
                "copy-fails" => settings.copy_fails = Some(value),
                "wait-fails" => settings.wait_fails = Some(value),
                "query-fails" => settings.query_fails = Some(value),
                "copy-takes" => settings.copy_takes = Duration::from_micros(value),
                "copies-by-processor" => settings.copies_by_processor = value as usize,
                "call-takes" => settings.call_takes = Duration::from_nanos(value),
                "dma-buf" => settings.dma_buf = value != 0,
                "streams-reused" => settings.streams_reused = value != 0,
                "c2c" => settings.c2c = value != 0,
                "writes-ordering" => settings.writes_ordering = value as i32,
                _ => panic!("SOFTWARE_CUDA: there is no setting {name:?}"),
            }
        }
        settings
    }
}
