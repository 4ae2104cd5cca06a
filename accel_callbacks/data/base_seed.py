"""The base seed of torch's loader, which it draws on the default device at the start of a pass."""

from __future__ import annotations

import torch

__all__ = ["base_seed_generator", "draw_base_seed", "seeded_generator"]


def base_seed_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a copy of the generator from which torch's loader draws its base seed.

    Args:
        generator: the loader's own; if ``None`` it is the one of the default device.

    Returns:
        A generator on the same device in the same state; ``None`` for a device without random
        numbers, such as ``"meta"``.

    Example:
        >>> import torch
        >>> from accel_callbacks.data.base_seed import base_seed_generator
        >>> copy = base_seed_generator(None)
        >>> bool(torch.rand(1, generator=copy) == torch.rand(1))
        True
    """
    device = torch.get_default_device() if generator is None else generator.device
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.default_generator.get_state()
    elif (module := getattr(torch, device.type, None)) is None:
        return None
    else:
        state = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    copy = torch.Generator(device=device)
    copy.set_state(state)
    return copy


def draw_base_seed(generator: torch.Generator | None) -> None:
    """Draw a number as torch's loader does for its base seed.

    Args:
        generator: the loader's own, or ``None``.
    """
    device = torch.get_default_device()
    torch.empty((), dtype=torch.int64, device=device).random_(generator=generator)


def seeded_generator(seed: int) -> torch.Generator:
    """Return a generator for torch's loader, which takes one of the default device only.

    Args:
        seed: the seed.

    Example:
        >>> from accel_callbacks.data.base_seed import seeded_generator
        >>> seeded_generator(3).initial_seed()
        3
    """
    device = torch.get_default_device()
    if not hasattr(torch, device.type) and device.type != "cpu":  # it has no random numbers
        device = torch.device("cpu")
    return torch.Generator(device=device).manual_seed(seed)
