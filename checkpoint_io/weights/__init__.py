"""Model weights in files of this package, of Hugging Face and of torch."""

from checkpoint_io.weights.find import open_weights as open_weights
from checkpoint_io.weights.load import ModelTargets as ModelTargets
from checkpoint_io.weights.mapped import map_tensors as map_tensors
from checkpoint_io.weights.merge import merge_weights as merge_weights
from checkpoint_io.weights.source import Destination as Destination
from checkpoint_io.weights.source import Rows as Rows
from checkpoint_io.weights.source import WeightInfo as WeightInfo
