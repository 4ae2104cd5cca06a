"""Throughput: what it counts, what it leaves out, and that it goes on where a run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from accel_callbacks import Accelerator
from accel_callbacks.callbacks import Throughput, throughput
from accel_callbacks.callbacks.flops import FlopCounter, matmul_precision, peak_flops_of
from accel_callbacks.loop import passes

SIZE = 4  # samples of a batch
PER_SAMPLE = 2 * 8 * 3 * 2  # FLOPs: forward, and the gradient of the weight


class Rows(torch.utils.data.Dataset):
    """Rows of ones; reading one may take some time."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(8)


def make(speed: Throughput, batches: int = 6, seconds: float = 0.0, **options):
    accel = Accelerator(cpu=True, callbacks=[speed], **options)
    model = torch.nn.Linear(8, 3)
    data = torch.utils.data.DataLoader(Rows(batches * SIZE, seconds), SIZE)
    return accel, *accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)


def train(speed: Throughput, epochs: int = 1, **options) -> dict:
    accel, model, optimizer, data = make(speed, **options)
    with accel.run("speed") as run:
        for _ in run.epochs(epochs):
            for batch in data:
                with accel.accumulate(model):
                    accel.backward(model(batch).sum())
                    optimizer.step()
                    optimizer.zero_grad()
    return {name.removeprefix("throughput/"): value for name, value in speed.rates.items()}


@pytest.fixture(autouse=True)
def leaves_no_mode() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode() is None


def test_rates_of_samples_tokens_batches_and_steps_fit_together():
    rates = train(Throughput(tokens=lambda batch: batch.numel()), epochs=2)
    assert rates["samples_per_s"] == pytest.approx(SIZE * rates["batches_per_s"])
    assert rates["tokens_per_s"] == pytest.approx(8 * rates["samples_per_s"])
    assert rates["steps_per_s"] == pytest.approx(rates["batches_per_s"])
    assert rates["device/samples_per_s"] == rates["samples_per_s"]
    assert rates["total_samples"] == 12 * SIZE
    assert rates["total_tokens"] == 12 * SIZE * 8
    assert 0 <= rates["data_wait_fraction"] <= 1


def test_a_step_of_several_batches_is_one_step():
    rates = train(Throughput(), epochs=2, batches=6, gradient_accumulation_steps=2)
    assert rates["batches_per_s"] == pytest.approx(2 * rates["steps_per_s"])
    assert rates["tflops"] * 1e12 == pytest.approx(PER_SAMPLE * rates["samples_per_s"])


def test_the_first_two_steps_are_left_out_of_the_rates():
    speed = Throughput()
    rates = train(speed, batches=2)
    assert set(rates) == {"total_seconds", "total_samples"}
    assert "samples_per_s" in train(speed, batches=3)


def test_the_window_holds_the_last_steps():
    speed = Throughput(window=2)
    train(speed, batches=6)
    assert [mark.steps for mark in speed._marks] == [4, 5, 6]


def test_it_logs_at_its_steps_and_at_the_end(training):
    kit = training(Throughput(log_every_n_steps=2), batches=5)
    with kit.accel.run("speed"):
        for batch in kit.train:
            kit.step(batch)
    logged = [line.split()[-1] for line in kit.recorder.take() if line.startswith("log ")]
    assert logged == ["2", "4", "5"]


# --- FLOPs ---------------------------------------------------------------------------------------


def test_flops_of_the_first_batch_are_counted_and_compared_with_the_peak():
    rates = train(Throughput(peak_flops=1e9))
    assert rates["tflops"] * 1e12 == pytest.approx(PER_SAMPLE * rates["samples_per_s"])
    assert rates["mfu"] == pytest.approx(rates["tflops"] * 1e12 / 1e9)


def test_flops_may_be_given_for_a_step_or_left_out():
    rates = train(Throughput(flops_per_step=1e6))
    assert rates["tflops"] * 1e12 == pytest.approx(1e6 * rates["steps_per_s"])
    assert "mfu" not in rates  # of a CPU nobody knows what it could do
    assert "tflops" not in train(Throughput(measure_flops=False))


def test_compiled_models_are_counted_too():
    model = torch.compile(torch.nn.Linear(8, 3), backend="aot_eager")
    with FlopCounter() as counter:
        model(torch.ones(SIZE, 8)).sum().backward()
    assert counter.total == PER_SAMPLE * SIZE


