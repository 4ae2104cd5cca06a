"""Context parallelism: ranks of one replica share sequences, each with a part of the tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_callbacks import collectives
from accel_callbacks.engines.checks import is_of_transformers
from accel_callbacks.plugins.parallelism_handlers import TorchContextParallelConfig
from accel_callbacks.strategy.base import Sequences
from checkpoint_io.warning import warn

__all__ = ["ContextParallel", "plain_attention", "token_order"]

_WHAT = "maybe_context_parallel"
_ADVICE = {
    "attention.* does not have a sharding strategy": (
        "{size}: torch computes attention over several ranks with the kernels of GPUs alone, and "
        "this is {device}. Pass ParallelismConfig(sp_size=...), whose ranks exchange heads and "
        "compute attention with any kernel, or train on GPUs."
    ),
}
# Names of models of transformers that pool the tokens.
_OF_SEQUENCES = (
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForQuestionAnswering",
    "ForNextSentencePrediction",
)


def token_order(length: int, ranks: int, *, load_balance: bool = True) -> torch.Tensor:
    """Return the positions of the tokens that ranks hold, one rank after the other.

    Under causal attention the last tokens have the most to do, so each rank holds a piece of the
    start of a sequence and one of its end.

    Args:
        length: of a sequence, a multiple of twice the number of ranks.
        ranks: number of ranks that share a sequence.
        load_balance: False for one piece a rank.
    """
    positions = torch.arange(length, device="cpu")
    if not load_balance:
        return positions
    pieces = positions.chunk(2 * ranks)
    order = [piece for rank in range(ranks) for piece in (pieces[rank], pieces[-1 - rank])]
    return torch.cat(order)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Context manager: attention is of the tokens of this rank alone, and waits for no other."""
    replaced = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = replaced


