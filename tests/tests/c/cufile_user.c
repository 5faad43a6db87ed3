/*
 * A program that uses cuFile: copies the file $1 to $2 by cuFileRead and cuFileWrite, through host
 * memory or, if $3 is "device", through a GPU's, and prints the version. It is linked with the
 * library, or, built with LOADED, loads it by name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { int code, cuda; } status;
typedef struct { int kind; union { int fd; void *handle; } handle; const void *operations; } descriptor;

status cuFileGetVersion(int *);
status cuFileHandleRegister(void **, const descriptor *);
void cuFileHandleDeregister(void *);
status cuFileBufRegister(const void *, size_t, int);
status cuFileBufDeregister(const void *);
ssize_t cuFileRead(void *, void *, size_t, off_t, off_t);
ssize_t cuFileWrite(void *, const void *, size_t, off_t, off_t);
status cuFileDriverClose_v2(void);

#ifdef LOADED
static void *find(const char *name)
{
	static void *library;
	if (!library && !(library = dlopen("libcufile.so.0", RTLD_LAZY | RTLD_LOCAL)))
		errx(1, "%s", dlerror());
	return dlsym(library, name);
}
#define CALL(name) ((__typeof__(&name))find(#name))
#else
#define CALL(name) name
#endif

static void *handle(int fd)
{
	descriptor file = { .kind = 1, .handle.fd = fd };
	void *found;
	status result = CALL(cuFileHandleRegister)(&found, &file);
	if (result.code)
		errx(1, "cuFileHandleRegister: %d", result.code);
	return found;
}

/* Memory of a GPU, which the driver is loaded for. It is never freed. */
static void *device_memory(size_t size)
{
	void *driver = dlopen("libcuda.so", RTLD_NOW | RTLD_LOCAL), *context;
	unsigned long long address;
	if (!driver)
		errx(1, "%s", dlerror());
	int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
	int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
	int (*push)(void *) = (int (*)(void *))dlsym(driver, "cuCtxPushCurrent_v2");
	int (*alloc)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))dlsym(driver, "cuMemAlloc_v2");
	if (init(0) || retain(&context, 0) || push(context) || alloc(&address, size))
		errx(1, "no memory of a GPU");
	return (void *)address;
}

int main(int argc, char **argv)
{
	struct stat about;
	int version;
	if (argc != 3 && argc != 4)
		errx(2, "usage: cufile_user FROM TO [device]");
	int from = open(argv[1], O_RDONLY | O_DIRECT), to = open(argv[2], O_CREAT | O_RDWR | O_DIRECT, 0644);
	if (from < 0 || to < 0 || fstat(from, &about))
		err(1, "files");
	int device = argc == 4 && !strcmp(argv[3], "device");
	void *source = handle(from), *copy = handle(to);
	void *memory = device ? device_memory(about.st_size) : malloc(about.st_size);
	if (device && CALL(cuFileBufRegister)(memory, about.st_size, 0).code)
		errx(1, "memory of a GPU is not registered");
	if (CALL(cuFileGetVersion)(&version).code ||
	    CALL(cuFileRead)(source, memory, about.st_size, 0, 0) != about.st_size ||
	    CALL(cuFileWrite)(copy, memory, about.st_size, 0, 0) != about.st_size)
		err(1, "no bytes");
	if (device && CALL(cuFileBufDeregister)(memory).code)
		errx(1, "memory of a GPU is not taken back");
	CALL(cuFileHandleDeregister)(source);
	CALL(cuFileHandleDeregister)(copy);
	printf("cuFile %d, closed with %d\n", version, CALL(cuFileDriverClose_v2)().code);
	return 0;
}
