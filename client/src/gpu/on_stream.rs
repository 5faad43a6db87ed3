//! The entry points of requests in the order of a CUDA stream.

use super::answer::Pending;
use super::request::Segment;
use super::stream::observer::Observer;
use super::transfers::Transfers;
use crate::error::Result;
use crate::file::File;
use gpunvme_abi::Direction;

impl Transfers {
    /// Puts a read into the order of a CUDA stream: it begins when the stream comes to it, and
    /// what is put into the stream afterwards sees the bytes.
    ///
    /// The stream goes on even if the read fails; [`Pending::wait`] tells. While it waits, calls
    /// that wait for the stream wait for the read. All that CUDA has to do for the read is in the
    /// stream when the call returns, so calls that wait for the whole GPU (`cudaFree`,
    /// `cuMemFree`) may be made meanwhile, in any thread.
    ///
    /// The call returns before the stream comes to the read, unless there is no room: CUDA takes a
    /// limited number of operations into a stream, of which a read takes two or three for each 512
    /// KiB (two for pinned host memory), and more where many small pieces are copied singly; and a
    /// GPU has 8 windows of 2 MiB of pinned memory, one for each stream that has requests to come
    /// to. A call that finds no room waits until streams went on.
    ///
    /// Where the read fails, or the file becomes shorter between the call and the read, what is in
    /// memory behind what was read is what was there before, bytes of the file, or zeros. Where a
    /// kernel of the application crashes, its context ends with all streams: such requests are
    /// answered with [`Cuda`] within a second. That is only so in the context that the CUDA runtime
    /// uses, the GPU's primary one: in one of the application's own (`cuCtxCreate`) they are never
    /// answered, and dropping the `Transfers` waits for them.
    ///
    /// # Safety
    /// `stream` is a `CUstream` or `cudaStream_t` of this process, which outlives the read; 0 is
    /// the default stream. As for [`Transfers::read`], from when the stream comes to the read
    /// until it has passed it.
    ///
    /// # Errors
    /// As [`Transfers::read`], if nothing was begun; [`StreamCaptured`]; [`Cuda`]
    /// where CUDA does not take all of it, and any segment may have changed in part then; later
    /// ones come with the answer. After an error of either kind the memory may still be in use
    /// until the stream has passed what was put into it.
    ///
    /// [`Cuda`]: crate::Error::Cuda
    /// [`StreamCaptured`]: crate::Error::StreamCaptured
    pub unsafe fn read_on_stream(&self, file: &File, segments: &[Segment], stream: usize) -> Result<Pending> {
        self.begin_on_stream(Direction::Read, file, segments, stream, None, false)
    }

    /// [`Transfers::read_on_stream`], with an observer: it may move the file offsets when the
    /// stream comes to the read, and is told the outcome before the stream goes on.
    ///
    /// Where offsets were moved, memory behind the end of the file keeps what it had, or gets
    /// zeros.
    ///
    /// # Safety
    /// As for [`Transfers::read_on_stream`].
    ///
    /// # Errors
    /// As [`Transfers::read_on_stream`]. Before the call returns one the observer may have been
    /// called, at most once for each of its functions: the stream may come to a part of the request
    /// before CUDA refuses the rest. It is not called afterwards.
    pub unsafe fn read_on_stream_with(
        &self,
        file: &File,
        segments: &[Segment],
        stream: usize,
        observer: impl Observer + 'static,
    ) -> Result<Pending> {
        self.begin_on_stream(Direction::Read, file, segments, stream, Some(Box::new(observer)), false)
    }

    /// Puts a write into the order of a CUDA stream, as [`Transfers::read_on_stream`] does: it
    /// writes what is in memory when the stream comes to it, and what is put into the stream
    /// afterwards may change the memory.
    ///
    /// # Safety
    /// As for [`Transfers::read_on_stream`].
    ///
    /// # Errors
    /// As [`Transfers::read_on_stream`].
    pub unsafe fn write_on_stream(&self, file: &File, segments: &[Segment], stream: usize) -> Result<Pending> {
        self.begin_on_stream(Direction::Write, file, segments, stream, None, false)
    }

    /// [`Transfers::write_on_stream`], with an observer, as [`Transfers::read_on_stream_with`].
    ///
    /// # Safety
    /// As for [`Transfers::read_on_stream`].
    ///
    /// # Errors
    /// As [`Transfers::read_on_stream_with`].
    pub unsafe fn write_on_stream_with(
        &self,
        file: &File,
        segments: &[Segment],
        stream: usize,
        observer: impl Observer + 'static,
    ) -> Result<Pending> {
        self.begin_on_stream(Direction::Write, file, segments, stream, Some(Box::new(observer)), false)
    }

    /// Puts a read into the order of a CUDA stream of which it is known only when the stream comes
    /// to it what it is to read: the observer says then ([`Observer::segment`]), from anywhere in
    /// the file, into the allocations that `most` lies in, and no more than `most` is long.
    ///
    /// A kernel copies what [`Transfers::read_on_stream`] has copy engines for. Where no kernel of
    /// the stream reaches the memory (in another context than the GPU's primary one, on another
    /// GPU), and where the device itself does (the route is `p2p`), only the file offset may
    /// change, by a multiple of [`crate::Info::block_size`].
    ///
    /// # Safety
    /// As for [`Transfers::read_on_stream`]; of what the observer says.
    ///
    /// # Errors
    /// As [`Transfers::read_on_stream_with`]. The answer is [`Error::Transfer`] with `EINVAL` where
    /// the observer says more than `most`, `EFAULT` where it names other allocations, and
    /// `EOPNOTSUPP` where that may not change.
    ///
    /// [`Error::Transfer`]: crate::Error::Transfer
    pub unsafe fn read_on_stream_late(
        &self,
        file: &File,
        most: Segment,
        stream: usize,
        observer: impl Observer + 'static,
    ) -> Result<Pending> {
        self.begin_on_stream(Direction::Read, file, &[most], stream, Some(Box::new(observer)), true)
    }

    /// A write, as [`Transfers::read_on_stream_late`].
    ///
    /// # Safety
    /// As for [`Transfers::read_on_stream_late`].
    ///
    /// # Errors
    /// As [`Transfers::read_on_stream_late`].
    pub unsafe fn write_on_stream_late(
        &self,
        file: &File,
        most: Segment,
        stream: usize,
        observer: impl Observer + 'static,
    ) -> Result<Pending> {
        self.begin_on_stream(Direction::Write, file, &[most], stream, Some(Box::new(observer)), true)
    }
}
