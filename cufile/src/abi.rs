//! cuFile's structures and numbers, as its documentation and its header of versions 1.11 to 1.20
//! have them. `tests/tests/cufile` compares them with the header of NVIDIA's wheel.

use std::ffi::{c_char, c_int, c_long, c_uint, c_void};

/// What most functions return: a number of [`crate::failure::Code`], and a `CUresult`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub code: c_int,
    pub cuda: c_int,
}

/// `CUfileDescr_t`: the file to be registered.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    pub kind: c_uint,
    /// A file descriptor in its first four bytes.
    pub handle: u64,
    pub operations: *const c_void,
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
pub const KIND_FD: c_uint = 1;
/// `CU_FILE_HANDLE_TYPE_USERSPACE_FS`.
pub const KIND_USERSPACE: c_uint = 3;

/// `CUfileDrvProps_t`. Sizes are in KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    pub major_version: c_uint,
    pub minor_version: c_uint,
    pub poll_threshold: usize,
    pub max_direct_io: usize,
    pub status_flags: c_uint,
    pub control_flags: c_uint,
    pub features: c_uint,
    pub max_device_cache: c_uint,
    pub per_buffer_cache: c_uint,
    pub max_pinned: c_uint,
    pub max_batch: c_uint,
    pub batch_timeout_ms: c_uint,
}

/// `CU_FILE_NVME_SUPPORTED`, as a bit of `status_flags`.
pub const STATUS_NVME: c_uint = 1 << 4;
/// `CU_FILE_USE_POLL_MODE` and `CU_FILE_ALLOW_COMPAT_MODE`, as bits of `control_flags`.
pub const CONTROL_POLL: c_uint = 1 << 0;
pub const CONTROL_ALLOW_COMPAT: c_uint = 1 << 1;
/// `CU_FILE_BATCH_IO_SUPPORTED`, `CU_FILE_STREAMS_SUPPORTED`, `CU_FILE_PARALLEL_IO_SUPPORTED`.
pub const FEATURES: c_uint = 1 << 1 | 1 << 2 | 1 << 3;

/// `CUfileIOParams_t`: one request of a batch.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchRequest {
    pub mode: c_uint,
    pub memory: *mut c_void,
    pub file_offset: i64,
    pub memory_offset: i64,
    pub size: usize,
    pub file: *mut c_void,
    pub opcode: c_uint,
    pub cookie: *mut c_void,
}

/// `CUFILE_BATCH`.
pub const MODE_BATCH: c_uint = 1;
/// `CUFILE_READ` and `CUFILE_WRITE`.
pub const OPCODE_READ: c_uint = 0;
pub const OPCODE_WRITE: c_uint = 1;

/// `CUfileIOEvents_t`: how a request of a batch ended.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatchEvent {
    pub cookie: *mut c_void,
    pub status: c_uint,
    /// Bytes, or a negative error.
    pub result: usize,
}

/// `CUFILE_CANCELED`, `CUFILE_COMPLETE`, `CUFILE_FAILED`.
pub const EVENT_CANCELED: c_uint = 0x08;
pub const EVENT_COMPLETE: c_uint = 0x10;
pub const EVENT_FAILED: c_uint = 0x40;

/// `CU_FILE_STREAM_FIXED_BUF_OFFSET`, `_FILE_OFFSET`, `_FILE_SIZE`, and all that there are.
pub const STREAM_FIXED_MEMORY_OFFSET: c_uint = 1;
pub const STREAM_FIXED_FILE_OFFSET: c_uint = 2;
pub const STREAM_FIXED_SIZE: c_uint = 4;
pub const STREAM_FLAGS: c_uint = 15;

/// `CUfileIOVec_t`, of `cuFileReadv` and `cuFileWritev`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Vector {
    pub memory: *mut c_void,
    pub len: usize,
}

/// `CUfileOpCounter_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counter {
    pub ok: u64,
    pub failed: u64,
}

