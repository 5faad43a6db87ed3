/*
 * The ioctls of a gpunvme mount: what the library makes, for programs that would rather make them
 * themselves. docs/reference/ioctl.md explains them.
 *
 * All structures are little-endian. `version` is GPUNVME_VERSION; reserved fields are zero;
 * unknown flags are refused with EINVAL. Fields marked "out" are ignored on the way in.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef GPUNVME_ABI_H
#define GPUNVME_ABI_H

#include <stdint.h>
#include <sys/ioctl.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPUNVME_VERSION 2u
#define GPUNVME_MAX_SIZE 16383u          /* bytes of one ioctl's argument */
#define GPUNVME_MAX_SEGMENTS 678u        /* of one READ or WRITE */
#define GPUNVME_MAX_NEW_DEVICES 15u      /* of one GROW */
#define GPUNVME_MAX_EXTENTS 510u         /* of one RESOLVE */
#define GPUNVME_MAX_TRANSFER (1ull << 30) /* bytes of one READ or WRITE */

/* Routes. */
#define GPUNVME_ROUTE_NONE 0u
#define GPUNVME_ROUTE_P2P 1u
#define GPUNVME_ROUTE_BOUNCE 2u
#define GPUNVME_ROUTE_HOST 3u
#define GPUNVME_ROUTE_CACHE 4u

/* Reasons. New ones may come; gpunvme_reason_explain() puts them into words. */
#define GPUNVME_REASON_NONE 0u
#define GPUNVME_REASON_NOT_GPU_MEMORY 1u
#define GPUNVME_REASON_NO_VFIO 2u
#define GPUNVME_REASON_MMAP_REFUSED 3u
#define GPUNVME_REASON_IOMMUFD_COMPAT 4u
#define GPUNVME_REASON_MAP_DMA_REFUSED 5u
#define GPUNVME_REASON_UNALIGNED 6u
#define GPUNVME_REASON_EXPORT_REFUSED 7u
#define GPUNVME_REASON_NO_ROOM 8u
#define GPUNVME_REASON_NOT_CACHED 9u
#define GPUNVME_REASON_NOT_REGISTERED 10u
#define GPUNVME_REASON_NOT_RESIDENT 11u
#define GPUNVME_REASON_CACHING_OFF 12u
#define GPUNVME_REASON_RESIDENCY_HIDDEN 13u
#define GPUNVME_REASON_OLD_KERNEL 14u
#define GPUNVME_REASON_NOT_A_BUFFER 32u
#define GPUNVME_REASON_NOT_SEALED 33u
#define GPUNVME_REASON_TOO_SMALL 34u
#define GPUNVME_REASON_NOT_WRITABLE 35u
#define GPUNVME_REASON_PROCESS_LIMIT 36u
#define GPUNVME_REASON_TOTAL_LIMIT 37u
#define GPUNVME_REASON_FD_NOT_REACHABLE 38u
#define GPUNVME_REASON_NO_SUCH_BUFFER 39u
#define GPUNVME_REASON_OUTSIDE_BUFFER 40u
#define GPUNVME_REASON_ROUTE_NOT_AVAILABLE 41u
#define GPUNVME_REASON_MEMLOCK_LIMIT 42u
#define GPUNVME_REASON_NOT_ALLOCATED 43u
#define GPUNVME_REASON_USER_LIMIT 44u
#define GPUNVME_REASON_DESCRIPTOR_HIDDEN 45u
#define GPUNVME_REASON_WRONG_DESCRIPTOR 46u
#define GPUNVME_REASON_UNKNOWN 63u

