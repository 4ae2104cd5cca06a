"""Scripts that import ``accelerate`` or ``transformers`` are no modules of tests."""

collect_ignore = ["killed_trainer.py", "parity_cases.py", "programs", "sample_order.py"]
