"""GPU memory by its address."""


class DeviceMemory:
    """Bytes at an address of a GPU, which another object keeps.

    Args:
        address: where they begin.
        length: how many they are.
        stream: the stream that may still be using them, by its handle: None where that needs no waiting.
    """

    def __init__(self, address: int, length: int, stream: int | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "stream": stream,
        }
