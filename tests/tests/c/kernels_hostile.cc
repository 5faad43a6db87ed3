/*
 * Kernels on the CPU with a daemon that answers anything: a ring in the memory of this process, and
 * no mount (tests/tests/kernels).
 *
 *     kernels_hostile SCENARIO
 *
 * Exits with 0 when every call ended as it should.
 */
#include "kernels.h"

#include <atomic>

static const unsigned N = 256, SLOT = 4096;

/* What the host's library lays out (client/src/gpu/kernels/layout.rs). */
struct Handed {
	unsigned char *memory, *staging, *state;
	unsigned long long buffer, patience;
	unsigned entries, slot_bytes;
	unsigned long long unused[2];
};

struct HandedArray {
	Handed ring;
	unsigned long long file, bytes;
	unsigned long long *words;
	gpunvme::detail::set *sets;
	unsigned char *frames;
	gpunvme::detail::counters *counters;
	unsigned ways, sets_count, page_bits, writable;
};

/* A ring, and the daemon's end of it. */
struct Ring {
	alignas(4096) unsigned char memory[4096 + N * 128] = {};
	alignas(4096) unsigned char staging[N * SLOT] = {};
	alignas(128) unsigned char state[2048 + N * 36 + N / 8] = {};
	unsigned taken = 0, tail = 0;

	Ring() { memset(state + 2048 + N * 36, 0xff, N / 8); }

	Handed handed(unsigned patience_ms)
	{
		return {memory, staging, state, 1, patience_ms * 1000000ull, N, SLOT, {0, 0}};
	}

	gpunvme::ring for_kernels(unsigned patience_ms)
	{
		Handed handed = this->handed(patience_ms);
		gpunvme::ring ring;
		static_assert(sizeof(handed) == sizeof(ring), "the same fields");
		memcpy(static_cast<void *>(&ring), &handed, sizeof(ring));
		return ring;
	}

	unsigned *word(unsigned offset) { return reinterpret_cast<unsigned *>(memory + offset); }

	void complete(unsigned long long number, unsigned status)
	{
		struct gpunvme_completion answer = {};
		answer.user_data = number;
		answer.status = int(status);
		answer.flags = GPUNVME_COMPLETION_ALL;
		memcpy(memory + GPUNVME_RING_ENTRIES + 64 * (N + tail % N), &answer, sizeof(answer));
		__atomic_store_n(word(GPUNVME_RING_COMPLETION_TAIL), ++tail, __ATOMIC_RELEASE);
	}

	/* Answers what was submitted, so many at most. */
	void answer(unsigned status, unsigned most = N)
	{
		while (most-- > 0 && taken != __atomic_load_n(word(GPUNVME_RING_SUBMISSION_TAIL), __ATOMIC_ACQUIRE)) {
			struct gpunvme_submission asked;
			memcpy(&asked, memory + GPUNVME_RING_ENTRIES + 64 * (taken++ % N), sizeof(asked));
			complete(asked.user_data, status);
		}
	}
};

/* A daemon that answers whatever is submitted with a status, until it goes. */
class Answering {
      public:
	Answering(Ring &ring, unsigned status)
		: thread([this, &ring, status] {
			  while (!over)
				  ring.answer(status);
		  })
	{
	}
	~Answering()
	{
		over = true;
		thread.join();
	}

      private:
	std::atomic<bool> over{false};
	std::thread thread;
};

/* An array of one set of four frames. */
struct Array {
	unsigned long long words[4] = {};
	gpunvme::detail::set sets[1] = {};
	gpunvme::detail::counters counters[128] = {};
	unsigned char frames[4 * 4096] = {};

	template <class T = unsigned>
	gpunvme::array<T> for_kernels(Ring &ring, unsigned patience_ms, unsigned writable)
	{
		HandedArray handed = {ring.handed(patience_ms), 1, 1 << 20, words, sets, frames, counters, 4, 1, 12, writable};
		gpunvme::array<T> array;
		static_assert(sizeof(handed) == sizeof(array), "the same fields");
		memcpy(static_cast<void *>(&array), &handed, sizeof(array));
		return array;
	}
};

/* Gets an element of an array, while the daemon answers with a status or says one for the ring. */
static int get(unsigned status, bool of_ring)
{
	static Ring ring;
	static Array made;
	gpunvme::array<unsigned> array = made.for_kernels(ring, 500, 0);
	if (of_ring)
		*ring.word(GPUNVME_RING_OVER) = status;
	Answering daemon(ring, status);
	unsigned value;
	return array.get(5, &value);
}

/* A status that is no errno is an error, and no value of the header's own. */
static void status()
{
	int ended = get(0xffffffff, false);
	CHECK(ended > 0, "%d", ended);
}

static void status_of_ring()
{
	int ended = get(0xffffffff, true);
	CHECK(ended > 0, "%d", ended);
}