/* INFO: on any file or directory of the mount. Texts are UTF-8 and end in a zero byte. */
struct gpunvme_info {
	uint32_t version;
	uint32_t flags;
	uint8_t magic[8];                /* out: "gpunvme" */
	uint64_t features;               /* out: GPUNVME_FEATURE_* */
	uint8_t uuid[16];                /* out */
	uint64_t capacity;               /* out: bytes */
	uint64_t free;                   /* out: bytes */
	uint64_t max_transfer;           /* out: bytes of one READ or WRITE */
	uint64_t max_buffer_bytes;       /* out: of one process */
	uint32_t max_buffers;            /* out: of one process */
	uint32_t max_segments;           /* out: of one READ or WRITE */
	uint32_t block_size;             /* out: writes of whole blocks go direct */
	uint32_t logical_block;          /* out: reads of whole logical blocks go direct */
	uint32_t memory_alignment;       /* out: of offsets and lengths in a buffer, to go direct */
	uint32_t devices;                /* out */
	uint32_t route;                  /* out: the fastest that GPU memory can take here */
	uint32_t reason;                 /* out: why that is not p2p */
	uint64_t stripe_unit;            /* out: 0 where there is one device */
	uint32_t sets;                   /* out: of devices, one behind the other */
	uint32_t commit;                 /* out: seconds between two commits of the journal */
	uint64_t cache;                  /* out: bytes for metadata */
	uint64_t write_buffer;           /* out: bytes for small writes */
	uint32_t threads;                /* out: loops that take the kernel's requests */
	uint32_t reserved2;
	uint64_t reserved[3];
	char label[64];                  /* out */
	char socket[112];                /* out: path of the registration socket, or empty */
	char device[256];                /* out */
	char daemon[40];                 /* out */
};
#define GPUNVME_FEATURE_READ_ONLY (1ull << 0)
#define GPUNVME_FEATURE_IO_URING  (1ull << 1) /* the kernel's requests come through io_uring */
/* They were to, and the system refuses it; the kernel does not offer it; it refused a queue. */
#define GPUNVME_FEATURE_IO_URING_REFUSED        (1ull << 2)
#define GPUNVME_FEATURE_IO_URING_NOT_OFFERED    (1ull << 3)
#define GPUNVME_FEATURE_IO_URING_NOT_REGISTERED (1ull << 4)
#define GPUNVME_FEATURE_DISCARD  (1ull << 5) /* the device is told of blocks that files gave up */

/* REGISTER: on any file or directory of the mount, and over the socket. */
struct gpunvme_register {
	uint32_t version;
	uint32_t flags;                  /* GPUNVME_REGISTER_* */
	int32_t fd;                      /* of a memfd with F_SEAL_SHRINK; over the socket -1 */
	uint32_t reserved;
	uint64_t len;                    /* bytes */
	uint64_t buffer;                 /* out: the buffer's name */
	uint32_t route;                  /* out */
	uint32_t reason;                 /* out: why that is not p2p, or why it was refused */
	uint64_t reserved2[2];
};
#define GPUNVME_REGISTER_STAGING (1u << 0) /* its bytes go on to a GPU: count them as bounce */

/* UNREGISTER: on any file or directory of the mount, and over the socket. */
struct gpunvme_unregister {
	uint32_t version;
	uint32_t flags;
	uint64_t buffer;
};

/* RESOLVE: on a regular file. `capacity` extents follow. */
struct gpunvme_resolve {
	uint32_t version;
	uint32_t flags;                  /* GPUNVME_WRITTEN_BACK */
	uint64_t offset;                 /* bytes */
	uint64_t len;                    /* bytes; UINT64_MAX for the rest of the file */
	uint64_t next;                   /* out: where the next call should begin */
	uint64_t file_size;              /* out: bytes */
	uint32_t capacity;
	uint32_t count;                  /* out: extents filled in */
};
struct gpunvme_extent {
	uint64_t file_offset;            /* bytes */
	uint64_t device_offset;          /* bytes */
	uint64_t len;                    /* bytes */
	uint32_t device;
	uint32_t flags;                  /* GPUNVME_EXTENT_* */
};
#define GPUNVME_EXTENT_UNWRITTEN (1u << 0) /* reads as zeros */
#define GPUNVME_EXTENT_LAST (1u << 1)      /* of the file */

