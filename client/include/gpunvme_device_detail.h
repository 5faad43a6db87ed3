/*
 * What gpunvme_device.h and gpunvme_array.h are made of: words that threads share, loads, stores
 * and atomics on them, and copies. No program includes it by itself.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_DEVICE_DETAIL_H
#define GPUNVME_DEVICE_DETAIL_H

#ifdef __CUDACC__
#define GPUNVME_FN __host__ __device__ inline
#else
#define GPUNVME_FN inline
#endif

/*
 * What keeps kernels short: functions that are called, and loops that stay loops. Loops over arrays
 * that are to be in registers become none.
 */
#ifdef __CUDA_ARCH__
#define GPUNVME_OUTLINE __noinline__
#define GPUNVME_ROLLED _Pragma("unroll 1")
#define GPUNVME_UNROLLED _Pragma("unroll")
#else
#define GPUNVME_OUTLINE
#define GPUNVME_ROLLED
#define GPUNVME_UNROLLED
#endif

#ifndef __CUDACC_RTC__
#include <sched.h>
#include <time.h>
#endif

namespace gpunvme {

typedef unsigned int u32;
typedef unsigned long long u64;

namespace detail {

enum : u32 { none = 0xffffffffu };

/* docs/reference/ioctl.md: the words, and what is in an entry. */
enum : u32 {
	submission_tail = 0,
	completion_tail = 128,
	completion_head = 192,
	over_word = 384,
	entries_begin = 4096,
	entry_bytes = 64,
	command_read = 4,
	command_write = 5,
	block_bytes = 4096,
	flags_at = 56, /* in a completion */
	moved_all = 2, /* of its flags */
};

/* What of a status from the daemon counts: its sign is for values of these headers' own. */
enum : u32 { errnos = 0x7fffffff };

/* More than any request has: of one whose bytes were all moved. */
enum : u64 { as_asked = ~0ull };

/* What may have become of a slot's request. */
enum : u32 { idle, pending, abandoned, done };

struct slot {
	u32 state;
	u32 spare;
	int status;
	u32 reason;
	u64 bytes;
	u64 *page; /* null, or the word of an array's frame that is being written back */
};

/*
 * A frame's word: which page is in it, in what state, and how many threads use it. What changes
 * the page is done by compare-and-exchange from a word without users, all else by additions: so
 * that a thread which counts itself in too late, and out again, does no harm.
 */
enum : u64 {
	one_user = 1,
	users = (1ull << 20) - 1,
	busy = 1ull << 20,       /* being read or written back, by the group that made it so */
	valid = 1ull << 21,
	changed = 1ull << 22,
	used_lately = 1ull << 23,
	one_page = 1ull << 24,
};

/* A word alone in its cache line. */
template <class T> struct alignas(128) line {
	T word;
};

/* What the submitters share, in their own memory: atomics on the host's need not work. */
struct state {
	line<u32> ticket;     /* position of the next submission */
	line<u32> published;  /* position up to which the daemon was told */
	line<u32> publishing; /* a lock */
	line<u32> taking;     /* a lock, of what takes completions */
	line<u32> head;       /* position of the next completion to take */
	line<u32> told;       /* position up to which the daemon was told that they are taken */
	line<u32> over;       /* 0, or the status of all that begins or waits */
	line<u32> unused[9];
};
static_assert(sizeof(state) == 2048 && sizeof(slot) == 32, "as the host's library lays them out");

/*
 * Loads, stores and atomics. Words that the host shares are only loaded and stored, in the scope of
 * the system: where it has no atomics on them, the GPU would only seem to have. Those in memory of
 * the GPU are for its own threads, in its scope.
 */
#ifdef __CUDA_ARCH__
#define GPUNVME_EITHER(gpu, cpu) gpu
#else
#define GPUNVME_EITHER(gpu, cpu) cpu
#endif

GPUNVME_FN u32 load_acquire(const u32 *at)
{
	u32 value;
	GPUNVME_EITHER(asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_ACQUIRE));
	return value;
}

GPUNVME_FN u64 load_acquire(const u64 *at)
{
	u64 value;
	GPUNVME_EITHER(asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_ACQUIRE));
	return value;
}

