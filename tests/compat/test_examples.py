"""Scripts of transformers' examples, of a copy that is named: on this library as on Accelerate.

They are not in its wheel: ``scripts/test_compat --examples PATH`` names a copy. Models, tokenizers
and data are small and made here, so that nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COPY = os.environ.get("ACCEL_TRANSFORMERS_EXAMPLES", "")
ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("programs")
AS_ACCELERATE = ("-m", "accel_callbacks.as_accelerate")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "accel_callbacks.cli", "launch", "--cpu", "--num_processes", "2", "--as_accelerate")
STARTS = {1: ((), AS_ACCELERATE), 2: (TORCHRUN, LAUNCH)}
CLM = (
    *("--train_file", "train.txt", "--validation_file", "train.txt", "--block_size", "16"),
    *("--per_device_train_batch_size", "2", "--seed", "3", "--learning_rate", "0.01"),
)
CASES = {
    "language-modeling/run_clm.py": (
        *(*CLM, "--do_train", "--do_eval", "--max_steps", "4", "--report_to", "none"),
        *("--use_cpu", "--model_name_or_path", "language"),
    ),
    "language-modeling/run_clm_no_trainer.py": (
        *(*CLM, "--num_train_epochs", "2", "--checkpointing_steps", "epoch"),
        *("--model_name_or_path", "language"),
    ),
    "text-classification/run_glue.py": (
        *("--train_file", "train.json", "--validation_file", "train.json", "--do_train"),
        *("--do_eval", "--max_steps", "4", "--max_seq_length", "16", "--report_to", "none"),
        *("--per_device_train_batch_size", "2", "--use_cpu", "--model_name_or_path", "classes"),
    ),
}
FILES = """
import json
from language import config, language_model, texts, tokenizer
from transformers import LlamaForSequenceClassification, set_seed

language_model().save_pretrained("language")
set_seed(0)
LlamaForSequenceClassification(config(num_labels=2)).save_pretrained("classes")
for folder in ("language", "classes"):
    tokenizer().save_pretrained(folder)
rows = texts(40)
open("train.txt", "w").write("\\n".join(rows))
labelled = [{"sentence": row, "label": index % 2} for index, row in enumerate(rows)]
open("train.json", "w").write("\\n".join(map(json.dumps, labelled)))
"""


#: `evaluate` looks for a metric in the current folder first.
ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int32")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {"accuracy": sum(float(p == r) for p, r in pairs) / len(pairs)}
"""


def run(folder: Path, *command: str) -> tuple[int, str]:
    """Run a command of Python in a folder, and return its exit code and what it says."""
    environment = {
        **os.environ,
        **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        **{"PYTHONPATH": f"{ROOT}{os.pathsep}{PROGRAMS}", "ACCELERATE_USE_CPU": "true"},
        "HF_HOME": str(folder / "home"),
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def ended(folder: Path) -> dict[str, object]:
    """Return a digest of the weights that a script has written, and its results."""
    weights = (folder / "model.safetensors").read_bytes()
    results = json.loads((folder / "all_results.json").read_text())
    timed = ("runtime", "per_second", "memory", "flos")
    kept = {name: value for name, value in results.items() if not name.endswith(timed)}
    return {"weights": hashlib.sha256(weights).hexdigest(), **kept}


def same_on_both(folder: Path, script: Path, *words: str, processes: int = 1) -> dict[str, object]:
    """Run a script on Accelerate and on this library, and return what both end with."""
    code, said = run(folder, "-c", FILES)
    assert code == 0, said
    (folder / "accuracy").mkdir()
    (folder / "accuracy" / "accuracy.py").write_text(ACCURACY)
    # A name that Accelerate has given up, with which the script runs on this library alone.
    known = folder / f"there_{script.name}"
    known.write_text(script.read_text().replace("DistributedType.TPU", "DistributedType.XLA"))
    scripts, starts = (known, script), STARTS[processes]
    for name, start, path in zip(("there", "here"), starts, scripts, strict=True):
        code, said = run(folder, *start, str(path), *words, "--output_dir", name)
        assert code == 0, said
    outcome = ended(folder / "here")
    # Two processes share a last batch here, so that means are over other groups of its samples.
    other = {
        key: pytest.approx(value, rel=1e-6) if processes > 1 and isinstance(value, float) else value
        for key, value in ended(folder / "there").items()
    }
    assert outcome == other
    return outcome


needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="scripts/test_compat has it"
)


@needs_accelerate
@pytest.mark.skipif(not COPY, reason="scripts/test_compat --examples PATH names a copy")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("example", CASES)
def test_an_example_of_transformers_ends_as_on_accelerate(example, processes, tmp_path):
    script = Path(COPY) / "pytorch" / example
    same_on_both(tmp_path, script, *CASES[example], processes=processes)


@needs_accelerate
@pytest.mark.skipif(not COPY, reason="scripts/test_compat --examples PATH names a copy")
@pytest.mark.timeout(1800)
def test_fp16_on_a_cpu_ends_as_on_accelerate(tmp_path):
    example = "language-modeling/run_clm.py"
    same_on_both(tmp_path, Path(COPY) / "pytorch" / example, *CASES[example], "--fp16")


STAND_IN = """
import argparse
import torch
from language import OPTIONS, losses, tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--model_name_or_path")
parser.add_argument("--output_dir")
words = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(words.model_name_or_path)
lines = open("train.txt").read().splitlines()
rows = tokenizer()(lines, padding="max_length", max_length=12, truncation=True)["input_ids"]
data = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows]
options = TrainingArguments(words.output_dir, max_steps=3, **OPTIONS)
trainer = Trainer(model, options, train_dataset=data, eval_dataset=data[:9])
trainer.save_metrics("train", trainer.train().metrics)
trainer.save_metrics("eval", trainer.evaluate())
trainer.save_model()
"""


@needs_accelerate
def test_a_script_of_their_kind_is_compared(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STAND_IN)
    outcome = same_on_both(tmp_path, script, "--model_name_or_path", "language")
    assert {"weights", "train_loss", "eval_loss"} <= outcome.keys()
