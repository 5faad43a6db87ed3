/*
 * Files of a gpunvme mount, read and written by the threads of a kernel: C++14, for nvcc, NVRTC,
 * and any C++ compiler of the CPU, where a kernel runs as a function.
 *
 *     __global__ void __launch_bounds__(1024)
 *     sum(gpunvme::ring ring, gpunvme::file file, unsigned *sums)
 *     {
 *             __shared__ unsigned words[1024];
 *             unsigned long long at = blockIdx.x * sizeof(words);
 *             gpunvme::outcome done = ring.read(file, at, words, sizeof(words), gpunvme::block());
 *             if (done.status == 0)
 *                     atomicAdd(sums + blockIdx.x, words[threadIdx.x]);
 *     }
 *
 * The host makes the ring and attaches the file (gpunvme_gpu_ring_* in gpunvme.h, GpuRing in Rust),
 * and passes both to the kernel by value. The daemon decides what a kernel may read and write: by
 * the access that the file was opened for, as for a thread of the process.
 *
 * Every call is for a group of threads, which all make it together, with the same arguments: a
 * thread, where none is named, a warp or a block. It begins when all have come to it, and when it
 * returns all see what it read. Memory is any that the group can reach; offsets, addresses and
 * lengths need no alignment, but bytes are copied 16 at a time only where offset and address are
 * the same number of bytes past a multiple of 16.
 *
 * Errors are values, and every wait ends: with `closed` when the daemon ends, the volume is
 * unmounted or the host gives the ring up, with `timed_out` when the ring's patience is over.
 *
 * Device code needs compute capability 7.0. A call takes about 130 registers of each thread:
 * kernels with blocks of more than 384 threads say so, by __launch_bounds__.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_DEVICE_H
#define GPUNVME_DEVICE_H

#include "gpunvme_device_detail.h"

/* The version of gpunvme::ring, which the host's library has to know. */
#define GPUNVME_DEVICE_VERSION 2

namespace gpunvme {

/* A file, as the host attached it. */
typedef u64 file;

/* What else than the daemon's errors a status may be; the numbers are errnos. */
enum : int {
	broken = 5,      /* the daemon broke the ring's rules */
	again = 11,      /* no slot is free: wait for a request first */
	closed = 19,     /* the ring is over: daemon, mount or host have ended */
	invalid = 22,    /* a request is longer than ring::longest() */
	timed_out = 110, /* no answer came in time, or no slot became free */
};

/* How a read or write ended. */
struct outcome {
	int status; /* 0, or an errno */
	u32 reason; /* GPUNVME_REASON_*: why it was refused or slower */
	u64 bytes;  /* moved, from the first on; fewer than asked for where the file ends */
};

/* A request in flight; every thread of its group has a copy. */
struct request {
	u32 slot;
	int status;   /* 0, or why it did not begin */
	u32 reads;    /* whether it is a read */
	u32 skew;     /* where in the slot its bytes begin */
	u64 len;      /* bytes */
	void *memory; /* the group's */
};

/* What a request read, where it lies; every thread of its group has a copy. */
struct lent {
	outcome result;
	const void *data; /* result.bytes of the slot, or null */
	u32 slot;         /* to be given back, or ~0 */
};

/*
 * Groups: threads that make a call together. On the CPU each is one thread; a type with the same
 * four functions makes any other group.
 */

struct thread {
	GPUNVME_FN u32 rank() const { return 0; }
	GPUNVME_FN u32 size() const { return 1; }
	/* Every thread waits for the others, and sees what they did before. */
	GPUNVME_FN void sync() const {}
	/* The value of the thread of rank 0. */
	template <class T> GPUNVME_FN T share(const T &value) const { return value; }
	/* One of the threads that say yes, the same for all of them, or ~0. Arrays need it. */
	GPUNVME_FN u32 first(bool yes) const { return yes ? 0u : u32(detail::none); }
	/* The value of that thread. */
	template <class T> GPUNVME_FN T from(const T &value, u32) const { return value; }
};

/* The threads of a warp that come to a call together, any number of the 32. */
struct lanes {
#ifdef __CUDA_ARCH__
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
#else
	GPUNVME_FN u32 rank() const { return 0; }
	GPUNVME_FN u32 size() const { return 1; }
	GPUNVME_FN void sync() const {}
	template <class T> GPUNVME_FN T share(const T &value) const { return value; }
	GPUNVME_FN u32 first(bool yes) const { return yes ? 0u : u32(detail::none); }
	template <class T> GPUNVME_FN T from(const T &value, u32) const { return value; }
#endif
};

/* All 32 threads of a warp. */
struct warp : lanes {
#ifdef __CUDA_ARCH__
	GPUNVME_FN warp() : lanes(0xffffffffu) {}
#endif
};

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

template <class T> class array;

/*
 * The ring, as the host hands it to kernels: copied freely, valid until the host destroys it. Its
 * fields are the library's.
 */
class ring {
      public:
	/*
	 * Reads `len` bytes from `offset` on to memory of the group, several parts at once. It ends
	 * early, and successfully, where the file does. After an error any byte may have changed.
	 */
	template <class Group = thread>
	GPUNVME_FN outcome read(file from, u64 offset, void *to, u64 len, const Group &group = Group()) const
	{
		return transfer(detail::command_read, from, offset, to, len, group);
	}