/* READ and WRITE: on a regular file that is open for it. `segments` segments follow. */
struct gpunvme_transfer {
	uint32_t version;
	uint32_t flags;                  /* GPUNVME_REQUIRE_*, GPUNVME_WRITTEN_BACK */
	uint64_t buffer;
	uint32_t segments;
	int32_t descriptor;              /* of this file in this process, open for this */
	uint64_t grant;                  /* in: one got before, or 0; out: for later calls */
	uint64_t bytes;                  /* out: p2p + bounce + host + hole + edge */
	uint64_t p2p;                    /* out */
	uint64_t bounce;                 /* out */
	uint64_t host;                   /* out */
	uint64_t hole;                   /* out: filled with zeros */
	uint64_t edge;                   /* out: copied by the CPU, for lack of alignment */
	uint32_t reason;                 /* out */
	int32_t status;                  /* out: errno of what ended it early, or 0 */
	uint32_t failed_segment;         /* out: that status is about, or UINT32_MAX */
	uint32_t reserved2;
};
struct gpunvme_segment {
	uint64_t file_offset;            /* bytes */
	uint64_t buffer_offset;          /* bytes */
	uint64_t len;                    /* bytes */
};
#define GPUNVME_REQUIRE_P2P (1u << 0)
#define GPUNVME_REQUIRE_BOUNCE (1u << 1)
#define GPUNVME_REQUIRE_HOST (1u << 2)
#define GPUNVME_REQUIRE_DIRECT (1u << 3) /* no byte may be copied by the CPU */
/*
 * sync_file_range(2) was called for the range. Otherwise the daemon makes the kernel write back,
 * and drop, its pages of it.
 */
#define GPUNVME_WRITTEN_BACK (1u << 4)

/* METRICS: on any file or directory of the mount. `capacity` entries follow. */
struct gpunvme_metrics {
	uint32_t version;
	uint32_t flags;
	uint32_t capacity;               /* at least 1 */
	uint32_t count;                  /* out: entries filled in */
	uint64_t uptime;                 /* out: nanoseconds */
	uint64_t volume_bytes;           /* out */
	uint64_t free;                   /* out: bytes */
	uint64_t dirty;                  /* out: bytes of the write buffer in use */
	uint64_t cache_lookups;          /* out: of blocks of metadata */
	uint64_t cache_misses;           /* out */
	uint64_t cache_bytes;            /* out */
	uint64_t rings;                  /* out */
	uint64_t reserved[6];
};
struct gpunvme_metric {
	uint32_t kind;                   /* GPUNVME_METRIC_* */
	uint32_t reserved;
	char name[24];
	uint64_t begun;
	uint64_t failed;                 /* that ended with an error */
	uint64_t bytes;
	uint64_t nanoseconds;            /* of those that ended, added up */
	uint64_t buckets[24];            /* ended within 1024 << n ns; the last: later */
};
#define GPUNVME_METRIC_REQUEST 0u  /* of the kernel, by operation of FUSE */
#define GPUNVME_METRIC_TRANSFER 1u /* of the direct path, by direction and route */
#define GPUNVME_METRIC_DEVICE 2u   /* to the device */

/* SYNC: on any file or directory of the mount. As sync(2), for this volume. */
struct gpunvme_sync {
	uint32_t version;
	uint32_t flags;
	uint64_t reserved;
};

/*
 * TOP: on any file or directory of the mount. `capacity` entries follow. It is counted from the
 * first call on, as long as there is one every 10 s.
 */
struct gpunvme_top_list {
	uint32_t version;
	uint32_t flags;
	uint32_t capacity;               /* at least 1 */
	uint32_t count;                  /* out: entries filled in, those that took longest */
	uint64_t left_out;               /* out: entries without room */
	uint64_t others;                 /* out: operations in no entry, of too many at once */
	uint64_t reserved[4];
};
struct gpunvme_top {
	uint32_t user;
	uint32_t thread;                 /* or the process that had transfers done; 0: not seen */
	uint64_t ino;
	uint64_t requests;               /* of the kernel, that ended */
	uint64_t transfers;              /* that ended */
	uint64_t read;                   /* bytes */
	uint64_t written;                /* bytes */
	uint64_t nanoseconds;            /* of requests, added up; of a ring, transfers */
	uint64_t reserved;
};

/*
 * LOG: on any file or directory of the mount, for administrators. A filter in the syntax of the
 * mount option "log", or an empty one to leave it; out: the one that held before.
 */
struct gpunvme_log {
	uint32_t version;
	uint32_t flags;
	uint8_t filter[256];
	uint64_t reserved;
};

/*
 * TRIM: on any file or directory of the mount, for administrators. Tells the devices which blocks
 * of a part of the volume no file has. A call goes as far as it gets in a moment.
 */
struct gpunvme_trim {
	uint32_t version;
	uint32_t flags;
	uint64_t start;                  /* bytes of the volume */
	uint64_t len;                    /* bytes of the volume */
	uint64_t minimum;                /* free bytes side by side, at least */
	uint64_t next;                   /* out: where to go on; UINT64_MAX: it is done */
	uint64_t trimmed;                /* out: bytes */
	uint64_t reserved[2];
	uint8_t why[192];                /* out: why it failed */
};

