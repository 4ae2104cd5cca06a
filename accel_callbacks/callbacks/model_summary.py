"""ModelSummary and summarize: count parameters, memory, shapes and FLOPs of a model by layer."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch.nn.parameter import is_lazy

from accel_callbacks.callbacks.base import Callback
from accel_callbacks.callbacks.flops import FlopCounter
from accel_callbacks.callbacks.progress_display import can_redraw
from accel_callbacks.collectives import tensors_in
from accel_callbacks.collectives.sharded import class_of
from accel_callbacks.models.undisturbed import undisturbed_eval
from accel_callbacks.terminal_text import table, terminal_width, wrapped

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from accel_callbacks.loop.run import TrainingRun

__all__ = [
    "ExamplePass",
    "LayerSummary",
    "ModelSummary",
    "Summary",
    "count_text",
    "run_example",
    "size_text",
    "summarize",
]

Shapes = tuple[tuple[int, ...], ...]
_STYLES = {"name": "cyan", "type": "green"}  # of columns, in the names of rich


class ModelSummary(Callback):
    """Print the layers, modes, parameters and dtypes of each prepared model when a run starts.

    It prints once a run, on the main process, and not again when the run is resumed with the same
    model. On a terminal it is in color if rich is installed, with frozen layers dim, and long
    lines wrap at words.

    Args:
        max_depth: levels of modules to show, 2 by default; -1 for all, 0 for the totals only.
        example: an input for the first model, for shapes and FLOPs: see :func:`summarize`. All
            ranks call the model then.
        file: to print to; standard error if ``None``.

    Attributes:
        summaries: one for each prepared model.

    Raises:
        ValueError: ``max_depth`` is below -1.

    Example:
        >>> import sys, torch
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import ModelSummary
        >>> accel = Accelerator(cpu=True, callbacks=[ModelSummary(file=sys.stdout)])
        >>> model = accel.prepare(torch.nn.Sequential(torch.nn.Linear(1, 2)))
        >>> with accel.run("summary"):
        ...     pass
        name  type    mode   parameters  trainable  size  dtype
        0     Linear  train  4           4          16 B  float32
        Sequential: 4 parameters (4 trainable, 0 frozen), 16 B, buffers 0 B
        modules: 2 in train mode, 0 in eval mode
    """

    def __init__(
        self, max_depth: int = 2, *, example: Any = None, file: TextIO | None = None
    ) -> None:
        if max_depth < -1:
            raise ValueError(f"max_depth={max_depth} must be -1 (all levels) or more.")
        self.max_depth = max_depth
        self.example = example
        self.summaries: list[Summary] = []
        self._file = file
        self._printed = ""  # the run and the text, so that a resume does not print it again

    def on_fit_start(self, run: TrainingRun, model: Any) -> None:
        """Summarize the models, and print the tables."""
        self.summaries = []
        for index, prepared in enumerate(run.models):
            example = self.example if index == 0 else None
            self.summaries.append(summarize(prepared, self.max_depth, example))
        text = "\n".join(map(str, self.summaries))
        printed = f"{run.run_id} {zlib.crc32(text.encode()):08x}"
        if printed != self._printed and run.is_global_zero:
            for summary in self.summaries:
                _show(summary, self._file or sys.stderr)
        self._printed = printed

    def state_dict(self) -> dict[str, Any]:
        """Return what was printed."""
        return {"printed": self._printed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what was printed."""
        self._printed = state_dict["printed"]


def _show(summary: Summary, file: TextIO) -> None:
    if not can_redraw(file) or find_spec("rich") is None:
        print(wrapped(str(summary), file), file=file, flush=True)
        return
    from rich.console import Console

    Console(file=file, force_terminal=True, width=terminal_width(file)).print(summary)
    file.flush()


def summarize(model: torch.nn.Module, max_depth: int = 2, example: Any = None) -> Summary:
    """Summarize a model's modules; parameters may be tied, lazy, sharded or on ``meta``.

    Args:
        model: not changed, except that an example initializes lazy parameters.
        max_depth: levels of modules in :attr:`Summary.layers`, 2 by default; -1 for all, 0 for
            none.
        example: an input for the model, a tuple of them, or a mapping of keyword arguments, on the
            model's device: the model is called once with it, in eval mode and without gradients,
            for shapes and FLOPs. Not called if ``None``.

    Raises:
        ValueError: ``max_depth`` is below -1.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks import summarize
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> print(summarize(model, example=torch.ones(2, 4)))
        name  type    mode   parameters  trainable  size   dtype    input   output  FLOPs
        0     Linear  train  40          40         160 B  float32  [2, 4]  [2, 8]  128
        1     Linear  train  9           9          36 B   float32  [2, 8]  [2, 1]  32
        Sequential: 49 parameters (49 trainable, 0 frozen), 196 B, buffers 0 B
        modules: 3 in train mode, 0 in eval mode
        FLOPs of one forward pass with the example: 160
    """
    if max_depth < -1:
        raise ValueError(f"max_depth={max_depth} must be -1 (all levels) or more.")
    named = {
        name: module
        for name, module in model.named_modules()
        if max_depth == -1 or _depth(name) <= max_depth
    }
    passed = {} if example is None else run_example(model, named, example)
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), name)
    rows = {
        name: _summarize_layer(name, module, owners, passed.get(name))
        for name, module in named.items()
    }
    total = rows.pop("")
    buffers = {id(buffer): buffer for buffer in model.buffers() if not is_lazy(buffer)}.values()
    in_train_mode = sum(module.training for module in model.modules())
    in_eval_mode = sum(not module.training for module in model.modules())
    buffer_bytes = sum(_bytes(buffer) for buffer in buffers)
    return Summary(total, tuple(rows.values()), buffer_bytes, in_train_mode, in_eval_mode)


