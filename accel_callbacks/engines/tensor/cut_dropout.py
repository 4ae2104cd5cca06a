"""Random numbers of dropout on activations that are cut over the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["CutDropout", "draws_random_numbers"]

# Above the 32 bits of seeds that users take, and that a generator on the CPU looks at.
_MARK = 0x7A3C51 << 32
_GOLDEN = 0x9E3779B9
_LOW = 0xFFFFFFFF


def draws_random_numbers(model: torch.nn.Module) -> bool:
    """Return whether a model has dropout, in a module or as a number in an attribute of one."""
    for module in model.modules():
        if "dropout" in type(module).__name__.lower() and getattr(module, "p", None):
            return True
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float) and value > 0:
                return True
    return False


class CutDropout:
    """Draws other numbers on each rank between modules whose outputs are cut, and the same outside.

    Ranks that share a model draw the same random numbers, as dropout of whole activations needs.
    Of activations that are cut, each rank has another part, whose mask must be another one. Where
    such a part begins, the generator gets a seed of the rank's own, which follows from its state:
    blocks that are computed again in backward draw the same numbers again, and a checkpoint has
    nothing to add. Where the activations are whole again, it goes on as on the other ranks.

    Args:
        model: the model; while it trains, its forward does this from now on.
        styled: modules with whether their outputs are cut.
        rank: index of this rank among those that share the model.
        device: of this rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        styled: Iterable[tuple[torch.nn.Module, bool]],
        rank: int,
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._whole: tuple[int, torch.Tensor] | None = None  # the own seed, and the state before it
        self.generator = _generator(device)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def cut(module: torch.nn.Module, *_: Any) -> None:
            if module.training:
                self.cut()

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def join(*_: Any) -> None:
            self.join()

        for module, is_cut in styled:
            module.register_forward_hook(cut if is_cut else join)
        # A forward that failed midway has left the generator where it was.
        model.register_forward_pre_hook(join, prepend=True)
        model.register_forward_hook(join, always_call=True)

    @property
    def _is_own(self) -> bool:
        # The generator says it, and no flag: checkpointed blocks set it back when they are computed
        # again, and may end in the middle.
        return self.generator.initial_seed() & ~_LOW == _MARK

    def cut(self) -> None:
        """Draw numbers of this rank from now on."""
        if self._is_own:
            return
        seed = int(torch.randint(1 << 31, (), generator=torch.default_generator, device="cpu"))
        cut_seed = _MARK | ((seed + self._rank * _GOLDEN) & _LOW)
        self._whole = cut_seed, self.generator.get_state()
        self.generator.manual_seed(cut_seed)

    def join(self) -> None:
        """Draw the numbers of all ranks again."""
        if not self._is_own:
            return
        cut_seed = self.generator.initial_seed()
        if self._whole is not None and self._whole[0] == cut_seed:
            self.generator.set_state(self._whole[1])
        else:  # of another forward than the last one: go on with what all ranks know of it
            self.generator.manual_seed((cut_seed - self._rank * _GOLDEN) & _LOW)


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator that dropout on a device draws from."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
