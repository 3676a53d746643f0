"""Cloud instance types: their GPUs, and the network between instances."""

import difflib
import tomllib
from functools import cache
from pathlib import Path

from pydantic import Field, PositiveFloat, PositiveInt

from ..document import Frozen
from .cluster import ClusterSpec, Link, cluster_of, load_device

_FILE = Path(__file__).parent / "instances.toml"


class Instance(Frozen):
    """A cloud's instance type with GPUs. source: the vendor's page that the numbers come from."""

    name: str
    cloud: str
    device: str = Field(description="a device preset")
    gpus: PositiveInt
    network: PositiveFloat = Field(description="nominal Gbit/s of one instance")
    share: float = Field(gt=0, le=1, description="of it that large collectives get")
    source: str

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that large collectives get between instances, for one instance in one direction."""
        return self.network * 1e9 / 8 * self.share

    def cluster(self, nodes: int) -> ClusterSpec:
        """A cluster of so many instances."""
        device = load_device(self.device)
        network = Link(bandwidth=self.bytes_per_s, latency=device.network.latency)
        whole = cluster_of(device, nodes * self.gpus, self.gpus)
        return whole.model_copy(update={"name": f"{nodes} x {self.name}", "network": network})


@cache
def instances() -> dict[str, Instance]:
    """Name -> instance type, cloud by cloud."""
    found = {}
    for cloud, table in tomllib.loads(_FILE.read_text()).items():
        source = table.pop("source")
        for name, values in table.items():
            found[name] = Instance(name=name, cloud=cloud, source=source, **values)
    return found


def instance(name: str) -> Instance:
    """The instance type of a name, in any case. Raises ValueError with the nearest ones."""
    known = {each.lower(): each for each in instances()}
    wanted = name.lower()
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(known[each] for each in near)}? " if near else ""
        raise ValueError(
            f"unknown instance {name!r}: {hint}`plan devices --cloud` lists all; of others give --gpus, "
            "--gpus-per-node and --device, or a --cluster file"
        )
    return instances()[known[wanted]]
