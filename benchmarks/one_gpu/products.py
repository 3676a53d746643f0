"""Products of 16-bit matrices whose sides are no multiples of 8: how fast they are on a GPU, and what the model says.

    python -m benchmarks.one_gpu.products              # needs a GPU, seconds; measures, then reports
    python -m benchmarks.one_gpu.products --report     # of what was measured before

The share of speed that is left is the median over products of FEWEST FLOPs and more; each group of products is also
predicted by what the other groups say.
"""

import argparse
import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from meshwright.planner.cost.kernels import SIDES_ALIGNED, family_of, product_s
from meshwright.profiler.machine.cluster import Device, load_device
from meshwright.profiler.machine.local import local_gpus, preset_of

FILE = Path(__file__).with_name("results") / "products.json"
FEWEST = 1e10
"""FLOPs of products that show: smaller ones wait for their launch."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

GROUPS = {
    "vocabulary of GPT-2": [(8192, 768, n) for n in (50257, 50258, 50260, 50264, 50304, 50272)],
    "vocabulary of BERT": [(8192, 1024, n) for n in (30522, 30528, 30520, 30521, 30524)],
    "classes": [(4096, 4096, n) for n in (1000, 1001, 1002, 1004, 1008, 4097, 4098, 4100, 4104, 4096)],
    "many classes": [(2048, 512, n) for n in (10, 11, 12, 16, 100, 1000, 1001, 1002, 1004, 10001, 10002, 10004, 10008)],
    "features": [(8192, k, 4096) for k in (1021, 1022, 1023, 1020, 1024)],
    "tokens": [(m, 1024, 4096) for m in (8191, 8190, 8188, 8184, 3152, 2955)],
}
"""(tokens, inputs, outputs) of linear layers."""

KINDS = {0: "multiples of 8", 1: "odd", 2: "even"}


@dataclass(frozen=True)
class Product:
    """One product of a linear layer's three: seconds, the median of three times four. what: forward, input (gradient)
    or weight (gradient)."""

    group: str
    dtype: str
    tokens: int
    inputs: int
    outputs: int
    what: str
    seconds: float

    @property
    def sides(self) -> tuple[int, int, int]:
        """Rows, inner side and columns."""
        return {
            "forward": (self.tokens, self.inputs, self.outputs),
            "input": (self.tokens, self.outputs, self.inputs),
            "weight": (self.outputs, self.tokens, self.inputs),
        }[self.what]

    @property
    def kind(self) -> int:
        """0: both features are multiples of 8; 1: one is odd; 2: one is only even."""
        worst = min((side & -side for side in (self.inputs, self.outputs)), default=8)
        return 0 if worst >= SIDES_ALIGNED else min(worst, 2)

    @property
    def flops(self) -> float:
        """Of the product."""
        return 2.0 * self.tokens * self.inputs * self.outputs


def measured() -> Iterator[Product]:
    """Every product of every group on the GPU here."""
    for name, dtype in DTYPES.items():
        for group, layers in GROUPS.items():
            for tokens, inputs, outputs in layers:
                x, weight, gradient = (
                    torch.randn(shape, dtype=dtype, device="cuda")
                    for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
                )
                runs: dict[str, Callable[[], Any]] = {
                    "forward": lambda x=x, weight=weight: x @ weight.t(),
                    "input": lambda gradient=gradient, weight=weight: gradient @ weight,
                    "weight": lambda gradient=gradient, x=x: gradient.t() @ x,
                }
                for what, run in runs.items():
                    yield Product(group, name, tokens, inputs, outputs, what, _seconds(run))


def _seconds(run: Callable[[], Any], warm_ups: int = 3, times: int = 4) -> float:
    for _ in range(warm_ups):
        run()
    found = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        torch.cuda.synchronize()
        found.append(1e-3 * start.elapsed_time(end) / times)
    return median(found)


def aligned_s(product: Product, device: Device) -> float:
    """Seconds that the model says of the product if its sides were multiples of 8."""
    family = family_of(device)
    assert family is not None, f"there are no kernels of {device.name}"
    rows, inner, columns = (np.array([side], dtype=float) for side in product.sides)
    peak, rates = device.flops[product.dtype], family.products["bf16"]
    return float(product_s(rows, inner, columns, device, product.dtype, peak, rates)[0]) + rates.launch


def share_of(products: list[Product], kind: int, device: Device) -> float:
    """Median share of the aligned speed that products of a kind have, on clocks that aligned ones show."""
    ratios = {k: [aligned_s(p, device) / p.seconds for p in products if p.kind == k] for k in (0, kind)}
    return median(ratios[kind]) / median(ratios[0])


def markdown(products: list[Product], device: Device, where: str) -> str:
    """Shares by kind, and how well the other groups predict each."""
    large = [product for product in products if product.flops >= FEWEST]
    lines = [
        f"`python -m benchmarks.one_gpu.products`, {where}",
        "",
        f"Products of linear layers with {FEWEST:g} FLOPs and more. Share: of the speed with sides that are multiples "
        f"of {SIDES_ALIGNED} (inputs and outputs; how many tokens there are makes no difference). Error: of seconds, "
        "each group predicted by the shares of the others, median and largest.",
        "",
        "| inputs or outputs | products | TFLOP/s, median | share | error |",
        "|---|---:|---:|---:|---:|",
    ]
    clock = median(aligned_s(p, device) / p.seconds for p in large if p.kind == 0)
    for kind, name in KINDS.items():
        of = [product for product in large if product.kind == kind]
        errors = []
        for group in GROUPS:
            others, own = [p for p in large if p.group != group], [p for p in of if p.group == group]
            share = share_of(others, kind, device) if kind and own else 1.0
            errors += [abs(aligned_s(p, device) / clock / share / p.seconds - 1) for p in own]
        speed = median(product.flops / product.seconds for product in of) / 1e12
        lines.append(
            f"| {name} | {len(of)} | {speed:.0f} | {share_of(large, kind, device):.3f} "
            f"| {median(errors):.0%}, {max(errors):.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, unless it was done before, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="of what was measured before")
    arguments = parser.parse_args()
    if not arguments.report:
        gpus = local_gpus()
        preset = preset_of(*gpus[0]) if gpus else None
        if preset is None:
            parser.error("no GPU here with a preset; --report tells of what was measured before")
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        where = f"{date}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
        rows = [asdict(product) for product in measured()]
        FILE.write_text(json.dumps({"where": where, "device": preset, "products": rows}, indent=0) + "\n")
    told = json.loads(FILE.read_text())
    products = [Product(**row) for row in told["products"]]
    table = markdown(products, load_device(told["device"]), told["where"])
    FILE.with_suffix(".md").write_text(table)
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