def test_an_evaluation_in_the_first_batch_is_not_counted():
    speed = Throughput()
    accel, model, optimizer, data = make(speed, batches=1)
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
        with accel.evaluate(model):
            model(batch)
    accel.end_training()
    assert speed._measured == PER_SAMPLE


def test_a_formula_that_fails_ends_nothing():
    counter = FlopCounter()
    counter.flop_registry[torch.ops.aten.mm] = lambda *args, **kwargs: 1 / 0
    with pytest.warns(UserWarning, match=r"FLOPs of \['aten.mm'\] could not be counted"), counter:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.sum() == 8


def test_counting_ends_with_the_batch_that_was_only_looked_at():
    speed = Throughput()
    accel, model, optimizer, data = make(speed)
    next(iter(data))
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
    accel.end_training()
    assert speed._measured == PER_SAMPLE


def test_counting_ends_with_an_error():
    accel, model, _, data = make(Throughput())

    def fail() -> None:
        with accel.run("speed"):
            for batch in data:
                model(batch)
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA RTX A5000", "bf16", 111.1),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA GeForce RTX 4080", "fp8", 194.9),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("AMD Instinct MI250X/MI250", "bf16", 191.5),
    ],
)
def test_known_devices(name, precision, tera):
    assert peak_flops_of(name, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("NVIDIA GeForce RTX 3080", "bf16"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16"),
        ("NVIDIA RTX A5000 Laptop GPU", "bf16"),
        ("NVIDIA H1000", "bf16"),
    ],
)
def test_unknown_devices_have_no_peak(name, precision):
    assert peak_flops_of(name, precision) is None


def test_the_precision_of_products():
    half = torch.nn.Linear(1, 1).half()
    assert matmul_precision("bf16", half) == "bf16"
    assert matmul_precision("no", half) == "fp16"
    assert matmul_precision("no", None) == "fp32"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert matmul_precision("no", torch.nn.Linear(1, 1)) == "tf32"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def tf32_settings():
    """The holders of torch's newer settings, which are restored: older functions raise after it."""
    found = [torch.backends.cuda.matmul, torch.backends]
    found = [one for one in found if hasattr(one, "fp32_precision")]
    before = [one.fp32_precision for one in found]
    yield found
    for one, value in zip(found, before, strict=True):
        one.fp32_precision = value


def test_the_precision_of_products_that_was_set_by_the_newer_names(tf32_settings):
    if not tf32_settings:
        pytest.skip("this torch has the older setting only")
    matmul, every = tf32_settings
    fp32 = torch.nn.Linear(1, 1)
    matmul.fp32_precision = "tf32"
    assert matmul_precision("no", fp32) == "tf32"
    matmul.fp32_precision = "ieee"
    assert matmul_precision("no", fp32) == "fp32"
    matmul.fp32_precision, every.fp32_precision = "none", "tf32"
    assert matmul_precision("no", fp32) == "tf32"
    every.fp32_precision = "none"
    assert matmul_precision("no", fp32) == "fp32"


def test_a_precision_that_torch_does_not_tell_costs_the_mfu_and_not_the_training(
    monkeypatch, tf32_settings
):
    def refuses() -> str:
        raise RuntimeError("a mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    for owner in tf32_settings:
        owner.fp32_precision = "none"
    assert matmul_precision("no", torch.nn.Linear(1, 1)) is None

    class Gpu:
        """Stands in for torch.cuda."""

        def get_device_name(self, device):
            return "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(torch, "get_device_module", lambda device: Gpu())
    speed = Throughput(log_every_n_steps=1)
    accel, model, optimizer, data = make(speed)
    monkeypatch.setattr(type(accel), "device", torch.device("cuda"))
    with accel.run("speed"):
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
    assert "throughput/tflops" in speed.rates
    assert "throughput/mfu" not in speed.rates


# --- time ----------------------------------------------------------------------------------------


def test_evaluations_and_saves_are_no_time_of_training(tmp_path):
    slept = 0.0

    def rest() -> None:
        nonlocal slept
        time.sleep(0.1)
        slept += 0.1

    class Slow:
        def state_dict(self) -> dict:
            rest()
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    speed = Throughput()
    accel, model, optimizer, data = make(speed)
    val = accel.prepare(torch.utils.data.DataLoader(Rows(4), 2))
    accel.register_for_checkpointing(Slow())
    begun = time.perf_counter()
    with accel.run("speed") as run:
        for _ in run.epochs(2):
            for index, batch in enumerate(data):
                accel.backward(model(batch).sum())
                optimizer.step()
                if index == 2:
                    with accel.evaluate(model):
                        rest()
                if index == 4:
                    accel.save_state(str(tmp_path / f"s{run.global_step}"))
            for _ in val:
                with torch.no_grad():
                    pass
            with accel.evaluate(model):
                rest()
    wall = time.perf_counter() - begun
    assert slept >= 0.6 - 1e-9
    assert speed.rates["throughput/total_seconds"] <= wall - slept


def test_waiting_for_the_loader_is_reported_apart(monkeypatch):
    now = [0.0]

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=pass_time)
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(passes, "perf_counter", clock.perf_counter)
    monkeypatch.setitem(Rows.__getitem__.__globals__, "time", clock)
    rates = train(Throughput(), batches=8, seconds=0.005)
    assert rates["data_wait_fraction"] == pytest.approx(
        1.0
    )  # computing takes no time by this clock


