/*
 * Kernels on the CPU: gpunvme_device.h as the kernels of a GPU use it, with threads of this process
 * in their place (tests/tests/kernels.rs).
 *
 *     kernels SCENARIO MOUNT FILE     each function below that takes a `Site`
 *
 * Exits with 0 when everything was as it should be, and else says what was not.
 */
#include <gpunvme.h>
#include <gpunvme_array.h>
#include <gpunvme_device.h>

#include <assert.h>
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <functional>
#include <thread>
#include <vector>

static_assert(gpunvme::detail::submission_tail == GPUNVME_RING_SUBMISSION_TAIL &&
                      gpunvme::detail::completion_tail == GPUNVME_RING_COMPLETION_TAIL &&
                      gpunvme::detail::completion_head == GPUNVME_RING_COMPLETION_HEAD &&
                      gpunvme::detail::over_word == GPUNVME_RING_OVER &&
                      gpunvme::detail::entries_begin == GPUNVME_RING_ENTRIES &&
                      gpunvme::detail::entry_bytes == sizeof(struct gpunvme_submission) &&
                      gpunvme::detail::entry_bytes == sizeof(struct gpunvme_completion) &&
                      gpunvme::detail::command_read == _IOC_NR(GPUNVME_READ(1)) &&
                      gpunvme::detail::command_write == _IOC_NR(GPUNVME_WRITE(1)),
              "the device header is another ABI");
static_assert(gpunvme::again == EAGAIN && gpunvme::broken == EIO && gpunvme::closed == ENODEV &&
                      gpunvme::invalid == EINVAL && gpunvme::timed_out == ETIMEDOUT,
              "these are errnos");

#define MUST(call) \
	do { \
		if ((call) != 0) \
			errx(1, "%s: %s", #call, gpunvme_last_error()); \
	} while (0)
#define CHECK(condition, ...) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s; ", __FILE__, __LINE__, #condition); \
			errx(1, __VA_ARGS__); \
		} \
	} while (0)

/* Threads that play one block. */
struct Team {
	pthread_barrier_t *barrier;
	void *shared;
	unsigned number, count;

