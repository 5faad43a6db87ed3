/*
 * Stands in for NVIDIA's libcufile: reads and writes by pread and pwrite, and, like it, calls some
 * of its own functions by way of the table of names, where a library before it would catch them.
 * It writes a line for each call to the file $FAKE_LOG.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int code, cuda; } status;
typedef struct { int kind; union { int fd; void *handle; } handle; const void *operations; } descriptor;

static const status ok;

static void say(const char *what)
{
	FILE *log = fopen(getenv("FAKE_LOG"), "a");
	fprintf(log, "%s\n", what);
	fclose(log);
}

status cuFileDriverOpen(void) { say("open"); return ok; }
status cuFileDriverClose(void) { say("close"); return ok; }
status cuFileDriverClose_v2(void) { say("close"); return ok; }
status cuFileGetVersion(int *version) { *version = 77; return ok; }

status cuFileHandleRegister(void **handle, const descriptor *file)
{
	/* The file without O_DIRECT, which would ask for memory that is aligned. */
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", file->handle.fd);
	int fd = open(path, (fcntl(file->handle.fd, F_GETFL) & O_ACCMODE) | O_CLOEXEC);
	say("register");
	cuFileDriverOpen();
	*handle = (void *)(long)(fd + 1000);
	return fd < 0 ? (status){ 5031, 0 } : ok;
}

static int number(void *handle) { return (int)(long)handle - 1000; }
void cuFileHandleDeregister(void *handle) { close(number(handle)); say("deregister"); }

ssize_t cuFileRead(void *handle, void *memory, size_t size, off_t file, off_t inside)
{
	say(inside ? "read inside" : "read");
	return pread(number(handle), (char *)memory + inside, size, file);
}

ssize_t cuFileWrite(void *handle, const void *memory, size_t size, off_t file, off_t inside)
{
	say(inside ? "write inside" : "write");
	return pwrite(number(handle), (const char *)memory + inside, size, file);
}

status cuFileReadAsync(void *handle, void *memory, size_t *size, off_t *file, off_t *inside, ssize_t *done, void *stream)
{
	(void)stream;
	say("read async");
	*done = cuFileRead(handle, memory, *size, *file, *inside);
	return ok;
}

status cuFileWriteAsync(void *handle, void *memory, size_t *size, off_t *file, off_t *inside, ssize_t *done, void *stream)
{
	(void)stream;
	say("write async");
	*done = cuFileWrite(handle, memory, *size, *file, *inside);
	return ok;
}

status cuFileBufRegister(const void *memory, size_t size, int flags) { (void)memory, (void)size, (void)flags; say("buffer"); return ok; }
status cuFileBufDeregister(const void *memory) { (void)memory; say("no buffer"); return ok; }

status cuFileStreamRegister(void *stream, unsigned flags)
{
	(void)stream;
	say(flags == 7 ? "stream 7" : "stream with other flags");
	return ok;
}

status cuFileStreamDeregister(void *stream) { (void)stream; say("no stream"); return ok; }
