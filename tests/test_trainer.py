"""Trainer: who may start it, what each rank is given, weights, precision, and initial values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.executor import Trainer, apply, parallelize
from meshwright.executor.faults import tell_own_generators, tell_step_hooks
from meshwright.executor.parallel.expert import HeldExperts
from meshwright.executor.parallel.micro_batches import num_microbatches
from meshwright.executor.parallel.tensor_layout import ParameterCut
from meshwright.executor.state import initialise
from meshwright.executor.state.initialise import Materialiser, initial_values
from meshwright.planner.cost.expert_place import ExpertPlace
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.making import make_plan
from meshwright.planner.plan.shape import LayerOption, Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.model.load import load_model
from meshwright.profiler.model.model_profile import ModelProfile
from meshwright.profiler.model.trace import trace
from support import slow, tied_net
from support.cli import some_plan
from support.ranks import run_ranks
from support.small_net import CLASSES, GLOBAL_BATCH, WIDTH, Net, assert_same, batch_of, loss, sgd
from support.synthetic import cluster


class WritingNet(Net):
    """The same numbers, but it writes into what a block returned."""

    def add_half(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        return x


def weight(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (batch[1] != -1).sum()


def mean_of_valid(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss, whose value and gradient are NaN where no target counts."""
    targets = batch[1].flatten()
    each = nn.functional.cross_entropy(output.flatten(0, 1), targets.clamp(min=0), reduction="none")
    return (each * (targets != -1)).sum() / weight(batch)


class OwnMean(Net):
    """Returns that loss, beside what it is computed from."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = super().forward(tokens)
        return {"loss": mean_of_valid(logits, (tokens, targets)), "logits": logits}


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return trace(load_model(Net, batch=batch_of, loss=loss))


@pytest.fixture(scope="module")
def make(profile: ModelProfile) -> Callable[..., Plan]:
    def plan(
        replicate: int = 1,
        shard: int = 1,
        tensor: int = 1,
        stages: tuple[int, ...] = (),
        precision: str = "fp32",
        option: LayerOption | None = None,
    ) -> Plan:
        shape = Shape(
            data_replicate=replicate,
            data_shard=shard,
            tensor=tensor,
            pipeline=max(1, len(stages)),
            micro_batch=GLOBAL_BATCH // (replicate * shard) // 2,
            num_microbatches=2,
            schedule="1f1b" if stages else "none",
        )
        sizes = stages or (len(profile.layers),)
        training = TrainingSpec.model_validate({"global_batch": GLOBAL_BATCH, "precision": precision})
        ranks = replicate * shard * tensor * len(sizes)
        return make_plan(profile, cluster(1, ranks), training, shape, [[option or LayerOption()] * n for n in sizes])

    return plan


def trainer_of(plan: Plan, **more: Any) -> Trainer:
    return parallelize(Net, plan, sgd, loss=loss, **more)


def plain(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and parameters after one step of one process."""
    torch.manual_seed(0)
    model = Net()
    value = loss(model(batch[0]), batch)
    value.backward()
    sgd(model.parameters()).step()
    return value.item(), model.state_dict()


def test_wrong_number_of_ranks_is_refused_with_both_numbers(make: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match="the plan is for 4 ranks, this job has 1"):
        trainer_of(make(replicate=4))


def test_another_model_is_refused_with_both_numbers(make: Callable[..., Plan]) -> None:
    def wider() -> nn.Module:
        model = Net()
        model.head = nn.Linear(WIDTH, 2 * CLASSES)
        return model

    with pytest.raises(ValueError, match=r"3,368 parameters, this Net has 3,504"):
        parallelize(wider, make(), sgd, loss=loss)


def test_model_without_a_planned_parameter_is_refused(make: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match=r"a parameter blocks\.2\.0\.bias that this Net has not"):
        parallelize(lambda: Net(num_blocks=2), make(), sgd, loss=loss)


def test_model_with_a_parameter_that_was_not_planned_is_refused(make: Callable[..., Plan]) -> None:
    def longer() -> nn.Module:
        model = Net()
        model.head = nn.Sequential(model.head, nn.Linear(CLASSES, CLASSES))
        model.head.weight, model.head.bias = model.head[0].weight, model.head[0].bias
        return model

    with pytest.raises(ValueError, match=r"a parameter head\.1\.weight, which the plan for .* does not know"):
        parallelize(longer, make(), sgd, loss=loss)