	unsigned rank() const { return number; }
	unsigned size() const { return count; }
	void sync() const { pthread_barrier_wait(barrier); }
	template <class T> T share(const T &value) const
	{
		sync();
		if (number == 0)
			memcpy(shared, &value, sizeof(T));
		sync();
		T copy;
		memcpy(&copy, shared, sizeof(T));
		return copy;
	}
	unsigned first(bool yes) const
	{
		unsigned *lowest = static_cast<unsigned *>(shared);
		sync();
		if (number == 0)
			*lowest = ~0u;
		sync();
		unsigned seen = __atomic_load_n(lowest, __ATOMIC_RELAXED);
		while (yes && number < seen &&
		       !__atomic_compare_exchange_n(lowest, &seen, number, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
		sync();
		return *lowest;
	}
	template <class T> T from(const T &value, unsigned member) const
	{
		sync();
		if (number == member)
			memcpy(shared, &value, sizeof(T));
		sync();
		T copy;
		memcpy(static_cast<void *>(&copy), shared, sizeof(T));
		return copy;
	}
};

/* Runs a kernel: `blocks` teams of `threads` threads. */
static void launch(unsigned blocks, unsigned threads, const std::function<void(unsigned, const Team &)> &kernel)
{
	struct Block {
		pthread_barrier_t barrier;
		alignas(64) char shared[256];
	};
	std::vector<Block> made(blocks);
	std::vector<std::thread> running;
	for (unsigned block = 0; block < blocks; block++) {
		pthread_barrier_init(&made[block].barrier, nullptr, threads);
		for (unsigned n = 0; n < threads; n++) {
			Team team = {&made[block].barrier, made[block].shared, n, threads};
			running.emplace_back([&kernel, block, team] { kernel(block, team); });
		}
	}
	for (auto &thread : running)
		thread.join();
}

/* A ring on a mount, and its file. */
struct Site {
	gpunvme_mount *mount;
	gpunvme_file *opened;
	gpunvme_gpu_ring *host;
	gpunvme_attached *attached;
	gpunvme::ring ring;
	gpunvme::file file;
	std::vector<unsigned char> bytes; /* the file's */

	Site(const char *root, const char *file_path, unsigned entries, unsigned slot, unsigned patience_ms)
	{
		int fd = open(file_path, O_RDONLY);
		CHECK(fd >= 0, "%s", file_path);
		bytes.resize(lseek(fd, 0, SEEK_END));
		CHECK(pread(fd, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()), "%s", file_path);
		close(fd);
		MUST(gpunvme_mount_open(root, &mount));
		MUST(gpunvme_file_open(file_path, O_RDWR, 0, &opened));
		MUST(gpunvme_gpu_ring_create(mount, -1, entries, slot, patience_ms, &host));
		MUST(gpunvme_gpu_ring_attach(host, opened, &attached));
		MUST(gpunvme_gpu_ring_for_kernels(host, GPUNVME_DEVICE_VERSION, &ring));
		file = gpunvme_attached_name(attached);
		gpunvme_mount_close(mount);
	}

	/* What is attached stays, and no descriptor keeps the volume from being unmounted. */
	void close_file()
	{
		gpunvme_file_close(opened);
		opened = nullptr;
	}

	~Site()
	{
		gpunvme_file_close(opened);
		gpunvme_attached_release(attached);
		gpunvme_gpu_ring_destroy(host);
	}
};

static unsigned long long random_number(unsigned long long *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* Blocks read ranges of any offset and length, to any address, at the file's end too. */
static void reads(const char *root, const char *path)
{
	/* Far more is asked for at once than there are slots. */
	Site site(root, path, 32, 16384, 0);
	launch(12, 3, [&](unsigned block, const Team &team) {
		unsigned long long state = block + 1;
		std::vector<unsigned char> own(300000);
		unsigned char *to = team.share(own.data()); /* the leader's */
		for (unsigned round = 0; round < 60; round++) {
			unsigned long long offset = random_number(&state) % (site.bytes.size() + 5000);
			unsigned long long len = random_number(&state) % (round % 4 ? 20000 : 200000);
			unsigned long long skew = random_number(&state) % 64;
			if (round % 3 == 0)
				offset &= ~4095ull, len &= ~4095ull, skew = 0;
			if (team.rank() == 0)
				memset(own.data(), 0xEE, own.size());
			team.sync();
			gpunvme::outcome done = site.ring.read(site.file, offset, to + skew, len, team);
			unsigned long long left = offset < site.bytes.size() ? site.bytes.size() - offset : 0;
			unsigned long long expected = len < left ? len : left;
			CHECK(done.status == 0 && done.bytes == expected, "%d, %llu bytes of %llu at %llu",
			      done.status, done.bytes, expected, offset);
			CHECK(memcmp(to + skew, site.bytes.data() + offset, expected) == 0, "%llu bytes at %llu",
			      expected, offset);
			CHECK(to[skew + expected] == 0xEE, "a byte behind a read changed");
			CHECK(skew == 0 || to[skew - 1] == 0xEE, "a byte before a read changed");
			team.sync();
		}
	});
}

/* Blocks write their parts of a file, which become longer by it, and read them again. */
static void writes(const char *root, const char *path)
{
	Site site(root, path, 64, 8192, 0);
	const unsigned len = 50021;
	launch(8, 2, [&](unsigned block, const Team &team) {
		static std::vector<unsigned char> parts[8];
		if (team.rank() == 0) {
			for (unsigned at = 0; at < len; at++)
				parts[block].push_back((unsigned char)(at * 7 + block));
			parts[block].resize(2 * len);
		}
		team.sync();
		unsigned char *part = parts[block].data();
		gpunvme::outcome done = site.ring.write(site.file, (unsigned long long)block * len, part, len, team);
		CHECK(done.status == 0 && done.bytes == len, "%d, %llu bytes", done.status, done.bytes);
		done = site.ring.read(site.file, (unsigned long long)block * len, part + len, len, team);
		CHECK(done.status == 0 && memcmp(part, part + len, len) == 0, "%d", done.status);
	});
}

/* Requests are begun until no slot is free, and waited for in another order. */
static void requests(const char *root, const char *path)
{
	Site site(root, path, 32, 4096, 0);
	for (unsigned round = 0; round < 3; round++) {
		std::vector<std::vector<unsigned char>> memory(32, std::vector<unsigned char>(4096));
		std::vector<gpunvme::request> begun;
		for (unsigned n = 0; n < 32; n++) {
			begun.push_back(site.ring.read_async(site.file, n * 4096, memory[n].data(), 4096));
			CHECK(begun[n].status == 0, "request %u: %d", n, begun[n].status);
		}
		gpunvme::request refused = site.ring.read_async(site.file, 0, memory[0].data(), 4096);
		CHECK(refused.status == gpunvme::again, "%d", refused.status);
		CHECK(site.ring.wait(refused).status == gpunvme::again, "it did not begin");
		for (unsigned n = 32; n-- > 0;) {
			gpunvme::outcome done = site.ring.wait(begun[n]);
			CHECK(done.status == 0 && done.bytes == 4096, "%d, %llu bytes", done.status, done.bytes);
			CHECK(memcmp(memory[n].data(), site.bytes.data() + n * 4096, 4096) == 0, "request %u", n);
		}
	}
	unsigned char byte;
	CHECK(site.ring.longest(1) == 4095, "it ends where the slot does");
	CHECK(site.ring.read_async(site.file, 1, &byte, 4096).status == gpunvme::invalid, "longer than a slot");
	gpunvme::request write = site.ring.write_async(site.file, 5, "written", 7);
	gpunvme::outcome done = site.ring.wait(write);
	CHECK(done.status == 0 && done.bytes == 7, "%d, %llu bytes", done.status, done.bytes);
}

/* Blocks use what they read where it lies; no other request gets its slot before it is given back. */
static void lends(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 200);
	launch(6, 3, [&](unsigned block, const Team &team) {
		unsigned long long state = block + 1;
		for (unsigned round = 0; round < 200; round++) {
			unsigned long long offset = random_number(&state) % (site.bytes.size() + 3000);
			unsigned long long len = 1 + random_number(&state) % site.ring.longest(offset);
			gpunvme::request begun = site.ring.read_async(site.file, offset, nullptr, len, team);
			CHECK(begun.status == 0, "%d", begun.status);
			gpunvme::lent used = site.ring.lend(begun, team);
			unsigned long long left = offset < site.bytes.size() ? site.bytes.size() - offset : 0;
			unsigned long long expected = len < left ? len : left;
			CHECK(used.result.status == 0 && used.result.bytes == expected, "%d, %llu bytes of %llu",
			      used.result.status, used.result.bytes, expected);
			CHECK((used.data == nullptr) == (expected == 0), "%llu bytes", expected);
			/* Each thread its part; others read by the ring meanwhile. */
			for (unsigned turn = 0; turn < 2; turn++) {
				for (unsigned long long at = team.rank(); at < expected; at += team.size())
					CHECK(static_cast<const unsigned char *>(used.data)[at] == site.bytes[offset + at],
					      "byte %llu of %llu at %llu", at, expected, offset);
				sched_yield();
			}
			site.ring.give_back(used, team);
		}
	});
	/* All slots lent: none is left, until one is given back. */
	std::vector<gpunvme::lent> all;
	for (unsigned n = 0; n < 32; n++) {
		all.push_back(site.ring.lend(site.ring.read_async(site.file, n * 8192, nullptr, 8192)));
		CHECK(all[n].result.status == 0 && all[n].data != nullptr, "%d", all[n].result.status);
	}
	unsigned char page[4096];
	CHECK(site.ring.read_async(site.file, 0, page, 4096).status == gpunvme::again, "a slot that was lent");
	CHECK(site.ring.read(site.file, 0, page, 4096).status == gpunvme::timed_out, "patience");
	for (unsigned n = 0; n < 32; n++)
		CHECK(memcmp(all[n].data, site.bytes.data() + n * 8192, 8192) == 0, "slot %u", n);
	site.ring.give_back(all[7]);
	CHECK(site.ring.read(site.file, 4096, page, 4096).status == 0, "a slot that was given back");
	CHECK(memcmp(page, site.bytes.data() + 4096, 4096) == 0, "other bytes");
	for (unsigned n = 0; n < 32; n++)
		if (n != 7)
			site.ring.give_back(all[n]);
	/* What did not begin, what failed, and a write. */
	gpunvme::lent none = site.ring.lend(site.ring.read_async(site.file, 1, nullptr, 8192));
	CHECK(none.result.status == gpunvme::invalid && none.data == nullptr, "%d", none.result.status);
	site.ring.give_back(none);
	none = site.ring.lend(site.ring.read_async(site.file + 77, 0, nullptr, 4096));
	CHECK(none.result.status == EBADF && none.data == nullptr, "%d", none.result.status);
	site.ring.give_back(none);
	none = site.ring.lend(site.ring.write_async(site.file, 0, site.bytes.data(), 100));
	CHECK(none.result.status == 0 && none.result.bytes == 100 && none.data == nullptr, "%d", none.result.status);
	site.ring.give_back(none);
	/* Nothing was lost by it. */
	std::vector<gpunvme::request> begun;
	for (unsigned n = 0; n < 32; n++) {
		begun.push_back(site.ring.read_async(site.file, 0, page, 4096));
		CHECK(begun[n].status == 0, "slot %u: %d", n, begun[n].status);
	}
	CHECK(site.ring.read_async(site.file, 0, page, 4096).status == gpunvme::again, "a slot too many");
	for (const auto &request : begun)
		CHECK(site.ring.wait(request).status == 0, "a read");
}

/* An array over the file of a site. */
template <class T> struct Array {
	gpunvme_gpu_array *host;
	gpunvme::array<T> kernels;

	Array(const Site &site, unsigned page, unsigned ways, unsigned long long cache, bool writable,
	      unsigned long long len = 0)
	{
		struct gpunvme_array_settings settings = {page, ways, cache, len, writable, {}};
		MUST(gpunvme_gpu_array_create(site.host, site.opened, &settings, &host));
		MUST(gpunvme_gpu_array_for_kernels(host, GPUNVME_ARRAY_VERSION, &kernels));
	}

	gpunvme_array_stats stats() const
	{
		gpunvme_array_stats found;
		MUST(gpunvme_gpu_array_stats(host, &found));
		return found;
	}

	~Array() { gpunvme_gpu_array_destroy(host); }
};

/* Threads of blocks, and threads alone, get elements of their own of a file, and of a cache that is
 * far smaller, or as large. */
static void array_gets(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 0);
	for (unsigned page : {1024u, 8192u}) {
		for (bool fits : {false, true}) {
			Array<unsigned> array(site, page, 4, fits ? 4 << 20 : 16 * page, false);
			const unsigned long long count = site.bytes.size() / 4;
			CHECK(array.kernels.size() == count, "%llu elements", array.kernels.size());
			std::vector<unsigned> words(count);
			memcpy(words.data(), site.bytes.data(), count * 4);
			auto check = [&](unsigned long long index, int status, unsigned value) {
				CHECK(status == 0 && value == words[index], "element %llu: %d, %x and not %x", index, status,
				      value, words[index]);
			};
			launch(4, 3, [&](unsigned block, const Team &team) {
				unsigned long long state = 77 * block + team.rank() + 1;
				for (unsigned n = 0; n < 100; n++) {
					unsigned value = 0;
					/* Now and then all want the same. */
					unsigned long long wild = random_number(&state);
					unsigned long long index = n % 10 == 0 ? team.share(wild) % count : wild % count;
					int status = array.kernels.get(index, &value, team);
					check(index, status, value);
					if (n % 7 == 0) {
						index = random_number(&state) % count;
						status = array.kernels.get(index, &value);
						check(index, status, value);
					}
					unsigned long long behind = count + wild % 2 * (1ull << 60) + wild % 1000;
					CHECK(array.kernels.get(behind, &value) == gpunvme::invalid, "behind the end");
				}
			});
			CHECK(array.kernels.set(0, 1) == gpunvme::read_only, "it is not for changes");
			gpunvme_array_stats before = array.stats();
			CHECK(before.hits > 0 && before.misses > 0 && before.written == 0, "%llu hits, %llu misses",
			      (unsigned long long)before.hits, (unsigned long long)before.misses);
			launch(4, 1, [&](unsigned, const Team &) {
				for (unsigned long long index = 0; index < count; index += page / 4) {
					unsigned value = 0;
					int status = array.kernels.get(index, &value);
					check(index, status, value);
				}
			});
			/* Where all pages have room, each was read once, whoever wanted it. */
			unsigned long long pages = (count * 4 + page - 1) / page, misses = array.stats().misses;
			CHECK(!fits || misses == pages, "%llu misses of %llu pages", misses, pages);
			CHECK(fits || misses > pages, "%llu misses of %llu pages", misses, pages);
		}
	}
}

/*
 * Blocks change every element of a file, each its own among those of others, by a cache of a few
 * pages; element n becomes 3 n + 1, behind the file's old end too. The last of them the host
 * flushes.
 */
static void array_sets(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 0);
	const unsigned long long count = site.bytes.size() / 4 + 2000;
	Array<unsigned> array(site, 4096, 4, 8 * 4096, true, count * 4);
	const unsigned blocks = 6, threads = 3;
	launch(blocks, threads, [&](unsigned block, const Team &team) {
		unsigned step = blocks * threads, mine = block * threads + team.rank();
		for (unsigned long long at = 0; at < count; at += step) {
			/* All threads of a block come to a call, also those that have nothing left. */
			unsigned long long index = at + mine;
			int status = array.kernels.set(index, unsigned(3 * index + 1), team);
			CHECK(status == (index < count ? 0 : int(gpunvme::invalid)), "%d", status);
			unsigned value = 0;
			if (index % 17 == 0 && index < count) {
				status = array.kernels.get(index, &value);
				CHECK(status == 0 && value == unsigned(3 * index + 1), "%d, %u", status, value);
			}
		}
	});
	launch(blocks, threads, [&](unsigned block, const Team &team) {
		int status = array.kernels.flush(block, blocks, team);
		CHECK(status == 0, "%d", status);
	});
	unsigned long long written = array.stats().written;
	CHECK(written >= (count * 4 + 4095) / 4096, "%llu pages", written);
	uint64_t flushed = 1;
	MUST(gpunvme_gpu_array_flush(array.host, site.opened, &flushed));
	CHECK(flushed == 0, "kernels had flushed, but %llu bytes", (unsigned long long)flushed);
	for (unsigned long long index : {0ull, 5000ull, count - 1})
		CHECK(array.kernels.set(index, 0xABCD0000u + unsigned(index % 1000)) == 0, "element %llu", index);
	MUST(gpunvme_gpu_array_flush(array.host, site.opened, &flushed));
	CHECK(flushed == 2 * 4096 + (count * 4) % 4096, "%llu bytes", (unsigned long long)flushed);
	MUST(gpunvme_gpu_array_flush(array.host, site.opened, &flushed));
	CHECK(flushed == 0, "twice");
}

