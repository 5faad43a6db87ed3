/*
 * Kernels on the CPU: gpunvme_device.h as the kernels of a GPU use it, with threads of this process
 * in their place (tests/tests/kernels.rs).
 *
 *     kernels SCENARIO MOUNT FILE     each function below that takes a `Site`
 *
 * Exits with 0 when everything was as it should be, and else says what was not.
 */
#include <gpunvme.h>
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
		/* What is attached stays, and no descriptor keeps the volume from being unmounted. */
		gpunvme_file_close(opened);
		gpunvme_mount_close(mount);
	}

	~Site()
	{
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

/* Blocks read until it is over, and say how it ended. `kernels.rs` ends it. */
static void until_over(const char *root, const char *path, unsigned patience_ms)
{
	Site site(root, path, 64, 4096, patience_ms);
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
		{"wild_completions", wild_completions}, {"host_ends", host_ends},
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
