/*
 * libgpunvme: files of a gpunvme mount, read and written straight into memory that the device
 * reaches.
 *
 * Functions that return int return 0, or a negative errno; gpunvme_last_error() has the sentence
 * that goes with it. Handles may be used from several threads at once. A buffer's memory is shared
 * with the device while a call moves it: what a read covers must not be touched until it returns.
 *
 *     gpunvme_file *file;
 *     gpunvme_mount *mount;
 *     gpunvme_buffer *buffer;
 *     if (gpunvme_file_open("/data/model.bin", O_RDONLY, 0, &file) ||
 *         gpunvme_mount_open("/data", &mount) ||
 *         gpunvme_buffer_create(mount, 64 << 20, &buffer))
 *             errx(1, "%s", gpunvme_last_error());
 *     struct gpunvme_segment whole = { .len = 64 << 20 };
 *     struct gpunvme_result done;
 *     if (gpunvme_read(file, buffer, &whole, 1, 0, &done))
 *             errx(1, "%s", gpunvme_last_error());
 *     use(gpunvme_buffer_data(buffer), done.bytes);
 *
 * Link with -lgpunvme.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_H
#define GPUNVME_H

#include <stddef.h>
#include <stdint.h>

#include "gpunvme_abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpunvme_mount gpunvme_mount;
typedef struct gpunvme_buffer gpunvme_buffer;
typedef struct gpunvme_file gpunvme_file;
typedef struct gpunvme_ring gpunvme_ring;
typedef struct gpunvme_attached gpunvme_attached;

/*
 * What a read or write moved, from the first byte of the first segment on; of GPU memory it is a
 * sum, for its pieces are moved in any order: after an error any segment may have changed in part.
 */
struct gpunvme_result {
	uint64_t bytes;                  /* the sum of `moved` and `cache` */
	struct gpunvme_moved moved;
	uint64_t cache;                  /* from the kernel's page cache */
	uint32_t reason;                 /* GPUNVME_REASON_*: why it was slower, or failed */
	uint32_t failed_segment;         /* index of the segment that failed, or UINT32_MAX */
};

/* The library's version, as "0.1.0"; never NULL, valid for ever. */
const char *gpunvme_version(void);

/*
 * What went wrong in this thread's last call that failed. Valid until the next one does. Never
 * NULL. While the thread ends, in destructors of what it had, it may be "".
 */
const char *gpunvme_last_error(void);

/*
 * Why not every byte of the read that this thread was last told of came from the kernel's page
 * cache: GPUNVME_REASON_NOT_RESIDENT, _CACHING_OFF, _RESIDENCY_HIDDEN, _OLD_KERNEL or _NOT_CACHED.
 * GPUNVME_REASON_NONE where each did, and after what never takes it: writes, transfers of rings,
 * reads into memory that the device writes to itself, and those that gpunvme_read() never takes
 * from there. Of several that one call takes, it is the
 * last one's; in a function that is called back it is that of its `result`.
 */
uint32_t gpunvme_last_cache_reason(void);

/* Names and explanations of routes and reasons; never NULL, valid for ever. */
const char *gpunvme_route_name(uint32_t route);
const char *gpunvme_reason_name(uint32_t reason);
const char *gpunvme_reason_explain(uint32_t reason);

/* The mount that a file or directory lies on; -ENOTTY where that is another filesystem. */
int gpunvme_mount_open(const char *path, gpunvme_mount **mount);
int gpunvme_mount_info(const gpunvme_mount *mount, struct gpunvme_info *info);
int gpunvme_mount_stats(const gpunvme_mount *mount, struct gpunvme_stats *stats);
/*
 * Makes everything durable that any process did to the volume before: what sync(2) does for other
 * filesystems, and the kernel keeps from FUSE's.
 */
int gpunvme_mount_sync(const gpunvme_mount *mount);
/* Buffers, files and rings outlive it. NULL is fine. */
void gpunvme_mount_close(gpunvme_mount *mount);

