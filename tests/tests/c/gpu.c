/*
 * Moves a file of a mount into GPU memory and back into another, in every way that the library has: gpu FROM TO LEN.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <gpunvme.h>

/* What cuda.h declares, which this test does not need to be installed. */
typedef void *CUcontext, *CUstream;
typedef unsigned long long CUdeviceptr;
int cuInit(unsigned int flags);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(CUcontext *context, int device);
int cuCtxPushCurrent_v2(CUcontext context);
int cuMemAlloc_v2(CUdeviceptr *address, size_t len);
int cuStreamCreate(CUstream *stream, unsigned int flags);
int cuStreamSynchronize(CUstream stream);

#define PARTS 16
/* Of the filesystem, in bytes. */
#define BLOCK 4096

static void check(int result)
{
	if (result < 0)
		errx(1, "%s", gpunvme_last_error());
}

static void cuda(int result)
{
	if (result)
		errx(1, "CUDA: %d", result);
}

static void expect(int result, int error, const char *words)
{
	if (result != error || !strstr(gpunvme_last_error(), words))
		errx(1, "%d: %s", result, gpunvme_last_error());
}

static _Atomic uint64_t called_back;

static void done(void *user_data, int error, const struct gpunvme_result *result)
{
	if (error || user_data != &called_back)
		errx(1, "%s", gpunvme_last_error());
	called_back += result->bytes;
}

static void note(void *user_data, int error, const struct gpunvme_result *result)
{
	if (error)
		errx(1, "%s", gpunvme_last_error());
	*(_Atomic uint64_t *)user_data = result->bytes;
}

static void refused(void *user_data, int error, const struct gpunvme_result *result)
{
	*(_Atomic uint64_t *)user_data = result->bytes ? result->bytes : (uint64_t)-error;
}

static int one_block_on(void *user_data, int64_t *moved_by)
{
	(void)user_data;
	*moved_by = BLOCK;
	return 0;
}

static int refuse(void *user_data, int64_t *moved_by)
{
	(void)user_data;
	(void)moved_by;
	return -EPERM;
}

