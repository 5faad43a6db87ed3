"""The headers that come with the package."""

from pathlib import Path


def get_include() -> str:
    """The folder of ``gpunvme_device.h`` and ``gpunvme_array.h``, for a compiler's option ``-I``."""
    return str(Path(__file__).with_name("include"))
