"""What is known of the device."""

from __future__ import annotations

import jax


def free_bytes() -> int | None:
    """The bytes that are free on the device, if it says so; CPUs do not."""
    stats = jax.local_devices()[0].memory_stats()
    return None if not stats else stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