int main(int argc, char **argv)
{
	gpunvme_mount *mount;
	gpunvme_file *from, *to;
	gpunvme_transfers *transfers;
	gpunvme_queue *queue;
	gpunvme_pending *written, *read;
	struct gpunvme_result result;
	struct gpunvme_finished finished[3];
	struct gpunvme_gpu_segment parts[PARTS];
	uint32_t route, reason;
	size_t count, all = 0;
	uint64_t len;
	CUcontext context;
	CUdeviceptr memory;
	CUstream stream;
	int device, host;

	if (argc != 4)
		errx(2, "usage: gpu FROM TO LEN");
	len = strtoull(argv[3], NULL, 10);
	cuda(cuInit(0));
	cuda(cuDeviceGet(&device, 0));
	cuda(cuDevicePrimaryCtxRetain(&context, device));
	cuda(cuCtxPushCurrent_v2(context));
	cuda(cuMemAlloc_v2(&memory, len));
	cuda(cuStreamCreate(&stream, 1));
	for (int i = 0; i < PARTS; i++) {
		uint64_t at = len / PARTS * i;

		parts[i] = (struct gpunvme_gpu_segment){ at, (char *)(uintptr_t)memory + at, len / PARTS };
	}

	check(gpunvme_mount_open(argv[1], &mount));
	check(gpunvme_file_open(argv[1], O_RDONLY, 0, &from));
	check(gpunvme_file_open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0666, &to));
	struct gpunvme_settings settings = { .staging = 8 << 20, .caching = 99 };
	expect(gpunvme_transfers_open(mount, &settings, &transfers), -EINVAL, "GPUNVME_CACHING_");
	settings.caching = GPUNVME_CACHING_NEVER;
	check(gpunvme_transfers_open(mount, &settings, &transfers));
	check(gpunvme_gpu_route(transfers, parts[0].address, &route, &reason));
	if (route != GPUNVME_ROUTE_BOUNCE || reason != GPUNVME_REASON_NO_VFIO)
		errx(1, "%s: %s", gpunvme_route_name(route), gpunvme_reason_explain(reason));

	/* Calls that wait, and what they refuse. */
	check(gpunvme_gpu_read(transfers, from, parts, PARTS, GPUNVME_REQUIRE_BOUNCE | GPUNVME_REQUIRE_DIRECT, NULL));
	check(gpunvme_gpu_read(transfers, from, parts, PARTS, 0, &result));
	if (result.bytes != len || result.moved.bounce != len || result.reason != GPUNVME_REASON_NO_VFIO)
		errx(1, "%llu bytes", (unsigned long long)result.bytes);
	if (gpunvme_last_cache_reason() != GPUNVME_REASON_CACHING_OFF)
		errx(1, "%s", gpunvme_reason_name(gpunvme_last_cache_reason()));
	expect(gpunvme_gpu_read(transfers, from, parts, PARTS, GPUNVME_REQUIRE_P2P, NULL), -EOPNOTSUPP, "vfio-pci");
	expect(gpunvme_gpu_read(transfers, from, parts, PARTS, GPUNVME_REQUIRE_P2P | GPUNVME_REQUIRE_HOST, NULL), -EINVAL, "one route");
	expect(gpunvme_gpu_read(transfers, from, NULL, PARTS, 0, NULL), -EINVAL, "segments");
	expect(gpunvme_gpu_write(transfers, from, parts, PARTS, 0, &result), -EBADF, argv[1]);
	parts[1].address = &host;
	expect(gpunvme_gpu_read(transfers, from, parts, PARTS, 0, &result), -EFAULT, "CUDA knows no memory");
	if (result.failed_segment != 1)
		errx(1, "segment %u", result.failed_segment);
	parts[1].address = (char *)parts[0].address + len / PARTS;

	/* Out of the page cache. */
	uint64_t prepared;
	expect(gpunvme_gpu_read(transfers, from, parts, PARTS, GPUNVME_REQUIRE_CACHE, NULL), -EOPNOTSUPP, "cache");
	expect(gpunvme_gpu_read(transfers, from, parts, 1, GPUNVME_REQUIRE_CACHE | GPUNVME_REQUIRE_P2P, NULL), -EINVAL, "one route");
	check(gpunvme_gpu_prepare(transfers, from, 0, len, &prepared));
	check(gpunvme_gpu_read(transfers, from, parts, PARTS, GPUNVME_REQUIRE_CACHE, &result));
	if (prepared != len || result.bytes != len || result.cache != len || gpunvme_last_cache_reason() != GPUNVME_REASON_NONE)
		errx(1, "%llu bytes prepared, %llu read", (unsigned long long)prepared, (unsigned long long)result.cache);
	expect(gpunvme_gpu_set_caching(from, 4), -EINVAL, "GPUNVME_CACHING_");
	check(gpunvme_gpu_set_caching(from, GPUNVME_CACHING_RESIDENT));
	check(gpunvme_gpu_read(transfers, from, parts, PARTS, 0, &result));
	if (result.bytes != len || result.cache != len)
		errx(1, "%llu bytes of the page cache", (unsigned long long)result.cache);

	/* In the order of a stream: what was read is written, and read again over it. */
	check(gpunvme_gpu_write_on_stream(transfers, to, parts, PARTS / 2, 0, stream, &written));
	check(gpunvme_gpu_read_on_stream(transfers, from, parts, PARTS, 0, stream, &read));
	cuda(cuStreamSynchronize(stream));
	check(gpunvme_pending_wait(written, &result));
	if (result.bytes != len / 2)
		errx(1, "%llu bytes written", (unsigned long long)result.bytes);
	while (!gpunvme_pending_is_done(read))
		;
	check(gpunvme_pending_wait(read, NULL));

	/* The outcome is there when the stream has gone on, and offsets may change until it comes. */
	_Atomic uint64_t bytes = 0;
	struct gpunvme_observer observer = { NULL, note, &bytes };
	check(gpunvme_gpu_read_on_stream_with(transfers, from, parts, PARTS, 0, stream, &observer));
	cuda(cuStreamSynchronize(stream));
	if (bytes != len)
		errx(1, "%llu bytes told before the stream went on", (unsigned long long)bytes);
	observer.begins = one_block_on;
	check(gpunvme_gpu_read_on_stream_with(transfers, from, parts, PARTS, 0, stream, &observer));
	cuda(cuStreamSynchronize(stream));
	if (bytes != len - BLOCK)
		errx(1, "%llu bytes from one block on", (unsigned long long)bytes);
	observer = (struct gpunvme_observer){ refuse, refused, &bytes };
	check(gpunvme_gpu_read_on_stream_with(transfers, from, parts, PARTS, 0, stream, &observer));
	cuda(cuStreamSynchronize(stream));
	if (bytes != EPERM)
		errx(1, "a refused request ended with %llu", (unsigned long long)bytes);
	observer.ends = NULL;
	expect(gpunvme_gpu_read_on_stream_with(transfers, from, parts, PARTS, 0, stream, &observer), -EINVAL, "ends");
	expect(gpunvme_gpu_read_on_stream_with(transfers, from, parts, PARTS, 0, stream, NULL), -EINVAL, "observer");
	check(gpunvme_gpu_read(transfers, from, parts, PARTS, 0, NULL));

	/* A queue, with a descriptor to wait for. */
	check(gpunvme_queue_create(transfers, 0, &queue));
	for (int i = PARTS / 2; i < PARTS; i++)
		check(gpunvme_queue_write(queue, to, &parts[i], 1, i));
	while (all < PARTS / 2) {
		struct pollfd ready = { gpunvme_queue_fd(queue), POLLIN, 0 };

		if (gpunvme_queue_arm(queue) == 1 && poll(&ready, 1, 20000) != 1)
			errx(1, "no signal");
		check(gpunvme_queue_complete(queue, 1, 0, finished, 3, &count));
		for (size_t i = 0; i < count; i++)
			if (finished[i].error || finished[i].result.bytes != len / PARTS || finished[i].user_data < PARTS / 2)
				errx(1, "%s", gpunvme_last_error());
		all += count;
	}
	check(gpunvme_queue_read(queue, from, parts, 1, 7));
	check(gpunvme_queue_complete(queue, 1, -1, finished, 3, &count));
	if (count != 1 || finished[0].user_data != 7)
		errx(1, "%zu requests", count);
	check(gpunvme_queue_complete(queue, 1, -1, finished, 3, &count));
	if (count != 0)
		errx(1, "%zu requests of none", count);
	for (int i = 0; i < 4; i++)
		check(gpunvme_queue_read(queue, from, parts, 1, i));
	check(gpunvme_queue_complete(queue, 3, -1, finished, 3, &count));
	if (count != 3)
		errx(1, "%zu requests instead of at least 3", count);
	check(gpunvme_queue_complete(queue, 3, -1, finished, 3, &count));
	if (count != 1)
		errx(1, "%zu requests instead of the last", count);
	for (int i = 0; i < 3; i++)
		check(gpunvme_queue_read(queue, from, &parts[4 * i], 4, i));
	gpunvme_queue_cancel(queue);
	check(gpunvme_queue_complete(queue, 3, -1, finished, 3, &count));
	for (size_t i = 0; i < count; i++)
		if (finished[i].error && finished[i].error != -ECANCELED)
			errx(1, "a request that was called off ended with %d", finished[i].error);
	check(gpunvme_queue_read(queue, from, parts, PARTS, 3));
	check(gpunvme_queue_complete(queue, 1, -1, finished, 3, &count));
	if (count != 1 || finished[0].error)
		errx(1, "a request after a cancellation: %s", gpunvme_last_error());
	gpunvme_queue_cancel(NULL);
	gpunvme_queue_destroy(queue);

	/* Closing waits for those that call back. */
	check(gpunvme_gpu_read_then(transfers, from, parts, PARTS, 0, done, &called_back));
	check(gpunvme_gpu_write_then(transfers, to, parts, 1, 0, done, &called_back));
	gpunvme_transfers_close(transfers);
	if (called_back != len + len / PARTS)
		errx(1, "%llu bytes called back", (unsigned long long)called_back);
	gpunvme_file_close(to);
	gpunvme_file_close(from);
	gpunvme_mount_close(mount);
	return 0;
}
