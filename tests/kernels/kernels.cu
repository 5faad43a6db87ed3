/*
 * The kernels of `cuda-checks --kernels` (tests/src/cuda/kernels.rs): kernels.ptx is what NVRTC
 * makes of them (scripts/kernels).
 */
#include "gpunvme_device.h"

typedef unsigned int u32;
typedef unsigned long long u64;

/* How one group's work ended. */
struct report {
	gpunvme::outcome last;
	u64 wrong; /* words that were not the file's */
	u64 done;  /* reads */
};

/* What the file has at word `n`. */
__device__ static u32 word_at(u64 n)
{
	return u32((n + 1) * 0x9E3779B97F4A7C15ull >> 32);
}

__device__ static u64 next(u64 *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* Every group copies its part of one file to memory: part n is `len` bytes from `from` + n * len on. */
template <class Group>
__device__ static void read_part(gpunvme::ring ring, gpunvme::file file, u64 from, unsigned char *to, u64 len, u64 n,
				 report *reports, const Group &group)
{
	gpunvme::outcome done = ring.read(file, from + n * len, to + n * len, len, group);
	if (group.rank() == 0)
		reports[n].last = done;
}

extern "C" __global__ void read_by_threads(gpunvme::ring ring, gpunvme::file file, u64 from, unsigned char *to, u64 len,
					   report *reports)
{
	u64 n = u64(blockIdx.x) * blockDim.x + threadIdx.x;
	read_part(ring, file, from, to, len, n, reports, gpunvme::thread());
}

extern "C" __global__ void read_by_warps(gpunvme::ring ring, gpunvme::file file, u64 from, unsigned char *to, u64 len,
					 report *reports)
{
	u64 n = (u64(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
	read_part(ring, file, from, to, len, n, reports, gpunvme::warp());
}

extern "C" __global__ void __launch_bounds__(1024)
	read_by_blocks(gpunvme::ring ring, gpunvme::file file, u64 from, unsigned char *to, u64 len, report *reports)
{
	read_part(ring, file, from, to, len, blockIdx.x, reports, gpunvme::block());
}

extern "C" __global__ void write_by_blocks(gpunvme::ring ring, gpunvme::file file, u64 to, const unsigned char *from,
					   u64 len, report *reports)
{
	u64 n = blockIdx.x;
	gpunvme::outcome done = ring.write(file, to + n * len, from + n * len, len, gpunvme::block());
	if (threadIdx.x == 0)
		reports[n].last = done;
}

/* Each block begins eight requests of `len` bytes, then waits for them in the other order. */
extern "C" __global__ void read_async(gpunvme::ring ring, gpunvme::file file, u64 from, unsigned char *to, u64 len,
				      report *reports)
{
	u64 first = u64(blockIdx.x) * 8;
	gpunvme::block group;
	gpunvme::request begun[8];
	for (u32 n = 0; n < 8; n++)
		begun[n] = ring.read_async(file, from + (first + n) * len, to + (first + n) * len, len, group);
	for (u32 n = 8; n-- > 0;) {
		gpunvme::outcome done = ring.wait(begun[n], group);
		if (threadIdx.x == 0)
			reports[first + n].last = done;
	}
}

/*
 * Each block reads `count` random pages of 4 KiB of the first `pages`, and checks each word; after
 * an error it ends.
 */
extern "C" __global__ void random_reads(gpunvme::ring ring, gpunvme::file file, u64 pages, u64 count, report *reports)
{
	__shared__ __align__(16) u32 page[1024];
	u64 state = (blockIdx.x + 1) * 0x9E3779B97F4A7C15ull;
	u64 wrong = 0, n = 0;
	gpunvme::outcome done = {0, 0, 0};
	for (; n < count && done.status == 0; n++) {
		u64 at = next(&state) % pages;
		done = ring.read(file, at * 4096, page, 4096, gpunvme::block());
		for (u32 word = threadIdx.x; done.status == 0 && word < 1024; word += blockDim.x)
			wrong += page[word] != word_at(at * 1024 + word);
		__syncthreads();
	}
	if (wrong != 0)
		atomicAdd(&reports[blockIdx.x].wrong, wrong);
	if (threadIdx.x == 0) {
		reports[blockIdx.x].last = done;
		reports[blockIdx.x].done = n;
	}
}

/* The same with each word checked where it lies, in a slot that the ring lends. */
extern "C" __global__ void lent_reads(gpunvme::ring ring, gpunvme::file file, u64 pages, u64 count, report *reports)
{
	u64 state = (blockIdx.x + 1) * 0x9E3779B97F4A7C15ull;
	u64 wrong = 0, n = 0;
	gpunvme::block group;
	gpunvme::outcome done = {0, 0, 0};
	for (; n < count && done.status == 0; n++) {
		u64 at = next(&state) % pages;
		gpunvme::lent page = ring.lend(ring.read_async(file, at * 4096, nullptr, 4096, group), group);
		const u32 *words = static_cast<const u32 *>(page.data);
		done = page.result;
		for (u32 word = threadIdx.x; done.status == 0 && word < 1024; word += blockDim.x)
			wrong += words[word] != word_at(at * 1024 + word);
		ring.give_back(page, group);
	}
	if (wrong != 0)
		atomicAdd(&reports[blockIdx.x].wrong, wrong);
	if (threadIdx.x == 0) {
		reports[blockIdx.x].last = done;
		reports[blockIdx.x].done = n;
	}
}

/* Blocks read pages until one of them crashes, which ends all. */
extern "C" __global__ void crashing_reads(gpunvme::ring ring, gpunvme::file file, u64 pages, u64 count)
{
	__shared__ __align__(16) u32 page[1024];
	u64 state = (blockIdx.x + 1) * 0x9E3779B97F4A7C15ull;
	for (u64 n = 0; n < count; n++) {
		ring.read(file, next(&state) % pages * 4096, page, 4096, gpunvme::block());
		if (blockIdx.x == 3 && n == 100)
			asm volatile("trap;");
	}
}
