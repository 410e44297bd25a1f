"""The run directory: complete, plain, readable without jaxnn, and never half-written."""

from jaxnn.record.curves import draw_curves as draw_curves
from jaxnn.record.directory import check_unused as check_unused
from jaxnn.record.directory import check_vacant as check_vacant
from jaxnn.record.directory import create_run_dir as create_run_dir
from jaxnn.record.directory import json_line as json_line
from jaxnn.record.directory import jsonable as jsonable
from jaxnn.record.directory import new_run_dir as new_run_dir
from jaxnn.record.directory import write_text as write_text
from jaxnn.record.provenance import config_from_json as config_from_json
from jaxnn.record.provenance import config_json as config_json
from jaxnn.record.provenance import data_fingerprint as data_fingerprint
from jaxnn.record.provenance import jax_flags as jax_flags
from jaxnn.record.provenance import script as script
from jaxnn.record.provenance import text_fingerprint as text_fingerprint
from jaxnn.record.reader import final_metrics as final_metrics
from jaxnn.record.reader import find_runs as find_runs
from jaxnn.record.reader import find_sweeps as find_sweeps
from jaxnn.record.reader import is_sweep as is_sweep
from jaxnn.record.reader import metrics_of as metrics_of
from jaxnn.record.reader import read_metrics as read_metrics
from jaxnn.record.reader import read_run as read_run
from jaxnn.record.writer import Record as Record
from jaxnn.record.writer import open_record as open_record
from jaxnn.record.writer import rewind_metrics as rewind_metrics
