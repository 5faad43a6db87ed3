//! Memory barriers between this processor and a device that reads and writes memory. It guards the
//! order in which the two see each other's writes, which the fences of Rust promise among
//! processors only: on Arm those reach the inner shareable domain, and a device is in the outer
//! one.
//!
//! What each has to be is what Linux uses for the same: `dma_wmb`, `dma_rmb` and `dma_mb`, and the
//! barriers inside `writel` and `readl` (arch/x86/include/asm/barrier.h,
//! arch/arm64/include/asm/barrier.h and io.h). The Arm variants were assembled and never run on a
//! device.

/// Everything written to memory before is visible to the device before anything written after: a
/// doorbell, a shadow doorbell.
#[inline]
pub(crate) fn before_doorbell() {
    #[cfg(target_arch = "x86_64")]
    // The processor keeps stores in order; this holds the compiler.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier touches neither registers nor the stack.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags))
    };
}

/// What the device wrote before what was just read is visible to what is read after: the entry
/// behind a phase tag, the data behind a completion.
#[inline]
pub(crate) fn after_device_write() {
    #[cfg(target_arch = "x86_64")]
    // The processor keeps loads in order; this holds the compiler.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `before_doorbell`.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags))
    };
}

/// What was written before is visible to the device before what is read after was read.
#[inline]
pub(crate) fn between_write_and_read() {
    #[cfg(target_arch = "x86_64")]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as in `before_doorbell`.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags))
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "the NVMe driver does not know this processor's barriers towards devices: add them to blockdev/src/transport/barrier.rs"
);