/* Zeroed, page-aligned host memory of `len` bytes, registered with the mount. */
int gpunvme_buffer_create(const gpunvme_mount *mount, size_t len, gpunvme_buffer **buffer);
/*
 * Memory that the application has: the first `len` bytes of a memfd of ordinary pages, open for
 * reading and writing, with F_SEAL_SHRINK. The descriptor is duplicated, and stays the caller's;
 * the bytes are in each mapping of the memfd. -EINVAL, -EACCES and others where it cannot be
 * registered, and gpunvme_last_error() says why. The memory outlives the buffer, and so do
 * transfers: see gpunvme_ring_destroy().
 */
int gpunvme_buffer_from_fd(const gpunvme_mount *mount, int fd, size_t len, gpunvme_buffer **buffer);
/*
 * Any memory of the application, which has to stay where it is as long as the buffer. It is not
 * registered: the CPU copies between it and 8 MiB of the library's, for one thread at a time, and
 * the reason is GPUNVME_REASON_NOT_REGISTERED. GPUNVME_REQUIRE_DIRECT is -EOPNOTSUPP.
 */
int gpunvme_buffer_from_memory(const gpunvme_mount *mount, void *data, size_t len, gpunvme_buffer **buffer);
/* NULL for gpunvme_buffer_from_fd(). */
void *gpunvme_buffer_data(const gpunvme_buffer *buffer);
size_t gpunvme_buffer_len(const gpunvme_buffer *buffer);
uint32_t gpunvme_buffer_route(const gpunvme_buffer *buffer);
uint32_t gpunvme_buffer_reason(const gpunvme_buffer *buffer);
/*
 * Unregisters it, and unmaps what the library mapped, when its transfers in rings are taken. No
 * call may be using it. NULL is fine.
 */
void gpunvme_buffer_destroy(gpunvme_buffer *buffer);

/*
 * As open(2); -ENOTTY where the file lies, or would lie, on another filesystem: nothing is created
 * or truncated there. O_TRUNC is -EINVAL with O_RDONLY.
 */
int gpunvme_file_open(const char *path, int flags, unsigned int mode, gpunvme_file **file);
/* A file that is open already. The descriptor is duplicated, and stays the caller's. */
int gpunvme_file_from_fd(int fd, gpunvme_file **file);
/* NULL is fine. */
void gpunvme_file_close(gpunvme_file *file);

/*
 * Moves `count` segments, of any offset and length. `flags` are GPUNVME_REQUIRE_*. A read ends
 * early, and successfully, where the file does; a write extends it. One segment of at most 4 MiB
 * that is read to memory of gpunvme_buffer_create(), and of which the kernel's page cache has all,
 * is copied from there, unless a flag is set or gpunvme_gpu_set_caching() forbids it. `result` may
 * be NULL; after an error it says what was moved before.
 *
 * -ECONNABORTED or -ENOTCONN of a read: the daemon died, and the device may still write what was
 * to be read. The library then puts other pages with the same bytes at the addresses of memory of
 * gpunvme_buffer_create(), which the device does not write to; what other threads store into those
 * pages meanwhile may be lost. To memory of gpunvme_buffer_from_fd() the device may write for as
 * long as it takes. Either buffer is -ENODEV from then on.
 */
int gpunvme_read(const gpunvme_file *file, gpunvme_buffer *buffer, const struct gpunvme_segment *segments, size_t count,
                 uint32_t flags, struct gpunvme_result *result);
int gpunvme_write(const gpunvme_file *file, const gpunvme_buffer *buffer, const struct gpunvme_segment *segments, size_t count,
                  uint32_t flags, struct gpunvme_result *result);

/*
 * The extents that touch a range of the file, in order: at most `capacity` of them, and how many
 * in `count`. Where there may be more, ask again from the end of the last.
 */
int gpunvme_resolve(const gpunvme_file *file, uint64_t offset, uint64_t len, struct gpunvme_extent *extents, size_t capacity,
                    size_t *count);

