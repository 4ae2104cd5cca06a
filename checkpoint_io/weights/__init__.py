"""Model weights in files of this package, of Hugging Face, torch and DeepSpeed.

`save.save_model` writes safetensors files in the layout of Hugging Face; `load.load_model` and
`load_model_state` read any format that `find.open_weights` knows, and `merge.merge_weights` writes
it in that layout. A format is a `source.WeightSource`: the names with their shapes and dtypes at
once, the bytes on request, into the memory where they are needed. `mapped` gives views of files.

All names, shapes and dtypes are checked before a model changes. An index never leads out of its
folder. No pickle is executed: the formats that are one are in `foreign`.
"""

from checkpoint_io.weights.find import open_weights as open_weights
from checkpoint_io.weights.foreign.dcp import DcpSource as DcpSource
from checkpoint_io.weights.foreign.dcp import DcpTensor as DcpTensor
from checkpoint_io.weights.load import ModelTargets as ModelTargets
from checkpoint_io.weights.mapped import map_tensors as map_tensors
from checkpoint_io.weights.merge import merge_weights as merge_weights
from checkpoint_io.weights.source import Destination as Destination
from checkpoint_io.weights.source import Rows as Rows
from checkpoint_io.weights.source import WeightInfo as WeightInfo
from checkpoint_io.weights.source import sizes_of as sizes_of