	/* Writes `len` bytes to `offset`; the file becomes longer where it ends before. */
	template <class Group = thread>
	GPUNVME_FN outcome write(file to, u64 offset, const void *from, u64 len, const Group &group = Group()) const
	{
		return transfer(detail::command_write, to, offset, const_cast<void *>(from), len, group);
	}

	/* The most bytes of a request that begins at `offset` of a file. */
	GPUNVME_FN u64 longest(u64 offset) const { return slot_bytes - offset % detail::block_bytes; }

	/*
	 * Begins a read of at most longest(offset) bytes. Every request that was begun is waited for,
	 * by the same group; until then `to` is left alone. Where no slot is free its status is `again`,
	 * at once: a group that holds requests must not wait for more.
	 */
	template <class Group = thread>
	GPUNVME_FN request read_async(file from, u64 offset, void *to, u64 len, const Group &group = Group()) const
	{
		return begin(detail::command_read, from, offset, to, len, false, group);
	}

	/* Begins a write. When it returns, `from` may be used again. */
	template <class Group = thread>
	GPUNVME_FN request write_async(file to, u64 offset, const void *from, u64 len,
				       const Group &group = Group()) const
	{
		return begin(detail::command_write, to, offset, const_cast<void *>(from), len, false, group);
	}

	/*
	 * Waits for a request, once; the status of one that did not begin is passed on. After
	 * `timed_out` or `closed` a write may still happen, and memory of a read does not change.
	 */
	template <class Group = thread>
	GPUNVME_OUTLINE GPUNVME_FN outcome wait(const request &begun, const Group &group = Group()) const
	{
		end ended = {{begun.status, 0, 0}, false};
		if (begun.status != 0)
			return ended.result;
		if (group.rank() == 0)
			ended = finish(begun.slot);
		ended = group.share(ended);
		if (!ended.ours)
			return ended.result;
		if (ended.result.bytes > begun.len)
			ended.result.bytes = begun.len; /* a broken daemon's */
		if (begun.reads)
			detail::copy(begun.memory, place(begun), ended.result.bytes, group);
		group.sync();
		if (group.rank() == 0)
			free_slot(begun.slot);
		return ended.result;
	}

	/*
	 * Waits for a read, once, as `wait` does, and copies nothing: its bytes are used where they lie,
	 * in pinned host memory, as far past a multiple of 4096 as in the file. What uses them once
	 * saves a copy; each load crosses the bus. `to` of the read may be null. The slot is the
	 * group's until `give_back`: groups that keep slots must not wait for more than the ring has.
	 * A write is waited for as by `wait`, and lends nothing.
	 */
	template <class Group = thread>
	GPUNVME_OUTLINE GPUNVME_FN lent lend(const request &begun, const Group &group = Group()) const
	{
		if (begun.status != 0 || !begun.reads)
			return {wait(begun, group), nullptr, detail::none};
		end ended = {{0, 0, 0}, false};
		if (group.rank() == 0)
			ended = finish(begun.slot);
		ended = group.share(ended);
		if (!ended.ours)
			return {ended.result, nullptr, detail::none};
		if (ended.result.bytes > begun.len)
			ended.result.bytes = begun.len; /* a broken daemon's */
		/* Later loads of any kind find what the daemon wrote, and no older copy. */
		detail::fence();
		return {ended.result, ended.result.bytes > 0 ? place(begun) : nullptr, begun.slot};
	}