def test_recompute_of_loose_modules_is_refused(make: Callable[..., Plan]) -> None:
    plan = make(option=LayerOption("full"))
    stage = plan.stages[0]
    two = stage.layers[0].model_copy(update={"modules": ("blocks.0", "blocks.1")})
    broken = plan.model_copy(update={"stages": (stage.model_copy(update={"layers": (two, *stage.layers[1:])}),)})

    with pytest.raises(ValueError, match="consists of 2 modules"):
        trainer_of(broken)


def test_one_device_needs_no_process_group(make: Callable[..., Plan]) -> None:
    batch = batch_of(GLOBAL_BATCH)
    expected_loss, expected = plain(batch)

    trainer = trainer_of(make())
    metrics = trainer.step(batch)

    assert not dist.is_initialized()
    assert metrics.loss == pytest.approx(expected_loss, rel=1e-6)
    assert metrics.tokens_per_s == pytest.approx(GLOBAL_BATCH / metrics.step_time_s)
    assert str(metrics).startswith(f"Metrics(loss={expected_loss:.4f}"[:-1])
    assert_same(trainer.full_state_dict(), expected)


def test_wrong_share_is_refused_with_both_numbers(make: Callable[..., Plan]) -> None:
    with pytest.raises(ValueError, match=r"must hold 8 samples .*, found tensors of 6 samples"):
        trainer_of(make()).step(batch_of(6))


def test_the_global_batch_given_to_every_rank_is_told_as_such() -> None:
    plan = some_plan(replicate=4, micro_batches=2)

    with pytest.raises(ValueError, match=r"the global batch: every data rank gives its own share .* trainer\.loader"):
        num_microbatches(plan, plan.training.global_batch)


def test_plan_may_be_a_file(make: Callable[..., Plan], tmp_path: Any) -> None:
    make().save(tmp_path / "plan.json")

    assert trainer_of(str(tmp_path / "plan.json")).samples_per_step == GLOBAL_BATCH


def _shares(plan: Plan) -> tuple[int, list[list[int]]]:
    trainer = trainer_of(plan)
    samples = [torch.tensor(i) for i in range(2 * GLOBAL_BATCH + 3)]
    return trainer.data_rank, [share.tolist() for share in trainer.loader(lambda: iter(samples))]


def test_loader_deals_every_global_batch_in_order(make: Callable[..., Plan]) -> None:
    shares = dict(run_ranks(_shares, 4, make(replicate=2, shard=2)))

    assert shares == {rank: [[2 * rank, 2 * rank + 1], [8 + 2 * rank, 9 + 2 * rank]] for rank in range(4)}


def test_an_epoch_that_is_left_early_is_followed_by_another_one(make: Callable[..., Plan], tmp_path: Any) -> None:
    data = [(torch.full((4, WIDTH), float(i)), torch.zeros(4, dtype=torch.int64)) for i in range(4 * GLOBAL_BATCH)]

    def first_batch(trainer: Any) -> list[float]:
        for inputs, targets in trainer.loader(data, shuffle=True):
            trainer.step((inputs, targets))
            break
        return inputs[:, 0, 0].tolist()  # type: ignore[no-any-return]

    trainer = trainer_of(make())
    first, second = first_batch(trainer), first_batch(trainer)
    trainer.save(tmp_path)
    third = first_batch(trainer)
    resumed = trainer_of(make())
    resumed.resume(tmp_path)

    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    assert set(first_batch(resumed)).isdisjoint(second)
    assert trainer.progress.epoch == 2
    assert resumed.progress.epoch == 1


def _in_turns(trainer: Any, steps: int, sizes: tuple[int, int]) -> list[list[float]]:
    """Which samples come, of two sets of data by turns, each begun anew when it has ended."""
    sets = [
        [(torch.full((4, WIDTH), 1e3 * which + i), torch.zeros(4, dtype=torch.int64)) for i in range(size)]
        for which, size in enumerate(sizes)
    ]
    loaders = [trainer.loader(data, shuffle=True) for data in sets]
    found = []
    for step in range(steps):
        which = step % 2
        batch = next(loaders[which], None)
        if batch is None:
            loaders[which] = trainer.loader(sets[which], shuffle=True)
            batch = next(loaders[which])
        trainer.step(batch)
        found.append(batch[0][:, 0, 0].tolist())
    return found