@dataclass(frozen=True)
class Summary:
    """The result of :func:`summarize`; ``str()`` is the table, which rich prints in color.

    Attributes:
        total: the model; a parameter shared by several modules counts once.
        layers: its modules down to ``max_depth``, in the model's order.
        buffer_bytes: memory of its buffers.
        in_train_mode: number of its modules in train mode, itself included.
        in_eval_mode: number of those in eval mode.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks import summarize
        >>> summarize(torch.nn.Linear(2, 3)).total.trainable
        9
    """

    total: LayerSummary
    layers: tuple[LayerSummary, ...]
    buffer_bytes: int
    in_train_mode: int = 0
    in_eval_mode: int = 0

    def __str__(self) -> str:
        columns = _columns(self.layers)
        rows = list(zip(*columns.values(), strict=True))
        totals = self._totals()
        return "\n".join([table(tuple(columns), rows), *totals] if rows else totals)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        columns = {title: (title, *cells) for title, cells in _columns(self.layers).items()}
        widths = {title: max(map(len, cells)) for title, cells in columns.items()}
        # Rich breaks the widest columns first, in words too: tell it the longest word of each.
        words = {title: max(map(len, " ".join(cells).split())) for title, cells in columns.items()}
        gap = 2 if sum(widths.values()) + 2 * len(widths) - 2 <= options.max_width else 1
        breaks_at_words = sum(words.values()) + gap * (len(words) - 1) <= options.max_width
        styled = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for title in columns:
            styled.add_column(
                title,
                style=_STYLES.get(title),
                overflow="fold",
                min_width=words[title] if breaks_at_words else None,
                no_wrap=breaks_at_words and words[title] == widths[title],
            )
        cells_of_layers = list(zip(*columns.values(), strict=True))[1:]  # below the titles
        for layer, cells in zip(self.layers, cells_of_layers, strict=True):
            styled.add_row(*map(Text, cells), style="dim" if layer.frozen else None)
        if self.layers:
            yield styled
        yield from (Text(line, style="bold") for line in self._totals())

    def _totals(self) -> list[str]:
        total = self.total
        frozen = total.parameters - total.trainable
        lines = [
            f"{total.kind}: {count_text(total.parameters)} parameters"
            f" ({count_text(total.trainable)} trainable, {count_text(frozen)} frozen), "
            f"{size_text(total.bytes)}, buffers {size_text(self.buffer_bytes)}"
        ]
        if total.lazy:
            lines[0] += ", and lazy parameters, whose shapes depend on the first batch"
        modes = f"{self.in_train_mode} in train mode, {self.in_eval_mode} in eval mode"
        lines.append(f"modules: {modes}")
        if total.flops is not None:
            lines.append(f"FLOPs of one forward pass with the example: {count_text(total.flops)}")
        return lines


@dataclass(frozen=True)
class LayerSummary:
    """One module of a model, including its submodules.

    Attributes:
        name: path of the module, such as ``encoder.0``.
        kind: name of its class.
        parameters: number of elements of its parameters; shared parameters count once.
        trainable: those of them with ``requires_grad``.
        bytes: memory of its parameters, over all ranks if they are sharded.
        dtypes: of its parameters.
        tied_to: other modules, earlier in the model, that own some of these parameters.
        lazy: a parameter has no shape yet, and is not counted.
        inputs: shapes of the input tensors of the first call; empty without an example.
        outputs: shapes of its output tensors.
        flops: of its forward pass, ``None`` without an example.
        training: it is in train mode.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks import summarize
        >>> layer = summarize(torch.nn.Sequential(torch.nn.Linear(2, 3))).layers[0]
        >>> layer.name, layer.kind, layer.parameters
        ('0', 'Linear', 9)
    """

    name: str
    kind: str
    parameters: int
    trainable: int
    bytes: int
    dtypes: tuple[str, ...]
    tied_to: tuple[str, ...] = ()
    lazy: bool = False
    inputs: Shapes = ()
    outputs: Shapes = ()
    flops: int | None = None
    training: bool = True

    @property
    def frozen(self) -> bool:
        """True if it has parameters, and none of them is trainable."""
        return self.parameters > 0 and self.trainable == 0

    @property
    def mode(self) -> str:
        """``"train"`` or ``"eval"``, and ``"frozen"`` beside it."""
        return ("train" if self.training else "eval") + (", frozen" if self.frozen else "")


