/*
 * Calls that fail while a thread ends: in destructors of its keys, and of C++'s thread_local, which
 * run after those of the library.
 */
#include <gpunvme.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* What C++ compilers call for a thread_local with a destructor. */
extern int __cxa_thread_atexit_impl(void (*destructor)(void *), void *object, void *dso);
extern void *__dso_handle;

static int failed;

static void fails(void *object)
{
	gpunvme_mount *mount;
	(void)object;
	if (gpunvme_mount_open(NULL, &mount) == 0 || gpunvme_last_error() == NULL)
		failed = 1;
}

static void *thread(void *key)
{
	/* Before the library's own, so that it runs after them. */
	__cxa_thread_atexit_impl(fails, NULL, &__dso_handle);
	pthread_setspecific(*(pthread_key_t *)key, key);
	fails(NULL);
	if (strlen(gpunvme_last_error()) == 0)
		failed = 1;
	return NULL;
}

int main(void)
{
	pthread_key_t key;
	pthread_t started;
	if (pthread_key_create(&key, fails) || pthread_create(&started, NULL, thread, &key) || pthread_join(started, NULL) || failed)
		return 1;
	puts("fine");
	return 0;
}