/* Pages that groups hold stay, and what waits for them in vain is told. */
static void array_holds(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 100);
	Array<unsigned> array(site, 4096, 4, 4 * 4096, true);
	gpunvme::held<unsigned> all[4];
	for (unsigned n = 0; n < 4; n++) {
		all[n] = array.kernels.hold(n * 1024 + 3);
		CHECK(all[n].status == 0 && all[n].count == 1021, "%d, %llu", all[n].status, all[n].count);
		CHECK(memcmp(all[n].data, site.bytes.data() + n * 4096 + 12, 4084) == 0, "page %u", n);
	}
	unsigned value;
	int status = array.kernels.get(4 * 1024, &value);
	CHECK(status == gpunvme::timed_out, "%d", status);
	CHECK(array.kernels.get(1024, &value) == 0, "what is held can be had");
	CHECK(array.kernels.flush(0, 1) == 0, "nothing was changed");
	all[2].data[0] = 0x11223344;
	CHECK(array.kernels.release(all[2], true) == 0, "it is for changes");
	status = array.kernels.get(4 * 1024, &value); /* page 2 goes to the file for it */
	CHECK(status == 0 && memcmp(&value, site.bytes.data() + 4 * 4096, 4) == 0, "%d", status);
	CHECK(array.stats().written == 1, "%llu", (unsigned long long)array.stats().written);
	for (unsigned n : {0u, 1u, 3u})
		array.kernels.release(all[n]);
	status = array.kernels.get(2 * 1024 + 3, &value);
	CHECK(status == 0 && value == 0x11223344, "%d, %x", status, value);
	launch(4, 3, [&](unsigned block, const Team &team) {
		for (unsigned n = 0; n < 50; n++) {
			/* Blocks hold pages of one set of four frames, and add to them in turns. */
			gpunvme::held<unsigned> page = array.kernels.hold((n * 5 + block) % 6 * 1024 + 100, team);
			CHECK(page.status == 0, "%d", page.status);
			if (team.rank() == 0)
				__atomic_fetch_add(page.data, 1, __ATOMIC_RELAXED);
			array.kernels.release(page, true, team);
		}
	});
	unsigned sum = 0;
	for (unsigned n = 0; n < 6; n++) {
		unsigned before;
		CHECK(array.kernels.get(n * 1024 + 100, &value) == 0, "page %u", n);
		memcpy(&before, site.bytes.data() + n * 4096 + 400, 4);
		sum += value - before;
	}
	CHECK(sum == 200, "%u of 200", sum);
	/* Settings that are none. */
	gpunvme_gpu_array *none;
	for (gpunvme_array_settings wrong : {gpunvme_array_settings{16384, 0, 0, 0, 0, {}},
						 gpunvme_array_settings{1000, 0, 0, 0, 0, {}},
						 gpunvme_array_settings{0, 6, 0, 0, 0, {}},
						 gpunvme_array_settings{0, 0, 0, 0, 0, {1}}}) {
		CHECK(gpunvme_gpu_array_create(site.host, site.opened, &wrong, &none) == -EINVAL, "page %u", wrong.page);
	}
	gpunvme_file *reader;
	MUST(gpunvme_file_open(path, O_RDONLY, 0, &reader));
	gpunvme_array_settings writable = {0, 0, 0, 0, 1, {}};
	CHECK(gpunvme_gpu_array_create(site.host, reader, &writable, &none) == -EBADF, "%s", gpunvme_last_error());
	gpunvme_file_close(reader);
	gpunvme::array<unsigned> unknown;
	CHECK(gpunvme_gpu_array_for_kernels(array.host, GPUNVME_ARRAY_VERSION + 1, &unknown) == -EINVAL, "version");
}

