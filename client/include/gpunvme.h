/*
 * libgpunvme: files of a gpunvme mount, read and written straight into memory that the device reaches.
 *
 * Functions that return int return 0, or a negative errno; gpunvme_last_error() has the sentence that goes with it. Handles may be used from several
 * threads at once. A buffer's memory is shared with the device while a call moves it: what a read covers must not be
 * touched until it returns.
 *
 *     gpunvme_file *file;
 *     gpunvme_mount *mount;
 *     gpunvme_buffer *buffer;
 *     if (gpunvme_file_open("/data/model.bin", O_RDONLY, 0, &file) || gpunvme_mount_open("/data", &mount) ||
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

/* What a read or write moved, from the first byte of the first segment on. */
struct gpunvme_result {
	uint64_t bytes;                  /* the sum of `moved` */
	struct gpunvme_moved moved;
	uint32_t reason;                 /* GPUNVME_REASON_*: why not every byte went the fastest way, or why it failed */
	uint32_t failed_segment;         /* index of the segment that failed, or UINT32_MAX */
};

/* What went wrong in this thread's last call that failed. Valid until the next one does. Never NULL. */
const char *gpunvme_last_error(void);

/* Names and explanations of routes and reasons; never NULL, valid for ever. */
const char *gpunvme_route_name(uint32_t route);
const char *gpunvme_reason_name(uint32_t reason);
const char *gpunvme_reason_explain(uint32_t reason);

/* The mount that a file or directory lies on; -ENOTTY where that is another filesystem. */
int gpunvme_mount_open(const char *path, gpunvme_mount **mount);
int gpunvme_mount_info(const gpunvme_mount *mount, struct gpunvme_info *info);
int gpunvme_mount_stats(const gpunvme_mount *mount, struct gpunvme_stats *stats);
/* Buffers and files outlive it. NULL is fine. */
void gpunvme_mount_close(gpunvme_mount *mount);

/* Zeroed, page-aligned host memory of `len` bytes, registered with the mount. */
int gpunvme_buffer_create(const gpunvme_mount *mount, size_t len, gpunvme_buffer **buffer);
void *gpunvme_buffer_data(const gpunvme_buffer *buffer);
size_t gpunvme_buffer_len(const gpunvme_buffer *buffer);
uint32_t gpunvme_buffer_route(const gpunvme_buffer *buffer);
uint32_t gpunvme_buffer_reason(const gpunvme_buffer *buffer);
/* Unregisters and unmaps it. No call may be using it. NULL is fine. */
void gpunvme_buffer_destroy(gpunvme_buffer *buffer);

/* As open(2); -ENOTTY where the file lies on another filesystem. */
int gpunvme_file_open(const char *path, int flags, unsigned int mode, gpunvme_file **file);
/* A file that is open already. The descriptor is duplicated, and stays the caller's. */
int gpunvme_file_from_fd(int fd, gpunvme_file **file);
/* NULL is fine. */
void gpunvme_file_close(gpunvme_file *file);

/*
 * Moves `count` segments, of any offset and length. `flags` are GPUNVME_REQUIRE_*. A read ends early, and successfully, where the file does; a
 * write extends it. `result` may be NULL; after an error it says what was moved before.
 */
int gpunvme_read(const gpunvme_file *file, gpunvme_buffer *buffer, const struct gpunvme_segment *segments, size_t count,
                 uint32_t flags, struct gpunvme_result *result);
int gpunvme_write(const gpunvme_file *file, const gpunvme_buffer *buffer, const struct gpunvme_segment *segments, size_t count,
                  uint32_t flags, struct gpunvme_result *result);

/*
 * The extents that touch a range of the file, in order: at most `capacity` of them, and how many in `count`. Where there may be more, ask again
 * from the end of the last.
 */
int gpunvme_resolve(const gpunvme_file *file, uint64_t offset, uint64_t len, struct gpunvme_extent *extents, size_t capacity,
                    size_t *count);

#ifdef __cplusplus
}
#endif

#endif
