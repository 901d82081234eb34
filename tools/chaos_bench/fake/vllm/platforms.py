"""The device: none, so that workarounds for the kernels of a real one do not apply."""

from __future__ import annotations


class Platform:
    """No device."""

    device_type = "fake"

    def is_cpu(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return False


current_platform = Platform()
