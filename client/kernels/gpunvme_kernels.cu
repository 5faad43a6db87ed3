/*
 * Kernels for programs without a compiler: gpunvme_kernels.ptx, which the driver loads
 * (cuModuleLoad), is what NVRTC makes of this (scripts/kernels).
 *
 * Their first parameter is what gpunvme_gpu_ring_for_kernels() or gpunvme_gpu_array_for_kernels()
 * filled in. Any number of blocks and threads will do, up to 256 threads in a block. A status is 0,
 * or the errno of something that failed; the host sets it to 0 before.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include "gpunvme_array.h"

typedef unsigned int u32;
typedef unsigned long long u64;

/* One read or write of a list, in memory of the GPU. */
struct gpunvme_piece {
	u64 file;    /* gpunvme_attached_name() */
	u64 offset;  /* in the file */
	u64 address; /* of memory that the kernel reaches */
	u64 len;     /* bytes, any number */
	u64 bytes;   /* out: moved */
	int status;  /* out: 0, or an errno */
	u32 reason;  /* out: GPUNVME_REASON_* */
};

__device__ static void ended(gpunvme_piece *piece, const gpunvme::outcome &done)
{
	piece->bytes = done.bytes;
	piece->status = done.status;
	piece->reason = done.reason;
}

/* Reads pieces, each by one block. */
extern "C" __global__ void __launch_bounds__(256) gpunvme_read_list(gpunvme::ring ring, gpunvme_piece *pieces, u64 count)
{
	for (u64 n = blockIdx.x; n < count; n += gridDim.x) {
		gpunvme_piece *at = pieces + n;
		void *to = reinterpret_cast<void *>(at->address);
		gpunvme::outcome done = ring.read(at->file, at->offset, to, at->len, gpunvme::block());
		if (threadIdx.x == 0)
			ended(at, done);
	}
}

/* Writes pieces, each by one block. */
extern "C" __global__ void __launch_bounds__(256) gpunvme_write_list(gpunvme::ring ring, gpunvme_piece *pieces, u64 count)
{
	for (u64 n = blockIdx.x; n < count; n += gridDim.x) {
		gpunvme_piece *at = pieces + n;
		const void *from = reinterpret_cast<const void *>(at->address);
		gpunvme::outcome done = ring.write(at->file, at->offset, from, at->len, gpunvme::block());
		if (threadIdx.x == 0)
			ended(at, done);
	}
}

/* Copies `len` bytes of an array to or from memory, by a warp. */
template <bool WRITES>
__device__ static int copy_row(const gpunvme::array<unsigned char> &array, u64 from, u64 len, unsigned char *memory)
{
	gpunvme::warp warp;
	for (u64 done = 0; done < len;) {
		gpunvme::held<unsigned char> part = array.hold(from + done, warp);
		if (part.status != 0)
			return part.status;
		u64 bytes = part.count < len - done ? part.count : len - done;
		unsigned char *to = WRITES ? part.data : memory + done;
		const unsigned char *at = WRITES ? memory + done : part.data;
		/* Four bytes at a time where both are so aligned. */
		u64 words = ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(at)) & 3) == 0 ? bytes / 4 : 0;
		for (u64 n = warp.rank(); n < words; n += 32)
			reinterpret_cast<u32 *>(to)[n] = reinterpret_cast<const u32 *>(at)[n];
		for (u64 n = words * 4 + warp.rank(); n < bytes; n += 32)
			to[n] = at[n];
		int status = array.release(part, WRITES, warp);
		if (status != 0)
			return status;
		done += bytes;
	}
	return 0;
}

template <bool WRITES>
__device__ static void copy_rows(const gpunvme::array<unsigned char> &array, const u64 *rows, u64 count, u64 row_bytes,
				 unsigned char *memory, int *status)
{
	u64 first = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 32, step = u64(gridDim.x) * blockDim.x / 32;
	for (u64 n = first; n < count; n += step) {
		u64 size = array.size();
		bool is_inside = row_bytes <= size && (row_bytes == 0 || rows[n] <= (size - row_bytes) / row_bytes);
		int ended = is_inside ? copy_row<WRITES>(array, rows[n] * row_bytes, row_bytes, memory + n * row_bytes)
				      : int(gpunvme::invalid);
		if (ended != 0 && threadIdx.x % 32 == 0)
			*status = ended;
	}
}

/*
 * memory[n] = array[rows[n]], of rows of `row_bytes` bytes, each by one warp. Blocks are of whole
 * warps.
 */
extern "C" __global__ void __launch_bounds__(256)
	gpunvme_gather(gpunvme::array<unsigned char> array, const u64 *rows, u64 count, u64 row_bytes, unsigned char *memory,
		       int *status)
{
	copy_rows<false>(array, rows, count, row_bytes, memory, status);
}

/* array[rows[n]] = memory[n]; of rows that are there twice, one of both. */
extern "C" __global__ void __launch_bounds__(256)
	gpunvme_scatter(gpunvme::array<unsigned char> array, const u64 *rows, u64 count, u64 row_bytes, unsigned char *memory,
			int *status)
{
	copy_rows<true>(array, rows, count, row_bytes, memory, status);
}

/* Writes to the file what kernels changed. Blocks are of whole warps. */
extern "C" __global__ void __launch_bounds__(256) gpunvme_flush(gpunvme::array<unsigned char> array, int *status)
{
	u32 warps = blockDim.x / 32;
	gpunvme::warp warp;
	int ended = array.flush(blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps, warp);
	if (ended != 0 && warp.rank() == 0)
		*status = ended;
}
