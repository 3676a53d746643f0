"""Results on disk, a file for each model on each topology, so that a run that was ended goes on where it was."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planned_vs_manual.bench import TOPOLOGIES, Calibrated, Residual, Topology
from benchmarks.planned_vs_manual.figures import Result, Row
from benchmarks.planned_vs_manual.models import CASES, Case
from meshwright.profiler.machine.cluster import Device


@dataclass(frozen=True)
class Taken:
    """When a result was taken, and how long that took."""

    date: str
    seconds: int

    @classmethod
    def now(cls, started: float) -> "Taken":
        """started: by time.monotonic()."""
        return cls(time.strftime("%Y-%m-%d"), round(time.monotonic() - started))


class Store:
    """A folder with results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def calibration(self, topology: Topology) -> Calibrated | None:
        """The fitted device, if there is one already."""
        file = self._calibration_file(topology)
        if not file.exists():
            return None
        found = json.loads(file.read_text())
        residuals = tuple(Residual(**residual) for residual in found["residuals"])
        return Calibrated(Device.model_validate(found["device"]), found["factors"], residuals)

    def save_calibration(self, topology: Topology, found: Calibrated, taken: Taken) -> None:
        """Write the fitted device with its residuals."""
        document = {"topology": topology.name, "taken": asdict(taken), "factors": found.factors}
        document["residuals"] = [asdict(residual) for residual in found.residuals]
        document["device"] = found.device.model_dump(mode="json")
        _write(self._calibration_file(topology), document)

    def has(self, topology: Topology, case: Case) -> bool:
        """Whether a model was run there."""
        return self._file(topology, case).exists()

    def save(self, topology: Topology, case: Case, result: Result, taken: Taken) -> None:
        """Write what was found of a model."""
        _write(self._file(topology, case), {"taken": asdict(taken), **asdict(result)})

    def everything(self) -> tuple[list[Result], dict[str, Calibrated], list[Taken]]:
        """(results in the order of topologies and models, topology -> calibration, when all was taken)."""
        results, calibrations, taken = [], {}, []
        for topology in (*TOPOLOGIES, *(replace(topology, shaped=False) for topology in TOPOLOGIES)):
            found = self.calibration(topology)
            if found is not None:
                calibrations[topology.name] = found
                taken.append(_taken(json.loads(self._calibration_file(topology).read_text())))
            for case in CASES:
                if self.has(topology, case):
                    document = json.loads(self._file(topology, case).read_text())
                    rows = tuple(Row(**row) for row in document["rows"])
                    results.append(Result(document["case"], document["topology"], rows))
                    taken.append(_taken(document))
        return results, calibrations, taken

    def _calibration_file(self, topology: Topology) -> Path:
        return self._folder / topology.folder / "calibration.json"

    def _file(self, topology: Topology, case: Case) -> Path:
        return self._folder / topology.folder / f"{case.name.replace(' ', '_')}.json"


def _taken(document: dict[str, Any]) -> Taken:
    return Taken(**document["taken"])


def _write(file: Path, document: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def seconds_of(taken: Sequence[Taken]) -> int:
    """How long everything took."""
    return sum(each.seconds for each in taken)