/* A flag of GROW: nothing is done; it fails where the volume could not have the devices. */
#define GPUNVME_GROW_CHECK (1u << 0)

/*
 * GROW: on any file or directory of the mount, for administrators. Makes the volume as large as its
 * devices have become, or gives it the devices that follow.
 */
struct gpunvme_grow {
	uint32_t version;
	uint32_t flags;                  /* GPUNVME_GROW_CHECK */
	uint64_t before;                 /* out: bytes that the volume could hold */
	uint64_t capacity;               /* out: bytes that it can hold now */
	uint64_t reserved[5];
	uint8_t why[192];                /* out: why it failed */
};

/* A device for GROW. Its first and last MiB are zero. */
struct gpunvme_new_device {
	uint8_t name[256];               /* as the daemon is to open it */
};

/* GRANT: over the socket only, with a descriptor of a file of the mount. */
struct gpunvme_grant {
	uint32_t version;
	uint32_t flags;
	uint64_t grant;                  /* out: for this process and this file */
	uint64_t reserved[2];
};

/* Bytes moved, by route. */
struct gpunvme_moved {
	uint64_t p2p;
	uint64_t bounce;
	uint64_t host;
	uint64_t hole;
	uint64_t edge;
};

/* STATS: on any file or directory of the mount. Counters since mount, of all processes. */
struct gpunvme_stats {
	uint32_t version;
	uint32_t flags;
	uint64_t calls[16];              /* out: by command number, below 16 */
	uint64_t failed;                 /* out: calls */
	struct gpunvme_moved read;       /* out */
	struct gpunvme_moved write;      /* out */
	uint64_t buffers;                /* out: registered now */
	uint64_t buffer_bytes;           /* out */
	uint64_t processes;              /* out: that own them */
	uint64_t reasons[64];            /* out: transfers, by reason */
	uint64_t more_calls[4];          /* out: by command number, from 16 on */
};

/*
 * RING: on any file or directory of the mount. docs/reference/ioctl.md says how the two sides use
 * its memory: a memfd of GPUNVME_RING_BYTES(entries) zero bytes, sealed with F_SEAL_SHRINK, that
 * begins with the words, each a uint32_t.
 */
struct gpunvme_ring_setup {
	uint32_t version;
	uint32_t flags;
	int32_t memory;                  /* fd of the memfd */
	int32_t submitted;               /* fd of the eventfd that the application signals */
	int32_t completed;               /* fd of the eventfd that the daemon signals */
	uint32_t entries;                /* a power of two from 8 to 4096 */
	uint64_t ring;                   /* out: the ring's name */
	uint64_t reserved[3];
};

/* ATTACH: on an open regular file, which the ring may use as it was opened. */
struct gpunvme_attach {
	uint32_t version;
	uint32_t flags;
	uint64_t ring;
	uint64_t file;                   /* out: the file's name in submissions */
	uint64_t grant;                  /* as in struct gpunvme_transfer */
	int32_t descriptor;              /* the ring uses the file for what this is open for */
	uint32_t reserved;
};

/* DETACH: on any file or directory of the mount. */
struct gpunvme_detach {
	uint32_t version;
	uint32_t flags;
	uint64_t ring;
	uint64_t file;                   /* 0: the ring itself */
	uint64_t reserved[2];
};

struct gpunvme_submission {
	uint32_t command;                /* 4 READ, 5 WRITE */
	uint32_t flags;                  /* as in struct gpunvme_transfer */
	uint64_t file;
	uint64_t buffer;
	uint64_t file_offset;            /* bytes */
	uint64_t buffer_offset;          /* bytes */
	uint64_t len;                    /* bytes; at most GPUNVME_MAX_RING_TRANSFER */
	uint64_t user_data;
	uint64_t reserved;
};

