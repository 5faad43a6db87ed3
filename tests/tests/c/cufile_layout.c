/*
 * Compiled with NVIDIA's cufile.h: its structures and numbers are those that cufile/src/abi.rs and
 * cufile/src/failure.rs declare. LEVEL1 is the size of the first level of statistics, which grew
 * with version 1.19.
 */
#include <stddef.h>

#include "cufile.h"

#define IS(what, number) _Static_assert((what) == (number), #what)
#define AT(type, field, number) IS(offsetof(type, field), number)

IS(sizeof(CUfileError_t), 8);
IS(sizeof(CUfileDescr_t), 24);
AT(CUfileDescr_t, handle, 8);
AT(CUfileDescr_t, fs_ops, 16);
IS(sizeof(CUfileDrvProps_t), 56);
AT(CUfileDrvProps_t, nvfs.poll_thresh_size, 8);
AT(CUfileDrvProps_t, nvfs.max_direct_io_size, 16);
AT(CUfileDrvProps_t, nvfs.dstatusflags, 24);
AT(CUfileDrvProps_t, nvfs.dcontrolflags, 28);
AT(CUfileDrvProps_t, fflags, 32);
AT(CUfileDrvProps_t, max_device_cache_size, 36);
AT(CUfileDrvProps_t, max_device_pinned_mem_size, 44);
AT(CUfileDrvProps_t, max_batch_io_size, 48);
AT(CUfileDrvProps_t, max_batch_io_timeout_msecs, 52);
IS(sizeof(CUfileIOParams_t), 64);
AT(CUfileIOParams_t, u.batch.devPtr_base, 8);
AT(CUfileIOParams_t, u.batch.file_offset, 16);
AT(CUfileIOParams_t, u.batch.devPtr_offset, 24);
AT(CUfileIOParams_t, u.batch.size, 32);
AT(CUfileIOParams_t, fh, 40);
AT(CUfileIOParams_t, opcode, 48);
AT(CUfileIOParams_t, cookie, 56);
IS(sizeof(CUfileIOEvents_t), 24);
AT(CUfileIOEvents_t, status, 8);
AT(CUfileIOEvents_t, ret, 16);
IS(sizeof(CUfileStatsLevel1_t), LEVEL1);
AT(CUfileStatsLevel1_t, read_bytes, 96);
AT(CUfileStatsLevel1_t, batch_submit_ops, 176);
AT(CUfileStatsLevel1_t, batch_read_bytes, 416);
AT(CUfileStatsLevel1_t, last_batch_write_bytes, 504);
IS(sizeof(CUfileStatsLevel2_t), LEVEL1 + 512);
IS(sizeof(CUfileStatsLevel3_t), LEVEL1 + 4488);
AT(CUfileStatsLevel3_t, num_gpus, LEVEL1 + 512);
AT(CUfileStatsLevel3_t, per_gpu_stats, LEVEL1 + 520);
IS(sizeof(CUfilePerGpuStats_t), 248);
AT(CUfilePerGpuStats_t, n_total_reads, 48);
AT(CUfilePerGpuStats_t, writes_bytes, 120);
AT(CUfilePerGpuStats_t, n_mmap, 208);

IS(CU_FILE_HANDLE_TYPE_OPAQUE_FD, 1);
IS(CU_FILE_HANDLE_TYPE_USERSPACE_FS, 3);
IS(CU_FILE_NVME_SUPPORTED, 4);
IS(CU_FILE_USE_POLL_MODE, 0);
IS(CU_FILE_ALLOW_COMPAT_MODE, 1);
IS(CU_FILE_BATCH_IO_SUPPORTED, 1);
IS(CU_FILE_PARALLEL_IO_SUPPORTED, 3);
IS(CUFILE_BATCH, 1);
IS(CUFILE_READ, 0);
IS(CUFILE_WRITE, 1);
IS(CUFILE_CANCELED, 0x08);
IS(CUFILE_COMPLETE, 0x10);
IS(CUFILE_FAILED, 0x40);
IS(CU_FILE_STREAM_FIXED_BUF_OFFSET, 1);
IS(CU_FILE_STREAM_FIXED_FILE_OFFSET, 2);
IS(CU_FILE_STREAM_FIXED_FILE_SIZE, 4);
IS(CUFILE_PARAM_PROPERTIES_MAX_DIRECT_IO_SIZE_KB, 5);
IS(CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS, 11);
IS(CUFILE_PARAM_ENV_LOGFILE_PATH, 1);

IS(CU_FILE_DRIVER_NOT_INITIALIZED, 5001);
IS(CU_FILE_DRIVER_UNSUPPORTED_LIMIT, 5003);
IS(CU_FILE_IO_NOT_SUPPORTED, 5008);
IS(CU_FILE_CUDA_DRIVER_ERROR, 5011);
IS(CU_FILE_CUDA_POINTER_INVALID, 5012);
IS(CU_FILE_CUDA_POINTER_RANGE_ERROR, 5014);
IS(CU_FILE_INVALID_FILE_TYPE, 5018);
IS(CU_FILE_INVALID_FILE_OPEN_FLAG, 5019);
IS(CU_FILE_INVALID_VALUE, 5022);
IS(CU_FILE_MEMORY_ALREADY_REGISTERED, 5023);
IS(CU_FILE_MEMORY_NOT_REGISTERED, 5024);
IS(CU_FILE_PERMISSION_DENIED, 5025);
IS(CU_FILE_DRIVER_ALREADY_OPEN, 5026);
IS(CU_FILE_HANDLE_NOT_REGISTERED, 5027);
IS(CU_FILE_HANDLE_ALREADY_REGISTERED, 5028);
IS(CU_FILE_DEVICE_NOT_FOUND, 5029);
IS(CU_FILE_INTERNAL_ERROR, 5030);
IS(CU_FILE_GETNEWFD_FAILED, 5031);
IS(CU_FILE_BATCH_FULL, 5037);
IS(CU_FILE_ASYNC_NOT_SUPPORTED, 5038);
IS(CU_FILE_NOMEM_ERROR, 5043);