@pytest.mark.parametrize("sizes", [(5 * GLOBAL_BATCH, 2 * GLOBAL_BATCH), (5 * GLOBAL_BATCH, 5 * GLOBAL_BATCH)])
@pytest.mark.parametrize("steps", [4, 6])
def test_loaders_that_are_read_in_turns_go_on_each_where_it_was(
    make: Callable[..., Plan], tmp_path: Any, steps: int, sizes: tuple[int, int]
) -> None:
    expected = _in_turns(trainer_of(make()), steps + 6, sizes)
    trainer = trainer_of(make())
    assert _in_turns(trainer, steps, sizes) == expected[:steps]
    trainer.save(tmp_path)
    resumed = trainer_of(make())
    resumed.resume(tmp_path)

    assert _in_turns(resumed, 6, sizes) == expected[steps:]
    assert [place.data for place in resumed.progress.others] == [f"{sizes[1]} samples, shuffle=True"]


def test_a_loader_that_another_one_has_followed_gives_its_place_to_that(
    make: Callable[..., Plan], tmp_path: Any
) -> None:
    data = [(torch.full((4, WIDTH), float(i)), torch.zeros(4, dtype=torch.int64)) for i in range(4 * GLOBAL_BATCH)]
    trainer = trainer_of(make())
    warm_up = trainer.loader(data)
    trainer.step(next(warm_up))
    batches = trainer.loader(data)
    for _ in range(3):
        trainer.step(next(batches))
    trainer.save(tmp_path)
    resumed = trainer_of(make())
    resumed.resume(tmp_path)

    assert next(resumed.loader(data))[0][0, 0, 0] == 3 * GLOBAL_BATCH
    assert next(warm_up)[0][0, 0, 0] == GLOBAL_BATCH


def test_a_loader_that_fails_before_its_first_batch_leaves_its_place(make: Callable[..., Plan], tmp_path: Any) -> None:
    data = [(torch.full((4, WIDTH), float(i)), torch.zeros(4, dtype=torch.int64)) for i in range(4 * GLOBAL_BATCH)]
    trainer = trainer_of(make())
    with pytest.raises(ValueError, match="need samples with numbers"):
        next(trainer.loader(lambda: iter(data), shuffle=True))

    trainer.step(next(trainer.loader(data)))

    assert (trainer.progress.epoch, trainer.progress.others) == (0, ())


def test_tensor_and_pipeline_ranks_take_the_same_share(make: Callable[..., Plan]) -> None:
    shares = run_ranks(_shares, 4, make(tensor=2, stages=(2, 2)))

    assert all(share == (0, [[*range(8)], [*range(8, 16)]]) for share in shares)


def _step(
    plan: Plan, batch: Any, model_fn: Any = Net, weight: Any = None, loss: Any = loss
) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    trainer = parallelize(model_fn, plan, sgd, loss=loss, weight=weight)
    random_state = torch.get_rng_state()
    metrics = trainer.step(next(iter(trainer.loader(list(zip(*batch, strict=True))))))
    return metrics.loss, trainer.full_state_dict(), random_state


@pytest.mark.parametrize(
    "degrees",
    slow.but_first([{"shard": 2}, {"stages": (2, 2)}, {"replicate": 2}, {"tensor": 2}], 2),
    ids=["fsdp", "pp", "ddp", "tp"],
)
def test_weight_makes_the_mean_one_over_all_tokens(make: Callable[..., Plan], degrees: dict[str, Any]) -> None:
    x, targets = batch_of(GLOBAL_BATCH)
    targets[2:, 1:] = -1  # the later samples have fewer valid tokens
    targets[4:] = -1  # and the last none, such that there are data ranks and micro-batches without any
    expected_loss, expected = plain((x, targets))

    found_loss, found, _ = run_ranks(_step, 2, make(**degrees), (x, targets), Net, weight, mean_of_valid)[0]

    assert found_loss == pytest.approx(expected_loss, rel=1e-6)
    assert_same(found, expected)


def test_a_model_that_computes_the_mean_itself_may_have_micro_batches_without_tokens(make: Callable[..., Plan]) -> None:
    batch = batch_of(GLOBAL_BATCH)
    batch[1][4:] = -1
    expected_loss, expected = plain(batch)

    found_loss, found, _ = run_ranks(_step, 2, make(shard=2), batch, OwnMean, weight, None)[0]

    assert found_loss == pytest.approx(expected_loss, rel=1e-6)
    assert_same(found, expected)


