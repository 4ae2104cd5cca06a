"""Model weights in files of this package, of Hugging Face and of torch."""

from checkpoint_io.weights.find import open_weights as open_weights
from checkpoint_io.weights.load import ModelTargets as ModelTargets
from checkpoint_io.weights.merge import merge_weights as merge_weights