	/*
	 * Gives a slot back, once, by the group that `lend` lent it to, also after an error: its bytes
	 * are another request's from then on.
	 */
	template <class Group = thread>
	GPUNVME_OUTLINE GPUNVME_FN void give_back(const lent &used, const Group &group = Group()) const
	{
		if (used.slot == detail::none)
			return;
		group.sync();
		if (group.rank() == 0)
			free_slot(used.slot);
	}

      private:
	template <class T> friend class array;

	unsigned char *memory;  /* words and entries, shared with the daemon */
	unsigned char *staging; /* a place of `slot_bytes` for each slot, shared with the daemon */
	detail::state *shared;  /* by the submitters; slots and `ready` follow it */
	u64 buffer;             /* the daemon's name for `staging` */
	u64 patience;           /* nanoseconds */
	u32 entries;            /* a power of two; there are as many slots */
	u32 slot_bytes;         /* a multiple of 4096 */
	u64 unused[2];

	/* Requests that one read or write has in flight. */
	enum : u32 { depth = 4 };

	struct end {
		outcome result;
		u32 ours; /* the slot, to be freed */
	};

	GPUNVME_FN u32 *word(u32 offset) const { return reinterpret_cast<u32 *>(memory + offset); }
	GPUNVME_FN detail::slot *slots() const { return reinterpret_cast<detail::slot *>(shared + 1); }
	/* Behind the slots: three arrays of a word for each entry. */
	GPUNVME_FN u32 *of_entry(u32 which, u32 position) const
	{
		return reinterpret_cast<u32 *>(slots() + entries) + which * entries + (position & (entries - 1));
	}
	/* The position behind the submission that was last written to an entry. */
	GPUNVME_FN u32 *ready(u32 position) const { return of_entry(0, position); }
	/* The position behind the completion that was last taken from an entry. */
	GPUNVME_FN u32 *taken(u32 position) const { return of_entry(1, position); }
	/* The free slots, in the order in which they are taken: a number and 1, or 0. */
	GPUNVME_FN u32 *free_at(u32 position) const { return of_entry(2, position); }
	/* Where a request's bytes are: as far past a block's boundary as in the file. */
	GPUNVME_FN unsigned char *place(const request &at) const
	{
		return staging + u64(at.slot) * slot_bytes + at.skew;
	}

	template <class Group>
	GPUNVME_FN outcome transfer(u32 command, file name, u64 offset, void *at, u64 len, const Group &group) const
	{
		request flight[depth];
		u32 first = 0, count = 0;
		u64 begun = 0;
		outcome total = {0, 0, 0};
		bool over = false;
		GPUNVME_ROLLED
		for (;;) {
			GPUNVME_ROLLED
			while (count < depth && begun < len && !over) {
				u64 most = longest(offset + begun), left = len - begun;
				u64 bytes = left < most ? left : most;
				unsigned char *part = static_cast<unsigned char *>(at) + begun;
				request next = begin(command, name, offset + begun, part, bytes, count == 0, group);
				if (next.status == again && count > 0)
					break;
				if (next.status != 0) {
					total.status = next.status;
					over = true;
					break;
				}
				flight[(first + count++) % depth] = next;
				begun += bytes;
			}
			if (count == 0)
				return total;
			const request &oldest = flight[first % depth];
			outcome part = wait(oldest, group);
			if (!over) {
				total.bytes += part.bytes;
				total.status = part.status;
				total.reason = total.reason ? total.reason : part.reason;
				over = part.status != 0 || part.bytes < oldest.len;
			}
			first++;
			count--;
		}
	}

	template <class Group>
	GPUNVME_OUTLINE GPUNVME_FN request begin(u32 command, file name, u64 offset, void *at, u64 len, bool patient,
						 const Group &group) const
	{
		int status = len > longest(offset) ? invalid : 0;
		u32 reads = command == detail::command_read, skew = offset % detail::block_bytes;
		request made = {detail::none, status, reads, skew, len, at};
		if (made.status != 0)
			return made;
		if (group.rank() == 0)
			made.slot = take_slot(patient, &made.status);
		made = group.share(made);
		made.memory = at; /* each thread's own, where it is not one memory */
		if (made.status != 0)
			return made;
		if (!made.reads) {
			detail::copy(place(made), at, len, group);
			detail::fence();
			group.sync();
		}
		if (group.rank() == 0)
			submit(command, name, offset, made);
		return made;
	}

