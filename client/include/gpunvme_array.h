/*
 * Arrays over files of a gpunvme mount, for the threads of a kernel: elements are in a cache in the
 * GPU's memory, by pages, and what is not there is read from the file by the ring.
 *
 *     __global__ void sum(gpunvme::array<float> weights, const unsigned long *rows, float *sum)
 *     {
 *             float weight;
 *             if (weights.get(rows[blockIdx.x * blockDim.x + threadIdx.x], &weight) == 0)
 *                     atomicAdd(sum, weight);
 *     }
 *
 * The host makes the array (gpunvme_gpu_array_* in gpunvme.h, GpuArray in Rust) and passes it by
 * value. Any number of threads, blocks and kernels use it at once. Threads of a warp that come to a
 * call together share the work of what is missing; what each wants may be the same or not. No call
 * waits for ever: errors are values, the same as those of gpunvme_device.h.
 *
 * A page has its place in one set of as many frames as the array has ways. Of a full set the page
 * goes that was not used since the clock's hand last passed it. A page that was changed is written
 * to the file, as a whole, when it goes or by flush(): nothing else should write to it meanwhile.
 * Changes that were not flushed when the host destroys the array are lost.
 *
 * Device code needs compute capability 7.0: threads of a warp wait for each other there, each by
 * itself. A call takes about 170 registers of each thread: kernels with blocks of more than 256
 * threads say so, by __launch_bounds__.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_ARRAY_H
#define GPUNVME_ARRAY_H

#include "gpunvme_device.h"

/* The version of gpunvme::array, which the host's library has to know. */
#define GPUNVME_ARRAY_VERSION 2

