"""The recorder of a replay: ends the process after the step, and shows what is in it."""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_callbacks import collectives
from accel_callbacks.addons.journal.recorder import Recorder
from accel_callbacks.addons.journal.replay import ReplayRequest

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from accel_callbacks.loop.run import TrainingRun

__all__ = ["ReplayRecorder"]


class ReplayRecorder(Recorder):
    """Keeps the journal of a replay in its scratch folder, up to the step that is replayed.

    Args:
        request: what is to be replayed.
    """

    def __init__(self, request: ReplayRequest) -> None:
        super().__init__(request.folder)
        self.scratch_folder = request.folder
        self._request = request
        self._batch: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @classmethod
    def requested(cls, environment: Mapping[str, str]) -> ReplayRecorder | None:
        """Return the recorder for a process that `accel replay` has started, None for others."""
        request = ReplayRequest.requested(environment)
        return None if request is None else cls(request)

    def may_save(self) -> bool:
        """Return False: the step is one of the past."""
        return False

    def resume_path(self) -> str:
        """Return the checkpoint before the step."""
        return self._request.checkpoint or ""

    def rollback_target(self, step: int) -> str:
        """Return where the run went back to, as its journal says."""
        # The newest that is left may be another one.
        return self._request.rollbacks.get(str(step), "")

    def past_commands(self) -> Sequence[Mapping[str, Any]]:
        """Return what `accel ctl` had changed."""
        return self._request.commands

    def on_train_batch_start(
        self, run: TrainingRun, model: Any, batch: Any, batch_idx: int
    ) -> None:
        """Watch the modules in the step that is asked for."""
        self._batch = batch
        if self._request.dump is not None and self._is_due(run) and not self._handles:
            self._watch()

    def _is_due(self, run: TrainingRun) -> bool:
        return run.global_step + 1 == self._request.step

    def on_before_backward(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Note the loss, and stop in the debugger before it goes backward."""
        super().on_before_backward(run, model, loss)
        if self._request.stop and self._is_due(run):
            self._stop(run, model, loss)

    def on_after_backward(self, run: TrainingRun, model: Any) -> None:
        """Keep the gradients of the step before they are clipped."""
        if self._handles and run.gradients_complete:
            for number, prepared in enumerate(self._loop.models):
                for name, parameter in prepared.named_parameters():
                    if parameter.grad is not None:
                        gradient = parameter.grad.detach()
                        if collectives.is_sharded(gradient):
                            gradient = gradient.to_local()  # type: ignore[attr-defined]
                        self._keep(f"gradients/{number}/{name}", gradient)

    def end_batch(self, run: TrainingRun, batch: Any) -> None:
        """Note the row, and end the process after that of the step."""
        super().end_batch(run, batch)
        # Also one that was left out in the run is left out here, and has no later row.
        if run.global_step >= self._request.step:
            self._end(run)

    def _end(self, run: TrainingRun) -> None:
        """End the process at once: what the script does after its loop would write to the run."""
        if self._tensors:
            self._write_tensors()
        self.close("success")
        collectives.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    # --- the inside of a step -----------------------------------------------------------------

    def _watch(self) -> None:
        for number, prepared in enumerate(self._loop.models):
            for name, module in prepared.named_modules():
                if fnmatchcase(name, self._request.modules):
                    place = f"activations/{number}/{name or 'model'}"
                    # A TorchScript module runs hooks, but its own method that registers one raises.
                    handle = torch.nn.Module.register_forward_hook(module, self._keeper(place))
                    self._handles.append(handle)

    def _keeper(self, place: str) -> Any:
        def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                self._keep(place, output.detach())

        return keep

    def _keep(self, place: str, tensor: torch.Tensor) -> None:
        """Keep a copy; further ones of a step get numbers."""
        name, number = place, 2
        while name in self._tensors:
            name, number = f"{place}#{number}", number + 1
        self._tensors[name] = tensor.cpu().clone().contiguous()

    def _write_tensors(self) -> None:
        from safetensors.torch import save_file

        assert self._request.dump is not None
        folder = Path(self._request.dump)
        folder.mkdir(parents=True, exist_ok=True)
        rank = self._loop.run.global_rank
        save_file(self._tensors, folder / f"step-{self._request.step}-rank-{rank:05}.safetensors")

    def _stop(self, run: TrainingRun, model: Any, loss: torch.Tensor) -> None:
        """Open the debugger with the parts of the step as local variables."""
        batch, optimizers = self._batch, self._loop.optimizers
        names = ("batch", "loss", "model", "run", "optimizers")
        values = dict(zip(names, (batch, loss, model, run, optimizers), strict=True))
        print(f"step {self._request.step}, before backward: {', '.join(values)}; `c` goes on")
        debugger = pdb.Pdb(nosigint=True)
        debugger.prompt = f"(step {self._request.step}) "
        debugger.run("breakpoint_of_the_step = None", {**values, "__name__": "__replay__"})