/* Requests that were given up, all answered later but one, and one twice: so many slots are free. */
static void late()
{
	Ring ring;
	gpunvme::ring kernels = ring.for_kernels(20);
	std::vector<gpunvme::request> begun;
	char byte;
	for (unsigned n = 0; n < N; n++)
		begun.push_back(kernels.read_async(1, 0, &byte, 1));
	for (const gpunvme::request &request : begun)
		CHECK(kernels.wait(request).status == gpunvme::timed_out, "nothing was answered");
	CHECK(kernels.read_async(1, 0, &byte, 1).status == gpunvme::again, "no slot is free");
	ring.answer(0, N - 1);
	ring.complete(begun[0].slot, 0);
	begun.clear();
	for (unsigned n = 0; n < N - 1; n++) {
		begun.push_back(kernels.read_async(1, 0, &byte, 1));
		CHECK(begun[n].status == 0, "slot %u: %d", n, begun[n].status);
	}
	CHECK(kernels.read_async(1, 0, &byte, 1).status == gpunvme::again, "a slot was free twice");
	/* What only begins requests is told that the ring is over. */
	*ring.word(GPUNVME_RING_OVER) = gpunvme::closed;
	unsigned tries = 0;
	while (kernels.read_async(1, 0, &byte, 1).status == gpunvme::again && tries < 10)
		tries++;
	CHECK(kernels.read_async(1, 0, &byte, 1).status == gpunvme::closed, "after %u tries", tries);
}

/* A ring that is over says so also where completions never end. */
static void ahead()
{
	Ring ring;
	gpunvme::ring kernels = ring.for_kernels(60000);
	char byte;
	for (unsigned n = 0; n < N; n++)
		kernels.read_async(1, 0, &byte, 1);
	for (unsigned n = 0; n < N; n++)
		ring.complete(1ull << 40, 0);
	*ring.word(GPUNVME_RING_OVER) = gpunvme::closed;
	int ended = gpunvme::again;
	for (unsigned tries = 0; tries < 1000 && ended == gpunvme::again; tries++) {
		*ring.word(GPUNVME_RING_COMPLETION_TAIL) = *ring.word(GPUNVME_RING_COMPLETION_HEAD) + N;
		ended = kernels.read_async(1, 0, &byte, 1).status;
	}
	CHECK(ended == gpunvme::closed, "%d", ended);
}

/*
 * A page whose write was given up is not written again before that write has ended: it could come
 * last. Then it is written anew, or, where it was written, nothing is left to do.
 */
static void late_writes()
{
	static Ring ring;
	static Array made;
	gpunvme::array<unsigned> array = made.for_kernels(ring, 100, 1);
	std::atomic<unsigned> answers{1}; /* requests that the daemon answers */
	std::atomic<bool> over{false};
	std::thread daemon([&] {
		while (!over)
			if (answers > 0 && ring.taken != __atomic_load_n(ring.word(GPUNVME_RING_SUBMISSION_TAIL), __ATOMIC_ACQUIRE)) {
				answers--;
				ring.answer(0, 1);
			}
	});
	unsigned value;
	for (unsigned round = 0; round < 3; round++) {
		int status = array.set(0, round + 1);
		CHECK(status == 0, "round %u: %d", round, status);
		status = array.flush(0, 1);
		CHECK(status == gpunvme::timed_out, "no write is answered: %d", status);
		unsigned submitted = *ring.word(GPUNVME_RING_SUBMISSION_TAIL);
		status = array.flush(0, 1);
		CHECK(status == gpunvme::timed_out, "it may still be written: %d", status);
		status = array.get(0, &value);
		CHECK(status == gpunvme::timed_out, "it may still be written: %d", status);
		CHECK(submitted == *ring.word(GPUNVME_RING_SUBMISSION_TAIL), "it was submitted again");
		answers = 1;
		while (answers > 0)
			std::this_thread::yield();
		status = array.get(0, &value);
		CHECK(status == 0 && value == round + 1, "%d, %u", status, value);
		status = array.flush(0, 1);
		CHECK(status == 0, "%d", status);
		CHECK(submitted == *ring.word(GPUNVME_RING_SUBMISSION_TAIL), "what is written was written again");
	}
	over = true;
	daemon.join();
}

/* What waits for a frame is told that the ring is over. */
static void full()
{
	static Ring ring;
	static Array made;
	gpunvme::array<unsigned> array = made.for_kernels(ring, 20000, 1);
	Answering daemon(ring, 0);
	for (unsigned page = 0; page < 4; page++)
		CHECK(array.hold(page * 1024).status == 0, "page %u", page);
	std::thread end([&] {
		usleep(20000);
		__atomic_store_n(ring.word(GPUNVME_RING_OVER), unsigned(gpunvme::closed), __ATOMIC_RELEASE);
	});
	unsigned value;
	int status = array.get(4 * 1024, &value);
	CHECK(status == gpunvme::closed, "%d", status);
	gpunvme::detail::set_bits(made.words, gpunvme::detail::changed);
	status = array.flush(0, 1);
	CHECK(status == gpunvme::closed, "%d", status);
	end.join();
}