/* How a transfer of a ring, or a request of a queue, ended. */
struct gpunvme_finished {
	uint64_t user_data;              /* what it was begun with */
	int error;                       /* 0 or a negative errno */
	uint32_t reserved;
	struct gpunvme_result result;
};

/*
 * Many transfers in flight from one thread, without a system call for each. A ring is for one
 * thread at a time, but for gpunvme_ring_attach(). `entries` is how many are in flight at most, a
 * power of two from 8 to 4096, or is made one.
 */
int gpunvme_ring_create(const gpunvme_mount *mount, uint32_t entries, gpunvme_ring **ring);
/*
 * Its transfers go on; how they end is not reported. The device may still write to the memory of
 * its reads then: to that of gpunvme_buffer_from_fd() also after gpunvme_buffer_destroy(). If that
 * is to be used otherwise, first call gpunvme_ring_complete() until none is in flight. NULL is
 * fine.
 */
void gpunvme_ring_destroy(gpunvme_ring *ring);
/*
 * Makes an open file known to the ring, with the access that it is open for. It is known until it
 * is released and its transfers are taken, also when the file is closed or unlinked.
 */
int gpunvme_ring_attach(const gpunvme_ring *ring, const gpunvme_file *file, gpunvme_attached **attached);
/* NULL is fine. */
void gpunvme_attached_release(gpunvme_attached *attached);
/*
 * Puts a transfer of at most GPUNVME_MAX_RING_TRANSFER bytes into the ring, with no system call.
 * The daemon learns of it by gpunvme_ring_submit() or gpunvme_ring_complete(). `flags` are
 * GPUNVME_REQUIRE_*, and GPUNVME_WRITTEN_BACK where sync_file_range(2) was called for the range.
 * -EAGAIN: all entries are in flight. -EOPNOTSUPP: the memory is not registered.
 */
int gpunvme_ring_read(gpunvme_ring *ring, const gpunvme_attached *file, uint64_t file_offset, const gpunvme_buffer *buffer,
                      uint64_t buffer_offset, uint64_t len, uint32_t flags, uint64_t user_data);
int gpunvme_ring_write(gpunvme_ring *ring, const gpunvme_attached *file, uint64_t file_offset, const gpunvme_buffer *buffer,
                       uint64_t buffer_offset, uint64_t len, uint32_t flags, uint64_t user_data);
void gpunvme_ring_submit(gpunvme_ring *ring);
/*
 * Takes up to `capacity` transfers that are done, and how many in `count`. While there are fewer
 * than `least` it waits, at most `timeout_ms`, or for ever if that is negative; not for more than
 * `capacity`, nor for more than are in flight. gpunvme_last_error() has the sentence of the last
 * of them that failed. An error of the call itself: nothing more will come, because the volume was
 * unmounted or its daemon is gone; in the second case the device may still write to the memory of
 * reads in flight.
 */
int gpunvme_ring_complete(gpunvme_ring *ring, size_t least, int timeout_ms, struct gpunvme_finished *finished, size_t capacity,
                          size_t *count);
/*
 * 1: the descriptor becomes readable when the next transfer is done. 0: there is one already, or
 * none will come, and it will not; or `ring` is NULL.
 */
int gpunvme_ring_arm(gpunvme_ring *ring);
/* For poll(2), epoll(7) and the like; it belongs to the ring. */
int gpunvme_ring_fd(const gpunvme_ring *ring);

/*
 * GPU memory. Addresses are those of CUDA: of cudaMalloc, of pools, mapped piece by piece,
 * managed, of any GPU; and of host memory that CUDA allocated or registered. Nothing needs to be
 * registered here. Bytes go through a staging pool, or, where the mount's SSD reaches the GPU
 * itself, straight.
 *
 *     gpunvme_transfers *transfers;
 *     gpunvme_transfers_open(mount, NULL, &transfers);               // once
 *     struct gpunvme_gpu_segment whole = { .address = tensor, .len = 64 << 20 };
 *     if (gpunvme_gpu_read(transfers, file, &whole, 1, 0, &done))
 *             errx(1, "%s", gpunvme_last_error());
 *
 * From the call until a request is done nothing else may use its memory: no kernel, no copy.
 * Segments of a read must not overlap in memory; of segments of a write that overlap in the file
 * it is not defined which is there afterwards. A segment that reaches past the end of the file is
 * read as far as the file goes.
 */
