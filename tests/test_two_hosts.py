"""torchrun on two hosts, which are network namespaces of this machine joined by a virtual cable."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.trace import trace
from support.small_net import GLOBAL_BATCH, Net, batch_of, loss, sgd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="making network namespaces needs root and the command ip",
    ),
]

NETWORK = "10.87.21"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(namespace, address, interface) of two hosts; skips where the system forbids them."""
    tag = uuid.uuid4().hex[:6]
    names, cables = [f"mw{tag}{i}" for i in (0, 1)], [f"mw{tag}c{i}" for i in (0, 1)]
    try:
        ip("netns", "add", names[0])
        ip("netns", "add", names[1])
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"this system makes no network namespaces: {error.stderr.strip()}")
    try:
        for i, (name, cable) in enumerate(zip(names, cables, strict=True)):
            ip("-n", name, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"{NETWORK}.{i + 1}", cable) for i, (name, cable) in enumerate(zip(names, cables, strict=True))]
    finally:
        for name in names:
            ip("netns", "del", name)


SCRIPT = """
import sys
sys.path[:0] = {folders!r}
import torch
from support.small_net import Net, batch_of, loss, sgd
from meshwright.executor import parallelize

trainer = parallelize(Net, {plan!r}, sgd, loss=loss, timeout_s=120.0)
for step in range(3):
    share = next(iter(trainer.loader(list(zip(*batch_of(8, step), strict=True)))))
    value = trainer.step(share).loss
    if trainer.mesh.rank == 0:
        print("loss", repr(value), flush=True)
trainer.close()
"""


def one_process(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.parameters())
    losses = []
    for step in range(steps):
        x, targets = batch_of(GLOBAL_BATCH, step)
        optimizer.zero_grad()
        value = loss(model(x), (x, targets))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_two_hosts_of_two_ranks_train_as_one_process(hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    profile = trace(load_model(Net, batch=batch_of, loss=loss))
    shape = Shape(
        data_replicate=1, data_shard=2, tensor=1, pipeline=2, schedule="1f1b", micro_batch=2, num_microbatches=2
    )
    training = TrainingSpec(global_batch=GLOBAL_BATCH, precision="fp32")
    machines = cluster_of(load_device("cpu"), 4, 2)
    make_plan(profile, machines, training, shape, [[LayerOption()] * 2] * 2).save(tmp_path / "plan.json")
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(folders=[str(folder) for folder in Path(__file__).parents[:2]], plan=str(tmp_path / "plan.json"))
    )

    launched = []
    for node, (namespace, _, interface) in enumerate(hosts):
        words = ["ip", "netns", "exec", namespace, sys.executable, "-m", "torch.distributed.run"]
        words += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
        words += ["--master-addr", hosts[0][1], "--master-port", "29500", "--local-addr", hosts[node][1], str(script)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"host{node}.log").open("w+")
        launched.append((subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT), log))
    try:
        codes = [process.wait(timeout=240) for process, _ in launched]
    finally:
        for process, _ in launched:
            process.kill()
    texts = []
    for _, log in launched:
        log.seek(0)
        texts.append(log.read())
        log.close()

    assert codes == [0, 0], texts
    found = [float(line.split()[1]) for line in texts[0].splitlines() if line.startswith("loss ")]
    assert found == pytest.approx(one_process(3), rel=1e-5)
    assert "loss" not in texts[1]