def _summarize_layer(
    name: str, module: torch.nn.Module, owners: Mapping[int, str], passed: ExamplePass | None
) -> LayerSummary:
    every = list({id(parameter): parameter for parameter in module.parameters()}.values())
    known = [parameter for parameter in every if not is_lazy(parameter)]
    prefix = f"{name}." if name else ""
    others = {owners[id(parameter)] for parameter in every} - {name}
    return LayerSummary(
        name=name,
        kind=class_of(module).__name__,
        parameters=sum(parameter.numel() for parameter in known),
        trainable=sum(parameter.numel() for parameter in known if parameter.requires_grad),
        bytes=sum(_bytes(parameter) for parameter in known),
        dtypes=tuple(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in every})),
        tied_to=tuple(sorted(other for other in others if not other.startswith(prefix))),
        lazy=len(known) < len(every),
        inputs=passed.inputs if passed else (),
        outputs=passed.outputs if passed else (),
        flops=passed.flops if passed else None,
        training=module.training,
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


@dataclass
class ExamplePass:
    """The shapes and FLOPs of a module in a forward pass.

    Attributes:
        inputs: shapes of the input tensors of its first call.
        outputs: shapes of the output tensors of its first call.
        flops: of all its calls.
    """

    inputs: Shapes = ()
    outputs: Shapes = ()
    flops: int = 0


def run_example(
    model: torch.nn.Module, modules: Mapping[str, torch.nn.Module], example: Any
) -> dict[str, ExamplePass]:
    """Call a model once, and record the shapes and FLOPs of some of its modules.

    Args:
        model: called in eval mode and without gradients; modes are restored afterwards.
        modules: those to record, by name.
        example: an input, a tuple of inputs, or a mapping of keyword arguments.

    Example:
        >>> import torch
        >>> from accel_callbacks.callbacks.model_summary import run_example
        >>> model = torch.nn.Linear(2, 3)
        >>> run_example(model, {"": model}, torch.ones(1, 2))
        {'': ExamplePass(inputs=((1, 2),), outputs=((1, 3),), flops=12)}
    """
    args: tuple[Any, ...] = example if isinstance(example, tuple) else (example,)
    kwargs: dict[str, Any] = {}
    if isinstance(example, Mapping):
        args, kwargs = (), {str(name): value for name, value in example.items()}
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    counter, passes = FlopCounter(), {name: ExamplePass() for name in modules}
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # the hooks would recompile a compiled model
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(undisturbed_eval([model], device))
        for name, module in modules.items():
            _record(stack, module, counter, passes[name])
        with counter:
            model(*args, **kwargs)
    return passes


def _record(
    stack: ExitStack, module: torch.nn.Module, counter: FlopCounter, record: ExamplePass
) -> None:
    """Register two hooks on a module, which the stack removes."""
    totals_at_entry: list[int] = []  # a stack, because a module may call itself

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        totals_at_entry.append(counter.total)
        record.inputs = record.inputs or _shapes_in((args, kwargs))

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        record.flops += counter.total - totals_at_entry.pop()
        record.outputs = record.outputs or _shapes_in(output)

    # A TorchScript module runs hooks, but its own methods that register them raise.
    for handle in (
        torch.nn.Module.register_forward_pre_hook(module, before, with_kwargs=True),
        torch.nn.Module.register_forward_hook(module, after),
    ):
        stack.callback(handle.remove)


def _shapes_in(data: Any) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(data))


def _columns(layers: Iterable[LayerSummary]) -> dict[str, list[str]]:
    """Return the table's columns, without the empty ones."""
    rows = list(layers)
    columns = {
        "name": [row.name for row in rows],
        "type": [row.kind for row in rows],
        "mode": [row.mode for row in rows],
        "parameters": [count_text(row.parameters) + ("?" if row.lazy else "") for row in rows],
        "trainable": [count_text(row.trainable) for row in rows],
        "size": [size_text(row.bytes) for row in rows],
        "dtype": ["+".join(row.dtypes) for row in rows],
        "input": [_shapes_text(row.inputs) for row in rows],
        "output": [_shapes_text(row.outputs) for row in rows],
        "FLOPs": ["" if row.flops is None else count_text(row.flops) for row in rows],
        "tied to": [", ".join(row.tied_to) for row in rows],
    }
    return {title: cells for title, cells in columns.items() if any(cells)}


def _shapes_text(shapes: Shapes) -> str:
    return " ".join(str(list(shape)) for shape in shapes)


def count_text(count: float) -> str:
    """Format a number with at most four digits and a letter for its thousands."""
    return _scale(count, 1000, ("", " K", " M", " G", " T", " P"))


def size_text(size: float) -> str:
    """Format bytes in units of 1024."""
    return _scale(size, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scale(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while round(value, 1) >= base and power < len(units) - 1:
        value /= base
        power += 1
    number = f"{value:.1f}".removesuffix(".0")
    return number + units[power]