	/* A free slot, waited for or not. */
	GPUNVME_OUTLINE GPUNVME_FN u32 take_slot(bool patient, int *status) const
	{
		u64 start = detail::now();
		for (;;) {
			u32 over = detail::load(&shared->over.word);
			if (over != 0) {
				*status = over;
				return detail::none;
			}
			if (int(detail::add(&shared->free.word, ~0u)) > 0)
				return next_free();
			detail::add(&shared->free.word, 1);
			if (!patient || detail::now() - start > patience) {
				*status = patient ? timed_out : again;
				return detail::none;
			}
			do {
				end none;
				if (take(detail::none, &none) == nothing && !poll())
					detail::pause();
			} while (int(detail::load(&shared->free.word)) <= 0 && detail::load(&shared->over.word) == 0 &&
				 detail::now() - start <= patience);
		}
	}

	/* The next free slot, of which one is this thread's: who puts it there does not wait. */
	GPUNVME_FN u32 next_free() const
	{
		u32 *place = free_at(detail::add(&shared->took.word, 1)), number;
		while ((number = detail::exchange(place, 0)) == 0)
			detail::pause();
		return number - 1;
	}

	GPUNVME_OUTLINE GPUNVME_FN void free_slot(u32 slot) const
	{
		detail::store_release_gpu(free_at(detail::add(&shared->put.word, 1)), slot + 1);
		detail::add(&shared->free.word, 1);
	}

	/*
	 * Fills the next entry. The daemon has taken what was there: all that it has not hold slots,
	 * and there are as many as entries.
	 */
	GPUNVME_OUTLINE GPUNVME_FN void submit(u32 command, file name, u64 offset, const request &made) const
	{
		/* An exchange: the slot's last owner has looked at it before this. */
		detail::exchange(&slots()[made.slot].state, detail::pending);
		u32 position = detail::add(&shared->ticket.word, 1);
		u64 *entry = reinterpret_cast<u64 *>(memory + detail::entries_begin) + (position & (entries - 1)) * 8;
		detail::store(entry + 0, u64(command));
		detail::store(entry + 1, name);
		detail::store(entry + 2, buffer);
		detail::store(entry + 3, offset);
		detail::store(entry + 4, u64(place(made) - staging));
		detail::store(entry + 5, made.len);
		detail::store(entry + 6, u64(made.slot));
		detail::store(entry + 7, u64(0));
		detail::store_release_gpu(ready(position), position + 1);
		publish();
	}

	/*
	 * Moves the tail over all entries that are ready. Who finds the lock taken may go: its holder
	 * unlocks by an exchange, and then sees what was ready before the lock was tried.
	 */
	GPUNVME_FN void publish() const
	{
		u32 tail;
		do {
			if (detail::exchange(&shared->publishing.word, 1) != 0)
				return;
			u32 before = tail = detail::load(&shared->published.word);
			while (detail::load_acquire_gpu(ready(tail)) == tail + 1)
				tail++;
			if (tail != before) {
				detail::store_release(word(detail::submission_tail), tail);
				detail::store(&shared->published.word, tail);
			}
			detail::exchange(&shared->publishing.word, 0);
		} while (detail::load_acquire_gpu(ready(tail)) == tail + 1);
	}

	/* Waits for a slot's request, or leaves the slot to whoever takes its completion. */
	GPUNVME_OUTLINE GPUNVME_FN end finish(u32 number) const
	{
		detail::slot *slot = slots() + number;
		u64 start = detail::now();
		for (;;) {
			u32 over = detail::load(&shared->over.word);
			end own;
			found what = take(number, &own);
			if (what == ours)
				return own;
			if (detail::load_acquire_gpu(&slot->state) == detail::done)
				return {{slot->status, slot->reason, slot->bytes}, true};
			bool late = detail::now() - start > patience;
			/* What was completed before the ring was over is taken first. */
			bool ends = late || (over != 0 && what == nothing);
			if (ends && leave(slot))
				return {{over != 0 ? int(over) : timed_out, 0, 0}, false};
			if (what == nothing && !poll())
				detail::pause();
		}
	}

