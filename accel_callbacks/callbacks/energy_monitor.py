"""EnergyMonitor: measure the energy of a run with codecarbon."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import TYPE_CHECKING, Any

from accel_callbacks import collectives
from accel_callbacks.callbacks.base import Callback
from checkpoint_io.warning import warn

if TYPE_CHECKING:
    from accel_callbacks.loop.run import TrainingRun

__all__ = ["EnergyMonitor"]

_MEASURE_EVERY = 15  # seconds
_STOP_TIMEOUT = 10.0  # seconds; a driver that hangs must not keep the run from ending


class EnergyMonitor(Callback):
    """Measure the energy that the machines of a run use, with codecarbon.

    One process of each machine measures all of the machine (processor, memory, GPUs), on threads of
    its own, without a network and without files. The trackers get ``energy/kwh`` at the end of the
    training, summed over the machines, and the journal at each save too, so that ``accel report``
    adds up the attempts of a run. Where a machine does not tell its power, codecarbon estimates it.

    Args:
        country: three-letter ISO code, such as ``"DEU"``, of the country whose electricity is
            used; ``energy/co2_kg`` is logged too then. ``None``, the default, logs the energy only.

    Attributes:
        kwh: energy of all machines since this attempt began to train, as of the last save, or of
            the end.

    Raises:
        ImportError: codecarbon is not installed.

    Example:
        >>> from accel_callbacks import Accelerator
        >>> from accel_callbacks.callbacks import EnergyMonitor
        >>> accel = Accelerator(callbacks=[EnergyMonitor(country="DEU")])  # doctest: +SKIP
    """

    collective = True

    def __init__(self, country: str | None = None) -> None:
        try:
            importlib.import_module("codecarbon.output")
        except ImportError as error:
            raise ImportError(
                f"EnergyMonitor needs codecarbon ({error}): pip install accel-callbacks[energy]"
            ) from None
        self.country = country
        self._meter: _Meter | None = None
        self.kwh = 0.0

    def on_train_start(self, run: TrainingRun, model: Any) -> None:
        """Begin to measure, on one process of each machine."""
        self._close()
        self.kwh = 0.0
        if run.accelerator.is_local_main_process:
            self._meter = _Meter(self.country)

    def on_save_checkpoint(self, run: TrainingRun, model: Any, checkpoint: dict[str, Any]) -> None:
        """Note the energy so far, which a killed process cannot note at its end."""
        self._note(run)

    def on_train_end(self, run: TrainingRun, model: Any) -> None:
        """Stop, and log the sum of all machines."""
        if self._meter is not None:
            self._meter.stop()
        kwh, co2_kg = self._note(run)
        run.accelerator.log(
            {"energy/kwh": kwh} | ({} if self.country is None else {"energy/co2_kg": co2_kg})
        )

    def teardown(self, run: TrainingRun, model: Any, stage: str) -> None:
        """Stop, if an error has ended the run."""
        self._close()

    def _note(self, run: TrainingRun) -> tuple[float, float]:
        """Collective: write a mark into the journal, and return its energy and emissions."""
        here = (0.0, 0.0) if self._meter is None else self._meter.readings
        machines = collectives.all_objects(here, operation="summing energy")
        kwh, co2_kg = (sum(readings) for readings in zip(*machines, strict=True))
        self.kwh = kwh
        if kwh > 0:
            run.note("energy", kwh=kwh, co2_kg=None if self.country is None else co2_kg)
        return kwh, co2_kg

    def _close(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()


class _Meter:
    """A tracker of codecarbon, whose readings it hands over on a thread of its own.

    Attributes:
        readings: energy in kWh and emissions in kg, as they were measured last.
    """

    def __init__(self, country: str | None) -> None:
        self.readings = (0.0, 0.0)
        self._stopped = False
        base: Any = importlib.import_module("codecarbon.output").BaseOutput

        def read(handler: Any, total: Any, delta: Any) -> None:
            self.readings = float(total.energy_consumed), float(total.emissions)

        handler = type("Readings", (base,), {"out": read, "live_out": read})()

        # It looks for sensors for some seconds, and says so before it reads its own log level.
        logging.getLogger("codecarbon").setLevel(logging.ERROR)
        self._tracker: Any = importlib.import_module("codecarbon").OfflineEmissionsTracker(
            country_iso_code=country or "USA",
            measure_power_secs=_MEASURE_EVERY,
            api_call_interval=1,
            output_handlers=[handler],
            allow_multiple_runs=True,
            output_methods=[],
            log_level="error",
        )
        self._begin = threading.Thread(target=self._tracker.start, name="energy", daemon=True)
        self._begin.start()

    def stop(self) -> None:
        """Take a last reading, and end the threads; again, without effect."""
        if self._stopped:
            return
        self._stopped = True
        end = threading.Thread(target=self._finish, name="energy", daemon=True)
        end.start()
        end.join(_STOP_TIMEOUT)
        if end.is_alive():
            warn(f"the sensors of energy do not answer within {_STOP_TIMEOUT:.0f} s: left out.")

    def _finish(self) -> None:
        self._begin.join()
        self._tracker.stop()
