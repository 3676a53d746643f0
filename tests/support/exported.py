"""Plans of a decoder that go out to other frameworks, and how they are read again."""

from meshwright.planner.exchange.accelerate import read_accelerate
from meshwright.planner.exchange.deepspeed import read_deepspeed
from meshwright.planner.exchange.export import Export
from meshwright.planner.exchange.imports import Layout, plan_of
from meshwright.planner.exchange.megatron import read_megatron
from meshwright.planner.exchange.torchtitan import read_torchtitan
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import cluster_of, load_device
from meshwright.profiler.model.model_profile import Experts, LayerPart, ModelProfile
from support.synthetic import layer_class, profile

NUM_BLOCKS = 8


def decoder(scale: float = 1.0) -> ModelProfile:
    """Embedding, eight blocks that tensor parallelism may cut, norm and head: named as Hugging Face names them.
    scale multiplies the parameters."""
    classes = [
        layer_class("Embedding", 1e6, int(2e7 * scale), saved=1e5, inputs=0),
        layer_class("Block", 5e10, int(1e8 * scale), saved=2e8, inputs=1e7, transient=1e7, heads=8),
        layer_class("head", 1e10, int(2e7 * scale), saved=5e7, inputs=1e7, transient=5e7),
    ]
    plain = profile(classes, [0, *[1] * NUM_BLOCKS, 2], crossing=1e7)
    names = ["model.embed", *(f"model.layers.{i}" for i in range(NUM_BLOCKS)), "head"]
    layers = [
        layer.model_copy(
            update={
                "name": name,
                "root": name,
                "modules": (name,) if name != "head" else ("model.norm", "head"),
                "parameters": (f"{name}.weight",),
            }
        )
        for layer, name in zip(plain.layers, names, strict=True)
    ]
    parts = (LayerPart(name="self_attn"), LayerPart(name="mlp"))
    blocks = [c.model_copy(update={"parts": parts if c.name == "Block" else ()}) for c in classes]
    return plain.model_copy(update={"name": "decoder", "layers": tuple(layers), "classes": tuple(blocks)})


PROFILE = decoder()


def planned(
    shape: Shape,
    sizes: tuple[int, ...] = (),
    *,
    again: tuple[int, ...] = (),
    kind: str = "full",
    reshard: str = "none",
    model: ModelProfile = PROFILE,
) -> Plan:
    """A plan of the decoder. sizes: layers of each stage; again: blocks of each stage that recompute, the
    first ones, or the last ones if negative."""
    num_stages = shape.pipeline * shape.virtual_stages
    sizes = sizes or even_sizes(num_stages)
    stages, place = [], 0
    for index, size in enumerate(sizes):
        count = again[index] if again else 0
        blocks = [layer for layer in range(place, place + size) if 1 <= layer <= NUM_BLOCKS]
        chosen = blocks[:count] if count >= 0 else blocks[count:]
        options = []
        for layer in range(place, place + size):
            gives_back = reshard == "all" or (reshard == "inner" and layer <= NUM_BLOCKS)
            options.append(LayerOption(kind if layer in chosen else "none", gives_back))  # type: ignore[arg-type]
        stages.append(options)
        place += size
    machine = cluster_of(load_device("h100-80gb"), shape.degrees.num_devices, 8)
    training = TrainingSpec(
        global_batch=shape.micro_batch * shape.num_microbatches * shape.data, seq_len=PROFILE.seq_len
    )
    return make_plan(model, machine, training, shape, stages)


def even_sizes(num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: as many blocks, and the embedding and the head at the ends."""
    sizes = [NUM_BLOCKS // num_stages] * num_stages
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)


def layout_of(found: Export, plan: Plan, model: ModelProfile = PROFILE) -> Layout:
    """What an export says, read again."""
    count = plan.degrees.num_devices
    if found.target == "megatron":
        return read_megatron(found.words, count, model)
    if found.target == "torchtitan":
        return read_torchtitan(found.words, count, model)
    return (read_accelerate if found.target == "accelerate" else read_deepspeed)(found.document, count)


def read_back(found: Export, plan: Plan, model: ModelProfile = PROFILE) -> Plan:
    """An export as a plan again; what its target says in a script is taken from the plan."""
    layout = layout_of(found, plan, model)
    kind = layout.recompute or next((x.recompute for x in plan.layers if x.recompute != "none"), "none")
    size = layout.micro_batch or plan.micro_batch
    return plan_of(layout, model, plan.cluster, plan.training, size, kind)


def value(found: Export, option: str) -> str:
    """What an export gives an option of the command line."""
    return found.words[found.words.index(option) + 1]


def mixture() -> ModelProfile:
    """The decoder with eight experts in each block."""
    bank = Experts(module="experts", count=8, parameters=("weight",), routed=(0.0, 1024.0, 0.0, 0.0), called="routed")
    block = PROFILE.classes[1].model_copy(update={"experts": (bank,)})
    return PROFILE.model_copy(update={"classes": (PROFILE.classes[0], block, PROFILE.classes[2])})


MIXTURE = mixture()
