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

#include "gpunvme_device_groups.h"

/* The version of gpunvme::ring, which the host's library has to know. */
#define GPUNVME_DEVICE_VERSION 3

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
	GPUNVME_FN outcome wait(const request &begun, const Group &group = Group()) const
	{
		return wait_since(detail::now(), begun, group);
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
			ended = finish(begun.slot, detail::now());
		ended = group.share(ended);
		if (!ended.ours)
			return {ended.result, nullptr, detail::none};
		if (ended.result.bytes > begun.len)
			ended.result.bytes = begun.len; /* `as_asked`, or a broken daemon's */
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
	/* Behind the slots: of each entry the position behind its last submission. */
	GPUNVME_FN u32 *ready(u32 position) const
	{
		return reinterpret_cast<u32 *>(slots() + entries) + (position & (entries - 1));
	}
	/* Behind those: a bit for each slot, set while it is free; words in pairs. */
	GPUNVME_FN u64 *free_words() const
	{
		return reinterpret_cast<u64 *>(reinterpret_cast<u32 *>(slots() + entries) + entries);
	}
	/* Where a request's bytes are: as far past a block's boundary as in the file. */
	GPUNVME_FN unsigned char *place(const request &at) const
	{
		return staging + u64(at.slot) * slot_bytes + at.skew;
	}

	/* 0, or the status of all that begins or waits. */
	GPUNVME_FN int ended() const { return int(detail::load(&shared->over.word)); }

	/* As `wait`, by a group that has waited since then, with the first thread's clock. */
	template <class Group>
	GPUNVME_OUTLINE GPUNVME_FN outcome wait_since(u64 start, const request &begun, const Group &group) const
	{
		end ended = {{begun.status, 0, 0}, false};
		if (begun.status != 0)
			return ended.result;
		if (group.rank() == 0)
			ended = finish(begun.slot, start);
		ended = group.share(ended);
		if (!ended.ours)
			return ended.result;
		if (ended.result.bytes > begun.len)
			ended.result.bytes = begun.len; /* `as_asked`, or a broken daemon's */
		if (begun.reads)
			detail::copy(begun.memory, place(begun), ended.result.bytes, group);
		group.sync();
		if (group.rank() == 0)
			free_slot(begun.slot);
		return ended.result;
	}

	/*
	 * Waits for the write of a page of an array. Where it is given up, which `ours` says, its frame is
	 * no longer busy when its completion has come.
	 */
	template <class Group>
	GPUNVME_OUTLINE GPUNVME_FN end wait_for_page(const request &begun, u64 *frame, const Group &group) const
	{
		end done = {{begun.status, 0, 0}, true};
		if (begun.status != 0)
			return done;
		if (group.rank() == 0) {
			slots()[begun.slot].page = frame;
			done = finish(begun.slot, detail::now());
		}
		done = group.share(done);
		group.sync();
		if (done.ours && group.rank() == 0)
			free_slot(begun.slot);
		return done;
	}

	template <class Group>
	GPUNVME_FN outcome transfer(u32 command, file name, u64 offset, void *at, u64 len, const Group &group) const
	{
		request flight[depth];
		u32 first = 0, count = 0;
		u64 begun = 0;
		u64 start = 0; /* of the wait for what failed */
		outcome total = {len <= ~0ull - offset ? 0 : int(invalid), 0, 0};
		bool over = total.status != 0;
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
					start = detail::now();
					over = true;
					break;
				}
				flight[(first + count++) % depth] = next;
				begun += bytes;
			}
			if (count == 0)
				return total;
			const request &oldest = flight[first % depth];
			start = over ? start : detail::now();
			outcome part = wait_since(start, oldest, group);
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

	/*
	 * A free slot, waited for or not. Also where it is not, completions are looked for once: they may
	 * be of requests that were given up, whose slots nobody else waits for.
	 */
	GPUNVME_OUTLINE GPUNVME_FN u32 take_slot(bool patient, int *status) const
	{
		u64 start = detail::now();
		for (bool looked = false;; looked = true) {
			u32 over = detail::load(&shared->over.word), slot = find_slot();
			if (over == 0 && slot != detail::none)
				return slot;
			u64 waited = detail::now() - start;
			bool late = patient ? waited > patience : looked;
			if (over != 0 || late) {
				if (slot != detail::none)
					free_slot(slot);
				*status = over != 0 ? int(over) : patient ? timed_out : again;
				return detail::none;
			}
			if (!poll())
				detail::pause_among_others(waited);
		}
	}

	/*
	 * Takes a slot that is free, if one is. The first are preferred: what few requests use of the
	 * staging memory stays in the processor's caches. Multiprocessors begin at different bits, so
	 * that their threads seldom want the same.
	 */
	GPUNVME_FN u32 find_slot() const
	{
		u32 shift = detail::processor() * 5 % 64;
		GPUNVME_ROLLED
		for (u32 first = 0; first < entries; first += 128) {
			u64 *words = free_words() + first / 64;
			detail::two seen = detail::load_gpu(reinterpret_cast<const detail::two *>(words));
			GPUNVME_ROLLED
			for (u32 n = 0; n < 2; n++) {
				u64 free = seen.word[n];
				while (free != 0) {
					u64 above = free >> shift << shift;
					u32 bit = detail::lowest(above != 0 ? above : free);
					free = detail::clear_bits(words + n, 1ull << bit);
					if ((free >> bit & 1) != 0)
						return first + n * 64 + bit;
				}
			}
		}
		return detail::none;
	}

	GPUNVME_FN void free_slot(u32 slot) const
	{
		detail::give_bits(free_words() + slot / 64, 1ull << slot % 64);
	}

	/*
	 * Fills the next entry. The daemon has taken what was there: all that it has not hold slots,
	 * and there are as many as entries.
	 */
	GPUNVME_OUTLINE GPUNVME_FN void submit(u32 command, file name, u64 offset, const request &made) const
	{
		slots()[made.slot].page = nullptr;
		/* The slot's last owner has looked at it before it gave it back. */
		detail::store_before_daemon(&slots()[made.slot].state, detail::pending);
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
			u32 before = detail::load(&shared->published.word), count;
			tail = before;
			do {
				u32 behind[4];
				for (u32 n = 0; n < 4; n++)
					behind[n] = detail::load_before_fence(ready(tail + n));
				for (count = 0; count < 4 && behind[count] == tail + count + 1; count++) {}
				tail += count;
			} while (count == 4);
			if (tail != before) {
				detail::fence();
				detail::store(word(detail::submission_tail), tail);
				detail::store(&shared->published.word, tail);
			}
			detail::exchange(&shared->publishing.word, 0);
		} while (detail::load_acquire_gpu(ready(tail)) == tail + 1);
	}

	/*
	 * Waits for a slot's request, or, when the ring's patience since `start` is over, leaves it to the
	 * thread that takes its completion.
	 */
	GPUNVME_OUTLINE GPUNVME_FN end finish(u32 number, u64 start) const
	{
		detail::slot *slot = slots() + number;
		for (;;) {
			u32 over = detail::load(&shared->over.word);
			if (detail::load_acquire_gpu(&slot->state) == detail::done)
				return {{slot->status, slot->reason, slot->bytes}, true};
			u64 waited = detail::now() - start;
			bool late = waited > patience;
			end own;
			found what = take(number, &own);
			if (what == ours)
				return own;
			/* A slot that has its completion cannot be left: the next look finds it. */
			bool ends = late || (over != 0 && what == nothing);
			if (ends && leave(slot))
				return {{over != 0 ? int(over) : timed_out, 0, 0}, false};
			if (what == nothing)
				detail::pause_after(waited);
		}
	}

	GPUNVME_FN static bool leave(detail::slot *slot)
	{
		u32 pending = detail::pending;
		return detail::compare_exchange(&slot->state, pending, u32(detail::abandoned)) == pending;
	}

	/* What a thread took: no completion, those of others, the one that it waits for too. */
	enum found : u32 { nothing, others, ours };

	/* How many completions cross the bus at once, and how many a thread takes in its turn. */
	enum : u32 { width = 8, turn = 64 };

	/* Whether there were completions, of which this thread waits for none. */
	GPUNVME_FN bool poll() const
	{
		end none;
		return take(detail::none, &none) != nothing;
	}

	/*
	 * Takes completions, if no other thread is at it, and hands each to its slot. A completion of
	 * slot `waits_for` goes to `own` instead. One thread at a time is fast enough: it takes many at
	 * once, and those that wait do not contend for them. Where the ring is over, all that came before
	 * are handed out first.
	 */
	GPUNVME_OUTLINE GPUNVME_FN found take(u32 waits_for, end *own) const
	{
		if (detail::load(&shared->taking.word) != 0 || detail::exchange(&shared->taking.word, 1) != 0)
			return nothing;
		u32 head = detail::load(&shared->head.word), told = detail::load(&shared->told.word), begin = head;
		u32 over, tail, looks = 4;
		do {
			over = detail::load(word(detail::over_word)) & detail::errnos;
			tail = detail::load_acquire(word(detail::completion_tail));
		} while (over == 0 && tail == head && --looks > 0);
		/* What the daemon completed before the ring was over counts. */
		if (over != 0) {
			over = detail::load_acquire(word(detail::over_word)) & detail::errnos;
			tail = detail::load_acquire(word(detail::completion_tail));
		}
		if (tail - told > entries || tail - head > entries) {
			over = broken;
			tail = head;
		}
		found what = nothing;
		GPUNVME_ROLLED
		while (head != tail && (over != 0 || head - begin < turn)) {
			u32 left = tail - head, count = left < width ? left : u32(width);
			found these = hand_out(head, count, waits_for, own);
			what = these == ours ? ours : what == ours ? ours : others;
			head += count;
		}
		/*
		 * Entries are used again when the daemon knows that they were taken. That costs a fence: it is
		 * told when nothing came, so that there is time, and before it has no room.
		 */
		if (head != told && (head == begin || head - told > entries / 4)) {
			detail::fence();
			detail::store(word(detail::completion_head), head);
			detail::store(&shared->told.word, head);
		}
		detail::store(&shared->head.word, head);
		if (over != 0 && head == tail)
			detail::store_release_gpu(&shared->over.word, over);
		detail::store_release_gpu(&shared->taking.word, 0);
		return what;
	}

	/*
	 * Hands the completions from a position on to their slots; one that is for no request is a broken
	 * daemon's. Loads of one sector of 32 bytes cross the bus one after the other, those of several
	 * sectors at once: of each completion only a part of either sector is loaded, where that says
	 * enough.
	 */
	GPUNVME_FN found hand_out(u32 position, u32 count, u32 waits_for, end *own) const
	{
		detail::sixteen first[width];
		u32 flags[width], states[width];
		GPUNVME_UNROLLED
		for (u32 n = 0; n < width; n++) {
			if (n < count) {
				first[n] = detail::load(reinterpret_cast<const detail::sixteen *>(completion(position + n)));
				flags[n] = detail::load(reinterpret_cast<const u32 *>(completion(position + n) + detail::flags_at));
			}
		}
		found what = others;
		GPUNVME_UNROLLED
		for (u32 n = 0; n < width; n++) {
			states[n] = detail::idle;
			if (n < count && first[n].pair(0) < entries) {
				u64 bytes = (flags[n] & detail::moved_all) != 0 ? detail::as_asked : moved(position + n);
				outcome ended = {int(first[n].word[2] & detail::errnos), first[n].word[3], bytes};
				if (first[n].word[0] == waits_for) {
					*own = {ended, true};
					what = ours;
				} else {
					detail::slot *slot = slots() + first[n].word[0];
					detail::load_behind_daemon(&slot->state);
					slot->status = ended.status;
					slot->reason = ended.reason;
					slot->bytes = ended.bytes;
					states[n] = detail::pending;
				}
			}
		}
		detail::fence_gpu();
		GPUNVME_UNROLLED
		for (u32 n = 0; n < width; n++)
			if (states[n] == detail::pending)
				states[n] = detail::compare_exchange_after_fence(&slots()[first[n].word[0]].state,
										 u32(detail::pending), u32(detail::done));
		GPUNVME_UNROLLED
		for (u32 n = 0; n < width; n++)
			if (states[n] == detail::abandoned &&
			    detail::compare_exchange(&slots()[first[n].word[0]].state, u32(detail::abandoned),
						     u32(detail::idle)) == detail::abandoned) {
				end_page(slots() + first[n].word[0]);
				free_slot(first[n].word[0]);
			}
		return what;
	}

	/* Of a write that was given up and has ended: its page, if it is of one, is used again. */
	GPUNVME_FN static void end_page(const detail::slot *slot)
	{
		bool is_written = slot->status == 0 && slot->bytes == detail::as_asked;
		if (slot->page != nullptr)
			detail::add_release(slot->page, detail::valid - detail::busy - (is_written ? u64(detail::changed) : 0));
	}

	GPUNVME_FN const unsigned char *completion(u32 position) const
	{
		return memory + detail::entries_begin + (entries + (position & (entries - 1))) * detail::entry_bytes;
	}

	/* How many bytes a completion says were moved, by all routes. */
	GPUNVME_OUTLINE GPUNVME_FN u64 moved(u32 position) const
	{
		const detail::sixteen *quarters = reinterpret_cast<const detail::sixteen *>(completion(position));
		detail::sixteen second = detail::load(quarters + 1), third = detail::load(quarters + 2);
		return second.pair(0) + second.pair(1) + third.pair(0) + third.pair(1) + detail::load(quarters + 3).pair(0);
	}
};
static_assert(sizeof(ring) == 64, "as the host's library lays it out");

} // namespace gpunvme

#endif