namespace gpunvme {

/* What else the status of an array's call may be. */
enum : int { read_only = 30 /* the array is not made for changes */ };

/* Elements that a group holds: they stay where they are until it releases them. */
template <class T> struct held {
	int status; /* 0, or why there are none */
	u32 frame;
	T *data;    /* the element that was asked for, and those behind it in its page */
	u64 count;  /* how many */
	u32 holder; /* whether this thread counts the group out again */
};

namespace detail {

struct set {
	u32 lock; /* held for some loads and stores, never for a transfer */
	u32 hand; /* of the clock */
};

/* Of a multiprocessor. */
struct alignas(128) counters {
	u64 hits, misses, written;
};

/* What a group gets that wants a page in. */
enum place : u32 {
	present,  /* it is there, or another group is at it */
	reserved, /* a frame, busy, for the page */
	to_write, /* a frame, busy, whose page has to be written back first */
	full,     /* no frame: all are in use */
};

struct reservation {
	u32 what; /* a `place` */
	u32 frame;
	u64 page; /* what is to be written */
};

/* What is done with an element. */
template <class T> struct reading {
	T *to;
	GPUNVME_FN void use(T *element, u64 *) { *to = *element; }
};

template <class T> struct writing {
	const T *from;
	GPUNVME_FN void use(T *element, u64 *word)
	{
		*element = *from;
		set_bits(word, changed);
	}
};

template <class T> struct holding {
	T *element;
	u64 *word;
	GPUNVME_FN void use(T *found, u64 *its_word)
	{
		add_acquire(its_word, one_user);
		element = found;
		word = its_word;
	}
};

} // namespace detail

/*
 * An array, as the host hands it to kernels: copied freely, valid until the host destroys it or its
 * ring. Its fields are the library's. T has a size that is a power of two, at most a page.
 */
template <class T> class array {
      public:
	/* Elements. */
	GPUNVME_FN u64 size() const { return bytes / sizeof(T); }

	/*
	 * Reads an element: each thread of the group one of its own. Returns 0, or the errno of this
	 * thread's page; `invalid` behind the end.
	 */
	template <class Group = lanes>
	GPUNVME_FN int get(u64 index, T *value, const Group &group = Group()) const
	{
		detail::reading<T> access = {value};
		return each(index, true, access, group);
	}

	/* Changes an element: each thread of the group one of its own. */
	template <class Group = lanes>
	GPUNVME_FN int set(u64 index, const T &value, const Group &group = Group()) const
	{
		detail::writing<T> access = {&value};
		int status = writable ? 0 : read_only;
		return status != 0 ? status : each(index, true, access, group);
	}

	/*
	 * Holds the page of an element for a group, whose threads all ask for the same: its elements are
	 * read, and changed, where they lie. It is released soon, by the same group: a group that holds
	 * something and waits for more waits in vain where all frames of a set are held, up to the
	 * ring's patience.
	 */
	template <class Group = lanes>
	GPUNVME_FN held<T> hold(u64 index, const Group &group = Group()) const
	{
		detail::holding<T> access = {nullptr, nullptr};
		held<T> made = {0, 0, nullptr, 0, 0};
		made.status = each(index, group.rank() == 0, access, group);
		if (group.rank() == 0 && made.status == 0) {
			made.frame = u32(access.word - words);
			made.data = access.element;
			u64 in_page = (1ull << page_bits) / sizeof(T), left = size() - index;
			made.count = in_page - index % in_page;
			made.count = made.count < left ? made.count : left;
		}
		made = group.share(made);
		made.holder = group.rank() == 0 && made.status == 0;
		return made;
	}

	/*
	 * Ends it; `is_changed` says whether elements were changed. The first thread of the group that
	 * held does so: where not all come together, the others need the elements no more by then.
	 */
	template <class Group = lanes>
	GPUNVME_FN int release(const held<T> &made, bool is_changed = false, const Group &group = Group()) const
	{
		group.sync();
		if (made.holder) {
			if (is_changed && writable)
				detail::set_bits(words + made.frame, detail::changed);
			detail::add_release(words + made.frame, -detail::one_user);
		}
		return is_changed && !writable ? int(read_only) : 0;
	}

	/*
	 * Writes changed pages back: of as many parts as groups call it, the group's. Returns 0, or the
	 * errno of the last page that could not be written, which is kept; until a write that `timed_out`
	 * has ended nothing else is done with its page. After one that did, the rest of the part is not
	 * written, and for pages that others use all the time it waits no longer than for one. What is set
	 * meanwhile may be written or not.
	 */
	template <class Group = lanes>
	GPUNVME_FN int flush(u32 part, u32 parts, const Group &group = Group()) const
	{
		int status = parts != 0 ? 0 : int(invalid);
		bool in_use = false; /* and stayed so */
		u64 waited = 0;      /* for frames that are */
		GPUNVME_ROLLED
		for (u64 frame = part; parts != 0 && frame < sets_count * ways && status != timed_out; frame += parts) {
			detail::reservation made = {detail::present, u32(frame), 0};
			if (group.rank() == 0)
				made.what = reserve_changed(made.frame, &made.page, &waited);
			made = group.share(made);
			int ended = 0;
			if (made.what == detail::to_write)
				ended = write_back(made, true, group);
			else if (made.what == detail::full)
				in_use = true;
			status = ended != 0 ? ended : status;
		}
		if (in_use && status == 0)
			status = group.share(by.ended() != 0 ? by.ended() : int(timed_out));
		return status;
	}

      private:
	ring by;
	file name;
	u64 bytes;
	u64 *words;                 /* of each frame */
	detail::set *sets;
	unsigned char *frames;      /* of a page each */
	detail::counters *counted;  /* 128 of them */
	u32 ways;                   /* a multiple of 4 */
	u32 sets_count;
	u32 page_bits;
	u32 writable;

	/* Pages that a group reads at once. */
	enum : u32 { depth = 8 };
	enum : int { wanted = -1 };

	GPUNVME_FN static u64 page_of(u64 word) { return word / detail::one_page; }
	GPUNVME_FN u32 set_of(u64 page) const { return u32(page ^ page >> 32) % sets_count; }
	GPUNVME_FN unsigned char *frame_at(u32 frame) const { return frames + (u64(frame) << page_bits); }
	GPUNVME_FN u64 page_len(u64 page) const
	{
		u64 left = bytes - (page << page_bits), most = 1ull << page_bits;
		return left < most ? left : most;
	}
	GPUNVME_FN T *element(u32 frame, u64 index) const
	{
		return reinterpret_cast<T *>(frame_at(frame) + (index * sizeof(T) & ((1ull << page_bits) - 1)));
	}
	GPUNVME_FN detail::counters *here() const { return counted + (detail::processor() & 127); }

	/* Does each thread's access, where it asks for one; the group reads what is missing. */
	template <class Access, class Group>
	GPUNVME_FN int each(u64 index, bool asks, Access &access, const Group &group) const
	{
		static_assert((sizeof(T) & (sizeof(T) - 1)) == 0, "no element lies on two pages");
		int status = !asks ? 0 : index < size() && sizeof(T) >> page_bits <= 1 ? int(wanted) : int(invalid);
		u64 page = index * sizeof(T) >> page_bits, since = 0;
		u32 pinned = detail::none;
		GPUNVME_ROLLED
		for (;;) {
			bool used = use(status == wanted, page, index, access, group);
			if (used) {
				detail::count(&here()->hits, 1);
				status = 0;
			}
			if (pinned != detail::none && (status != wanted || !is_of(detail::load(words + pinned), page))) {
				detail::add_release(words + pinned, -detail::one_user);
				pinned = detail::none;
			}
			if (group.first(status == wanted) == detail::none)
				return status;
			if (group.first(used) != detail::none)
				since = 0; /* others bring what is wanted */
			bool has_room = false;
			if (status == wanted && pinned == detail::none)
				pinned = pin(page, &has_room);
			bring(page, index, has_room, &status, access, &since, group);
		}
	}

	/*
	 * Does the access if it is wanted and the page is there: counted in, so that the page stays
	 * meanwhile. Threads whose pages are in the first one's frame are counted in and out together,
	 * since additions to one word are slow.
	 */
	template <class Access, class Group>
	GPUNVME_FN bool use(bool wants, u64 page, u64 index, Access &access, const Group &group) const
	{
		u32 frame = wants ? find(page) : u32(detail::none), leader = group.first(frame != detail::none);
		if (leader == detail::none)
			return false;
		bool together = frame == group.from(frame, leader);
		u64 count = group.how_many(together), users = together ? count : 1, before = 0;
		bool counts = together ? group.member() == leader : frame != detail::none;
		u64 *word = words + frame;
		if (counts)
			before = detail::add_acquire(word, users * detail::one_user);
		u64 of_leader = group.from(before, leader);
		before = together ? of_leader : before;
		bool there = frame != detail::none && holds(before, page);
		if (there)
			access.use(element(frame, index), word);
		group.sync();
		if (counts) {
			if (there && (before & detail::used_lately) == 0)
				detail::set_bits(word, detail::used_lately);
			detail::add_release(word, -(users * detail::one_user));
		}
		return there;
	}

	/*
	 * Counts a thread into the frame to which another group brings its page, or has brought it by now:
	 * so that the page stays until this thread has used it. Without that, pages that many wait for
	 * would go for those that others wait for, before all have come to look. If there is none, says
	 * whether the page seems to have room.
	 */
	GPUNVME_OUTLINE GPUNVME_FN u32 pin(u64 page, bool *has_room) const
	{
		u32 first = set_of(page) * ways;
		GPUNVME_ROLLED
		for (u32 frame = first; frame < first + ways; frame++) {
			u64 word = detail::load(words + frame);
			if (is_of(word, page)) {
				if (is_of(detail::add_acquire(words + frame, detail::one_user), page))
					return frame;
				detail::add_release(words + frame, -detail::one_user);
			}
			*has_room |= may_go(word);
		}
		return detail::none;
	}

	/* The frame that a page seems to be in. */
	GPUNVME_FN u32 find(u64 page) const
	{
		u32 first = set_of(page) * ways;
		GPUNVME_ROLLED
		for (u32 frame = first; frame < first + ways; frame += 4) {
			const detail::two *at = reinterpret_cast<const detail::two *>(words + frame);
			detail::two low = detail::load_gpu(at), high = detail::load_gpu(at + 1);
			u64 four[4] = {low.word[0], low.word[1], high.word[0], high.word[1]};
			for (u32 n = 0; n < 4; n++)
				if (holds(four[n], page))
					return frame + n;
		}
		return detail::none;
	}

	GPUNVME_FN static bool holds(u64 word, u64 page)
	{
		return page_of(word) == page && (word & detail::valid) != 0;
	}

	/* Whether its frame can be another page's: no thread uses its page, or waits for it. */
	GPUNVME_FN static bool may_go(u64 word)
	{
		u64 stays = (word & detail::valid) != 0 ? detail::users | detail::busy : u64(detail::busy);
		return (word & stays) == 0;
	}

	/* Whether it does, or will when a transfer ends. */
	GPUNVME_FN static bool is_of(u64 word, u64 page)
	{
		return page_of(word) == page && (word & (detail::valid | detail::busy)) != 0;
	}

	/* A page that a group reads. */
	struct load {
		u32 frame;
		u64 page;
		request begun;
	};

	/*
	 * Reads pages that threads of the group want, several at once, if they have room, and does those
	 * threads' accesses; waits a moment where others read them, or have all frames. A group waits for
	 * others only when it has no frame of its own.
	 */
	template <class Access, class Group>
	GPUNVME_OUTLINE GPUNVME_FN void bring(u64 page, u64 index, bool has_room, int *status, Access &access, u64 *since,
					      const Group &group) const
	{
		load loads[depth];
		u32 count = 0, written = 0;
		bool open = has_room && *status == wanted, stuck = true;
		GPUNVME_ROLLED
		while (count < depth) {
			u32 member = group.first(open);
			if (member == detail::none)
				break;
			u64 next = group.from(page, member);
			detail::reservation made = {detail::present, 0, 0};
			if (group.rank() == 0)
				made = reserve(next);
			made = group.share(made);
			int failed = 0;
			if (made.what == detail::to_write) {
				if (count > 0 || written == ways) {
					/* Others may take all that is freed. */
					end_use(made.frame, detail::valid - detail::busy, group);
					break;
				}
				failed = write_back(made, false, group);
				if (failed == 0) {
					written++;
					continue; /* the frame is free */
				}
			} else if (made.what == detail::reserved) {
				stuck = false;
				loads[count] = {made.frame, next, {}};
				loads[count].begun = by.begin(detail::command_read, name, next << page_bits,
							      frame_at(made.frame), page_len(next), count == 0, group);
				failed = loads[count].begun.status;
				if (failed == 0)
					count++;
				else
					end_use(made.frame, -detail::busy, group);
			}
			if (failed == again && count > 0)
				break; /* those that were begun come first */
			/* After a patience the next page would wait as long. */
			if (failed != 0 && *status == wanted && (page == next || failed == timed_out))
				*status = failed;
			if (failed == timed_out)
				break;
			open = open && page != next;
		}
		u64 start = detail::now(); /* one patience for all of them */
		GPUNVME_ROLLED
		for (u32 n = 0; n < count; n++) {
			const load &one = loads[n];
			outcome got = by.wait_since(start, one.begun, group);
			u64 len = page_len(one.page);
			unsigned char *bytes_of = frame_at(one.frame);
			GPUNVME_ROLLED
			for (u64 at = got.bytes + group.rank(); got.status == 0 && at < len; at += group.size())
				bytes_of[at] = 0; /* the file is shorter */
			u64 here_now = detail::valid + detail::used_lately + detail::one_user - detail::busy;
			end_use(one.frame, got.status == 0 ? here_now : -detail::busy, group);
			if (group.rank() == 0)
				detail::count(&here()->misses, 1);
			if (*status == wanted && page == one.page) {
				if (got.status == 0)
					access.use(element(one.frame, index), words + one.frame);
				*status = got.status;
			}
			if (got.status == 0)
				end_use(one.frame, -detail::one_user, group);
		}
		int over = 0;
		if (stuck && group.rank() == 0) {
			u64 now = detail::now();
			*since = *since != 0 ? *since : now;
			over = by.ended();
			over = over == 0 && now - *since > longest_wait() ? int(timed_out) : over;
			if (over == 0 && !by.poll())
				detail::pause_since(*since);
		} else if (!stuck) {
			*since = 0;
		}
		over = group.share(over);
		if (over != 0 && *status == wanted)
			*status = over;
	}

	/* For another group's transfer: its slot and its answer take the ring's patience each. */
	GPUNVME_FN u64 longest_wait() const { return by.patience < 1ull << 60 ? 4 * by.patience : by.patience; }

	/* What all threads of the group did with a frame is before this. */
	template <class Group> GPUNVME_FN void end_use(u32 frame, u64 change, const Group &group) const
	{
		group.sync();
		if (group.rank() == 0)
			detail::add_release(words + frame, change);
		group.sync();
	}

	/*
	 * A frame for a page, which is neither there nor on its way; one thread calls it. It does not wait
	 * for the set's lock, since its group may hold frames that others wait for: `full` then.
	 */
	GPUNVME_OUTLINE GPUNVME_FN detail::reservation reserve(u64 page) const
	{
		detail::reservation made = {detail::full, 0, 0};
		u32 first = set_of(page) * ways;
		if (is_present(page, first)) {
			made.what = detail::present;
			return made;
		}
		detail::set *set = sets + set_of(page);
		if (detail::load(&set->lock) != 0 || detail::exchange(&set->lock, 1) != 0)
			return made;
		if (is_present(page, first)) {
			made.what = detail::present;
		} else {
			u32 hand = set->hand;
			GPUNVME_ROLLED
			for (u32 n = 0; n < 3 * ways && made.what == detail::full; n++, hand++)
				/* The first time round only frames without a page. */
				made = evict(page, first + hand % ways, n >= ways);
			set->hand = hand % ways;
		}
		detail::store_release_gpu(&set->lock, 0);
		return made;
	}

	GPUNVME_FN bool is_present(u64 page, u32 first) const
	{
		bool found = false;
		GPUNVME_ROLLED
		for (u32 frame = first; frame < first + ways; frame++) {
			found |= is_of(detail::load(words + frame), page);
		}
		return found;
	}

	/* Takes a frame for a page, if that is possible; the set is locked. */
	GPUNVME_FN detail::reservation evict(u64 page, u32 frame, bool with_page) const
	{
		detail::reservation made = {detail::full, frame, 0};
		u64 *at = words + frame, word = detail::load(at);
		if ((word & detail::busy) != 0)
			return made;
		if ((word & detail::valid) == 0) {
			/* Threads that count themselves out again may be in it. */
			u64 taken = page * detail::one_page | detail::busy | (word & detail::users);
			if (detail::compare_exchange(at, word, taken) == word)
				made.what = detail::reserved;
		} else if (!with_page || (word & detail::users) != 0) {
		} else if ((word & detail::used_lately) != 0) {
			detail::compare_exchange(at, word, word & ~detail::used_lately);
		} else if ((word & detail::changed) != 0) {
			if (detail::compare_exchange(at, word, word - detail::valid + detail::busy) == word) {
				made.what = detail::to_write;
				made.page = page_of(word);
			}
		} else if (detail::compare_exchange(at, word, page * detail::one_page | detail::busy) == word) {
			made.what = detail::reserved;
		}
		return made;
	}

	/* A changed page for flush(), which has `waited` for all so far; one thread calls it. */
	GPUNVME_OUTLINE GPUNVME_FN u32 reserve_changed(u32 frame, u64 *page, u64 *waited) const
	{
		u64 *at = words + frame, start = detail::now() - *waited;
		for (;;) {
			u64 word = detail::load_acquire_gpu(at);
			if ((word & detail::changed) == 0)
				return detail::present;
			if ((word & detail::valid) != 0 && (word & detail::users) == 0 &&
			    detail::compare_exchange(at, word, word - detail::valid + detail::busy) == word) {
				*page = page_of(word);
				return detail::to_write;
			}
			*waited = detail::now() - start;
			if (by.ended() != 0 || *waited > longest_wait())
				return detail::full;
			if (!by.poll())
				detail::pause_since(start);
		}
	}

	/*
	 * Writes a page to the file; then it stays, or the frame is free. What fails stays. A write that
	 * was given up may still happen: the frame is busy until then, so that no later write of the page
	 * comes before it.
	 */
	template <class Group>
	GPUNVME_OUTLINE GPUNVME_FN int write_back(const detail::reservation &made, bool stays, const Group &group) const
	{
		u64 len = page_len(made.page);
		request begun = by.begin(detail::command_write, name, made.page << page_bits, frame_at(made.frame), len, true, group);
		ring::end done = by.wait_for_page(begun, words + made.frame, group);
		int status = done.result.status == 0 && done.result.bytes < len ? int(broken) : done.result.status;
		u64 written = (stays ? u64(detail::valid) : 0) - detail::busy - detail::changed;
		if (done.ours)
			end_use(made.frame, status == 0 ? written : detail::valid - detail::busy, group);
		if (status == 0 && group.rank() == 0)
			detail::count(&here()->written, 1);
		return status;
	}
};
static_assert(sizeof(array<u32>) == 128, "as the host's library lays it out");

} // namespace gpunvme

#endif