GPUNVME_FN u32 load(const u32 *at)
{
	u32 value;
	GPUNVME_EITHER(asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_RELAXED));
	return value;
}

GPUNVME_FN u64 load(const u64 *at)
{
	u64 value;
	GPUNVME_EITHER(asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_RELAXED));
	return value;
}

GPUNVME_FN void store(u32 *at, u32 value)
{
	GPUNVME_EITHER(asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"),
		       __atomic_store_n(at, value, __ATOMIC_RELAXED));
}

GPUNVME_FN void store(u64 *at, u64 value)
{
	GPUNVME_EITHER(asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory"),
		       __atomic_store_n(at, value, __ATOMIC_RELAXED));
}

GPUNVME_FN void store_release(u32 *at, u32 value)
{
	GPUNVME_EITHER(asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"),
		       __atomic_store_n(at, value, __ATOMIC_RELEASE));
}

/* The same in memory that the host does not share. */
GPUNVME_FN u32 load_acquire_gpu(const u32 *at)
{
	u32 value;
	GPUNVME_EITHER(asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_ACQUIRE));
	return value;
}

/* The same before a fence, which does the rest on a GPU; detectors of races know no fences. */
GPUNVME_FN u32 load_before_fence(const u32 *at)
{
	return GPUNVME_EITHER(load(at), load_acquire_gpu(at));
}

/*
 * The two ends of what is ordered by the way of a request through the daemon. The CPU's detectors
 * of races do not see that way: there each orders by itself.
 */
GPUNVME_FN void store_before_daemon(u32 *at, u32 value)
{
	GPUNVME_EITHER(store(at, value), __atomic_store_n(at, value, __ATOMIC_RELEASE));
}

GPUNVME_FN void load_behind_daemon(const u32 *at)
{
	(void)at;
	GPUNVME_EITHER(, (void)__atomic_load_n(at, __ATOMIC_ACQUIRE));
}

GPUNVME_FN u64 load_acquire_gpu(const u64 *at)
{
	u64 value;
	GPUNVME_EITHER(asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory"),
		       value = __atomic_load_n(at, __ATOMIC_ACQUIRE));
	return value;
}

GPUNVME_FN void store_release_gpu(u32 *at, u32 value)
{
	GPUNVME_EITHER(asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory"),
		       __atomic_store_n(at, value, __ATOMIC_RELEASE));
}

GPUNVME_FN u32 add(u32 *at, u32 more)
{
	u32 before;
	GPUNVME_EITHER(asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;"
				    : "=r"(before) : "l"(at), "r"(more) : "memory"),
		       before = __atomic_fetch_add(at, more, __ATOMIC_RELAXED));
	return before;
}

GPUNVME_FN u32 exchange(u32 *at, u32 value)
{
	u32 before;
	GPUNVME_EITHER(asm volatile("atom.acq_rel.gpu.exch.b32 %0, [%1], %2;"
				    : "=r"(before) : "l"(at), "r"(value) : "memory"),
		       before = __atomic_exchange_n(at, value, __ATOMIC_ACQ_REL));
	return before;
}

/* What was there: `expected` if it was replaced. */
GPUNVME_FN u32 compare_exchange(u32 *at, u32 expected, u32 value)
{
	u32 before = expected;
	GPUNVME_EITHER(asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], %2, %3;"
				    : "=r"(before) : "l"(at), "r"(expected), "r"(value) : "memory"),
		       __atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	return before;
}

/*
 * The same after fence_gpu(), by which what was done before is seen with the new value; of the
 * CPU's fences, detectors of races know none.
 */
