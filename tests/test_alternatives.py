"""The one list of alternatives: of different kinds, and the same numbers wherever it is shown."""

import io
import json
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from meshwright.executor.commands.answers import print_plan
from meshwright.executor.planned import Planned
from meshwright.executor.reporting.explain_report import Explanation, explanation_document, print_explanation
from meshwright.executor.reporting.html_report import report_page
from meshwright.executor.reporting.report import json_document
from meshwright.executor.reporting.report_facts import gather
from meshwright.executor.reporting.terminal import print_essentials
from meshwright.planner.answers.alternatives import SHOWN, family, of_other_families, shown, trade
from meshwright.planner.answers.candidate import Candidate
from meshwright.planner.answers.landscape import landscape, weighed
from meshwright.planner.answers.search import SearchResult, search
from meshwright.planner.answers.sweep import kind_in_words
from meshwright.planner.answers.verdict import Verdict, VerdictKind
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.plan.document import Plan
from meshwright.planner.plan.shape import Shape
from meshwright.planner.plan.training import TrainingSpec
from meshwright.profiler.machine.cluster import ClusterSpec, cluster_of, load_device
from meshwright.profiler.model.model_profile import ModelProfile
from support import slow
from support.cli import small_profile
from support.exported import PROFILE, planned

_H100, _A100 = load_device("h100-80gb"), load_device("a100-40gb")
_SLOW_NETWORK = _A100.network.model_copy(update={"bandwidth": 1e9})
_CLUSTERS = {
    "one host": cluster_of(_H100, 4, 4),
    "two kinds": ClusterSpec(
        name="two kinds",
        hosts=tuple(group for one in (_H100, _A100) for group in cluster_of(one, 4, 4).hosts),
        network=_A100.network,
    ),
    "slow network": cluster_of(_A100.model_copy(update={"network": _SLOW_NETWORK}), 8, 2),
    "two hosts of little memory": cluster_of(_A100.model_copy(update={"memory": 6 * 2**30}), 8, 4),
}

_PACE = re.compile(r"[\d.]+% (?:slower|faster)|[\d.]+ times as long|as fast as the plan")


@dataclass(frozen=True)
class _Case:
    profile: ModelProfile
    result: SearchResult
    saved: Plan
    """The plan as it comes back from its file."""


@pytest.fixture(scope="module", params=slow.but_first(_CLUSTERS, 2))
def case(request: pytest.FixtureRequest) -> _Case:
    profile = small_profile()
    result = search(profile, _CLUSTERS[request.param], TrainingSpec(global_batch=16, seq_len=profile.seq_len))
    return _Case(profile, result, Plan.model_validate_json(result.plan.model_dump_json()))


def _paces(text: str) -> list[str]:
    return [" ".join(found.split()) for found in _PACE.findall(text)]


def _printed(show: "object", *arguments: object) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    show(console, *arguments)  # type: ignore[operator]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _section(text: str, title: str, end: str) -> str:
    return text.partition(f"\n{title}\n")[2].partition(end)[0]


def test_terminal_report_explain_and_json_say_the_same_of_the_same_plans(case: _Case) -> None:
    result, saved = case.result, case.saved
    found = estimate(saved, case.profile)
    facts = gather(saved, case.profile, seconds=0.0)
    explained = Explanation(saved, found, alternatives=weighed(saved, found, case.profile, 0.0))

    document = json_document(result)["alternatives"]
    ratios = [each["ratio"] for each in document]
    words = [_paces(each["verdict"]) for each in document]
    said = [pace for paces in words for pace in paces]
    places = [result.alternatives.index(each) for each in shown(result.alternatives, saved)]
    brief = [pace for place in places for pace in words[place]]

    assert brief
    assert [each.ratio for each in saved.alternatives if each.step_time_s is not None] == [
        ratio for ratio in ratios if ratio is not None
    ]
    assert json.loads(json.dumps(explanation_document(explained)["alternatives"])) == json.loads(json.dumps(document))
    table = report_page(facts, "plan.json").partition("what it would trade</h3>")[2].partition("</table>")[0]
    assert _paces(table) == said
    planned = Planned(saved, lambda: case.profile, result=result)
    printed = _printed(print_plan, planned, None, False, True)
    assert _paces(_section(printed, "Alternatives", "\n\n")) == brief
    assert _paces(_section(_printed(print_essentials, facts), "Alternatives", "\n\n")) == brief
    assert _paces(_section(_printed(print_explanation, explained), "Alternatives", "\n\n")) == brief