/* Blocks use an array until it is over, and say how it ended. */
static void array_until_over(const char *root, const char *path, unsigned patience_ms)
{
	Site site(root, path, 64, 4096, patience_ms);
	Array<unsigned> array(site, 4096, 4, 32 * 4096, true);
	site.close_file();
	int statuses[8] = {};
	launch(8, 2, [&](unsigned block, const Team &team) {
		unsigned long long state = block * 2 + team.rank() + 1, count = array.kernels.size();
		int ended = 0;
		for (unsigned round = 0; team.first(ended != 0) == ~0u; round++) {
			unsigned value;
			unsigned long long index = random_number(&state) % count;
			ended = round % 3 == 0 ? array.kernels.set(index, round, team) : array.kernels.get(index, &value, team);
			if (block == 0 && team.rank() == 0 && round == 50) {
				puts("reading");
				fflush(stdout);
			}
		}
		/* Of the threads of a block not all had to wait. */
		unsigned one = team.first(ended != 0);
		int status = team.from(ended, one);
		if (team.rank() == 0)
			statuses[block] = status;
	});
	for (int status : statuses)
		printf("%d\n", status);
	fflush(stdout);
}

/*
 * On a device that fails some commands and loses others: what is read is the file's or an error, and
 * what is set gets to the file when it is tried again. Element n becomes 3 n + 1.
 */
