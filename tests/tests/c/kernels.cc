/*
 * Kernels on the CPU: gpunvme_device.h as the kernels of a GPU use it, with threads of this process
 * in their place (tests/tests/kernels).
 *
 *     kernels SCENARIO MOUNT FILE     each function below that takes a `Site`
 *
 * Exits with 0 when everything was as it should be, and else says what was not.
 */
#include "kernels.h"
#include "kernels_arrays.h"

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

/* Far more threads than there are slots, and than processors: none of the slots is lost. */
static void slots(const char *root, const char *path)
{
	Site site(root, path, 32, 4096, 0);
	launch(64, 1, [&](unsigned, const Team &) {
		for (unsigned round = 0; round < 4000; round++) {
			unsigned word;
			gpunvme::outcome done = site.ring.read(site.file, 4 * round, &word, sizeof(word));
			CHECK(done.status == 0 && memcmp(&word, &site.bytes[4 * round], 4) == 0, "%d", done.status);
		}
	});
	std::vector<gpunvme::request> begun;
	unsigned char bytes[32];
	for (unsigned n = 0; n < 32; n++) {
		begun.push_back(site.ring.read_async(site.file, n, bytes + n, 1));
		CHECK(begun[n].status == 0, "slot %u of 32: %d", n, begun[n].status);
	}
	for (const gpunvme::request &request : begun)
		CHECK(site.ring.wait(request).status == 0, "a request after many");
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
	Site site(root, path, 32, 8192, 3000);
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
	gpunvme::lent none = site.ring.lend(site.ring.read_async(site.file, 1, nullptr, site.ring.longest(1) + 1));
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

/*
 * On a device that fails some commands, loses others, or resets: what is read is the file's or an
 * error, and what is written gets to the file when it is tried again. Says how often it was not
 * done at once.
 */
static void faults(const char *root, const char *path)
{
	Site site(root, path, 32, 16384, 0);
	/* Whole blocks: what is less is written back later, and a failure of that told by fsync. */
	const unsigned blocks = 6, part = site.bytes.size() / blocks / 4096 * 4096;
	unsigned failed = 0;
	launch(blocks, 2, [&](unsigned block, const Team &team) {
		unsigned long long state = block + 1;
		std::vector<unsigned char> own(150000);
		unsigned char *to = team.share(own.data()); /* the leader's */
		for (unsigned round = 0; round < 60; round++) {
			unsigned long long offset = random_number(&state) % site.bytes.size();
			unsigned long long len = random_number(&state) % (round % 4 ? 20000 : 150000);
			unsigned long long left = site.bytes.size() - offset, expected = len < left ? len : left;
			gpunvme::outcome done = site.ring.read(site.file, offset, to, len, team);
			CHECK(done.status == EIO || (done.status == 0 && done.bytes == expected), "%d, %llu bytes of %llu",
			      done.status, done.bytes, expected);
			/* What was moved before an error is the file's too. */
			CHECK(done.bytes <= expected && memcmp(to, site.bytes.data() + offset, done.bytes) == 0,
			      "%d, %llu bytes at %llu", done.status, done.bytes, offset);
			if (team.rank() == 0)
				__atomic_fetch_add(&failed, done.status != 0, __ATOMIC_RELAXED);
			team.sync();
		}
	});
	launch(blocks, 2, [&](unsigned block, const Team &team) {
		std::vector<unsigned char> own(2 * part);
		unsigned char *bytes = team.share(own.data());
		if (team.rank() == 0)
			for (unsigned at = 0; at < part; at++)
				bytes[at] = (unsigned char)(at * 7 + block);
		team.sync();
		auto until_done = [&](const std::function<gpunvme::outcome()> &call) {
			gpunvme::outcome done;
			while ((done = call()).status != 0) {
				CHECK(done.status == EIO, "%d", done.status);
				if (team.rank() == 0)
					__atomic_fetch_add(&failed, 1, __ATOMIC_RELAXED);
			}
			CHECK(done.bytes == part, "%llu bytes", done.bytes);
		};
		unsigned long long offset = (unsigned long long)block * part;
		until_done([&] { return site.ring.write(site.file, offset, bytes, part, team); });
		until_done([&] { return site.ring.read(site.file, offset, bytes + part, part, team); });
		unsigned at = 0, wrong = 0;
		for (unsigned n = part; n-- > 0;)
			if (bytes[n] != bytes[part + n])
				at = n, wrong++;
		CHECK(wrong == 0, "%u wrong bytes from %llu on, of %llu to %llu; %x and not %x", wrong, offset + at, offset,
		      offset + part, bytes[part + at], bytes[at]);
		team.sync(); /* the leader's memory goes */
	});
	printf("%u failed\n", failed);
}

/*
 * Blocks write their parts again and again, each time with the next number in every byte, and their
 * host makes that durable, until the device has no power. Says of each block which number was
 * durable, and which the last that it began to write.
 */
static void power_cut(const char *root, const char *path)
{
	Site site(root, path, 32, 16384, 0);
	const unsigned blocks = 6, part = site.bytes.size() / blocks / 4096 * 4096;
	int fd = open(path, O_RDWR);
	unsigned durable[blocks] = {}, begun[blocks] = {};
	launch(blocks, 2, [&](unsigned block, const Team &team) {
		std::vector<unsigned char> own(part);
		unsigned char *bytes = team.share(own.data()); /* the leader's */
		int status = 0;
		for (unsigned number = 1; status == 0; number++) {
			CHECK(number < 256, "the device has power");
			if (team.rank() == 0) {
				begun[block] = number;
				memset(bytes, int(number), part);
			}
			team.sync();
			gpunvme::outcome done = site.ring.write(site.file, (unsigned long long)block * part, bytes, part, team);
			status = done.status;
			if (team.rank() == 0 && status == 0)
				status = fsync(fd) == 0 ? 0 : errno;
			status = team.share(status);
			if (team.rank() == 0 && status == 0)
				durable[block] = number;
		}
		/* A volume whose device failed is read-only. */
		CHECK(status == EIO || status == EROFS || status == ENODEV, "%d", status);
	});
	unsigned char byte;
	int status = site.ring.read(site.file, 0, &byte, 1).status;
	CHECK(status != 0, "a device without power");
	for (unsigned block = 0; block < blocks; block++)
		printf("%u %u\n", durable[block], begun[block]);
	close(fd);
}

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
static void until_late(const char *root, const char *path) { until_over(root, path, 1000); }

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
		{"array_crowded", array_crowded},
		{"array_sets", array_sets}, {"array_holds", array_holds}, {"array_until_closed", array_until_closed},
		{"array_until_late", array_until_late}, {"array_faults", array_faults}, {"lends", lends},
		{"faults", faults}, {"power_cut", power_cut}, {"slots", slots},
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