# --- state ---------------------------------------------------------------------------------------


def test_totals_survive_a_resume(tmp_path):
    first = Throughput(tokens=lambda batch: batch.numel())
    accel, model, optimizer, data = make(first)
    for batch in data:
        accel.backward(model(batch).sum())
        optimizer.step()
    accel.save_state(str(tmp_path / "state"))
    accel.end_training()

    second = Throughput(tokens=lambda batch: batch.numel())
    accel, model, optimizer, data = make(second)
    accel.load_state(str(tmp_path / "state"))
    with accel.run("goes on") as run:
        for _ in run.epochs(2):
            for batch in data:
                accel.backward(model(batch).sum())
                optimizer.step()
    assert run.global_step == 12
    assert second.rates["throughput/total_samples"] == 12 * SIZE
    assert second.rates["throughput/total_tokens"] == 12 * SIZE * 8
    seconds = first.rates["throughput/total_seconds"]
    assert second.rates["throughput/total_seconds"] > seconds > 0


def test_totals_survive_an_evaluation_after_the_run():
    speed = Throughput()
    accel, model, optimizer, data = make(speed)
    with accel.run("speed"):
        for batch in data:
            accel.backward(model(batch).sum())
            optimizer.step()
    seconds = speed.state_dict()["seconds"]
    with accel.evaluate(model):
        pass
    state = speed.state_dict()
    assert state["samples"] == 6 * SIZE
    assert state["seconds"] >= seconds > 0


def test_another_run_resets_the_state():
    speed = Throughput()
    train(speed)
    assert train(speed)["total_samples"] == 6 * SIZE


def test_tokens_may_be_tensors_that_stay_where_they_are():
    speed = Throughput(tokens=lambda batch: batch.sum())
    rates = train(speed)
    assert isinstance(speed.rates["throughput/total_tokens"], torch.Tensor)
    assert float(rates["total_tokens"]) == 6 * SIZE * 8
    assert float(rates["tokens_per_s"]) == pytest.approx(8 * rates["samples_per_s"], rel=1e-5)


def test_batches_without_tensors_have_no_samples():
    speed = Throughput()
    accel = Accelerator(cpu=True, callbacks=[speed])
    model = torch.nn.Linear(8, 3)
    data = torch.utils.data.DataLoader(list("abcdef"), 2, collate_fn=lambda texts: texts)
    model, optimizer, data = accel.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    for _ in range(2):
        for _ in data:
            accel.backward(model(torch.ones(SIZE, 8)).sum())
            optimizer.step()
    accel.end_training()
    assert "throughput/samples_per_s" not in speed.rates
    flops = speed.rates["throughput/tflops"] * 1e12
    per_batch = PER_SAMPLE * SIZE
    assert flops == pytest.approx(per_batch * speed.rates["throughput/batches_per_s"])


@pytest.mark.parametrize("wrong", [{"window": 0}, {"log_every_n_steps": 0}])
def test_senseless_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        Throughput(**wrong)


def test_a_model_without_products_is_not_counted_for_ever():
    speed = Throughput()
    accel = Accelerator(cpu=True, callbacks=[speed])
    scale = torch.nn.Parameter(torch.ones(8))
    data = torch.utils.data.DataLoader(Rows(20), 4)
    optimizer, data = accel.prepare(torch.optim.SGD([scale], lr=0.1), data)
    modes = []
    for batch in data:
        modes.append(_get_current_dispatch_mode() is not None)
        accel.backward((batch * scale).sum())
        optimizer.step()
    accel.end_training()
    assert modes == [True, True, False, False, False]
    assert "throughput/tflops" not in speed.rates
