"""What the files of a record hold, as data."""

from typing import Any

from jaxnn._checked_json import AMOUNT, COUNT, METRIC, POSITIVE, Span

FORMAT = "jaxnn record 2"  # version 1 had other files for a run and for a sweep
DIRECTIONS = {"*": {"min", "max"}}
DEVICES = {"backend": str, "devices": [{"platform": str, "kind": str}], "versions": dict}
OPTIONS = {"device?": str, "strategy?": str, "mesh?": str, "stop?": str, "writers?": [str], "probes?": [str]}
OPTIONS |= {"monitor?": str, "order?": str, "shard?": str, "checkpoint_every?": COUNT}
OPTIONS["devices?"] = Span("a whole number from 1, or all", 1, 2**31 - 1, names=("all",))
FINGERPRINT = {"data?": str, "start?": str, "program?": str, "batches?": str, "evaluation?": str}
ARRAYS = {"*": {"rows": COUNT, "block": POSITIVE, "sum": str, "digests": str}}
STALLS = [{"where": str, "step": COUNT, "seconds": AMOUNT}]
SUMMARY = {
    **{"seconds?": {"*": AMOUNT}, "stalls?": STALLS, "members?": {"*": COUNT}, "num_compilations?": COUNT},
    **{"member_steps?": AMOUNT, "member_steps_per_second?": AMOUNT, "examples_per_second?": AMOUNT},
    "lanes_in_use?": AMOUNT,
    **{"throughput?": {"steps_per_second": AMOUNT, "spread": AMOUNT, "num_windows": COUNT}, "compiler?": [str]},
    **{"first_step_seconds?": {"*": AMOUNT}, "compilations?": {"*": AMOUNT}, "peak_bytes?": (AMOUNT, str)},
}
# Members that share one program; what it was opened with is absent before.
GROUP = {
    **{"members": [COUNT], "static": dict, "traced": [str], "closed?": bool, "steps_per_call?": POSITIVE},
    **{"seconds_per_step_measured?": dict, "fingerprint?": FINGERPRINT, "checkpoints?": [COUNT], "examples?": dict},
    **{
        "arrays?": ARRAYS,
        "implementations?": {"*": [str]},
        "precision?": dict,
        "layout?": {"strategy": str, "mesh?": {"*": POSITIVE}},
    },
    "vmap?": {
        **{"size": POSITIVE, "steps_per_call": POSITIVE, "block": POSITIVE, "note?": str},
        "trials": [{"size": POSITIVE, "seconds": AMOUNT, "per_second": AMOUNT, "temporary_bytes": AMOUNT}],
    },
}
CODE = {"digest": str, "bytes": COUNT, "cut": bool}
RECORD = {
    **{"format": {FORMAT}, "name": str, "status": str, "started": str, "config": dict, "options": OPTIONS},
    **{"monitored": str, "higher_is_better": bool, "directions": DIRECTIONS, "data?": str, "command?": [str]},
    **{"devices": DEVICES, "jax_flags": dict, "git?": dict, "code?": CODE, "groups": [GROUP], "summary?": SUMMARY},
    **{"axes": [{"name": str, "values": list, "scale": {"log", "linear", "nominal"}}], "points": [dict]},
    **{"search?": {"name": str}, "origin?": {"member": COUNT, "num_steps": POSITIVE}},
    "resumed?": [{"step": COUNT, "changed": [str], "damaged": [str], "before": dict}],
}
MEMBER = {
    **{"member": COUNT, "point": dict, "config": dict, "status": str, "step": COUNT, "final": {"*": METRIC}},
    **{"best": {"*": METRIC}, "error?": str},
}
LINE = {"step": COUNT, "member": COUNT, "digest?": str, "*": METRIC}
# The checkpoint.json of a checkpoint, and the writers.json beside it: by writer and member.
CHECKPOINT: dict[str, Any] = {"step": COUNT, "metrics": {"*": METRIC}, "log?": {"lines": COUNT, "sha256": str}}
# Of a search: the number of its events, the members in the rows of each group, in lanes, and by their status.
SEARCHED: dict[str, Any] = {"events": COUNT, "members": {"*": [COUNT]}, "by_status": {"*": [COUNT]}}
SEARCHED["steps"] = {"*": COUNT}
SEARCHED["lanes"] = {"*": [Span("a whole number from -1", -1, 2**31 - 1)]}
CHECKPOINT["search?"] = SEARCHED
IDS = {"*": {"*": {"id": str, "sent": COUNT}}}
