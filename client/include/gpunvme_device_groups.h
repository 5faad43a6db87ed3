/*
 * The groups of threads that make a call of gpunvme_device.h or gpunvme_array.h together. No
 * program includes it by itself.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_DEVICE_GROUPS_H
#define GPUNVME_DEVICE_GROUPS_H

#include "gpunvme_device_detail.h"

namespace gpunvme {

/*
 * Groups: threads that make a call together. On the CPU each is one thread; a type with the same
 * functions makes any other group.
 */

struct thread {
	GPUNVME_FN u32 rank() const { return 0; }
	GPUNVME_FN u32 size() const { return 1; }
	/* Every thread waits for the others, and sees what they did before. */
	GPUNVME_FN void sync() const {}
	/* The value of the thread of rank 0. */
	template <class T> GPUNVME_FN T share(const T &value) const { return value; }
	/* Arrays need the rest: one of the threads that say yes, the same for all, or ~0. */
	GPUNVME_FN u32 first(bool yes) const { return yes ? 0u : u32(detail::none); }
	/* Which this thread is there. */
	GPUNVME_FN u32 member() const { return 0; }
	/* The value of one of them. */
	template <class T> GPUNVME_FN T from(const T &value, u32) const { return value; }
	/* How many say yes. */
	GPUNVME_FN u32 how_many(bool yes) const { return yes; }
};

#ifdef __CUDA_ARCH__
/* The threads of a warp that come to a call together, any number of the 32. */
struct lanes {
	GPUNVME_FN lanes() : mask(__activemask()) {}
	GPUNVME_FN explicit lanes(u32 those) : mask(those) {}
	GPUNVME_FN u32 rank() const
	{
		u32 below;
		asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
		return __popc(mask & below);
	}
	GPUNVME_FN u32 size() const { return __popc(mask); }
	GPUNVME_FN void sync() const { __syncwarp(mask); }
	template <class T> GPUNVME_FN T share(const T &value) const { return from(value, __ffs(mask) - 1); }
	GPUNVME_FN u32 first(bool yes) const
	{
		u32 those = __ballot_sync(mask, yes);
		return those != 0 ? u32(__ffs(those) - 1) : u32(detail::none);
	}
	GPUNVME_FN u32 member() const
	{
		u32 lane;
		asm("mov.u32 %0, %%laneid;" : "=r"(lane));
		return lane;
	}
	GPUNVME_FN u32 how_many(bool yes) const { return __popc(__ballot_sync(mask, yes)); }
	template <class T> GPUNVME_FN T from(const T &value, u32 lane) const
	{
		static_assert(sizeof(T) % sizeof(u32) == 0, "shared word by word");
		union both {
			GPUNVME_FN both() {}
			T whole;
			u32 words[sizeof(T) / sizeof(u32)];
		} both;
		both.whole = value;
		__syncwarp(mask);
		for (u32 at = 0; at < sizeof(T) / sizeof(u32); at++)
			both.words[at] = __shfl_sync(mask, both.words[at], lane);
		return both.whole;
	}

	u32 mask;
};

/* All 32 threads of a warp. */
struct warp : lanes {
	GPUNVME_FN warp() : lanes(0xffffffffu) {}
};
#else
struct lanes : thread {};
struct warp : lanes {};
#endif

/* All threads of a block. */
struct block {
#ifdef __CUDA_ARCH__
	GPUNVME_FN u32 rank() const { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }
	GPUNVME_FN u32 size() const { return blockDim.x * blockDim.y * blockDim.z; }
	GPUNVME_FN void sync() const { __syncthreads(); }
	template <class T> GPUNVME_FN T share(const T &value) const
	{
		__shared__ T shared;
		__syncthreads(); /* all have read what was shared last */
		if (rank() == 0)
			shared = value;
		__syncthreads();
		return shared;
	}
#else
	GPUNVME_FN u32 rank() const { return 0; }
	GPUNVME_FN u32 size() const { return 1; }
	GPUNVME_FN void sync() const {}
	template <class T> GPUNVME_FN T share(const T &value) const { return value; }
#endif
};

} // namespace gpunvme

#endif
