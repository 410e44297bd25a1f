"""Run directories, which are readable without jaxnn and never half-written; the checkpoints and plots in them."""

from jaxnn.record._checkpoints import Checkpoints, Restored, load_checkpoint
from jaxnn.record._metric_log import LogDigest, MetricWriter, WriterFacts, Writers, rewind_metrics
from jaxnn.record._provenance import (
    PARTS,
    changed_implementations,
    changed_parts,
    check_same_data,
    describe_data,
    git_state,
    jax_flags,
    recorded_data,
    script,
)
from jaxnn.record._record_reader import (
    MEMBERS_FILE,
    Recorded,
    check_reported,
    check_trained,
    facts_as_run,
    find_records,
    is_sweep,
    read_lines,
    read_members,
    read_metrics,
    read_record,
    read_recorded,
    read_run,
    shard_folders,
    states_folder,
    sweep_folders,
)
from jaxnn.record._run_directory import (
    FOLDER,
    METRICS_FILE,
    RECORD_FILE,
    Record,
    check_vacant,
    create_run_dir,
    is_locked,
    new_run_dir,
    open_record,
)
from jaxnn.record._schemas import FORMAT
from jaxnn.record._state_files import as_key_like, find_damage, preload_orbax, save_checkpoint
from jaxnn.record._trackers import TRACKERS, MLflow, TensorBoard, WandB
from jaxnn.record._weights import load_weights, save_weights

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
