"""Run directories, which are readable without jaxnn and never half-written; the checkpoints and plots in them."""

from jaxnn.record._checkpoints import Checkpoints, Restored, load_checkpoint
from jaxnn.record._record_reader import MEMBERS_FILE, Recorded, RecordReader
from jaxnn.record._run_directory import FOLDER, RECORD_FILE, LogDigest, Record
from jaxnn.record._schemas import FORMAT
from jaxnn.record._state_files import as_key_like, find_damage, save_checkpoint
from jaxnn.record._trackers import TRACKERS, MLflow, TensorBoard, WandB
from jaxnn.record._weights import load_weights, save_weights
from jaxnn.record._writers import MetricWriter, WriterFacts, Writers

__all__ = [
    "MLflow",
    "MetricWriter",
    "TensorBoard",
    "WandB",
    "WriterFacts",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "save_weights",
]