	GPUNVME_FN static bool leave(detail::slot *slot)
	{
		u32 pending = detail::pending;
		return detail::compare_exchange(&slot->state, pending, u32(detail::abandoned)) == pending;
	}

	/* What a thread took: no completion, one for another thread, the one that it waits for. */
	enum found : u32 { nothing, others, ours };

	/* Takes the next completion that is known, if there is one; any number of threads do. */
	GPUNVME_FN found take(u32 number, end *own) const
	{
		u32 head = detail::load(&shared->head.word);
		u32 known = detail::load_acquire_gpu(&shared->known.word);
		while (int(known - head) > 0) {
			u32 seen = detail::compare_exchange(&shared->head.word, head, head + 1);
			if (seen == head)
				return complete(head, number, own);
			head = seen;
		}
		return nothing;
	}

	/* Looks for completions, if no other thread does; whether there are new ones. */
	GPUNVME_OUTLINE GPUNVME_FN bool poll() const
	{
		if (detail::load(&shared->polling.word) != 0 || detail::exchange(&shared->polling.word, 1) != 0)
			return false;
		u32 before = detail::load(&shared->known.word), retired = detail::load(&shared->retired.word);
		u32 over = detail::load(word(detail::over_word));
		u32 tail = detail::load_acquire(word(detail::completion_tail));
		/* What the daemon completed before the ring was over counts. */
		if (over != 0)
			tail = detail::load_acquire(word(detail::completion_tail));
		if (tail - retired > entries || tail - before > entries) {
			over = broken;
			tail = before;
		}
		if (tail != before)
			detail::store_release_gpu(&shared->known.word, tail);
		if (tail == before || tail - retired > entries / 4)
			retire(retired);
		if (over != 0)
			detail::store_release_gpu(&shared->over.word, over);
		detail::exchange(&shared->polling.word, 0);
		return tail != before;
	}

	/* Tells the daemon which completions were taken: their entries are used again. */
	GPUNVME_FN void retire(u32 from) const
	{
		u32 to = from, count;
		do {
			u32 behind[8];
			for (u32 n = 0; n < 8; n++)
				behind[n] = detail::load(taken(to + n));
			for (count = 0; count < 8 && behind[count] == to + count + 1; count++) {}
			to += count;
		} while (count == 8);
		if (to == from)
			return;
		detail::fence();
		detail::store_release(word(detail::completion_head), to);
		detail::store(&shared->retired.word, to);
	}

	/*
	 * Hands a completion to its slot, or, of the slot that the thread waits for, to the thread; one
	 * that is for no request is a broken daemon's.
	 */
	GPUNVME_OUTLINE GPUNVME_FN found complete(u32 position, u32 waits_for, end *own) const
	{
		const unsigned char *entry = memory + detail::entries_begin +
					     (entries + (position & (entries - 1))) * detail::entry_bytes;
		const detail::sixteen *quarters = reinterpret_cast<const detail::sixteen *>(entry);
		detail::sixteen first = detail::load(quarters), second = detail::load(quarters + 1);
		detail::sixteen third = detail::load(quarters + 2), fourth = detail::load(quarters + 3);
		detail::store_release_gpu(taken(position), position + 1);
		u64 number = first.pair(0);
		outcome ended = {int(first.word[2]), first.word[3],
				 second.pair(0) + second.pair(1) + third.pair(0) + third.pair(1) + fourth.pair(0)};
		if (number >= entries)
			return others;
		if (number == waits_for) {
			own->result = ended;
			own->ours = true;
			return ours;
		}
		detail::slot *slot = slots() + number;
		u32 state = detail::load_acquire_gpu(&slot->state);
		if (state == detail::pending) {
			slot->status = ended.status;
			slot->reason = ended.reason;
			slot->bytes = ended.bytes;
			u32 pending = detail::pending;
			state = detail::compare_exchange(&slot->state, pending, u32(detail::done));
		}
		if (state == detail::abandoned && detail::exchange(&slot->state, detail::idle) == detail::abandoned)
			free_slot(u32(number));
		return others;
	}
};
static_assert(sizeof(ring) == 64, "as the host's library lays it out");

} // namespace gpunvme

#endif