GPUNVME_FN u32 compare_exchange_after_fence(u32 *at, u32 expected, u32 value)
{
	u32 before = expected;
	GPUNVME_EITHER(asm volatile("atom.relaxed.gpu.cas.b32 %0, [%1], %2, %3;"
				    : "=r"(before) : "l"(at), "r"(expected), "r"(value) : "memory"),
		       __atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	return before;
}

GPUNVME_FN u64 compare_exchange(u64 *at, u64 expected, u64 value)
{
	u64 before = expected;
	GPUNVME_EITHER(asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;"
				    : "=l"(before) : "l"(at), "l"(expected), "l"(value) : "memory"),
		       __atomic_compare_exchange_n(at, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
	return before;
}

/* Words of 64 bits that the threads of the GPU alone share. */
GPUNVME_FN u64 add_acquire(u64 *at, u64 more)
{
	u64 before;
	GPUNVME_EITHER(asm volatile("atom.acquire.gpu.add.u64 %0, [%1], %2;"
				    : "=l"(before) : "l"(at), "l"(more) : "memory"),
		       before = __atomic_fetch_add(at, more, __ATOMIC_ACQUIRE));
	return before;
}

GPUNVME_FN void add_release(u64 *at, u64 more)
{
	GPUNVME_EITHER(asm volatile("red.release.gpu.add.u64 [%0], %1;" ::"l"(at), "l"(more) : "memory"),
		       __atomic_fetch_add(at, more, __ATOMIC_RELEASE));
}

GPUNVME_FN void count(u64 *at, u64 more)
{
	GPUNVME_EITHER(asm volatile("red.relaxed.gpu.add.u64 [%0], %1;" ::"l"(at), "l"(more) : "memory"),
		       __atomic_fetch_add(at, more, __ATOMIC_RELAXED));
}

GPUNVME_FN void set_bits(u64 *at, u64 bits)
{
	GPUNVME_EITHER(asm volatile("red.relaxed.gpu.or.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory"),
		       __atomic_fetch_or(at, bits, __ATOMIC_RELAXED));
}

/* Clears bits and says what was there; what their last owner did is before it. */
GPUNVME_FN u64 clear_bits(u64 *at, u64 bits)
{
	u64 before;
	GPUNVME_EITHER(asm volatile("atom.acquire.gpu.and.b64 %0, [%1], %2;"
				    : "=l"(before) : "l"(at), "l"(~bits) : "memory"),
		       before = __atomic_fetch_and(at, ~bits, __ATOMIC_ACQUIRE));
	return before;
}

/* Sets bits for their next owner. */
GPUNVME_FN void give_bits(u64 *at, u64 bits)
{
	GPUNVME_EITHER(asm volatile("red.release.gpu.or.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory"),
		       __atomic_fetch_or(at, bits, __ATOMIC_RELEASE));
}

/* The number of the lowest bit; there is one. */
GPUNVME_FN u32 lowest(u64 bits)
{
	return GPUNVME_EITHER(__ffsll(bits) - 1, __builtin_ctzll(bits));
}

struct alignas(16) two {
	u64 word[2];
};

GPUNVME_FN two load_gpu(const two *at)
{
	two value;
	GPUNVME_EITHER(asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];"
				    : "=l"(value.word[0]), "=l"(value.word[1]) : "l"(at) : "memory"),
		       value.word[0] = load(at->word);
		       value.word[1] = load(at->word + 1));
	return value;
}

/* A number of the multiprocessor, to spread counters. */
GPUNVME_FN u32 processor()
{
	u32 number;
	GPUNVME_EITHER(asm volatile("mov.u32 %0, %%smid;" : "=r"(number)), number = 0);
	return number;
}

/* What this thread wrote, and saw written, is there for the host before what it writes next. */
GPUNVME_FN void fence()
{
	GPUNVME_EITHER(asm volatile("fence.acq_rel.sys;" ::: "memory"), __atomic_thread_fence(__ATOMIC_ACQ_REL));
}

/* The same for the threads of the GPU. */
GPUNVME_FN void fence_gpu()
{
	GPUNVME_EITHER(asm volatile("fence.acq_rel.gpu;" ::: "memory"), __atomic_thread_fence(__ATOMIC_ACQ_REL));
}

/* Leaves the processor to threads that may have what this one needs. */
GPUNVME_FN void pause()
{
	GPUNVME_EITHER(asm volatile("nanosleep.u32 100;"), sched_yield());
}

/* Sleeps for a 64th of so many nanoseconds that a thread of a GPU has waited, or up to `most`. */
GPUNVME_FN void sleep_after(u64 waited, u32 most)
{
	u64 part = waited / 64;
	u32 time = part < 100 ? 100 : part > most ? most : u32(part);
	GPUNVME_EITHER(asm volatile("nanosleep.u32 %0;" : : "r"(time)), (void)time);
}

