"""Run directories, which are readable without jaxnn and never half-written; the checkpoints and plots in them."""

from jaxnn.record._checkpoints import Checkpoints, Restored, load_checkpoint
from jaxnn.record._metric_log import LogDigest, MetricWriter, WriterFacts, Writers, rewind_metrics
from jaxnn.record._plots import (
    draw_confusion,
    draw_curves,
    draw_picture,
    format_value,
    label_ticks,
    new_figure,
    new_panels,
    write_in_cells,
)
from jaxnn.record._provenance import (
    PARTS,
    changed_implementations,
    changed_parts,
    check_same_data,
    config_from_json,
    config_json,
    data_fingerprint,
    describe_data,
    git_state,
    jax_flags,
    leaf_fields,
    program_fingerprint,
    recorded_data,
    script,
    text_fingerprint,
    with_tuples,
)
from jaxnn.record._record_reader import (
    MEMBERS_FILE,
    Recorded,
    check_reported,
    check_trained,
    facts_as_run,
    final_metrics,
    find_records,
    is_sweep,
    metrics_of,
    read_lines,
    read_members,
    read_metrics,
    read_record,
    read_recorded,
    read_run,
    reports_by_member,
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
    json_line,
    jsonable,
    make_room,
    new_run_dir,
    open_record,
    write_bytes,
    write_json,
)
from jaxnn.record._schemas import FORMAT
from jaxnn.record._state_files import as_key_like, find_damage, is_key, preload_orbax, read_file, save_checkpoint
from jaxnn.record._trackers import TRACKERS, MLflow, TensorBoard, WandB
from jaxnn.record._weights import load_weights, needs_extra, save_weights

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