struct gpunvme_completion {
	uint64_t user_data;
	int32_t status;                  /* errno, or 0 */
	uint32_t reason;
	uint64_t p2p;
	uint64_t bounce;
	uint64_t host;
	uint64_t hole;
	uint64_t edge;
	uint64_t flags;                  /* GPUNVME_COMPLETION_* */
};
/* Another process has read the same bytes by a ring. */
#define GPUNVME_COMPLETION_COMMON (1ull << 0)
/* Every byte that was asked for was moved. */
#define GPUNVME_COMPLETION_ALL (1ull << 1)
#define GPUNVME_MAX_RING_TRANSFER (16ull << 20)
#define GPUNVME_RING_SUBMISSION_TAIL 0u   /* offsets of the words; the application's */
#define GPUNVME_RING_SUBMISSION_HEAD 64u  /* the daemon's */
#define GPUNVME_RING_COMPLETION_TAIL 128u /* the daemon's */
#define GPUNVME_RING_COMPLETION_HEAD 192u /* the application's */
#define GPUNVME_RING_DAEMON 256u          /* GPUNVME_RING_AWAKE, _ASLEEP or _CLOSED */
#define GPUNVME_RING_APPLICATION 320u     /* GPUNVME_RING_AWAKE or _ASLEEP */
#define GPUNVME_RING_OVER 384u            /* 0, or an errno: the application, for its kernels */
#define GPUNVME_RING_AWAKE 0u
#define GPUNVME_RING_ASLEEP 1u
#define GPUNVME_RING_CLOSED 2u
#define GPUNVME_RING_ENTRIES 4096u        /* where submissions begin; completions follow them */
#define GPUNVME_RING_BYTES(entries) (GPUNVME_RING_ENTRIES + (entries) * 128u)

/*
 * Precedes a gpunvme_register or gpunvme_unregister in a datagram of the registration socket
 * (AF_UNIX, SOCK_SEQPACKET), both ways.
 */
struct gpunvme_message {
	uint32_t request;                /* GPUNVME_REGISTER or GPUNVME_UNREGISTER */
	int32_t status;                  /* in: 0; out: 0 or an errno */
};

/*
 * The size is part of the number: for RESOLVE, READ and WRITE it counts the entries that follow
 * the header.
 */
#define GPUNVME_IOC(nr, size) _IOC(_IOC_READ | _IOC_WRITE, 'G', (nr), (size))
#define GPUNVME_INFO GPUNVME_IOC(0, sizeof(struct gpunvme_info))
#define GPUNVME_REGISTER GPUNVME_IOC(1, sizeof(struct gpunvme_register))
#define GPUNVME_UNREGISTER GPUNVME_IOC(2, sizeof(struct gpunvme_unregister))
#define GPUNVME_RESOLVE(n) GPUNVME_IOC(3, sizeof(struct gpunvme_resolve) + (n) * sizeof(struct gpunvme_extent))
#define GPUNVME_READ(n) GPUNVME_IOC(4, sizeof(struct gpunvme_transfer) + (n) * sizeof(struct gpunvme_segment))
#define GPUNVME_WRITE(n) GPUNVME_IOC(5, sizeof(struct gpunvme_transfer) + (n) * sizeof(struct gpunvme_segment))
#define GPUNVME_STATS GPUNVME_IOC(6, sizeof(struct gpunvme_stats))
#define GPUNVME_RING GPUNVME_IOC(7, sizeof(struct gpunvme_ring_setup))
#define GPUNVME_ATTACH GPUNVME_IOC(8, sizeof(struct gpunvme_attach))
#define GPUNVME_DETACH GPUNVME_IOC(9, sizeof(struct gpunvme_detach))
#define GPUNVME_GRANT GPUNVME_IOC(10, sizeof(struct gpunvme_grant))
#define GPUNVME_SYNC GPUNVME_IOC(11, sizeof(struct gpunvme_sync))
#define GPUNVME_TRIM GPUNVME_IOC(15, sizeof(struct gpunvme_trim))
#define GPUNVME_GROW(n) GPUNVME_IOC(16, sizeof(struct gpunvme_grow) + (n) * sizeof(struct gpunvme_new_device))
#define GPUNVME_LOG GPUNVME_IOC(13, sizeof(struct gpunvme_log))
#define GPUNVME_TOP(n) GPUNVME_IOC(14, sizeof(struct gpunvme_top_list) + (n) * sizeof(struct gpunvme_top))
#define GPUNVME_METRICS(n) GPUNVME_IOC(12, sizeof(struct gpunvme_metrics) + (n) * sizeof(struct gpunvme_metric))

#ifdef __cplusplus
}
#endif

#endif