/*
 * The same as pause, in a thread that has waited so many nanoseconds for what comes to it alone.
 * Thousands of warps that look for the same words again and again keep others from them: they sleep
 * up to 10 us. On a CPU, threads that yield to one another may keep the daemon from its processor:
 * after 20 ms they sleep.
 */
GPUNVME_FN void pause_after(u64 waited)
{
#ifdef __CUDA_ARCH__
	sleep_after(waited, 10000);
#else
	const struct timespec moment = {0, 100};
	if (waited > 20000000)
		nanosleep(&moment, nullptr);
	else
		pause();
#endif
}

/*
 * The same, in a thread that waits for what others may take before it: who sleeps while others do
 * not gets nothing.
 */
GPUNVME_FN void pause_among_others(u64 waited)
{
#ifdef __CUDA_ARCH__
	sleep_after(waited, 2000);
#else
	(void)waited;
	pause();
#endif
}

/* Nanoseconds since some moment. */
GPUNVME_FN u64 now()
{
	u64 time;
#ifdef __CUDA_ARCH__
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
#else
	struct timespec clock;
	clock_gettime(CLOCK_MONOTONIC, &clock);
	time = clock.tv_sec * 1000000000ull + clock.tv_nsec;
#endif
	return time;
}

/*
 * The same, in a thread that has waited since then for a frame of an array: others may take it, and
 * the daemon may have to fill it.
 */
GPUNVME_FN void pause_since(u64 start)
{
#ifdef __CUDA_ARCH__
	pause_among_others(now() - start);
#else
	pause_after(now() - start);
#endif
}

/* Sixteen bytes; of a slot they are never an older copy in a cache of the GPU. */
struct alignas(16) sixteen {
	u32 word[4];

	GPUNVME_FN u64 pair(u32 n) const { return u64(word[2 * n + 1]) << 32 | word[2 * n]; }
};

GPUNVME_FN sixteen load(const sixteen *at)
{
	sixteen value;
	GPUNVME_EITHER(asm volatile("ld.relaxed.sys.v4.u32 {%0, %1, %2, %3}, [%4];"
				    : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
				    : "l"(at) : "memory"),
		       u64 *words = reinterpret_cast<u64 *>(&value);
		       words[0] = load(reinterpret_cast<const u64 *>(at));
		       words[1] = load(reinterpret_cast<const u64 *>(at) + 1));
	return value;
}

GPUNVME_FN unsigned char load(const unsigned char *at)
{
	GPUNVME_EITHER(u32 value; asm volatile("ld.relaxed.sys.u8 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
		       return (unsigned char)value, return *at);
}

/* Copies units of T, each thread every so many; loads go ahead of stores, four at a time. */
template <class T> GPUNVME_FN void copy_units(void *to, const void *from, u64 count, u32 rank, u32 size)
{
	T *out = static_cast<T *>(to);
	const T *in = static_cast<const T *>(from);
	GPUNVME_ROLLED
	for (u64 at = rank; at < count; at += 4ull * size) {
		T units[4];
		for (u32 n = 0; n < 4; n++)
			if (at + u64(n) * size < count)
				units[n] = load(in + at + u64(n) * size);
		for (u32 n = 0; n < 4; n++)
			if (at + u64(n) * size < count)
				out[at + u64(n) * size] = units[n];
	}
}

template <class Group> GPUNVME_FN void copy(void *to, const void *from, u64 len, const Group &group)
{
	unsigned char *out = static_cast<unsigned char *>(to);
	const unsigned char *in = static_cast<const unsigned char *>(from);
	u32 rank = group.rank(), size = group.size();
	u64 before = -reinterpret_cast<u64>(out) & 15;
	if ((reinterpret_cast<u64>(out) ^ reinterpret_cast<u64>(in)) & 15 || before > len)
		before = len;
	u64 middle = (len - before) / 16, after = before + middle * 16;
	copy_units<unsigned char>(out, in, before, rank, size);
	copy_units<sixteen>(out + before, in + before, middle, rank, size);
	copy_units<unsigned char>(out + after, in + after, len - after, rank, size);
}

} // namespace detail

} // namespace gpunvme

#undef GPUNVME_EITHER

#endif