typedef struct gpunvme_transfers gpunvme_transfers;
typedef struct gpunvme_pending gpunvme_pending;
typedef struct gpunvme_queue gpunvme_queue;

struct gpunvme_gpu_segment {
	uint64_t file_offset;            /* in bytes */
	void *address;                   /* or a CUdeviceptr */
	uint64_t len;                    /* in bytes */
};

/*
 * What reads take of the kernel's page cache (the route GPUNVME_ROUTE_CACHE). Bytes that are not
 * in there always come from the device.
 */
enum {
	GPUNVME_CACHING_USUAL = 0,       /* what the settings say, or RESIDENT */
	GPUNVME_CACHING_NEVER = 1,       /* only what gpunvme_gpu_prepare() registered */
	GPUNVME_CACHING_RESIDENT = 2,    /* what ordinary reads and writes brought in */
	GPUNVME_CACHING_READ_AGAIN = 3,  /* and what is read again */
};

/*
 * Beside the other GPUNVME_REQUIRE_*, of reads of GPU memory: of pages that are registered with
 * CUDA, and nothing else.
 */
#define GPUNVME_REQUIRE_CACHE 0x80000000u

/* How much of the machine transfers may use; 0 for the usual, each. */
struct gpunvme_settings {
	uint64_t staging;                /* bytes of pinned host memory for each GPU */
	uint64_t registered;             /* bytes of each GPU's memory, registered at once */
	uint64_t cached;                 /* bytes of the page cache, registered with CUDA */
	uint32_t callers;                /* threads that do their own requests */
	uint32_t caching;                /* GPUNVME_CACHING_* */
};

/*
 * For the files of a mount; -ENODEV where there is no CUDA, and gpunvme_last_error() says why.
 * `settings` may be NULL. By default a staging pool has 16 MiB, or 4 for each device of the volume
 * where that is more; of such a pool transfers of devices use at most 8 MiB, or 4 for each device.
 * Beside it there are 2 MiB for each thread that waits for requests of at most 16 MiB in at most 8
 * parts, as many threads as there are processors and at most 16. One serves a whole application. A
 * process that forks must not use it in the child.
 */
int gpunvme_transfers_open(const gpunvme_mount *mount, const struct gpunvme_settings *settings, gpunvme_transfers **transfers);
/*
 * Waits for all requests; in a callback (gpunvme_done) it does not, and all ends when they are
 * done. Queues keep it alive. NULL is fine.
 */
void gpunvme_transfers_close(gpunvme_transfers *transfers);

/* The route that transfers to and from the memory at an address take, and why not a faster one. */
int gpunvme_gpu_route(const gpunvme_transfers *transfers, const void *address, uint32_t *route, uint32_t *reason);
/*
 * Gives up what is registered of a range of memory: registered memory stays in existence, even if
 * it is freed, until then or until it makes room for other.
 */
void gpunvme_gpu_forget(const gpunvme_transfers *transfers, const void *address, uint64_t len);

/*
 * Sets what reads of an open file take of the page cache, whatever the settings say:
 * GPUNVME_CACHING_*. gpunvme_read() takes what it has unless this is GPUNVME_CACHING_NEVER. It
 * counts for reads that begin from now on.
 */
int gpunvme_gpu_set_caching(const gpunvme_file *file, uint32_t caching);
/*
 * Has the kernel read a range of a file into its page cache, and registers that with CUDA: reads
 * of it take the route GPUNVME_ROUTE_CACHE from then on, for as long as the file is open, the
 * kernel keeps it, and nothing else needs the room. Stores how many bytes can be read so.
 */
