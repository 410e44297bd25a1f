"""What was measured of an experiment on more and more devices, and what the model makes of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from jaxnn.loop.options import check_choice, check_count
from jaxnn.parallel import check_divides
from jaxnn.scaling.cases import KINDS, Case, Kind, Sizes
from jaxnn.scaling.collectives import Collective
from jaxnn.scaling.cost import Link, Reduction, relative_errors
from jaxnn.scaling.machine import Machine
from jaxnn.scaling.points import Point, Prediction
from jaxnn.scaling.timing import Timing
from jaxnn.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Steps and all-reduces that were timed; all host values.

    Attributes:
        name: the data set's.
        config: the experiment's, in JSON's types.
        strategy: how it lies on the devices.
        machine: where was measured.
        sizes: numbers of devices and of examples.
        predict_for: larger numbers of devices, of which the table tells.
        steps_per_call: how many steps were compiled into one call.
        parameter_bytes: of the model, whole.
        timings: of each step that was timed, by its case.
        collectives: those of each step, by its case.
        reductions: all-reduces that were timed by themselves.
        link: α and β as these say; None where there is but one device.
    """

    name: str
    config: Mapping[str, Any]
    strategy: str
    machine: Machine
    sizes: Sizes
    predict_for: tuple[int, ...]
    steps_per_call: int
    parameter_bytes: int
    timings: Mapping[Case, Timing]
    collectives: Mapping[Case, tuple[Collective, ...]]
    reductions: tuple[Reduction, ...]
    link: Link | None

    def points(self, kind: Kind = "strong") -> list[Point]:
        """What was measured, fewest devices first.

        Args:
            kind: ``strong``, one batch shared by all; ``weak``, as many examples on each device.
        """
        return [self._point(kind, count) for count in sorted({1, *self.sizes.devices})]

    def predict(self, num_devices: int, kind: Kind = "strong", link: Link | None = None) -> Prediction:
        """What the model says: computation as measured on one device with as many examples, and α–β for collectives.

        Args:
            num_devices: of how many.
            kind: as for `points`.
            link: of a cluster, each of whose devices computes by itself as one does here; None: the link that was
                measured, and cores that are shared where they were shared.

        Raises:
            ConfigError: so many devices cannot share the batch, or would have fewer examples each than was measured;
                or one device is all that was measured.
        """
        check_count("num_devices", num_devices, 1)
        check_choice("kind", kind, KINDS)
        if kind == "strong":
            check_divides(self.sizes.batch_size, num_devices)
        if self.link is None:
            raise ConfigError("nothing was learnt of collectives on one device: measure two devices or more.")
        rows, collectives = self.sizes.rows(kind, num_devices), self._collectives(kind, num_devices)
        if link is None:
            compute = self._compute(rows, num_devices)
            spoken = self.link.seconds(collectives, num_devices, self.machine.turns(num_devices))
        else:
            compute, spoken = self._compute(rows, 1), link.seconds(collectives, num_devices)
        return Prediction(num_devices, rows, compute, spoken, self._base(kind))

    def predictions(self, kind: Kind = "strong") -> list[Prediction]:
        """Those for larger numbers of devices than were measured, where such can share the batch."""
        most = max(self.sizes.devices)
        counts = [count for count in self.predict_for if count > most and self.link is not None]
        return [self.predict(count, kind) for count in counts if kind == "weak" or self.sizes.batch_size % count == 0]

    def busy_cores(self, kind: Kind = "strong") -> float:
        """How many cores one device keeps busy: of shared ones, others find only the rest idle."""
        timing = self.timings[self.sizes.case(kind, 1)]
        return timing.work / timing.median

    def link_errors(self) -> list[float]:
        """How far the link is off each all-reduce, as shares of what was measured."""
        return [] if self.link is None else relative_errors(self.link, self.reductions)

    def _point(self, kind: Kind, num_devices: int) -> Point:
        case = self.sizes.case(kind, num_devices)
        timing, base = self.timings[case], self.timings[self.sizes.case(kind, 1)]
        times = case.batch_size / self.sizes.rows(kind, 1)
        speedup = times * median(map(operator.truediv, base.seconds, timing.seconds))
        alone = self.timings.get(case._replace(alone=True))
        share = None if alone is None else 1 - median(map(operator.truediv, alone.seconds, timing.seconds))
        return Point(
            num_devices,
            case.rows,
            timing.median,
            min(timing.seconds),
            max(timing.seconds),
            case.batch_size / timing.median,
            speedup,
            speedup / num_devices,
            share,
            None if num_devices == 1 else self.predict(num_devices, kind),
        )

    def _base(self, kind: Kind) -> float:
        """Examples a second of one device."""
        rows = self.sizes.rows(kind, 1)
        return rows / self.timings[Case(1, rows)].median

    def _collectives(self, kind: Kind, num_devices: int) -> tuple[Collective, ...]:
        """Those of a step on so many devices; of others than were measured, those on the most."""
        return self.collectives.get(self.sizes.case(kind, num_devices)) or self.collectives.get(
            self.sizes.case(kind, max(self.sizes.devices)), ()
        )

    def _compute(self, rows: int, num_devices: int) -> float:
        """The seconds in which ``num_devices`` each compute a step of ``rows`` examples.

        Shared cores have the work of all devices to do, so it takes no less than that work divided among them.
        """
        single = sorted(case for case in self.timings if case.num_devices == 1)
        known = [case.rows for case in single]
        if not known[0] <= rows <= known[-1]:
            raise ConfigError(
                f"{rows} examples a device is outside of what one device was timed with, {known[0]} to {known[-1]}: "
                "name the number of devices in predict=(…) when measuring."
            )
        seconds, work = (
            float(np.interp(rows, known, [getattr(self.timings[case], name) for case in single]))
            for name in ("median", "work")
        )
        cores = self.machine.shared_cores
        return seconds if cores is None else max(seconds, num_devices * work / cores)