static void array_faults(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 0);
	Array<unsigned> array(site, 4096, 4, 8 * 4096, true);
	const unsigned long long count = array.kernels.size();
	unsigned failed = 0;
	launch(6, 2, [&](unsigned block, const Team &team) {
		unsigned long long state = block * 2 + team.rank() + 1;
		for (unsigned n = 0; n < 200; n++) {
			unsigned value = 0, right;
			unsigned long long index = random_number(&state) % count;
			int status = array.kernels.get(index, &value, team);
			memcpy(&right, site.bytes.data() + index * 4, 4);
			CHECK(status == EIO || (status == 0 && value == right), "%d, %x at %llu", status, value, index);
			__atomic_fetch_add(&failed, status != 0, __ATOMIC_RELAXED);
		}
	});
	launch(6, 1, [&](unsigned block, const Team &) {
		for (unsigned long long index = block; index < count; index += 6) {
			int status;
			while ((status = array.kernels.set(index, unsigned(3 * index + 1))) != 0) {
				CHECK(status == EIO, "%d", status);
				__atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
			}
		}
	});
	int status;
	while ((status = array.kernels.flush(0, 1)) != 0) {
		CHECK(status == EIO, "%d", status);
		failed++;
	}
	CHECK(failed > 0, "the device did not fail");
	printf("%u failed\n", failed);
}

