"""Names of Lightning, Fabric and Accelerate, each with what is ours; read where one is used."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["ATTRIBUTES", "CALLBACK_OPTIONS", "HOOKS", "IMPORTS", "OPTIONS", "PRECISIONS"]

_PROCESSES = (
    "The number of processes is that of the launch: `accel launch --num_processes N train.py`, or "
    "notebook_launcher(function, num_processes=N)."
)
_CLIP = (
    "Call accel.clip_grad_norm_(model.parameters(), 1.0) (or clip_grad_value_) between backward "
    "and step."
)
_EPOCHS = "Write `with accel.run() as run:` and `for epoch in run.epochs(10):`."
_STEPS = "End the loop where run.global_step has reached it, or with callbacks=[Timer(...)]."
_CHECKPOINT = 'Give callbacks=[Checkpoint(every_n_epochs=1, monitor="val/loss")].'
_RESUME = "`with accel.run():` resumes the newest; else call accel.load_state(path)."
_BATCHES = "Leave the loop over the loader with `break`, or iterate islice(loader, n)."

#: Arguments of ``Trainer`` and ``Fabric``, and of older Accelerators.
OPTIONS: Mapping[str, str] = {
    "devices": _PROCESSES,
    "num_nodes": "Give `accel launch --num_machines N --machine_rank R --main_process_ip IP`.",
    "num_processes": _PROCESSES,
    "gpus": _PROCESSES,
    "accelerator": "The device is found; cpu=True keeps to the CPU.",
    "strategy": (
        "Several processes average their gradients (DDP) without an option; else give "
        "fsdp_plugin=FullyShardedDataParallelPlugin(), deepspeed_plugin=DeepSpeedPlugin() or "
        "parallelism_config=ParallelismConfig(...)."
    ),
    "precision": 'Give mixed_precision="bf16", "fp16" or "fp8".',
    "fp16": 'Give mixed_precision="fp16".',
    "bf16": 'Give mixed_precision="bf16".',
    "accumulate_grad_batches": (
        "Give gradient_accumulation_steps=N, and put the step into `with accel.accumulate(model):`."
    ),
    "logger": 'Give log_with="tensorboard" ("wandb", "csv", "jsonl", ...), and project_dir=.',
    "loggers": 'Give log_with=["tensorboard", "wandb"], and project_dir=.',
    "gradient_clip_val": _CLIP,
    "gradient_clip_algorithm": _CLIP,
    "max_epochs": _EPOCHS,
    "min_epochs": _EPOCHS,
    "max_steps": _STEPS,
    "max_time": "Give callbacks=[Timer(...)].",
    "log_every_n_steps": 'Call accel.log({"train/loss": loss}) in the steps that are to be logged.',
    "default_root_dir": 'Give project_dir="runs/name".',
    "logging_dir": 'Give project_config=ProjectConfiguration("runs/name", logging_dir="...").',
    "enable_checkpointing": _CHECKPOINT,
    "resume_from_checkpoint": _RESUME,
    "ckpt_path": _RESUME,
    "enable_progress_bar": "Give callbacks=[ProgressBar()].",
    "enable_model_summary": "Give callbacks=[ModelSummary()].",
    "deterministic": "Call set_seed(seed, deterministic=True) before the model is made.",
    "benchmark": "Set torch.backends.cudnn.benchmark.",
    "detect_anomaly": "Give callbacks=[NonFinite()], or call autograd.set_detect_anomaly(True).",
    "profiler": "Give callbacks=[Profiler()], or write `with accel.profile():`.",
    "limit_train_batches": _BATCHES,
    "limit_val_batches": _BATCHES,
    "limit_test_batches": _BATCHES,
    "fast_dev_run": _BATCHES,
    "overfit_batches": _BATCHES,
    "check_val_every_n_epoch": "Evaluate where `epoch % n == 0`, in `with accel.evaluate(model):`.",
    "val_check_interval": "Evaluate in the loop, in `with accel.evaluate(model):`.",
    "num_sanity_val_steps": "Evaluate before the loop, in `with accel.evaluate(model):`.",
    "sync_batchnorm": (
        "Call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before accel.prepare."
    ),
    "use_distributed_sampler": "A loader that you do not pass to accel.prepare stays as it is.",
    "replace_sampler_ddp": "A loader that you do not pass to accel.prepare stays as it is.",
    "plugins": "Give kwargs_handlers=[...] or the argument of the plugin.",
    "barebones": "Nothing runs that is not in callbacks=.",
    "inference_mode": "`with accel.evaluate(model):` computes no gradients.",
}

#: Options of Lightning's callbacks that are under another name here.
CALLBACK_OPTIONS: Mapping[str, str] = {
    "save_top_k": "keep_best",
    "save_last": "keep_last",
    "every_n_train_steps": "every_n_steps",
    "train_time_interval": "every_seconds",
    "refresh_rate": "refresh_every",
}

#: Values of Lightning's ``precision``.
PRECISIONS: Mapping[str, str] = {
    "16-mixed": "fp16",
    "16": "fp16",
    "bf16-mixed": "bf16",
    "32": "no",
    "32-true": "no",
    "fp32": "no",
    "float32": "no",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "transformer-engine": "fp8",
}

_TRACKER = (
    'is no class here: give Accelerator(log_with="{}"), and its arguments in '
    "accel.init_trackers(init_kwargs=)."
)

#: Names that are imported from ``lightning``, ``lightning.pytorch.callbacks`` and the like.
IMPORTS: Mapping[str, str] = {
    "ModelCheckpoint": "is Checkpoint here, with the same monitor, mode and every_n_epochs; "
    "save_top_k is keep_best, dirpath the first argument.",
    "TQDMProgressBar": "is ProgressBar here.",
    "StochasticWeightAveraging": "is WeightAveraging here.",
    "EMAWeightAveraging": "is EMA here.",
    "DeviceStatsMonitor": "is DeviceStats here.",
    "ThroughputMonitor": "is Throughput here.",
    "RichModelSummary": "is ModelSummary here.",
    "BatchSizeFinder": "is accel_callbacks.tuning.find_batch_size here.",
    "LearningRateFinder": "is accel_callbacks.tuning.find_learning_rate here.",
    "BackboneFinetuning": "is Freeze here, until the epoch where it unfreezes.",
    "BaseFinetuning": "is Freeze here, until the epoch where it unfreezes.",
    "OnExceptionCheckpoint": "is Checkpoint(on_exception=True) here.",
    "LambdaCallback": 'is a function here, below `@accel.on("train_batch_end")`.',
    "Trainer": "does not exist here, the loop stays yours: Accelerator, prepare, and a `for`.",
    "Fabric": "is Accelerator here: setup() is prepare(), and the launch `accel launch train.py`.",
    "LightningModule": "does not exist here: a torch.nn.Module, and the step in your own loop.",
    "LightningDataModule": "does not exist here: torch DataLoaders, passed to prepare().",
    "seed_everything": "is set_seed here.",
    "rank_zero_only": "is main_process_only here.",
    "rank_zero_info": "is get_logger(__name__).info here, which rank 0 prints.",
    "rank_zero_warn": "is get_logger(__name__).warning here, which rank 0 prints.",
    "WandbLogger": _TRACKER.format("wandb"),
    "TensorBoardLogger": _TRACKER.format("tensorboard"),
    "CSVLogger": _TRACKER.format("csv"),
    "MLFlowLogger": _TRACKER.format("mlflow"),
    "CometLogger": _TRACKER.format("comet_ml"),
    "NeptuneLogger": "is no tracker here: a class with log() of your own, in log_with=[...].",
}

#: Attributes of ``Trainer``, ``Fabric`` and ``LightningModule``.
ATTRIBUTES: Mapping[str, str] = {
    "fit": "Write the loop, and prepare what it uses: accel.prepare(model, optimizer, loader).",
    "validate": "Write the loop inside of `with accel.evaluate(model):`.",
    "test": 'Write the loop inside of `with accel.evaluate(model, stage="test"):`.',
    "predict": "Write the loop inside of `with accel.evaluate(model):`.",
    "launch": "Start the script with `accel launch`, a function with notebook_launcher.",
    "setup": "Call accel.prepare(model, optimizer).",
    "setup_module": "Call accel.prepare(model).",
    "setup_optimizers": "Call accel.prepare(optimizer).",
    "setup_dataloaders": "Call accel.prepare(loader).",
    "manual_backward": "Call accel.backward(loss).",
    "no_backward_sync": "Use `with accel.no_sync(model):` or `with accel.accumulate(model):`.",
    "clip_gradients": _CLIP,
    "all_gather": "Call accel.gather(tensor), in an evaluation accel.gather_for_metrics(tensor).",
    "all_reduce": 'Call accel.reduce(tensor, "mean").',
    "broadcast": "Call accel_callbacks.utils.broadcast(tensor).",
    "barrier": "Call accel.wait_for_everyone().",
    "log_dict": "Call accel.log(values).",
    "is_global_zero": "It is accel.is_main_process.",
    "global_rank": "It is accel.process_index.",
    "local_rank": "It is accel.local_process_index.",
    "world_size": "It is accel.num_processes.",
    "global_step": "It is run.global_step of `with accel.run() as run:`, or accel.current_run.",
    "current_epoch": "It is run.current_epoch of `with accel.run() as run:`, or accel.current_run.",
    "should_stop": "It is run.should_stop of `with accel.run() as run:`, or accel.current_run.",
    "save_checkpoint": "Call accel.save_state(path), or give callbacks=[Checkpoint()].",
    "load": "Call accel.load_state(path).",
    "logger": 'Call accel.get_tracker("tensorboard").',
    "seed_everything": "Call set_seed(seed).",
    "to_device": "Prepared loaders deliver on the device; else tensor.to(accel.device).",
    "rank_zero_first": "Use `with accel.main_process_first():`.",
}

#: Hooks of older Lightnings, of LightningModule and of other trainers.
HOOKS: Mapping[str, str] = {
    "on_batch_start": "It is on_train_batch_start.",
    "on_batch_end": "It is on_train_batch_end.",
    "on_batch_begin": "It is on_train_batch_start.",
    "on_epoch_start": "It is on_train_epoch_start.",
    "on_epoch_end": "It is on_train_epoch_end.",
    "on_epoch_begin": "It is on_train_epoch_start.",
    "on_train_begin": "It is on_train_start.",
    "on_step_begin": "It is on_train_batch_start.",
    "on_step_end": "It is on_train_batch_end.",
    "on_keyboard_interrupt": "It is on_exception.",
}