int gpunvme_gpu_prepare(const gpunvme_transfers *transfers, const gpunvme_file *file, uint64_t offset, uint64_t len,
                        uint64_t *prepared);

/*
 * Moves `count` segments, and waits for it. `flags` are GPUNVME_REQUIRE_*. `result` may be NULL.
 */
int gpunvme_gpu_read(const gpunvme_transfers *transfers, const gpunvme_file *file, const struct gpunvme_gpu_segment *segments,
                     size_t count, uint32_t flags, struct gpunvme_result *result);
int gpunvme_gpu_write(const gpunvme_transfers *transfers, const gpunvme_file *file, const struct gpunvme_gpu_segment *segments,
                      size_t count, uint32_t flags, struct gpunvme_result *result);

/*
 * Begins a request, and calls `done` when it is over, unless this returns an error. `error` is 0
 * or a negative errno; gpunvme_last_error() has its sentence. It is called on the thread that
 * serves many requests: it should do little, and must not wait for another request.
 */
typedef void gpunvme_done(void *user_data, int error, const struct gpunvme_result *result);
int gpunvme_gpu_read_then(const gpunvme_transfers *transfers, const gpunvme_file *file,
                          const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, gpunvme_done *done,
                          void *user_data);
int gpunvme_gpu_write_then(const gpunvme_transfers *transfers, const gpunvme_file *file,
                           const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, gpunvme_done *done,
                           void *user_data);

/*
 * Puts a request into the order of a CUDA stream (cudaStream_t, CUstream): it begins when the
 * stream comes to it, and what is put into the stream afterwards waits for it. The stream goes on
 * even if the request fails: gpunvme_pending_wait() tells. One that is being captured is refused
 * (EBUSY).
 *
 * All that CUDA has to do for it is in the stream when the call returns, so calls that wait for
 * the whole GPU (cudaFree, cuMemFree) may be made meanwhile, in any thread. The call waits while
 * CUDA has no room for more in the stream (a request takes two or three operations for each 512
 * KiB, two for pinned host memory, and more where many small pieces are copied singly; CUDA takes
 * a limited number), or while 8 other streams of the GPU have requests to come to. Where a read
 * fails, or the file becomes shorter between the call and the read, what is in memory behind what
 * was read is what was there before, bytes of the file, or zeros.
 * Where a kernel of the application crashes, its context ends with all streams: such requests are
 * answered with EIO within a second. That is only so in the context that the CUDA runtime uses,
 * the GPU's primary one: in one of the application's own (cuCtxCreate) they are never answered,
 * and closing waits for them.
 *
 * After an error, of the call or of gpunvme_pending_wait(), the memory may still be in use until
 * the stream has passed what was put into it.
 */
int gpunvme_gpu_read_on_stream(const gpunvme_transfers *transfers, const gpunvme_file *file,
                               const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, void *stream,
                               gpunvme_pending **pending);
int gpunvme_gpu_write_on_stream(const gpunvme_transfers *transfers, const gpunvme_file *file,
                                const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, void *stream,
                                gpunvme_pending **pending);
/*
 * Watches a request in a stream. Both are called on the thread that serves the requests of all
 * streams: they must neither wait nor call CUDA.
 */
struct gpunvme_observer {
	/*
	 * The stream has come to the request. Stores by how many bytes its file offsets are to be
	 * moved, a multiple of the filesystem's block size, and returns 0; or returns a negative errno
	 * that the request is to fail with. NULL: nothing is moved.
	 */
	int (*begins)(void *user_data, int64_t *moved_by);
	/* The outcome is known. The stream goes on after this call, unless its context has died. */
	gpunvme_done *ends;
	void *user_data;
};
/*
 * The same, with an observer instead of something to wait for. Before this returns an error each
 * of its functions may have been called, at most once: the stream may come to a part of the
 * request before CUDA refuses the rest. Neither is called afterwards. The structure may go when
 * this returns. Where offsets are moved, memory behind the end of the file keeps what it has, or
 * gets zeros.
 */
