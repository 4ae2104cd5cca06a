"""An encoder of sentences by sentence-transformers: trained on pairs, with an evaluator."""

from __future__ import annotations

import sys

from datasets import Dataset
from language import ALONE, OPTIONS, language_model, losses, texts, tokenizer
from outcome import digest, report
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

folder = sys.argv[1]
language_model().model.save_pretrained(folder)
tokenizer().save_pretrained(folder)
encoder = Transformer(folder)
model = SentenceTransformer(modules=[encoder, Pooling(16)], device="cpu")
first, second = texts(16, seed=1), texts(16, seed=2)
scores = [index / 16 for index in range(16)]
rows = {
    "pairs": Dataset.from_dict({"anchor": first, "positive": second}),
    "scores": Dataset.from_dict({"first": first, "second": second, "score": scores}),
}
arguments = SentenceTransformerTrainingArguments(
    folder,
    # On several processes Accelerate does not tell a batch sampler of its epoch.
    num_train_epochs=2 if ALONE else 1,
    eval_strategy="epoch" if ALONE else "no",
    **OPTIONS,
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=arguments,
    train_dataset=rows,
    eval_dataset={name: pairs.select(range(13)) for name, pairs in rows.items()},
    loss={"pairs": MultipleNegativesRankingLoss(model), "scores": CosineSimilarityLoss(model)},
    evaluator=EmbeddingSimilarityEvaluator(first, second, scores),
)
trainer.train()
similarities = [
    value
    for entry in trainer.state.log_history
    for key, value in entry.items()
    if key.endswith("cosine")
]
report(weights=digest(model), losses=losses(trainer), similarities=similarities)