class ContextParallel(Sequences):
    """Cuts sequences over ranks, whose attention exchanges keys and values, as torch does it.

    Args:
        ranks: number of ranks that share a sequence.
        options: how they exchange keys and values, and which tokens each has.
        mesh: returns the mesh of one dimension over these ranks.
    """

    shared = True
    _size = "cp_size"  # the option by which ranks share sequences

    def __init__(
        self, ranks: int, options: TorchContextParallelConfig, mesh: Callable[[], Any]
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self._options = options
        self._mesh = mesh
        self.active = False
        self._length = 0
        self._whole: list[tuple[torch.Tensor, torch.Tensor]] = []  # a buffer, and what it was
        self._attended = self._trained = False  # in the current context
        self._pending = False  # attention of the last context that no backward has followed
        self._warned: set[str] = set()
        self._attention: Callable[..., torch.Tensor] | None = None
        self._over_ranks: Callable[..., torch.Tensor] | None = None  # what it calls

    # --- the context ----------------------------------------------------------------------------

    @contextmanager
    def cut(
        self,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: Collection[torch.Tensor] | None,
    ) -> Iterator[None]:
        """Context manager: see ``Accelerator.maybe_context_parallel``."""
        if self.active:
            raise RuntimeError(f"{_WHAT}: this is inside of another one; leave that first.")
        sequences = list(buffers or ())
        unrestored = _ids_within(no_restore or (), sequences)
        dims = _check_dims(sequences, list(seq_dims or ()))
        self._length = self._check_length(sequences, dims)
        whole = [(buffer, buffer.data) for buffer in sequences]
        self._attended = self._trained = self._pending = False
        with ExitStack() as stack:
            stack.callback(self._leave, whole, unrestored)
            for buffer, data in whole:
                # torch resizes buffers in place, and some are views of one tensor, such as inputs
                # and labels: each gets memory of its own.
                buffer.data = data.clone(memory_format=torch.contiguous_format)
            stack.enter_context(self._share_attention(sequences, dims))
            self._whole, self.active = whole, True
            yield
        if self._trained and not self._attended:
            self._warn_once(
                f"{_WHAT}: no attention has run through torch.nn.functional."
                "scaled_dot_product_attention, so tokens have seen those of their own rank alone: "
                "call it by that name, from the module."
            )

    def is_cut(self, tensor: torch.Tensor) -> bool:
        """Return whether each rank has its own part of a tensor for now."""
        return any(tensor is buffer for buffer, _ in self._whole)

    def _leave(self, whole: list[tuple[torch.Tensor, torch.Tensor]], unrestored: set[int]) -> None:
        self._whole, self.active = [], False
        for buffer, data in whole:
            if id(buffer) not in unrestored:
                buffer.data = data
                # A backward that comes only now must not take it for what the forward saw.
                torch.autograd.graph.increment_version(buffer)

    @contextmanager
    def _share_attention(self, buffers: list[torch.Tensor], dims: list[int]) -> Iterator[None]:
        """Context manager: let torch cut the buffers and replace attention."""
        # Imported here, because most runs have no sequences to cut.
        from torch.distributed.tensor.experimental import _attention, context_parallel

        options = _attention._cp_options
        before = options.enable_load_balance, options.rotate_method
        plain = F.scaled_dot_product_attention
        math = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
        options.enable_load_balance = self._options.load_balance
        _attention.set_rotate_method(self._options.cp_comm_strategy or "allgather")
        # Its operations have other rules for sharded tensors, which know no order of tokens.
        torch.backends.cuda.enable_math_sdp(False)
        try:
            with context_parallel(
                self._mesh(),
                buffers=buffers,
                buffer_seq_dims=dims,
                no_restore_buffers=set(buffers),
            ):
                ring = F.scaled_dot_product_attention
                if ring is plain:  # torch goes by the name that the function has
                    raise RuntimeError(
                        f"{_WHAT}: torch.nn.functional.scaled_dot_product_attention was replaced "
                        f"by {getattr(plain, '__qualname__', plain)!r}, which sees the tokens of "
                        "one rank alone: restore torch's own."
                    )
                # It is ``ring`` again after it, by which torch finds its own way back.
                with self._replace_attention(ring, _attend):
                    yield
            # torch keeps one for each step.
            known = getattr(inspect.getmodule(context_parallel), "_replaced_functions", {})
            known.pop(ring, None)
        finally:
            F.scaled_dot_product_attention = plain
            torch.backends.cuda.enable_math_sdp(math)
            options.enable_load_balance, options.rotate_method = before

    def _check_length(self, buffers: list[torch.Tensor], dims: list[int]) -> int:
        lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
        length, ranks = lengths[0], self._ranks
        if len(set(lengths)) > 1:
            raise ValueError(
                f"{_WHAT}: the buffers have lengths of {lengths} along buffer_seq_dims: all must "
                "have that of the sequence; slice longer ones, such as tables of positions."
            )
        unit = 2 * ranks if self._options.load_balance else ranks
        if length % unit == 0 and length:
            return length
        why = (
            f"2 * {self._size}, to balance causal attention"
            if self._options.load_balance
            else self._size
        )
        shorter = f", or cut to {length // unit * unit}" if length >= unit else ""
        raise ValueError(
            f"{_WHAT}: sequences of a length of {length} cannot be cut over {ranks} ranks: it must "
            f"be a multiple of {unit} ({why}). Pad to {-(-length // unit) * unit or unit}, with "
            f"labels of -100{shorter}."
        )

    @contextmanager
    def _replace_attention(
        self, inner: Callable[..., torch.Tensor], attend: Callable[..., torch.Tensor]
    ) -> Iterator[None]:
        """Context manager: attention goes through ``attend(inner, query, key, value, ...)``.

        It is one function in all contexts, or each would compile a model again.
        """
        if self._attention is None:
            attention = self._guard_attention()
            self._attention = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
        self._over_ranks = partial(attend, inner)
        before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, self._attention
        try:
            yield
        finally:
            F.scaled_dot_product_attention = before
            self._over_ranks = None

    def _guard_attention(self) -> Callable[..., torch.Tensor]:
        """Return torch's attention over ranks, without what it computes wrongly in silence."""

        def attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            **options: Any,
        ) -> torch.Tensor:
            self._attended = True
            if attn_mask is not None:
                raise ValueError(
                    f"{_WHAT}: attention got an attn_mask, and ranks exchange keys and values "
                    "without one: use is_causal=True, and pad at the end of sequences."
                )
            if dropout_p > 0:
                raise ValueError(
                    f"{_WHAT}: attention got dropout_p={dropout_p}, whose backward torch computes "
                    "wrongly over several ranks: set the dropout of attention to 0 (in a "
                    "transformers config attention_dropout or attn_pdrop)."
                )
            if not is_causal and self._options.load_balance:
                raise ValueError(
                    f"{_WHAT}: attention without is_causal=True; the order of tokens that balances "
                    "causal attention does not serve it: pass ParallelismConfig(cp_handler="
                    "TorchContextParallelConfig(load_balance=False))."
                )
            if torch.is_grad_enabled():
                self._pending = self._pending or query.requires_grad or value.requires_grad
            assert self._over_ranks is not None
            try:
                return self._over_ranks(query, key, value, is_causal=is_causal, **options)
            except NotImplementedError as error:
                # Imported here, because most runs need no advice.
                from accel_callbacks.engines.advice import advise

                advise(error, _ADVICE, size=self._size, device=query.device.type)
                raise

        return attention

    def check_backward(self) -> None:
        """Refuse a backward of attention whose context has ended, which would be wrong.

        Raises:
            RuntimeError: the loss was computed inside of a context, and this is outside.
        """
        if self.active:
            self._trained, self._pending = True, False
        elif self._pending:
            raise RuntimeError(
                f"backward: the loss was computed inside of {_WHAT}, which has ended, and with it "
                "the attention over several ranks: call backward inside of it too."
            )
        else:
            self._warn_once(
                f"{self._size} is {self._ranks}, and this loss comes from outside of "
                f"accel.{_WHAT}: all {self._ranks} ranks compute the same. Wrap forward and "
                "backward in it."
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    # --- sequences that are whole ---------------------------------------------------------------

    def gather(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Collective: see ``Accelerator.gather_sequences``."""
        group = self._mesh().get_group()
        tensor = tensor.detach().contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._ranks)]
        dist.all_gather(parts, tensor, group=group)
        joined = torch.cat(parts, dim=seq_dim)
        order = token_order(
            joined.shape[seq_dim], self._ranks, load_balance=self._options.load_balance
        )
        return joined.index_select(seq_dim, order.argsort().to(joined.device))

    # --- models of transformers -----------------------------------------------------------------

    def adopt(self, model: torch.nn.Module) -> None:
        """Check how a model of transformers is called inside of the context, and drop its masks.

        They are made from positions, which it takes for those of packed sequences.
        """

        # Functions, which a copy of the model shares; methods would be copied with their context.
        def check(*call: Any) -> Any:
            return self.checked_call(*call)

        def drop_mask(*call: Any) -> Any:
            return self._without_mask(*call)

        inside: set[int] = set()
        for module in model.modules():
            if id(module) not in inside and is_of_transformers(module):
                inside.update(map(id, module.modules()))
                module.register_forward_pre_hook(check, with_kwargs=True, prepend=True)
            if isinstance(getattr(module, "is_causal", None), bool) and id(module) in inside:
                module.register_forward_pre_hook(drop_mask, with_kwargs=True, prepend=True)

    def _without_mask(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self.active or not module.is_causal or kwargs.get("attention_mask") is None:
            return None
        return args, {**kwargs, "attention_mask": None}

    def checked_call(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call of a model of transformers as ranks with parts need them.

        Returns:
            ``None`` outside of the context: they stay as they are.

        Raises:
            ValueError: the model would compute something else with a part of a sequence.
        """
        if not self.active:
            return None
        name = type(model).__name__
        parameters = inspect.signature(model.forward).parameters
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
            return None
        kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
        _refuse_attention(name, model, self._size)
        if name.endswith(_OF_SEQUENCES):
            raise ValueError(
                f"{name} has one output for a whole sequence, and would take it from the tokens of "
                f"each rank alone: call it outside of {_WHAT}, or leave {self._size} out."
            )
        tokens = next((kwargs[k] for k in ("input_ids", "inputs_embeds") if k in kwargs), None)
        if tokens is not None and tokens.shape[1] == self._length:
            raise ValueError(
                f"{name} got sequences of the whole length of {self._length} inside of {_WHAT}: "
                "name the tensor among its buffers."
            )
        if kwargs.get("position_ids") is None:
            raise ValueError(
                f"{name} was called without position_ids inside of {_WHAT}, and would count "
                "positions from 0 on each rank: pass position_ids=torch.arange(length).repeat("
                "batch, 1), and name it among the buffers, with a buffer_seq_dim of 1."
            )
        shifts = getattr(model, "loss_type", None) == "ForCausalLM" or name.endswith("LMHeadModel")
        if shifts and kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                f"{name} got labels inside of {_WHAT}, and would shift them inside of the part of "
                "each rank: pass shift_labels too, made before as torch.nn.functional.pad(labels, "
                "(0, 1), value=-100)[:, 1:].contiguous(), and name both among the buffers."
            )
        if kwargs.get("attention_mask") is not None:
            causal = self._options.load_balance or _is_causal(model)
            self._check_mask(kwargs["attention_mask"], causal)
            kwargs["attention_mask"] = None
        else:
            self._check_positions(name, kwargs["position_ids"])
        return (), kwargs

    def _check_positions(self, name: str, positions: torch.Tensor) -> None:
        """Refuse rows of several sequences, between which transformers would make a mask."""
        whole = next((data for buffer, data in self._whole if buffer is positions), None)
        if whole is not None and whole.dim() == 2 and bool(whole.diff(dim=1).ne(1).any()):
            raise ValueError(
                f"{name} got position_ids that start anew within a row, as those of packed "
                "sequences, and ranks exchange keys and values without a mask between them: put "
                "one sequence into a row."
            )

    def _check_mask(self, mask: torch.Tensor, causal: bool) -> None:
        """Refuse a mask of anything but padding at the end, which causal attention does not see."""
        whole = next((data for buffer, data in self._whole if buffer is mask), None)
        if whole is None:
            raise ValueError(
                f"{_WHAT}: leave attention_mask out of the call, or name it among the buffers."
            )
        seen = whole.ne(0)
        padded_at_end = seen[:, 1:].le(seen[:, :-1]).all() if causal else seen.all()
        if whole.dim() != 2 or not bool(padded_at_end):
            raise ValueError(
                f"{_WHAT}: the attention_mask hides tokens"
                + (" before others" if causal else "")
                + ", and ranks exchange keys and values without a mask"
                + (": pad at the end of sequences." if causal else ".")
            )


def _is_causal(model: torch.nn.Module) -> bool:
    """Return whether no attention of a model of transformers sees the tokens after its own."""
    flags = [getattr(module, "is_causal", None) for module in model.modules()]
    known = [flag for flag in flags if isinstance(flag, bool)]
    return bool(known) and all(known)


def _attend(
    ring: Callable[..., torch.Tensor], *heads: torch.Tensor, is_causal: bool, **options: Any
) -> torch.Tensor:
    return ring(*heads, None, 0.0, is_causal, **options)


def _ids_within(no_restore: Collection[torch.Tensor], buffers: list[torch.Tensor]) -> set[int]:
    ids = set(map(id, no_restore))
    if not ids <= set(map(id, buffers)):
        raise ValueError(f"{_WHAT}: no_restore_buffers has a tensor that is not among the buffers.")
    return ids


def _check_dims(buffers: list[torch.Tensor], dims: list[int]) -> list[int]:
    """Return the dimensions from the front."""
    if not buffers:
        raise ValueError(
            f"{_WHAT}: name the tensors that have tokens, such as inputs, labels and positions: "
            "buffers=[...], and the dimension of the sequence in each: buffer_seq_dims=[...]."
        )
    if len(buffers) != len(dims):
        raise ValueError(
            f"{_WHAT}: {len(buffers)} buffers, and {len(dims)} buffer_seq_dims: give one for each."
        )
    if len(set(map(id, buffers))) < len(buffers):
        raise ValueError(f"{_WHAT}: a tensor is among the buffers twice; name it once.")
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.requires_grad or collectives.is_sharded(buffer):
            raise ValueError(
                f"{_WHAT}: buffer {number} is trained or sharded, and cannot be cut: buffers are "
                "tensors of the batch, or constants."
            )
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"{_WHAT}: buffer {number} has a shape of {tuple(buffer.shape)}, and no dimension "
                f"{dim}."
            )
    return [dim % buffer.dim() for buffer, dim in zip(buffers, dims, strict=True)]


def _refuse_attention(name: str, model: Any, size: str) -> None:
    """Refuse attention of transformers that would see the tokens of one rank alone."""
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(config, "_attn_implementation", None)
    if kind not in (None, "sdpa"):
        raise ValueError(
            f"{name} has attn_implementation={kind!r}, which sees the tokens of one rank alone: "
            'load it with attn_implementation="sdpa".'
        )
    types = getattr(text, "layer_types", None)
    if types is None:
        types = ["sliding_attention"] if getattr(text, "sliding_window", None) else []
    if others := sorted({*types} - {"full_attention"}):
        raise ValueError(
            f"{name} has layers of {', '.join(others)}, which context parallelism would train as "
            f"full attention: use a model without them, or leave {size} out."
        )
