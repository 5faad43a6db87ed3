/*
 * The kernels of docs/guide/kernels.md, as tests/tests/kernels takes them out of it, with a
 * processor in place of the GPU: a block is one thread, which plays one thread of it after the
 * other.
 *
 *     guide MOUNT FILE     prints the sums of two blocks, and one float that was used where it lay
 */
#include <fcntl.h>
#include <gpunvme.h>
#include <stdio.h>

#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

static struct {
	unsigned x;
} blockIdx, threadIdx;

static void atomicAdd(float *to, float more)
{
	*to += more;
}

#include "guide-sum.h"
#include "guide-array.h"

static float use(gpunvme::ring ring, gpunvme::file file, unsigned long long offset)
{
	float mine = 0;
#include "guide-lent.h"
	return mine;
}

int main(int argc, char **argv)
{
	gpunvme_mount *mount;
	gpunvme_file *file;
	gpunvme_gpu_ring *host;
	gpunvme_attached *attached;
	gpunvme::ring ring;
	if (argc != 3 || gpunvme_mount_open(argv[1], &mount) != 0 || gpunvme_file_open(argv[2], O_RDONLY, 0, &file) != 0 ||
	    gpunvme_gpu_ring_create(mount, -1, 0, 0, 0, &host) != 0 || gpunvme_gpu_ring_attach(host, file, &attached) != 0 ||
	    gpunvme_gpu_ring_for_kernels(host, GPUNVME_DEVICE_VERSION, &ring) != 0) {
		puts(gpunvme_last_error());
		return 1;
	}
	gpunvme::file name = gpunvme_attached_name(attached);
	float sums[2] = {};
	for (blockIdx.x = 0; blockIdx.x < 2; blockIdx.x++)
		for (threadIdx.x = 0; threadIdx.x < 1024; threadIdx.x += 341)
			sum(ring, name, sums);
	threadIdx.x = 5;
	printf("%.0f %.0f %.0f\n", sums[0], sums[1], use(ring, name, 4096));
	gpunvme_attached_release(attached);
	gpunvme_gpu_ring_destroy(host);
	gpunvme_file_close(file);
	gpunvme_mount_close(mount);
	return 0;
}