int gpunvme_gpu_read_on_stream_with(const gpunvme_transfers *transfers, const gpunvme_file *file,
                                    const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, void *stream,
                                    const struct gpunvme_observer *observer);
int gpunvme_gpu_write_on_stream_with(const gpunvme_transfers *transfers, const gpunvme_file *file,
                                     const struct gpunvme_gpu_segment *segments, size_t count, uint32_t flags, void *stream,
                                     const struct gpunvme_observer *observer);
/* 1 if gpunvme_pending_wait() would return at once, else 0; 0 for NULL. */
int gpunvme_pending_is_done(const gpunvme_pending *pending);
/* Waits for the request, says how it ended, and frees the handle. `result` may be NULL. */
int gpunvme_pending_wait(gpunvme_pending *pending, struct gpunvme_result *result);

/*
 * For one thread with many requests in flight. A queue is for one thread at a time. `flags` are
 * GPUNVME_REQUIRE_*, for all its requests.
 */
int gpunvme_queue_create(const gpunvme_transfers *transfers, uint32_t flags, gpunvme_queue **queue);
/* Its requests go on; how they end is not reported. NULL is fine. */
void gpunvme_queue_destroy(gpunvme_queue *queue);
int gpunvme_queue_read(gpunvme_queue *queue, const gpunvme_file *file, const struct gpunvme_gpu_segment *segments, size_t count,
                       uint64_t user_data);
int gpunvme_queue_write(gpunvme_queue *queue, const gpunvme_file *file, const struct gpunvme_gpu_segment *segments, size_t count,
                        uint64_t user_data);
/*
 * Takes up to `capacity` requests that are done, and how many in `count`. While there are fewer
 * than `least` it waits, at most `timeout_ms`, or for ever if that is negative; not for more than
 * `capacity`, nor for more than are in flight. gpunvme_last_error() has the sentence of the last
 * of them that failed.
 */
int gpunvme_queue_complete(gpunvme_queue *queue, size_t least, int timeout_ms, struct gpunvme_finished *finished,
                           size_t capacity, size_t *count);
/*
 * Calls off the requests that are in flight. Each still has to be taken: it is done, or ended with
 * -ECANCELED, and its memory is no longer in use then. What is begun afterwards is not called off.
 * NULL is fine.
 */
void gpunvme_queue_cancel(gpunvme_queue *queue);
/*
 * 1: the descriptor becomes readable when the next request is done. 0: there is one already, and
 * it will not; or `queue` is NULL.
 */
int gpunvme_queue_arm(gpunvme_queue *queue);
/* For poll(2), epoll(7) and the like; it belongs to the queue. */
int gpunvme_queue_fd(const gpunvme_queue *queue);

/*
 * Rings that the kernels of a GPU use, by gpunvme_device.h: they read and write attached files
 * themselves. The ring is the process's, and is as any other to the daemon.
 *
 *     gpunvme_gpu_ring *ring;
 *     gpunvme_attached *attached;
 *     gpunvme::ring parameter;
 *     if (gpunvme_gpu_ring_create(mount, 0, 0, 0, 0, &ring) ||
 *         gpunvme_gpu_ring_attach(ring, file, &attached) ||
 *         gpunvme_gpu_ring_for_kernels(ring, GPUNVME_DEVICE_VERSION, &parameter))
 *             errx(1, "%s", gpunvme_last_error());
 *     kernel<<<blocks, threads>>>(parameter, gpunvme_attached_name(attached), ...);
 */
typedef struct gpunvme_gpu_ring gpunvme_gpu_ring;

/*
 * For GPU number `gpu` of those that the process may use; a negative one for kernels that were
 * compiled for the CPU. `entries` is how many requests are in flight at most, a power of two from
 * 32 to 4096, and `slot` the bytes that one has room for at least, a multiple of 4096: as much
 * pinned host memory, or a page more, is taken for each entry. A kernel waits `patience_ms` for an
 * answer. 0 stands for 1024 entries, 64 KiB, and 30 s. -ENODEV where there is no such GPU.
 */
