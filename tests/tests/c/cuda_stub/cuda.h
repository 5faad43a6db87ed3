/* What NVIDIA's cufile.h needs of CUDA's header, so that it is compiled without CUDA. */
#include <stdint.h>
#include <sys/types.h>
#include <time.h>
typedef int CUresult;
typedef void *CUstream;
