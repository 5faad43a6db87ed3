/*
 * The scenarios of kernels.cc that use arrays.
 */
#include "kernels.h"

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
 * Many threads want few pages at once, of which half have room: what one of them reads the others
 * use before it goes.
 */
static void array_crowded(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 0);
	const unsigned page = 8192, threads = 32, gets = 100;
	Array<unsigned> array(site, page, 4, 4 * page, false);
	launch(threads, 1, [&](unsigned block, const Team &) {
		unsigned long long state = 77 * block + 1;
		for (unsigned n = 0; n < gets; n++) {
			unsigned long long index = random_number(&state) % (8 * page / 4);
			unsigned value = 0, expected;
			int status = array.kernels.get(index, &value);
			memcpy(&expected, site.bytes.data() + index * 4, 4);
			CHECK(status == 0 && value == expected, "element %llu: %d, %x", index, status, value);
		}
	});
	unsigned long long misses = array.stats().misses;
	CHECK(misses < threads * gets / 3, "%llu misses of %u", misses, threads * gets);
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
			/* All threads of a block come to a call, with elements left or not. */
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
	/* Longer than a daemon takes to answer on a machine that has much to do. */
	Site site(root, path, 32, 8192, 5000);
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
 * On a device that fails some commands and loses others: what is read is the file's or an error,
 * and what is set gets to the file when it is tried again. Element n becomes 3 n + 1.
 */
static void array_faults(const char *root, const char *path)
{
	Site site(root, path, 32, 8192, 0);
	Array<unsigned> array(site, 4096, 4, 8 * 4096, true);
	const unsigned long long count = array.kernels.size();
	unsigned failed = 0;
	launch(6, 2, [&](unsigned block, const Team &team) {
		unsigned long long state = block * 2 + team.rank() + 1;
		for (unsigned n = 0; n < 40; n++) {
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
	auto flush = [&] {
		int status;
		while ((status = array.kernels.flush(0, 1)) != 0) {
			CHECK(status == EIO, "%d", status);
			failed++;
		}
	};
	flush();
	/*
	 * The last block of the file is not whole: its write-back comes later, and may fail too. What
	 * is lost by that is told here, and written again.
	 */
	int file = open(path, O_RDONLY | O_CLOEXEC);
	CHECK(file >= 0, "open: %s", strerror(errno));
	while (fsync(file) != 0) {
		CHECK(errno == EIO, "fsync: %s", strerror(errno));
		failed++;
		for (unsigned long long index = count / 1024 * 1024; index < count; index++) {
			int status;
			while ((status = array.kernels.set(index, unsigned(3 * index + 1))) != 0) {
				CHECK(status == EIO, "%d", status);
				failed++;
			}
		}
		flush();
	}
	close(file);
	CHECK(failed > 0, "the device did not fail");
	printf("%u failed\n", failed);
}

static void array_until_closed(const char *root, const char *path) { array_until_over(root, path, 0); }
static void array_until_late(const char *root, const char *path) { array_until_over(root, path, 1000); }