int gpunvme_gpu_ring_create(const gpunvme_mount *mount, int gpu, uint32_t entries, size_t slot, uint32_t patience_ms,
                            gpunvme_gpu_ring **ring);
/*
 * Ends the waits of kernels that use it, and waits for those kernels; kernels on the CPU must have
 * ended before. NULL is fine.
 */
void gpunvme_gpu_ring_destroy(gpunvme_gpu_ring *ring);
/*
 * Fills in a gpunvme::ring, the parameter of kernels, which is valid as long as the ring. `version`
 * is GPUNVME_DEVICE_VERSION; -EINVAL where the library speaks another one.
 */
int gpunvme_gpu_ring_for_kernels(const gpunvme_gpu_ring *ring, uint32_t version, void *parameter);
/* As gpunvme_ring_attach(). */
int gpunvme_gpu_ring_attach(const gpunvme_gpu_ring *ring, const gpunvme_file *file, gpunvme_attached **attached);
/* The gpunvme::file by which kernels name it; 0 for NULL. */
uint64_t gpunvme_attached_name(const gpunvme_attached *attached);

/*
 * Files that kernels use as arrays, by gpunvme_array.h: elements are read and changed in a cache in
 * memory of the GPU, by pages.
 *
 *     gpunvme_gpu_array *array;
 *     gpunvme::array<float> parameter;
 *     if (gpunvme_gpu_array_create(ring, file, NULL, &array) ||
 *         gpunvme_gpu_array_for_kernels(array, GPUNVME_ARRAY_VERSION, &parameter))
 *             errx(1, "%s", gpunvme_last_error());
 *     kernel<<<blocks, threads>>>(parameter, ...);
 */
typedef struct gpunvme_gpu_array gpunvme_gpu_array;

/* What the cache is like; 0 stands for what is usual. */
struct gpunvme_array_settings {
	uint32_t page;     /* bytes of a page: a power of two from 512 to the ring's slot; 4096 */
	uint32_t ways;     /* frames of a set: a multiple of 4 up to 64; 8 */
	uint64_t cache;    /* bytes of the cache, as far as whole sets fit; 256 MiB */
	uint64_t len;      /* bytes of the array; as long as the file */
	uint32_t writable; /* whether kernels may change it: the file is open for both then */
	uint32_t reserved[3];
};

/* What kernels found since the array was made. */
struct gpunvme_array_stats {
	uint64_t hits;    /* accesses whose page was in the cache */
	uint64_t misses;  /* pages read from the file */
	uint64_t written; /* pages written back by kernels */
};

/*
 * Makes an array over a file, whose kernels use the ring. `settings` may be NULL. The file may be
 * closed afterwards, and the array is destroyed before its ring.
 */
int gpunvme_gpu_array_create(const gpunvme_gpu_ring *ring, const gpunvme_file *file,
                             const struct gpunvme_array_settings *settings, gpunvme_gpu_array **array);
/* Waits for kernels that use it. What was changed and not flushed is lost. NULL is fine. */
void gpunvme_gpu_array_destroy(gpunvme_gpu_array *array);
/*
 * Fills in a gpunvme::array, the parameter of kernels, which is valid as long as the array and its
 * ring. `version` is GPUNVME_ARRAY_VERSION; -EINVAL where the library speaks another one.
 */
int gpunvme_gpu_array_for_kernels(const gpunvme_gpu_array *array, uint32_t version, void *parameter);
/*
 * Writes to the file what kernels changed, and stores how many bytes that were unless `bytes` is
 * NULL. `file` is the array's, open for writing; no kernel uses the array meanwhile.
 */
int gpunvme_gpu_array_flush(gpunvme_gpu_array *array, const gpunvme_file *file, uint64_t *bytes);
/* Also while kernels run. */
int gpunvme_gpu_array_stats(const gpunvme_gpu_array *array, struct gpunvme_array_stats *stats);

#ifdef __cplusplus
}
#endif

#endif