def test_a_saved_list_comes_back_with_its_plans_and_prices(case: _Case) -> None:
    found = estimate(case.saved, case.profile)

    again = weighed(case.saved, found, case.profile, 0.0)

    assert [(c.label, c.verdict, c.estimate) for c in again] == [
        (c.label, c.verdict, c.estimate) for c in case.result.alternatives
    ]


def _kinds(plan: Plan) -> str:
    """The kinds of parallelism of a plan. Shards are one kind, whenever they are gathered; replicas of shards are no
    other where anything else splits the model."""
    words = kind_in_words(plan).replace("ZeRO-1", "FSDP")
    return words.replace("HSDP +", "FSDP +")


def test_what_is_shown_are_other_families_each_once_and_none_of_them_has_a_faster_one(case: _Case) -> None:
    result = case.result
    plans = [each.plan for each in of_other_families(result.alternatives, result.plan) if each.plan is not None]
    families = [family(plan.degrees) for plan in plans]

    others = {_kinds(each.plan) for each in result.alternatives if each.plan is not None} - {_kinds(result.plan)}
    assert len({_kinds(plan) for plan in plans}) == len(plans) == min(SHOWN, len(others))
    assert _kinds(result.plan) not in {_kinds(plan) for plan in plans}
    for each in result.alternatives:
        if each.plan is not None and family(each.plan.degrees) in families:
            best = result.alternatives[families.index(family(each.plan.degrees))]
            assert best.seconds <= each.seconds


def test_what_an_alternative_would_trade_are_its_own_memory_and_kinds(case: _Case) -> None:
    peak = case.result.estimate.peak_device_bytes
    for each in case.result.alternatives:
        traded = trade(each, case.result.plan, case.result.estimate)
        if traded is None or each.plan is None or each.estimate is None:
            continue
        assert traded.more_bytes == each.estimate.peak_device_bytes - peak
        pipelines = each.plan.degrees.pipeline > 1, case.result.plan.degrees.pipeline > 1
        words = {(True, False): "with a pipeline", (False, True): "without a pipeline"}
        assert (words.get(pipelines) in traded.needs) == (pipelines in words)


def test_a_plan_that_says_nothing_is_weighed_against_rules_of_thumb(case: _Case) -> None:
    bare = case.saved.model_copy(update={"alternatives": ()})

    listed = weighed(bare, estimate(bare, case.profile), case.profile, 1.0)

    assert {each.label for each in listed} == {each.label for each in case.result.baselines}


def test_a_list_is_priced_anew_where_the_plan_is_another_by_now(case: _Case) -> None:
    first = case.result.alternatives[0]
    assert first.estimate is not None
    slower = estimate(case.saved, case.profile).model_copy(update={"step_time_s": first.estimate.step_time_s / 3})

    again = weighed(case.saved, slower, case.profile, 0.0)

    assert again[0].verdict.ratio == pytest.approx(2.0)


def test_no_layout_is_one_point_twice() -> None:
    profile = small_profile()
    result = search(profile, cluster_of(_H100, 1), TrainingSpec(global_batch=64, seq_len=profile.seq_len))
    found, known = result.estimate, result.alternatives

    others = landscape(result.plan, found, profile, known, 5.0)

    plans = [each.plan for each in (*known, *others) if each.plan is not None and each.plan != result.plan]
    assert len(plans) > 2
    assert len({(plan.degrees, plan.micro_batch, plan.schedule, plan.stages) for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("shards", "needs"),
    [(8, ("without context parallelism",)), (1, ("without context parallelism", "state not sharded"))],
)
def test_context_ranks_shard_the_state_as_well(shards: int, needs: tuple[str, ...]) -> None:
    over_context = planned(Shape(1, 1, 1, 1, 1, 8, context=8, context_kind="ring"))
    beside = planned(Shape(8 // shards, shards, 1, 1, 1, 1))
    found = estimate(beside, PROFILE)
    candidate = Candidate("beside", beside, found, Verdict(VerdictKind.SLOWER), found.step_time_s)

    told = trade(candidate, over_context, estimate(over_context, PROFILE))

    assert told is not None
    assert told.needs == needs