static void array_until_closed(const char *root, const char *path) { array_until_over(root, path, 0); }
static void array_until_late(const char *root, const char *path) { array_until_over(root, path, 100); }

/* Blocks read until it is over, and say how it ended. `kernels.rs` ends it. */
static void until_over(const char *root, const char *path, unsigned patience_ms)
{
	Site site(root, path, 64, 4096, patience_ms);
	site.close_file();
	int statuses[8] = {};
	launch(8, 2, [&](unsigned block, const Team &team) {
		unsigned char own[16384];
		unsigned char *page = team.share(&own[0]); /* the leader's */
		unsigned long long state = block + 1;
		for (unsigned round = 0;; round++) {
			unsigned long long offset = random_number(&state) % (site.bytes.size() - sizeof(own));
			gpunvme::outcome done = site.ring.read(site.file, offset, page, sizeof(own), team);
			if (done.status != 0) {
				if (team.rank() == 0)
					statuses[block] = done.status;
				break;
			}
			if (team.rank() == 0)
				CHECK(memcmp(page, site.bytes.data() + offset, sizeof(own)) == 0, "at %llu", offset);
			team.sync();
			if (block == 0 && team.rank() == 0 && round == 20) {
				puts("reading");
				fflush(stdout);
			}
		}
	});
	for (int status : statuses)
		printf("%d\n", status);
	fflush(stdout); /* to let go of the ring may take a daemon that answers */
}