/// `CUfileStatsLevel1_t` of versions before 1.19.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Level1 {
    pub read: Counter,
    pub write: Counter,
    pub handle_register: Counter,
    pub handle_deregister: Counter,
    pub buffer_register: Counter,
    pub buffer_deregister: Counter,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_bytes_per_second: u64,
    pub write_bytes_per_second: u64,
    pub read_average_us: u64,
    pub write_average_us: u64,
    pub reads_per_second: u64,
    pub writes_per_second: u64,
    pub read_sum_us: u64,
    pub write_sum_us: u64,
    pub batch_submit: Counter,
    pub batch_complete: Counter,
    pub batch_setup: Counter,
    pub batch_cancel: Counter,
    pub batch_destroy: Counter,
    pub batch_enqueued: Counter,
    pub batch_posix_enqueued: Counter,
    pub batch_processed: Counter,
    pub batch_posix_processed: Counter,
    pub batch_nvfs: Counter,
    pub batch_p2p: Counter,
    pub batch_aio: Counter,
    pub batch_io_uring: Counter,
    pub batch_mixed: Counter,
    pub batch_total: Counter,
    pub batch_read_bytes: u64,
    pub batch_write_bytes: u64,
    pub batch_read_bytes_per_second: u64,
    pub batch_write_bytes_per_second: u64,
    pub batch_submit_average_us: u64,
    pub batch_complete_average_us: u64,
    pub batch_submits_per_second: u64,
    pub batch_completes_per_second: u64,
    pub batch_submit_sum_us: u64,
    pub batch_complete_sum_us: u64,
    pub last_batch_read_bytes: u64,
    pub last_batch_write_bytes: u64,
}

/// What versions from 1.19 on have behind [`Level1`]: of readv and writev.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Vectored {
    pub read: Counter,
    pub write: Counter,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_bytes_per_second: u64,
    pub write_bytes_per_second: u64,
    pub read_average_us: u64,
    pub write_average_us: u64,
    pub reads_per_second: u64,
    pub writes_per_second: u64,
    pub read_sum_us: u64,
    pub write_sum_us: u64,
}

/// What `CUfileStatsLevel2_t` has behind level 1: how many requests had up to 2^n KiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    pub read: [u64; 32],
    pub write: [u64; 32],
}

/// GPUs that `CUfileStatsLevel3_t` has room for.
pub const GPUS: usize = 16;

/// What `CUfileStatsLevel3_t` has behind level 2.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PerGpu {
    pub gpus: u32,
    pub gpu: [GpuStatistics; GPUS],
}

/// `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuStatistics {
    pub uuid: [c_char; 16],
    pub read_bytes: u64,
    pub read_bytes_per_second: u64,
    pub read_utilization: u64,
    pub read_us: u64,
    pub reads: u64,
    pub p2p_reads: u64,
    pub nvfs_reads: u64,
    pub posix_reads: u64,
    pub unaligned_reads: u64,
    pub routed_reads: u64,
    pub sparse_regions: u64,
    pub inline_regions: u64,
    pub failed_reads: u64,
    pub write_bytes: u64,
    pub write_bytes_per_second: u64,
    pub write_utilization: u64,
    pub write_us: u64,
    pub writes: u64,
    pub p2p_writes: u64,
    pub nvfs_writes: u64,
    pub posix_writes: u64,
    pub unaligned_writes: u64,
    pub routed_writes: u64,
    pub failed_writes: u64,
    pub buffers: u64,
    pub buffers_ok: u64,
    pub buffers_failed: u64,
    pub buffers_freed: u64,
    pub buffer_bytes: u64,
}

/// `struct timespec`.
pub type Timespec = libc::timespec;

// Sizes and places, as C has them on x86-64 and aarch64.
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Status>() == 8 && size_of::<Descriptor>() == 24 && offset_of!(Descriptor, operations) == 16);
    assert!(size_of::<Properties>() == 56 && offset_of!(Properties, status_flags) == 24);
    assert!(offset_of!(Properties, features) == 32 && offset_of!(Properties, batch_timeout_ms) == 52);
    assert!(size_of::<BatchRequest>() == 64 && offset_of!(BatchRequest, memory) == 8 && offset_of!(BatchRequest, size) == 32);
    assert!(offset_of!(BatchRequest, file) == 40 && offset_of!(BatchRequest, cookie) == 56);
    assert!(size_of::<BatchEvent>() == 24 && offset_of!(BatchEvent, result) == 16);
    assert!(size_of::<Level1>() == 512 && size_of::<Vectored>() == 112 && size_of::<Sizes>() == 512);
    assert!(size_of::<GpuStatistics>() == 248 && offset_of!(PerGpu, gpu) == 8);
    assert!(size_of::<Level1>() + size_of::<Sizes>() + size_of::<PerGpu>() == 5000);
    assert!(size_of::<c_long>() == 8 && size_of::<libc::off_t>() == 8);
};