def test_a_step_of_which_nothing_counts_is_told(make: Callable[..., Plan]) -> None:
    trainer = parallelize(Net, make(), sgd, loss=loss, weight=lambda batch: 0.0)

    with pytest.raises(ValueError, match="so that none counts in the mean loss"):
        trainer.step(batch_of(GLOBAL_BATCH))


def test_noise_of_a_generator_that_data_ranks_share_is_told(
    make: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    model.blocks[1].noise = torch.Generator()  # type: ignore[assignment]

    for plan in (make(stages=(2, 2)), make(shard=2)):
        tell_own_generators(model, plan, 0)

    (told,) = caplog.messages
    assert told.startswith("blocks.1.noise is a generator of the model's own, which begins alike on all 2 data ranks")


def test_what_runs_before_steps_of_a_part_of_the_model_is_told(
    make: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = sgd([nn.Parameter(torch.ones(1))])
    tell_step_hooks(optimizer, make(stages=(2, 2)), 0)
    optimizer.register_step_pre_hook(lambda *_: None)

    for plan in (make(stages=(2, 2)), make(shard=2)):
        tell_step_hooks(optimizer, plan, 0)

    tell_step_hooks(optimizer, make(shard=2), 0, owned=True)

    assert ["one of 2 parts of the model" in told for told in caplog.messages] == [True, True]


@pytest.mark.slow
def test_units_may_be_written_into(make: Callable[..., Plan]) -> None:
    batch = batch_of(GLOBAL_BATCH)
    expected_loss, expected = plain(batch)

    for option in (LayerOption(reshard=True), LayerOption("full", reshard=True)):
        found_loss, found, _ = run_ranks(_step, 2, make(shard=2, option=option), batch, WritingNet)[0]

        assert found_loss == pytest.approx(expected_loss, rel=1e-6)
        assert_same(found, expected)


@pytest.mark.slow
def test_random_state_afterwards_is_that_of_one_process(make: Callable[..., Plan]) -> None:
    outcomes = run_ranks(_step, 4, make(tensor=2, stages=(1, 3)), batch_of(GLOBAL_BATCH))
    torch.manual_seed(0)
    Net()

    assert all(torch.equal(state, torch.get_rng_state()) for _, _, state in outcomes)


@pytest.mark.parametrize(
    "degrees",
    slow.but_first([{"replicate": 2}, {"shard": 2}, {"tensor": 2}, {"stages": (2, 2)}], 3),
    ids=["autocast ddp", "fsdp", "fsdp and tensor", "pipeline"],
)
def test_bf16_computes_in_bf16_and_keeps_fp32(make: Callable[..., Plan], degrees: dict[str, Any]) -> None:
    batch = batch_of(GLOBAL_BATCH)
    expected_loss, expected = plain(batch)

    found_loss, found, _ = run_ranks(_step, 2, make(precision="bf16", **degrees), batch)[0]

    assert found_loss == pytest.approx(expected_loss, rel=2e-2)
    assert found_loss != pytest.approx(expected_loss, rel=1e-6)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    torch.testing.assert_close(found, dict(expected), rtol=0, atol=2e-2)


def _initial(plan: Plan) -> dict[str, torch.Tensor]:
    apply.BUILD_LIMIT_BYTES = 0
    initialise.BLOCK_ELEMENTS = 64
    return trainer_of(plan).full_state_dict()


@pytest.mark.slow
def test_large_models_begin_alike_under_every_plan(make: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "BUILD_LIMIT_BYTES", 0)
    monkeypatch.setattr(initialise, "BLOCK_ELEMENTS", 64)
    expected = _initial(make())

    for degrees in ({"shard": 2, "tensor": 2}, {"replicate": 2, "stages": (1, 3)}):
        found = run_ranks(_initial, 4, make(**degrees))[0]

        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_large_models_begin_with_what_the_constructor_does() -> None:
    values = initial_values(Net, is_large=True, seed=0)

    rows = values.parameter("blocks.0.0.weight")
    head = values.parameter("head.weight")
    assert torch.equal(values.parameter("scale"), torch.ones(WIDTH))
    torch.testing.assert_close(rows.T @ rows, torch.eye(WIDTH))
    assert head.std().item() == pytest.approx(0.5, rel=0.2)
    assert head.abs().max() <= 2
    assert not torch.equal(values.parameter("blocks.1.0.weight"), values.parameter("blocks.2.0.weight"))
    assert torch.equal(head, initial_values(Net, is_large=True, seed=0).parameter("head.weight"))
    assert not torch.equal(head, initial_values(Net, is_large=True, seed=1).parameter("head.weight"))


class Banks(nn.Module):
    """Stacked experts, and an embedding with a row of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.empty(32, 8, WIDTH))
        self.tokens = nn.Embedding(256, WIDTH, padding_idx=99)
        nn.init.normal_(self.experts, std=0.1)


class LargestStorage(TorchDispatchMode):
    """Elements of the largest storage that any operator's result lies in."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_leaves(output):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return output


@pytest.mark.parametrize(
    ("cut", "own"),
    [
        (ParameterCut(0, (256,), 4), (slice(128, 192), slice(None))),
        (ParameterCut(0, (128, 128), 4), ([*range(64, 96), *range(192, 224)], slice(None))),
        (ParameterCut(1, (WIDTH,), 4), (slice(None), slice(8, 12))),
    ],
)
def test_ranks_make_only_their_part_of_large_parameters(
    monkeypatch: pytest.MonkeyPatch, cut: ParameterCut, own: Any
) -> None:
    monkeypatch.setattr(initialise, "BLOCK_ELEMENTS", 512)
    values = initial_values(Banks, is_large=True, seed=0)
    tokens, experts = values.parameter("tokens.weight"), values.parameter("experts")
    held = {"experts": HeldExperts(32, 4, 1, ExpertPlace(expert=2, shard=0))}
    with torch.device("meta"):
        stage = Banks()

    with LargestStorage() as largest:
        Materialiser(stage, values, {"tokens.weight": cut}, 2, torch.device("cpu"), held)([stage])

    assert largest.elements <= 1024
    assert torch.equal(stage.experts, experts[16:24])
    assert torch.equal(stage.tokens.weight, tokens[own])
    assert not tokens[99].any()
    assert experts.std().item() == pytest.approx(0.1, rel=0.1)
    assert len(experts.flatten().unique()) > 0.99 * experts.numel()


def test_large_models_may_not_look_at_their_numbers() -> None:
    class Curious(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            if self.weight.sum() > 0:
                nn.init.zeros_(self.weight)

    with pytest.raises(ValueError, match="may not look at the numbers"):
        initial_values(Curious, is_large=True, seed=0)


def test_large_models_must_initialise_everything() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))

    with pytest.raises(ValueError, match="weight gets no numbers"):
        initial_values(Empty, is_large=True, seed=0).parameter("weight")


def test_a_plan_that_is_only_priced_is_refused_in_a_sentence(make: Callable[..., Plan]) -> None:
    plan = make()
    in_fp4 = plan.model_copy(update={"training": plan.training.model_copy(update={"precision": "fp4"})})

    with pytest.raises(ValueError, match="precision fp4, which is priced, not run yet: plan with --precision bf16"):
        parallelize(lambda: torch.nn.Linear(2, 2), in_fp4, sgd)


def test_whole_states_share_no_memory_with_what_is_trained_nor_with_each_other() -> None:
    plan = tied_net.plan_of(tied_net.tied_profile())
    trainer = parallelize(tied_net.TiedNet, plan, tied_net.adamw, loss=tied_net.loss)
    shares = trainer.loader(tied_net.samples)
    trainer.step(next(shares))
    state, gradients = trainer.full_state_dict(), trainer.named_gradients()
    before = {name: value.clone() for name, value in {**state, **gradients}.items()}
    memory = [value.untyped_storage().data_ptr() for found in (state, gradients) for value in found.values()]

    trainer.step(next(shares))

    assert all(torch.equal(value, before[name]) for name, value in {**state, **gradients}.items())
    assert len(set(memory)) == len(memory)
    assert "head.weight" in state
    assert torch.equal(state["head.weight"], state["tokens.weight"])


def test_batch_norms_that_see_micro_batches_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = tied_net.plan_of(tied_net.tied_profile())

    parallelize(tied_net.TiedNet, plan, tied_net.adamw, loss=tied_net.loss)

    (message,) = (record.getMessage() for record in caplog.records if record.name == "meshwright")
    assert message.startswith("1 batch norms (norm first) take their statistics from micro-batches of 4 samples")
    assert "not from the global batch of 8" in message
