"""Random links, models, clusters, jobs and plans, as hypothesis draws them."""

import math

from hypothesis import assume
from hypothesis import strategies as st

from meshwright.planner.cost.comm_cost import GroupLinks
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.plan.document import Recompute
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.pins import Pins
from meshwright.planner.plan.schedules import Schedule
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.planner.solve.space import Space
from meshwright.profiler.machine.cluster import ClusterSpec, Group, Link
from meshwright.profiler.model.model_profile import ModelProfile
from support.synthetic import SEQ_LEN, cluster, device, layer_class, profile

ROUNDING = 1e-9
"""Relative: sums of the same terms in another order differ by less."""


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Floats of any magnitude between two."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda exponent: 10.0**exponent)


any_link = st.builds(Link, bandwidth=log_floats(1e8, 1e12), latency=log_floats(1e-7, 1e-3))
sizes = log_floats(1.0, 1e12)
factors = st.floats(1.0, 100.0)


@st.composite
def any_links(draw: st.DrawFn) -> GroupLinks:
    """A group of up to 8 ranks on each of up to 512 hosts."""
    devices = draw(st.integers(1, 8))
    group = Group(ranks_per_host=draw(st.integers(1, devices)), hosts=draw(st.integers(1, 512)))
    return GroupLinks(group=group, link=draw(any_link), network=draw(any_link), devices_per_host=devices)


@st.composite
def models(draw: st.DrawFn, max_layers: int = 4) -> ModelProfile:
    """A chain of up to `max_layers` layers of one or two classes, some cut by tensor parallelism, some tied."""
    classes = [
        layer_class(
            f"c{i}",
            flops=draw(log_floats(1e10, 1e12)),
            parameters=draw(st.integers(1, 40)) * 1_000_000,
            saved=draw(st.one_of(st.just(0.0), log_floats(1e6, 4e8))),
            inputs=draw(log_floats(1e5, 5e7)),
            transient=draw(log_floats(1e3, 1e8)),
            heads=draw(st.sampled_from([None, 2, 4])),
        )
        for i in range(draw(st.integers(1, 2)))
    ]
    order = draw(st.lists(st.integers(0, len(classes) - 1), min_size=1, max_size=max_layers))
    same = [(a, b) for b in range(len(order)) for a in range(b) if order[a] == order[b]]
    ties = [draw(st.sampled_from(same))] if same and draw(st.booleans()) else []
    return profile(classes, order, [draw(log_floats(1e5, 5e7)) for _ in order[1:]], ties)


clusters = st.builds(
    lambda hosts, memory, link, network: cluster(*hosts, device(memory=memory, link=link), network),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]),
    st.sampled_from([0.5e9, 1e9, 2e9, 4e9, 80e9]),
    any_link,
    any_link,
)

jobs = st.builds(
    TrainingSpec,
    global_batch=st.sampled_from([4, 8]),
    seq_len=st.just(SEQ_LEN),
    precision=st.sampled_from(["bf16", "fp32"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    memory_margin=st.just(0.0),
)

SCHEDULES: tuple[tuple[Schedule, int], ...] = (("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2))


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]]:
    """A model, a cluster, a job, a shape of the space (or a schedule beyond it), and the layers of each stage."""
    model, on, training = draw(models()), draw(clusters), draw(jobs)
    space = Space(model, on, training, Pins())
    shapes = [shape for family in list(space.families()) for shape in space.shapes(family)]
    assume(shapes)
    shape = draw(st.sampled_from(shapes))
    virtual = 1
    if shape.pipeline > 1:
        schedule, virtual = draw(st.sampled_from(SCHEDULES))
        assume(shape.num_microbatches >= shape.pipeline and shape.pipeline * virtual <= len(model.layers))
        changes = {"schedule": schedule, "virtual_stages": virtual}
        shape = Shape(**{name: getattr(shape, name) for name in shape.__dataclass_fields__} | changes)
    stages = shape.pipeline * virtual
    extra = draw(st.integers(0, stages - 1))
    counts = [1 + (len(model.layers) - stages if i == extra else 0) for i in range(stages)]
    return model, on, training, shape, counts


def priced(
    case: tuple[ModelProfile, ClusterSpec, TrainingSpec, Shape, list[int]], recomputes: list[Recompute]
) -> Estimate:
    """The estimate with each layer recomputed as said."""
    model, on, training, shape, counts = case
    options = iter([LayerOption(recompute, shape.reshard) for recompute in recomputes])
    return estimate(make_plan(model, on, training, shape, [[next(options) for _ in range(n)] for n in counts]), model)