static void until_closed(const char *root, const char *path) { until_over(root, path, 0); }
static void until_late(const char *root, const char *path) { until_over(root, path, 300); }

/* The ring, as only its kernels see it. */
struct Fields {
	unsigned char *memory, *staging;
	gpunvme::detail::state *shared;
	unsigned long long buffer, patience;
	unsigned entries, slot_bytes;
	unsigned long long unused[2];
};

static Fields fields(const gpunvme::ring &ring)
{
	Fields seen;
	static_assert(sizeof(seen) == sizeof(ring), "the same fields");
	memcpy(static_cast<void *>(&seen), static_cast<const void *>(&ring), sizeof(seen));
	return seen;
}

/* A kernel whose arguments and entries are garbage gets errors, and spoils its own ring alone. */
static void wild_entries(const char *root, const char *path)
{
	unsigned char page[8192];
	Site site(root, path, 32, 8192, 2000);
	gpunvme::outcome done = site.ring.read(site.file + 77, 0, page, 4096);
	CHECK(done.status == EBADF, "%d", done.status);
	Fields wild = fields(site.ring);
	wild.buffer ^= 0x55;
	gpunvme::ring other;
	memcpy(static_cast<void *>(&other), &wild, sizeof(other));
	done = other.read(site.file, 0, page, 4096);
	CHECK(done.status == ENOENT, "%d", done.status);
	done = site.ring.read(site.file, ~0ull - 100, page, 50);
	CHECK(done.status != 0, "an offset past the end of all files");
	done = site.ring.read(site.file, 0, page, 4096);
	CHECK(done.status == 0 && memcmp(page, site.bytes.data(), 4096) == 0, "the ring is as before: %d", done.status);
	/* The tail far ahead of what the ring can hold: the daemon closes it. */
	while (done.status == 0) {
		__atomic_store_n((unsigned *)(wild.memory + GPUNVME_RING_SUBMISSION_TAIL), 100000u, __ATOMIC_RELEASE);
		usleep(2000);
		done = site.ring.read(site.file, 0, page, 4096);
	}
	CHECK(done.status == gpunvme::closed || done.status == gpunvme::timed_out, "%d", done.status);
	Site second(root, path, 32, 8192, 0);
	done = second.ring.read(second.file, 0, page, 4096);
	CHECK(done.status == 0, "another ring: %d", done.status);
}

