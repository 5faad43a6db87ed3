/* What a C program does with memory of its own: registered by its memfd, copied where it is none, in rings; and what is refused. */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gpunvme.h>

#define LEN ((size_t)9 << 20)
#define PART ((size_t)1 << 20)
#define PARTS (LEN / PART)

#define DO(call) do { int r = (call); if (r) errx(1, "%s: %d: %s", #call, r, gpunvme_last_error()); } while (0)
#define CHECK(what) do { if (!(what)) errx(1, "line %d: %s", __LINE__, #what); } while (0)

static uint8_t byte(size_t at)
{
	return (uint8_t)(at * 31 + at / 4096);
}

static void fill(uint8_t *data)
{
	for (size_t at = 0; at < LEN; at++)
		data[at] = byte(at);
}

static int is_whole(const uint8_t *data, size_t len)
{
	for (size_t at = 0; at < len; at++)
		if (data[at] != byte(at))
			return 0;
	return 1;
}

int main(int argc, char **argv)
{
	gpunvme_mount *mount;
	gpunvme_file *file;
	gpunvme_buffer *copied, *registered, *none;
	gpunvme_ring *ring;
	gpunvme_attached *attached;
	struct gpunvme_result done;
	struct gpunvme_segment whole = { .len = LEN };
	size_t count;

	if (argc != 3)
		errx(2, "usage: memory MOUNT FILE");
	DO(gpunvme_mount_open(argv[1], &mount));
	DO(gpunvme_file_open(argv[2], O_RDWR | O_CREAT, 0644, &file));

	/* Ordinary memory is copied, and says so. It begins at an odd address. */
	uint8_t *heap = malloc(LEN + 1), *data = heap + 1;
	CHECK(heap);
	fill(data);
	DO(gpunvme_buffer_from_memory(mount, data, LEN, &copied));
	CHECK(gpunvme_buffer_data(copied) == data && gpunvme_buffer_len(copied) == LEN);
	CHECK(gpunvme_buffer_reason(copied) == GPUNVME_REASON_NOT_REGISTERED);
	CHECK(strcmp(gpunvme_reason_name(GPUNVME_REASON_NOT_REGISTERED), "not-registered") == 0);
	DO(gpunvme_write(file, copied, &whole, 1, 0, &done));
	CHECK(done.bytes == LEN && done.moved.host == LEN && done.reason == GPUNVME_REASON_NOT_REGISTERED);
	memset(data, 0, LEN);
	DO(gpunvme_read(file, copied, &whole, 1, GPUNVME_REQUIRE_HOST, &done));
	CHECK(done.bytes == LEN && is_whole(data, LEN));
	/* Past the end of the file, in one piece and in several, and from an offset that is not aligned. */
	for (size_t behind = 10; behind < LEN; behind += LEN / 2) {
		struct gpunvme_segment end = { .file_offset = behind, .len = LEN };

		memset(data, 7, LEN);
		DO(gpunvme_read(file, copied, &end, 1, 0, &done));
		CHECK(done.bytes == LEN - behind && data[0] == byte(behind) && data[LEN - behind - 1] == byte(LEN - 1));
		CHECK(data[LEN - behind] == 7);
	}
	struct gpunvme_segment two[] = { { .file_offset = 5, .buffer_offset = 3, .len = 2 }, { .file_offset = LEN - 1, .len = 2 } };
	DO(gpunvme_read(file, copied, two, 2, 0, &done));
	CHECK(done.bytes == 3 && data[3] == byte(5) && data[4] == byte(6) && data[0] == byte(LEN - 1));
	CHECK(gpunvme_read(file, copied, &whole, 1, GPUNVME_REQUIRE_DIRECT, &done) == -EOPNOTSUPP && done.bytes == 0);
	CHECK(done.reason == GPUNVME_REASON_NOT_REGISTERED && strstr(gpunvme_last_error(), "not registered"));
	CHECK(gpunvme_read(file, copied, &whole, 1, 1u << 20, &done) == -EINVAL);
	struct gpunvme_segment outside = { .buffer_offset = LEN, .len = 1 };
	CHECK(gpunvme_read(file, copied, &outside, 1, 0, &done) == -EINVAL && done.failed_segment == 0);
	outside.buffer_offset = UINT64_MAX;
	CHECK(gpunvme_write(file, copied, &outside, 1, 0, &done) == -EINVAL && done.reason == GPUNVME_REASON_OUTSIDE_BUFFER);
	/* What fails leaves no pointer of before behind. */
	none = copied;
	CHECK(gpunvme_buffer_from_memory(mount, data, SIZE_MAX, &none) == -EINVAL && !none);

	/* A memfd is registered: what arrives is in the application's own mapping. */
	int memory = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(memory >= 0 && !ftruncate(memory, (off_t)LEN));
	CHECK(gpunvme_buffer_from_fd(mount, memory, LEN, &none) == -EINVAL && !none);
	CHECK(strstr(gpunvme_last_error(), "F_SEAL_SHRINK"));
	CHECK(!fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK));
	CHECK(gpunvme_buffer_from_fd(mount, memory, 2 * LEN, &none) < 0 && !none);
	CHECK(gpunvme_buffer_from_fd(mount, -1, LEN, &none) == -EBADF);
	DO(gpunvme_buffer_from_fd(mount, memory, LEN, &registered));
	CHECK(!gpunvme_buffer_data(registered) && gpunvme_buffer_len(registered) == LEN);
	uint8_t *mapped = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	CHECK(mapped != MAP_FAILED && !close(memory));
	DO(gpunvme_read(file, registered, &whole, 1, GPUNVME_REQUIRE_DIRECT, &done));
	CHECK(done.moved.host == LEN && is_whole(mapped, LEN));

	/* Rings: more than the ring has entries, the last one behind the end of the file. */
	struct gpunvme_finished finished[PARTS + 1];
	DO(gpunvme_ring_create(mount, 8, &ring));
	DO(gpunvme_ring_attach(ring, file, &attached));
	memset(mapped, 0, LEN);
	CHECK(gpunvme_ring_read(ring, attached, 0, copied, 0, PART, 0, 0) == -EOPNOTSUPP);
	CHECK(gpunvme_ring_read(ring, attached, 0, registered, LEN, 1, 0, 0) == -EINVAL);
	CHECK(gpunvme_ring_read(ring, attached, 0, registered, 0, 1, 1u << 20, 0) == -EINVAL);
	DO(gpunvme_ring_complete(ring, 1, -1, finished, PARTS, &count));
	CHECK(count == 0);
	size_t begun = 0, ended = 0;
	while (ended < PARTS) {
		while (begun < PARTS) {
			int r = gpunvme_ring_read(ring, attached, begun * PART, registered, begun * PART, PART, 0, 1000 + begun);

			if (r == -EAGAIN)
				break;
			DO(r);
			begun++;
		}
		CHECK(begun - ended <= 8);
		DO(gpunvme_ring_complete(ring, 2, -1, finished, 3, &count));
		CHECK(count >= 1 && count <= 3);
		for (size_t at = 0; at < count; at++)
			CHECK(finished[at].error == 0 && finished[at].result.bytes == PART && finished[at].user_data >= 1000);
		ended += count;
	}
	CHECK(is_whole(mapped, LEN));
	/* Written back through the ring, in pieces that are not aligned; the descriptor tells of the end. */
	for (size_t at = 0; at < LEN; at++)
		mapped[at] = (uint8_t)~byte(at);
	DO(gpunvme_ring_write(ring, attached, 100, registered, 100, 3 * PART, 0, 1));
	gpunvme_ring_submit(ring);
	while (gpunvme_ring_arm(ring)) {
		struct pollfd polled = { .fd = gpunvme_ring_fd(ring), .events = POLLIN };

		CHECK(poll(&polled, 1, 60000) == 1);
	}
	DO(gpunvme_ring_complete(ring, 1, 0, finished, PARTS, &count));
	CHECK(count == 1 && finished[0].error == 0 && finished[0].result.bytes == 3 * PART);
	/* A demand that cannot be met is the transfer's error, not the call's. */
	DO(gpunvme_ring_read(ring, attached, 0, registered, 0, PART, GPUNVME_REQUIRE_P2P, 2));
	DO(gpunvme_ring_complete(ring, 1, -1, finished, PARTS, &count));
	CHECK(count == 1 && finished[0].error == -EOPNOTSUPP && finished[0].user_data == 2);
	DO(gpunvme_mount_sync(mount));

	/* In any order, and with transfers in flight. */
	DO(gpunvme_ring_read(ring, attached, 0, registered, 0, LEN, 0, 3));
	gpunvme_ring_submit(ring);
	gpunvme_file_close(file);
	gpunvme_buffer_destroy(registered);
	gpunvme_ring_destroy(ring);
	gpunvme_attached_release(attached);
	gpunvme_buffer_destroy(copied);
	gpunvme_mount_close(mount);
	CHECK(gpunvme_ring_create(NULL, 8, &ring) == -EINVAL);
	CHECK(gpunvme_ring_complete(NULL, 1, 0, finished, 1, &count) == -EINVAL && gpunvme_ring_arm(NULL) == 0);
	gpunvme_ring_submit(NULL);
	gpunvme_ring_destroy(NULL);
	gpunvme_attached_release(NULL);
	puts("fine");
	return 0;
}
