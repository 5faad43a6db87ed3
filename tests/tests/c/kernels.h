/*
 * What the scenarios of kernels.cc run on: a mount, a ring of kernels on it, and threads of this
 * process that play blocks of a kernel.
 */
#ifndef GPUNVME_TESTS_KERNELS_H
#define GPUNVME_TESTS_KERNELS_H

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
                      gpunvme::detail::flags_at == offsetof(struct gpunvme_completion, flags) &&
                      gpunvme::detail::moved_all == GPUNVME_COMPLETION_ALL &&
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
	unsigned member() const { return number; }
	unsigned how_many(bool yes) const
	{
		unsigned *all = static_cast<unsigned *>(shared);
		sync();
		if (number == 0)
			*all = 0;
		sync();
		__atomic_fetch_add(all, yes, __ATOMIC_RELAXED);
		sync();
		return *all;
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
static inline void launch(unsigned blocks, unsigned threads, const std::function<void(unsigned, const Team &)> &kernel)
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
		/* Threads that yield may keep one out for long, which is not what is tested. */
		const unsigned long_ms = 90000;
		MUST(gpunvme_gpu_ring_create(mount, -1, entries, slot, patience_ms != 0 ? patience_ms : long_ms, &host));
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

static inline unsigned long long random_number(unsigned long long *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

#endif
