/*
 * Copies a file of a gpunvme mount to another, through a registered buffer:
 *
 *     cc copy.c -lgpunvme -o copy && ./copy /data/from /data/to
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <err.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/stat.h>

#include <gpunvme.h>

#define PART (16u << 20)

static void check(int result)
{
	if (result < 0)
		errx(1, "%s", gpunvme_last_error());
}

/* Emptying a file to copy it to itself leaves nothing to copy. */
static int same(const char *a, const char *b)
{
	struct stat of_a, of_b;

	return !stat(a, &of_a) && !stat(b, &of_b) && of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
}

int main(int argc, char **argv)
{
	gpunvme_file *from, *to;
	gpunvme_mount *mount;
	gpunvme_buffer *buffer;
	struct gpunvme_result done;
	uint64_t at = 0;

	if (argc != 3)
		errx(2, "usage: copy FROM TO");
	if (same(argv[1], argv[2]))
		errx(1, "%s and %s are the same file", argv[1], argv[2]);
	check(gpunvme_file_open(argv[1], O_RDONLY, 0, &from));
	check(gpunvme_file_open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0666, &to));
	check(gpunvme_mount_open(argv[1], &mount));
	check(gpunvme_buffer_create(mount, PART, &buffer));

	do {
		struct gpunvme_segment part = { .file_offset = at, .buffer_offset = 0, .len = PART };

		check(gpunvme_read(from, buffer, &part, 1, 0, &done));
		part.len = done.bytes;
		check(gpunvme_write(to, buffer, &part, 1, 0, NULL));
		at += part.len;
	} while (done.bytes == PART);

	printf("%" PRIu64 " bytes by way of %s memory\n", at, gpunvme_route_name(gpunvme_buffer_route(buffer)));
	gpunvme_buffer_destroy(buffer);
	gpunvme_mount_close(mount);
	gpunvme_file_close(to);
	gpunvme_file_close(from);
	return 0;
}
