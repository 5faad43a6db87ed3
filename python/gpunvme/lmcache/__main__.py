"""The command ``lmcache``, with the backend ``gpunvme``."""

from lmcache.cli.main import main

from gpunvme.lmcache import register

if __name__ == "__main__":
    register()
    main()
