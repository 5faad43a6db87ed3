/* What a C program does with libgpunvme: writes a file from a registered buffer, reads it back in two pieces, and looks at what it was told. */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <gpunvme.h>

#define LEN ((size_t)3 << 20)

#define DO(call) do { int r = (call); if (r) errx(1, "%s: %d: %s", #call, r, gpunvme_last_error()); } while (0)
#define CHECK(what) do { if (!(what)) errx(1, "line %d: %s", __LINE__, #what); } while (0)

int main(int argc, char **argv)
{
	gpunvme_mount *mount;
	gpunvme_buffer *buffer;
	gpunvme_file *file;
	struct gpunvme_result done;

	if (argc != 4)
		errx(2, "usage: roundtrip MOUNT FILE OTHER_FILESYSTEM");
	CHECK(gpunvme_mount_open(argv[3], &mount) == -ENOTTY);
	CHECK(strlen(gpunvme_last_error()) > 0);
	DO(gpunvme_mount_open(argv[1], &mount));
	DO(gpunvme_buffer_create(mount, LEN, &buffer));
	CHECK(gpunvme_buffer_len(buffer) == LEN);
	CHECK(strcmp(gpunvme_route_name(gpunvme_buffer_route(buffer)), "host") == 0);
	uint8_t *data = gpunvme_buffer_data(buffer);
	for (size_t i = 0; i < LEN; i++)
		data[i] = (uint8_t)(i * 31 + i / 4096);

	DO(gpunvme_file_open(argv[2], O_RDWR | O_CREAT, 0644, &file));
	struct gpunvme_segment whole = { .len = LEN };
	DO(gpunvme_write(file, buffer, &whole, 1, 0, &done));
	CHECK(done.bytes == LEN && done.moved.host == LEN);

	/* The second half to the beginning of the buffer and the other way round, and more than there is. */
	memset(data, 0, LEN);
	struct gpunvme_segment halves[] = {
		{ .file_offset = LEN / 2, .buffer_offset = 0, .len = LEN / 2 },
		{ .file_offset = 0, .buffer_offset = LEN / 2, .len = LEN / 2 },
	};
	DO(gpunvme_read(file, buffer, halves, 2, 0, &done));
	CHECK(done.bytes == LEN);
	for (size_t i = 0; i < LEN; i++) {
		size_t at = (i + LEN / 2) % LEN;
		CHECK(data[i] == (uint8_t)(at * 31 + at / 4096));
	}
	struct gpunvme_segment behind = { .file_offset = LEN - 10, .len = 100 };
	DO(gpunvme_read(file, buffer, &behind, 1, 0, &done));
	CHECK(done.bytes == 10);
	struct gpunvme_segment outside = { .buffer_offset = LEN, .len = 1 };
	CHECK(gpunvme_read(file, buffer, &outside, 1, 0, &done) == -EINVAL && done.bytes == 0);
	CHECK(gpunvme_read(file, buffer, &whole, 1, GPUNVME_REQUIRE_P2P, NULL) == -EOPNOTSUPP);

	struct gpunvme_extent extents[4];
	size_t count;
	DO(gpunvme_resolve(file, 0, UINT64_MAX, extents, 4, &count));
	CHECK(count >= 1 && extents[0].file_offset == 0 && extents[0].device_offset % 4096 == 0);

	struct gpunvme_stats stats;
	DO(gpunvme_mount_stats(mount, &stats));
	CHECK(stats.buffers == 1);
	gpunvme_mount_close(mount);
	gpunvme_file_close(file);
	gpunvme_buffer_destroy(buffer);
	puts("fine");
	return 0;
}
