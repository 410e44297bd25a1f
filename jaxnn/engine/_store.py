"""Where the metrics and checkpoints of one population are kept, and what an earlier process left there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxnn.parallel import broadcast_from_primary
from jaxnn.record import METRICS_FILE, Checkpoints, LogDigest, Record, Restored, rewind_metrics
from jaxnn.types import PyTree


@dataclasses.dataclass
class Store:
    """An open record, and the folder in it for one population's checkpoints.

    Attributes:
        record: the open directory.
        folder: that of the checkpoints.
        numbers: the numbers of the members, for the column ``member`` of ``metrics.jsonl``; None: a run, without it.
        keep_last: the number of newest checkpoints to keep.
        keep_best: the number of best ones to keep in addition.
        monitored: the metric that ranks them.
        higher_is_better: whether more of it is better.
        reported: the digest of the lines that were written.
        saved_at: the time of the last checkpoint, on ``time.perf_counter``'s clock.
    """

    record: Record
    folder: Path
    numbers: tuple[int, ...] | None = None
    keep_last: int = 2
    keep_best: int = 0
    monitored: str = "loss"
    higher_is_better: bool = False
    reported: LogDigest = dataclasses.field(init=False)
    saved_at: float = dataclasses.field(default_factory=time.perf_counter)
    _checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        self.reported = LogDigest(self.record.path / METRICS_FILE)

    def report(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends what members reported to ``metrics.jsonl``."""
        self.reported.add(self.record.report(*lines))

    def save(self, step: int, state: PyTree, metrics: Mapping[str, float]) -> None:
        """Starts saving a state.

        Args:
            step: a number that grows.
            state: what is saved.
            metrics: of this step, by which the best is found.

        Raises:
            RecordError: the disk refused.
        """
        if self._checkpoints is None:
            self._checkpoints = self._open(
                keep_last=self.keep_last,
                keep_best=self.keep_best,
                monitor=self.monitored,
                higher_is_better=self.higher_is_better,
            )
        self._checkpoints.save(step, state, dict(metrics), self.reported)
        self.saved_at = time.perf_counter()

    def latest(self) -> int | None:
        """The newest checkpoint that this process saved."""
        return max(self._checkpoints.steps(), default=None) if self._checkpoints is not None else None

    def restore(self, like: PyTree) -> Restored[Any] | None:
        """The newest checkpoint that is as it was saved; None if there is none at all.

        Raises:
            RecordError: all are damaged, or it is not a state like ``like``.
        """
        return self._open().restore_newest(like)

    def set_aside(self, restored: Restored[Any] | None) -> list[str]:
        """Moves the damaged checkpoints that are newer than ``restored`` out of the way; describes each."""
        return [self._open().set_aside(*damage) for damage in restored.damaged] if restored is not None else []

    def rewind(
        self, end_of: Callable[[int], int], restored: Restored[Any] | None, where: str
    ) -> tuple[dict[int, list[dict[str, Any]]], list[str]]:
        """Cuts the metrics to those of a checkpoint.

        Args:
            end_of: from a row to the last step whose line is kept.
            restored: the checkpoint, or None.
            where: what it is, for messages.

        Returns:
            The kept lines by row, and what to tell the user of damage to them.
        """
        noted = restored.log if restored is not None else None
        if self.numbers is None:

            def rewound() -> tuple[list[dict[str, Any]], str | None]:
                # The digest stays in the process that writes.
                lines, self.reported, damage = rewind_metrics(self.record.path, lambda line: end_of(0), noted, where)
                return lines, damage

            lines, damage = broadcast_from_primary(rewound)
            return {0: lines}, [damage] if damage is not None else []
        rows = {number: row for row, number in enumerate(self.numbers)}
        lines, self.reported, damage = rewind_metrics(
            self.record.path, lambda line: end_of(rows[line["member"]]), noted, where, self.numbers
        )
        kept: dict[int, list[dict[str, Any]]] = {row: [] for row in rows.values()}
        for line in lines:
            kept[rows[line["member"]]].append({name: value for name, value in line.items() if name != "member"})
        return kept, [damage] if damage is not None else []

    def close(self, *, wait: bool = True) -> None:
        """Waits for checkpoints under way, unless other processes may be gone.

        Raises:
            RecordError: the disk refused.
        """
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close(wait=wait)

    def kept_steps(self) -> Sequence[int]:
        """The steps of the checkpoints that are complete."""
        return self._open().steps()

    def _open(self, **policy: Any) -> Checkpoints:
        return Checkpoints(self.folder, **policy)
