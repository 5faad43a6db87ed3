/*
 * Kernels that use arrays over files, for `cuda-checks --kernels` and `kernels-bench`
 * (tests/src/cuda/arrays.rs, tests/src/cuda/kernels_bench): arrays.ptx is what NVRTC makes of them
 * (scripts/kernels).
 */
#include "gpunvme_array.h"

typedef unsigned int u32;
typedef unsigned long long u64;

/* How one block's work ended; the host sets it to zeros. */
struct report {
	u64 status; /* of a thread that failed */
	u64 wrong;  /* words that were not the file's */
	u64 done;   /* accesses */
	u64 unused;
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

__device__ static u64 thread_number()
{
	return u64(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ static void tell(report *reports, int status, u64 wrong, u64 done)
{
	report *mine = reports + blockIdx.x;
	if (status != 0)
		mine->status = u64(status);
	if (wrong != 0)
		atomicAdd(&mine->wrong, wrong);
	atomicAdd(&mine->done, done);
}

/* Each thread gets `count` random words of the first `words`, and compares them. */
extern "C" __global__ void __launch_bounds__(256)
	get_random(gpunvme::array<u32> array, u64 words, u64 count, u64 seed, report *reports)
{
	u64 state = (thread_number() + 1) * 0x9E3779B97F4A7C15ull ^ seed, wrong = 0, n = 0;
	int status = 0;
	for (; n < count && status == 0; n++) {
		u32 value = 0;
		u64 index = next(&state) % words;
		status = array.get(index, &value);
		wrong += status == 0 && value != word_at(index);
	}
	tell(reports, status, wrong, n);
}

/* The same where threads of a warp go different ways: each asks alone, or with some others. */
extern "C" __global__ void __launch_bounds__(256)
	get_diverged(gpunvme::array<u32> array, u64 words, u64 count, u64 seed, report *reports)
{
	u64 state = (thread_number() + 1) * 0x9E3779B97F4A7C15ull ^ seed, wrong = 0, n = 0;
	int status = 0;
	for (; n < count && status == 0; n++) {
		u32 value = 0;
		u64 index = next(&state) % words;
		switch (state >> 40 & 3) {
		case 0: status = array.get(index, &value); break;
		case 1: status = array.get(index, &value, gpunvme::thread()); break;
		case 2:
			for (u64 spin = 0; spin < (state >> 50 & 15); spin++)
				status |= array.get(index, &value);
			status |= array.get(index, &value);
			break;
		default: index = threadIdx.x % 7; status = array.get(index, &value);
		}
		wrong += status == 0 && value != word_at(index);
	}
	tell(reports, status, wrong, n);
}

/* Sets word n to 3 n + 1, for all threads together the first `words`; then blocks flush. */
extern "C" __global__ void __launch_bounds__(256) set_all(gpunvme::array<u32> array, u64 words, report *reports)
{
	u64 step = u64(gridDim.x) * blockDim.x, wrong = 0, n = 0;
	int status = 0;
	for (u64 index = thread_number(); index < words && status == 0; index += step, n++) {
		status = array.set(index, u32(3 * index + 1));
		u32 value = 0;
		if (status == 0 && index % 5 == 0) {
			status = array.get(index, &value);
			wrong += status == 0 && value != u32(3 * index + 1);
		}
	}
	tell(reports, status, wrong, n);
}

/* Reads words one after the other, each thread its own of 32 neighbours. */
extern "C" __global__ void __launch_bounds__(256)
	get_in_order(gpunvme::array<u32> array, u64 words, report *reports)
{
	u64 step = u64(gridDim.x) * blockDim.x, wrong = 0, n = 0;
	int status = 0;
	for (u64 index = thread_number(); index < words && status == 0; index += step, n++) {
		u32 value = 0;
		status = array.get(index, &value);
		wrong += status == 0 && value != word_at(index);
	}
	tell(reports, status, wrong, n);
}

/* Each warp holds random pages and adds 1 to a word of its own of each. */
extern "C" __global__ void __launch_bounds__(256)
	hold_and_add(gpunvme::array<u32> array, u64 pages, u64 page_words, u64 count, report *reports)
{
	gpunvme::warp warp;
	u64 number = thread_number() / 32, state = (number + 1) * 0x9E3779B97F4A7C15ull, n = 0;
	int status = 0;
	for (; n < count && status == 0; n++) {
		gpunvme::held<u32> page = array.hold(next(&state) % pages * page_words, warp);
		status = page.status;
		if (status == 0) {
			if (warp.rank() == 0)
				atomicAdd(page.data, 1);
			status = array.release(page, true, warp);
		}
	}
	tell(reports, status, 0, warp.rank() == 0 ? n : 0);
}

/* Where words of a bench come from: an array, or memory that the kernel reaches. */
struct by_array {
	gpunvme::array<u32> array;
	__device__ int get(u64 index, u32 *value) const { return array.get(index, value); }
};

struct by_pointer {
	const u32 *words;
	__device__ int get(u64 index, u32 *value) const
	{
		*value = words[index];
		return 0;
	}
};

/*
 * Random gather: out[n] = the sum of the `row` words from rows[n] * row on, each row by one warp.
 */
template <class Words>
__device__ static void gather(const Words &words, const u32 *rows, u64 count, u32 row, u32 *out, report *reports)
{
	u64 step = u64(gridDim.x) * blockDim.x / 32, done = 0, wrong = 0;
	int status = 0;
	u32 lane = threadIdx.x % 32;
	for (u64 n = thread_number() / 32; n < count && status == 0; n += step) {
		u32 sum = 0;
		for (u32 at = lane; at < row; at += 32) {
			u32 value = 0;
			u64 index = u64(rows[n]) * row + at;
			int ended = words.get(index, &value);
			status = ended != 0 ? ended : status;
			wrong += ended == 0 && value != word_at(index);
			sum += value;
			done++;
		}
		for (u32 half = 16; half > 0; half /= 2)
			sum += __shfl_down_sync(0xffffffffu, sum, half);
		if (lane == 0)
			out[n] = sum;
		status = __any_sync(0xffffffffu, status != 0) ? (status != 0 ? status : 5) : 0;
	}
	tell(reports, status, wrong, done);
}

extern "C" __global__ void __launch_bounds__(256)
	gather_array(gpunvme::array<u32> array, const u32 *rows, u64 count, u32 row, u32 *out, report *reports)
{
	gather(by_array{array}, rows, count, row, out, reports);
}

extern "C" __global__ void __launch_bounds__(256)
	gather_pointer(const u32 *words, const u32 *rows, u64 count, u32 row, u32 *out, report *reports)
{
	gather(by_pointer{words}, rows, count, row, out, reports);
}

/*
 * A level of a breadth-first search: each vertex of the level `now`, by one warp, puts its
 * neighbours that have no level yet into the next. Neighbours of vertex v are the words of the file
 * from first[v] to first[v + 1]. A warp takes `run` vertices in a row: where those are the
 * vertices of one page, warps wait for different pages.
 */
template <class Words>
__device__ static void search(const Words &words, const u64 *first, u32 vertices, u32 run, u32 *levels, u32 now,
			      u32 *found, report *reports)
{
	u64 step = u64(gridDim.x) * blockDim.x / 32 * run, done = 0;
	int status = 0;
	for (u64 begin = thread_number() / 32 * run; begin < vertices; begin += step) {
		u64 end = begin + run < vertices ? begin + run : vertices;
		for (u64 vertex = begin; vertex < end; vertex++) {
			if (levels[vertex] != now)
				continue;
			for (u64 at = first[vertex] + threadIdx.x % 32; at < first[vertex + 1]; at += 32) {
				u32 neighbour = 0;
				int ended = words.get(at, &neighbour);
				status = ended != 0 ? ended : status;
				bool is_new = ended == 0 && neighbour < vertices && levels[neighbour] == ~0u;
				if (is_new && atomicCAS(levels + neighbour, ~0u, now + 1) == ~0u)
					*found = 1;
				done++;
			}
		}
	}
	tell(reports, status, 0, done);
}

extern "C" __global__ void __launch_bounds__(256)
	search_array(gpunvme::array<u32> array, const u64 *first, u32 vertices, u32 run, u32 *levels, u32 now,
		     u32 *found, report *reports)
{
	search(by_array{array}, first, vertices, run, levels, now, found, reports);
}

extern "C" __global__ void __launch_bounds__(256)
	search_pointer(const u32 *words, const u64 *first, u32 vertices, u32 run, u32 *levels, u32 now, u32 *found,
		       report *reports)
{
	search(by_pointer{words}, first, vertices, run, levels, now, found, reports);
}