/* Completions that no daemon writes. */
static void wild_completions(const char *root, const char *path)
{
	unsigned char page[8192];
	Site site(root, path, 32, 8192, 2000);
	Fields seen = fields(site.ring);
	gpunvme::outcome done = site.ring.read(site.file, 0, page, 4096);
	CHECK(done.status == 0, "%d", done.status);
	/* Of a slot that there is not, and of one that has no request. */
	unsigned *tail = (unsigned *)(seen.memory + GPUNVME_RING_COMPLETION_TAIL);
	for (unsigned long long number : {1ull << 40, 5ull}) {
		struct gpunvme_completion wild = {};
		wild.user_data = number;
		wild.host = 1ull << 50;
		memcpy(seen.memory + GPUNVME_RING_ENTRIES + 64 * (32 + *tail % 32), &wild, sizeof(wild));
		__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
	}
	/* The tail further ahead than the ring is long. */
	done = site.ring.read(site.file, 0, page, 4096);
	while (done.status == 0) {
		__atomic_store_n(tail, *tail + 1000, __ATOMIC_RELEASE);
		done = site.ring.read(site.file, 0, page, 4096);
	}
	CHECK(done.status == gpunvme::broken || done.status == gpunvme::closed || done.status == gpunvme::timed_out,
	      "%d", done.status);
}

/* A ring that its host gives up ends the waits of its kernels. */
static void host_ends(const char *root, const char *path)
{
	Site site(root, path, 32, 4096, 0);
	Fields seen = fields(site.ring);
	unsigned char page[4096];
	CHECK(site.ring.read(site.file, 0, page, 4096).status == 0, "before");
	__atomic_store_n((unsigned *)(seen.memory + GPUNVME_RING_OVER), (unsigned)gpunvme::closed, __ATOMIC_RELEASE);
	gpunvme::outcome done = site.ring.read(site.file, 0, page, 4096);
	while (done.status == 0)
		done = site.ring.read(site.file, 0, page, 4096);
	CHECK(done.status == gpunvme::closed, "%d", done.status);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(const char *, const char *);
	} scenarios[] = {
		{"reads", reads},           {"writes", writes},         {"requests", requests},
		{"until_closed", until_closed}, {"until_late", until_late}, {"wild_entries", wild_entries},
		{"wild_completions", wild_completions}, {"host_ends", host_ends}, {"array_gets", array_gets},
		{"array_sets", array_sets}, {"array_holds", array_holds}, {"array_until_closed", array_until_closed},
		{"array_until_late", array_until_late}, {"array_faults", array_faults}, {"lends", lends},
	};
	if (argc != 4)
		errx(2, "usage: kernels SCENARIO MOUNT FILE");
	for (const auto &scenario : scenarios) {
		if (strcmp(scenario.name, argv[1]) == 0) {
			scenario.run(argv[2], argv[3]);
			return 0;
		}
	}
	errx(2, "no scenario %s", argv[1]);
}