/* The group is counted out once, by the thread that it was counted in by. */
static void apart()
{
	static Ring ring;
	static Array made;
	gpunvme::array<unsigned> array = made.for_kernels(ring, 5000, 1);
	Answering daemon(ring, 0);
	gpunvme::held<unsigned> first = array.hold(0), other = first;
	other.holder = 0; /* as another thread of the group has it */
	CHECK((made.words[first.frame] & gpunvme::detail::users) == 1, "%llx", made.words[first.frame]);
	array.release(other, true);
	array.release(first, true);
	CHECK((made.words[first.frame] & gpunvme::detail::users) == 0, "%llx", made.words[first.frame]);
	int status = array.flush(0, 1);
	CHECK(status == 0, "%d", status);
}

/* Milliseconds that a call took. */
template <class Call> static unsigned long long time_of(Call call)
{
	unsigned long long start = gpunvme::detail::now();
	call();
	return (gpunvme::detail::now() - start) / 1000000;
}

/* A silent daemon costs a call one patience, however many requests the call would make. */
static void patience()
{
	static Ring ring, full;
	static Array made;
	const unsigned patience_ms = 1000;
	static unsigned char memory[4 * SLOT];
	auto check = [](const char *what, unsigned long long took) {
		CHECK(took >= patience_ms / 2 && took < 2 * patience_ms, "%s took %llu ms", what, took);
	};
	gpunvme::ring kernels = ring.for_kernels(patience_ms);
	check("a read of four parts", time_of([&] {
		      int status = kernels.read(1, 0, memory, sizeof(memory)).status;
		      CHECK(status == gpunvme::timed_out, "%d", status);
	      }));
	gpunvme::array<unsigned> array = made.for_kernels(ring, patience_ms, 1);
	for (unsigned long long page = 0; page < 4; page++)
		made.words[page] = page * gpunvme::detail::one_page | gpunvme::detail::valid | gpunvme::detail::changed;
	check("a flush of four pages", time_of([&] {
		      int status = array.flush(0, 1);
		      CHECK(status == gpunvme::timed_out, "%d", status);
	      }));
	static Array other;
	gpunvme::array<unsigned> without_slots = other.for_kernels(full, patience_ms, 0);
	gpunvme::ring taken = full.for_kernels(patience_ms);
	for (unsigned n = 0; n < N; n++)
		taken.read_async(1, 0, memory, 1);
	check("words of eight pages where no slot is free", time_of([&] {
		      launch(1, 8, [&](unsigned, const Team &team) {
			      unsigned value;
			      int status = without_slots.get(team.rank() * 1024, &value, team);
			      CHECK(status == gpunvme::timed_out, "%d", status);
		      });
	      }));
}

/* What can only be a mistake is refused, and changes nothing. */
static void mistakes()
{
	static Ring ring;
	static Array made;
	static struct Large {
		unsigned char bytes[8192];
	} large;
	Answering daemon(ring, 0);
	int status = made.for_kernels(ring, 500, 1).flush(0, 0);
	CHECK(status == gpunvme::invalid, "no parts: %d", status);
	auto array = made.for_kernels<Large>(ring, 500, 1);
	memset(&large, 0xab, sizeof(large));
	status = array.set(0, large);
	CHECK(status == gpunvme::invalid, "an element of two pages: %d", status);
	status = array.hold(0).status;
	CHECK(status == gpunvme::invalid, "an element of two pages: %d", status);
	CHECK(made.frames[0] == 0 && made.frames[4096] == 0, "it was set");
	unsigned submitted = *ring.word(GPUNVME_RING_SUBMISSION_TAIL);
	gpunvme::outcome ended = ring.for_kernels(500).write(1, ~0ull - 4095, &large, 2 * SLOT);
	CHECK(ended.status == gpunvme::invalid && ended.bytes == 0, "beyond the largest offset: %d", ended.status);
	CHECK(submitted == *ring.word(GPUNVME_RING_SUBMISSION_TAIL), "a part of it was submitted");
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)();
	} scenarios[] = {
		{"status", status}, {"status_of_ring", status_of_ring}, {"late", late}, {"ahead", ahead},
		{"late_writes", late_writes}, {"full", full}, {"apart", apart}, {"patience", patience},
		{"mistakes", mistakes},
	};
	if (argc != 2)
		errx(2, "usage: kernels_hostile SCENARIO");
	for (const auto &scenario : scenarios) {
		if (strcmp(scenario.name, argv[1]) == 0) {
			scenario.run();
			return 0;
		}
	}
	errx(2, "no scenario %s", argv[1]);
}
