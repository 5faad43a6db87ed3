/*
 * Reads a file of a gpunvme mount in blocks of 4 KiB, 64 of them in flight from one thread, into
 * memory of its own, and adds their bytes:
 *
 *     cc ring.c -lgpunvme -o ring && ./ring /data/file
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <err.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gpunvme.h>

#define BLOCK 4096u
#define DEPTH 64u

static void check(int result)
{
	if (result < 0)
		errx(1, "%s", gpunvme_last_error());
}

int main(int argc, char **argv)
{
	gpunvme_mount *mount;
	gpunvme_file *file;
	gpunvme_buffer *buffer;
	gpunvme_ring *ring;
	gpunvme_attached *attached;
	struct gpunvme_finished done[DEPTH];
	uint64_t next = 0, bytes = 0, sum = 0;
	unsigned int free_places[DEPTH], free_count = DEPTH;
	struct stat status;

	if (argc != 2)
		errx(2, "usage: ring FILE");
	/* Memory of the application: a memfd that cannot become shorter under a transfer. */
	int memory = memfd_create("blocks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (memory < 0 || ftruncate(memory, DEPTH * BLOCK) || fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK))
		err(1, "memfd");
	uint8_t *blocks = mmap(NULL, DEPTH * BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	if (blocks == MAP_FAILED)
		err(1, "mmap");

	check(gpunvme_mount_open(argv[1], &mount));
	check(gpunvme_file_open(argv[1], O_RDONLY, 0, &file));
	check(gpunvme_buffer_from_fd(mount, memory, DEPTH * BLOCK, &buffer));
	check(gpunvme_ring_create(mount, DEPTH, &ring));
	check(gpunvme_ring_attach(ring, file, &attached));
	if (stat(argv[1], &status))
		err(1, "%s", argv[1]);
	for (unsigned int i = 0; i < DEPTH; i++)
		free_places[i] = i;

	uint64_t end = (uint64_t)status.st_size;
	while (next < end || free_count < DEPTH) {
		size_t count;

		while (next < end && free_count > 0) {
			unsigned int place = free_places[--free_count];

			check(gpunvme_ring_read(ring, attached, next, buffer, place * BLOCK, BLOCK, 0, place));
			next += BLOCK;
		}
		check(gpunvme_ring_complete(ring, 1, -1, done, DEPTH, &count));
		for (size_t i = 0; i < count; i++) {
			unsigned int place = (unsigned int)done[i].user_data;

			check(done[i].error);
			for (uint64_t at = 0; at < done[i].result.bytes; at++)
				sum += blocks[place * BLOCK + at];
			bytes += done[i].result.bytes;
			free_places[free_count++] = place;
		}
	}
	printf("%" PRIu64 " bytes, sum %" PRIu64 "\n", bytes, sum);
	gpunvme_attached_release(attached);
	gpunvme_ring_destroy(ring);
	gpunvme_buffer_destroy(buffer);
	gpunvme_file_close(file);
	gpunvme_mount_close(mount);
	return 0;
}
