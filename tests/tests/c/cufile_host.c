/*
 * A program with a plug-in that uses cuFile, as NIXL has them: loads the library $1, and calls its
 * copy_file, which is the main of cufile_user.c, with the other arguments.
 */
#include <dlfcn.h>
#include <err.h>

int main(int argc, char **argv)
{
	void *plugin = dlopen(argc > 1 ? argv[1] : "", RTLD_LAZY | RTLD_LOCAL);
	if (!plugin)
		errx(1, "%s", dlerror());
	int (*copy_file)(int, char **) = (int (*)(int, char **))dlsym(plugin, "copy_file");
	if (!copy_file)
		errx(1, "%s", dlerror());
	return copy_file(argc - 1, argv + 1);
}
