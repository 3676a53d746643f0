"""A plan in words and rows: the sentence that gives the reason, runs of layers, who sits where, the JSON document."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...planner.answers.verdict import VerdictKind
from ...planner.cost.expert_place import expert_group
from ...planner.plan.document import CONTEXT_NAMES, Certificate, GroupAxis, LayerPlan, Plan, parts_in_words, parts_of
from ...planner.plan.layer_counts import parts_kinds, recompute_shares
from ...planner.plan.not_run import not_run
from ...profiler.machine.units import GIB, counted, format_count, format_seconds

if TYPE_CHECKING:
    from ...planner.answers.candidate import Candidate
    from ...planner.answers.fewer import Fewer
    from ...planner.answers.search import SearchResult
    from ...planner.cost.estimate import Estimate

_BRACKETS = re.compile(r" \(.*\)")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_MANY_RUNS = 4
_MOST_PARTS = 2
"""Ways to recompute parts of layers that are told one by one."""
_RECOMPUTES = {"full": "recompute", "selective": "selective recompute", "attention": "recompute of attention"}


def choice_in_words(plan: Plan) -> str:
    """Layout, micro-batches, recompute and what is kept gathered, in a phrase."""
    layers = plan.layers
    kept = sum(not layer.reshard for layer in layers) if plan.degrees.sharded_over > 1 else 0
    label = plan.label
    parts = [label, f"micro-batch {plan.micro_batch} x {plan.num_microbatches}"]
    parts += [f"{_RECOMPUTES[kind]} in {share}" for kind, share in recompute_shares(plan, _RECOMPUTES).items()]
    of_parts = {parts_in_words(kind): share for kind, share in recompute_shares(plan, parts_kinds(plan)).items()}
    if len(of_parts) > _MOST_PARTS:
        recomputed = sum(bool(parts_of(layer.recompute)) for layer in layers)
        of_parts = {f"parts in {len(of_parts)} ways": counted(recomputed, "layer")}
    parts += [f"recompute of {names} in {share}" for names, share in of_parts.items()]
    away = sum(layer.offload for layer in layers)
    parts += [f"activations of {away} of {len(layers)} layers in host memory"] if away else []
    parts += ["optimizer in host memory"] if plan.offload_optimizer else []
    if kept and "ZeRO" not in label:
        whose = "" if kept == len(layers) else f" of {kept} layer{'s' if kept > 1 else ''}"
        parts.append(f"parameters{whose} stay gathered")
    return ", ".join(parts)


def splits_in_words(plan: Plan) -> dict[str, str]:
    """What people ask of a plan by name -> its answer: how sequences are split, and how experts are spread."""
    degrees, found = plan.degrees, {}
    ways = [f"SP with tensor={degrees.tensor}"] if plan.sequence_parallel else []
    ways += [f"context={degrees.context} ({CONTEXT_NAMES[plan.context_kind]})"] if degrees.context > 1 else []
    if ways:
        found["sequence"] = ", ".join(ways)
    if degrees.expert > 1:
        found["experts"] = f"{degrees.expert} ways over {' and '.join(_expert_axes(plan))}"
    return found


def _expert_axes(plan: Plan) -> list[str]:
    """Axes that expert groups run along, outermost first."""
    axes: list[str] = []
    ranks = 1
    for axis in reversed(plan.token_axes):
        if plan.degrees.of(axis) > 1 and ranks < plan.degrees.expert:
            axes.insert(0, axis)
            ranks *= plan.degrees.of(axis)
    return axes


@dataclass(frozen=True)
class Against:
    """Why this plan and no other, as a phrase. of_the_plan: whether the phrase says what the plan is, as in "7% faster
    than the next best"."""

    phrase: str
    of_the_plan: bool

    @property
    def sentence(self) -> str:
        """The phrase as a sentence of its own."""
        return f"It is {self.phrase}." if self.of_the_plan else f"{self.phrase[0].upper()}{self.phrase[1:]}."


def against_others(plan: Plan, step_time_s: float, others: Sequence["Candidate"]) -> Against:
    """Why this plan, against the candidates that were priced beside it."""
    from ...planner.answers.alternatives import shown
    from ...planner.answers.simplicity import machinery

    label, parts, of_the_plan = plan.label, [], False
    choice = label, plan.micro_batch
    fitting = [c for c in others if c.plan is not None and (c.plan.label, c.plan.micro_batch) != choice]
    different = sorted(shown(others, plan) or fitting, key=_step_time)
    if different:
        best = different[0]
        name = _name(best) if _name(best) != label else best.label
        if best.plan is not None and name == label:
            name += f" with micro-batch {best.plan.micro_batch}"
        ahead = _step_time(best) / step_time_s - 1
        of_the_plan = ahead > -0.015
        same = best.plan is not None and best.plan.micro_batch == plan.micro_batch and _name(best) == label
        if same and abs(ahead) < 0.0005:
            parts.append(f"what {best.name} is at its best")
        elif same and 0 < ahead < 0.01:
            parts.append(f"the layout of {best.name}, layer by layer {ahead:.1%} faster")
        elif ahead >= 0.01:
            nearer = any(_step_time(other) < _step_time(best) for other in fitting)
            rank = "best of other kinds" if nearer else "next best"
            parts.append(f"{_percent(ahead)} faster than the {rank}, {name}")
        elif ahead > -0.015:
            simpler = best.plan is not None and machinery(plan) < machinery(best.plan)
            parts.append(f"as fast as {name} within 1%{', and simpler' if simpler else ''}")
        else:
            parts.append(f"slower than {name} ({format_seconds(_step_time(best))}), which is {best.verdict.detail}")
    elif any(c.plan is None for c in others):
        parts.append("nothing else that was priced fits")
    too_big = list(
        dict.fromkeys(c.label for c in others if c.plan is None and c.verdict.kind is VerdictKind.DOES_NOT_FIT)
    )
    if too_big and different:
        names = " and ".join(too_big) if len(too_big) < 3 else f"{too_big[0]} and {len(too_big) - 1} others"
        parts.append(f"{names} {'does' if len(too_big) == 1 else 'do'} not fit")
    return Against("; ".join(parts) or "nothing else was priced", of_the_plan)


def _step_time(candidate: "Candidate") -> float:
    assert candidate.estimate is not None
    return candidate.estimate.step_time_s


def _name(candidate: "Candidate") -> str:
    assert candidate.plan is not None
    return candidate.plan.label


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 1 else f"{1 + share:.1f} times"


def collapse(names: Iterable[str]) -> str:
    """Names with counted runs joined: "embed, blocks.0-11, head"."""
    runs: list[tuple[str, int, int, str]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number, suffix = (match.group(1), int(match.group(2)), match.group(3)) if match else (name, -1, "")
        if runs and number >= 0:
            last_prefix, first, last, last_suffix = runs[-1]
            if (last_prefix, last + 1, last_suffix) == (prefix, number, suffix):
                runs[-1] = (prefix, first, number, suffix)
                continue
        runs.append((prefix, number, number, suffix))
    words = []
    for prefix, first, last, suffix in runs:
        numbers = "" if first < 0 else str(first) if first == last else f"{first}-{last}"
        words.append(prefix + numbers + suffix)
    return ", ".join(words)


def joined_notes(notes: Sequence[str]) -> list[str]:
    """Notes on single modules that say the same, but for what is in brackets, as one: "conv2 and 17 others: ..."."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        name, mark, text = note.partition(": ")
        alike.setdefault(_BRACKETS.sub("", text) if mark and " " not in name else note, []).append(note)
    joined = []
    for first, *others in alike.values():
        name, _, text = first.partition(": ")
        words = f"{name} and {len(others)} other{'s' if others[1:] else ''}: {text}"
        joined.append(words if others else first)
    return joined


@dataclass(frozen=True)
class AlikeLayers:
    """Consecutive layers of one stage that are treated alike."""

    names: str
    num_layers: int
    treatment: str


def layer_runs(plan: Plan, position: int) -> list[AlikeLayers]:
    """The layers of a pipeline coordinate, split where recompute, resharding or the tensor cut changes."""
    runs: list[tuple[str, list[str]]] = []
    for layer in (layer for stage in plan.stages_of(position) for layer in plan.stages[stage].layers):
        treatment = _treatment(plan, layer)
        if runs and runs[-1][0] == treatment:
            runs[-1][1].append(layer.name)
        else:
            runs.append((treatment, [layer.name]))
    return [AlikeLayers(collapse(names), len(names), treatment) for treatment, names in runs]


def stage_names(plan: Plan, position: int) -> str:
    """The stages of a pipeline coordinate: "3", "3, 11", "3, 11 .. 59"."""
    stages = [str(stage) for stage in plan.stages_of(position)]
    return ", ".join(stages) if len(stages) <= 3 else f"{stages[0]}, {stages[1]} .. {stages[-1]}"


def _treatment(plan: Plan, layer: LayerPlan) -> str:
    words = []
    if plan.degrees.tensor > 1:
        kinds = dict.fromkeys(cut.kind for cut in plan.class_plan(layer.layer_class).cuts)
        words.append("cut: " + ", ".join(kinds) if kinds else "whole")
    if plan.degrees.sharded_over > 1:
        words.append("reshard" if layer.reshard else "keep gathered")
    if layer.recompute != "none":
        kind = parts_in_words(layer.recompute) or layer.recompute
        words.append("recompute" if kind == "full" else f"recompute {kind}")
    return "; ".join(words) or "whole"


def rank_runs(plan: Plan, position: int) -> tuple[int, int, int]:
    """Ranks of a pipeline coordinate as (first, length of a run, distance between runs); the distance is 0 for a single
    run."""
    stride = plan.stride("pipeline")
    period = stride * plan.degrees.pipeline
    return position * stride, stride, period if period < plan.degrees.num_devices else 0


def gpus_of(plan: Plan, position: int) -> str:
    """Where a pipeline coordinate sits: "GPUs 0-3", "hosts 0-127", "GPUs 0-1, 4-5 of every host", or runs of ranks."""
    first, length, period = rank_runs(plan, position)
    cluster = plan.cluster
    world, per_host = plan.degrees.num_devices, cluster.devices_per_host
    equal_hosts = all(group.devices_per_host == per_host for group in cluster.hosts)
    starts = list(range(first, world, period)) if period else [first]
    if any(group.first is not None for group in cluster.hosts) or len(cluster.kinds) > 1:
        return _hosts_and_kinds(plan, starts, length)
    if cluster.num_hosts == 1:
        return "GPU" + _ranges([(s, s + length - 1) for s in starts])
    if equal_hosts and period and per_host % period == 0:
        return "GPU" + _ranges([(s, s + length - 1) for s in starts if s < per_host]) + " of every host"
    if equal_hosts and length % per_host == 0 and first % per_host == 0:
        return "host" + _ranges([(s // per_host, (s + length) // per_host - 1) for s in starts])
    places = []
    for start in starts[:_MANY_RUNS]:
        (host, low), (last_host, high) = cluster.host_of(start), cluster.host_of(start + length - 1)
        if host == last_host:
            places.append(f"host {host}: GPU" + _ranges([(low, high)]))
        else:
            places.append("rank" + _ranges([(start, start + length - 1)]))
    return ", ".join(places) + _more(len(starts))


def _hosts_and_kinds(plan: Plan, starts: list[int], length: int) -> str:
    """Where runs of ranks sit on unequal devices: hosts by their number in the cluster file, and the kinds of
    devices."""
    cluster, places = plan.cluster, []
    for start in starts[:_MANY_RUNS]:
        seats = [cluster.host_of(rank) for rank in range(start, start + length)]
        hosts = sorted({host for host, _ in seats})
        if len(hosts) == 1:
            places.append(f"host {hosts[0]}: GPU" + _ranges([(seats[0][1], seats[-1][1])]))
        else:
            places.append("host" + _ranges([(host, host) for host in hosts]))
    names = dict.fromkeys(cluster.device_of(s + i).name for s in starts for i in (0, length - 1))
    return f"{', '.join(places)}{_more(len(starts))} ({', '.join(names)})"


def _ranges(runs: list[tuple[int, int]]) -> str:
    merged: list[tuple[int, int]] = []
    for low, high in runs:
        if merged and merged[-1][1] + 1 == low:
            merged[-1] = (merged[-1][0], high)
        else:
            merged.append((low, high))
    words = [str(low) if low == high else f"{low}-{high}" for low, high in merged[:_MANY_RUNS]]
    several = len(merged) > 1 or merged[0][0] != merged[0][1]
    return ("s " if several else " ") + ", ".join(words) + _more(len(merged))


def _more(num_runs: int) -> str:
    return f", ... ({num_runs} such runs)" if num_runs > _MANY_RUNS else ""


@dataclass(frozen=True)
class AxisRow:
    """How one mesh axis, or the groups that share experts, lie on the cluster."""

    axis: GroupAxis
    degree: int
    first_group: str
    where: str


def axis_rows(plan: Plan) -> list[AxisRow]:
    """The mesh axes that split anything, outermost first, and where their groups sit; at last the expert groups, which
    run along them."""
    rows = []
    for axis in plan.mesh_axes:
        degree, stride = plan.degrees.of(axis), plan.stride(axis)
        if degree > 1:
            group = plan.cluster.group(degree, stride)
            rows.append(_axis_row(plan, axis, [i * stride for i in range(degree)], group.hosts))
    if plan.degrees.expert > 1:
        members = expert_group(plan)
        hosts = {plan.cluster.host_of(rank)[0] for rank in members}
        rows.append(_axis_row(plan, "expert", members, len(hosts)))
    return rows


def _axis_row(plan: Plan, axis: GroupAxis, members: list[int], hosts: int) -> AxisRow:
    if plan.cluster.num_hosts == 1:
        where = "the one host"
    elif hosts == 1:
        where = "inside a host"
    else:
        hosts = min(hosts, plan.cluster.num_hosts)
        each = f", {len(members) // hosts} in each" if len(members) % hosts == 0 else ""
        where = f"across {hosts:,} hosts{each}"
    shown = [str(m) for m in (members if len(members) <= 4 else [*members[:2], "...", members[-1]])]
    in_a_row = members == list(range(members[0], members[0] + len(members)))
    first_group = f"{members[0]}-{members[-1]}" if in_a_row else ", ".join(shown)
    return AxisRow(axis, len(members), first_group, where)


def _without_proof(plan: Plan) -> str:
    return "this plan was " + ("not searched for" if plan.measured is None else "chosen for what it measured")


def certificate_line(plan: Plan) -> str:
    """What was proven, in a line."""
    certificate = plan.certificate
    if certificate is None:
        return f"no certificate: {_without_proof(plan)}"
    shapes = certificate.shapes
    faster = 1.0 - certificate.bound / certificate.step_s
    if faster < 0.00005:
        proof = "no plan in the space is faster under the cost model"
    elif certificate.bound > 0:
        proof = f"no plan in the space can be more than {faster:.2%} faster under the cost model"
    else:
        proof = "stopped by the time limit before all shapes were counted; how far from the fastest is not known"
    simpler = ""
    if certificate.framework is not None:
        proof = proof.replace("in the space", f"that {certificate.framework} runs")
        proof += _restriction(certificate)
    if certificate.given_away >= 0.00005:
        simpler = f"; {certificate.given_away:.2%} of its time is given away for a simpler plan"
    return (
        f"{certificate.status}: {proof} (step {format_seconds(certificate.step_s)}, proven bound "
        f"{format_seconds(certificate.bound)}, gap {certificate.gap:.2%}{simpler}). "
        f"{shapes['total']:,} shapes = {shapes['rejected']:,} rejected by rule + {shapes['pruned']:,} pruned by bound "
        f"+ {shapes['solved']:,} solved, {certificate.solver}, {format_seconds(certificate.search_seconds)}"
    )


def _restriction(certificate: Certificate) -> str:
    """What keeping to a framework costs, against the fastest plan of the open search."""
    costs, open_s = certificate.restriction, certificate.open_s
    if costs is None or open_s is None:
        return ""
    if costs < 0.00005:
        return "; without that restriction the search found nothing faster for the same software"
    found = f"for the same software the open search found {format_seconds(open_s)}"
    return f"; keeping to it costs {costs:.2%} or more: {found}"


def proof_sentence(plan: Plan) -> str:
    """What was proven, in a sentence."""
    certificate = plan.certificate
    if certificate is None:
        return f"none: {_without_proof(plan)}"
    shapes, seconds = certificate.shapes["total"], format_seconds(certificate.search_seconds)
    looked = f"of {shapes:,} layouts, in {seconds}"
    faster = 1.0 - certificate.bound / certificate.step_s
    if certificate.bound <= 0:
        return f"none: the time limit came before all layouts were counted ({looked}); give it longer by --time-limit"
    searched = "is searched" if certificate.framework is None else f"{certificate.framework} runs"
    slower = "faster" if faster < 0.00005 else f"more than {faster:.2%} faster"
    return f"no plan that {searched} is {slower} under the cost model ({looked}){_restriction(certificate)}"


def stack_of(plan: Plan) -> str:
    """The name of the training stack that a plan is priced for."""
    return Path(plan.training.software).stem


def stacks_of(candidates: Sequence["Candidate"]) -> str:
    """The stacks that set-ups are priced for, one as a rule: "with fsdp2-eager"."""
    names = dict.fromkeys(stack_of(candidate.plan) for candidate in candidates if candidate.plan is not None)
    return f"with {' or '.join(names)}" if names else ""


def comparison_rows(
    candidates: Sequence["Candidate"], price_per_hour: float | None
) -> tuple[list[str], list[tuple[str, ...]]]:
    """(headings, rows): step, throughput, MFU, memory and, with a price, cost of every set-up.

    price_per_hour: US dollars of one device.
    """
    reference = next((c.estimate.step_time_s for c in candidates if c.estimate is not None), 0.0)
    sequences = any(c.plan is not None and c.plan.training.seq_len is not None for c in candidates)
    headings = ["set-up", "step", "to first", "tokens/s" if sequences else "samples/s", "MFU", "GiB"]
    headings += ["$/hour", "$/step"] if price_per_hour is not None else []
    rows: list[tuple[str, ...]] = []
    for c in candidates:
        found = c.estimate
        if found is None or c.plan is None:
            rows.append((c.label, *["-"] * (len(headings) - 1)))
            continue
        cells = [
            c.label,
            format_seconds(found.step_time_s),
            f"{found.step_time_s / reference:.2f}x",
            format_count(found.tokens_per_s),
            f"{found.mfu:.1%}",
            f"{found.peak_device_bytes / GIB:.1f}",
        ]
        if price_per_hour is not None:
            hourly = price_per_hour * c.plan.degrees.num_devices
            cells += [f"{hourly:,.2f}", f"{hourly * found.step_time_s / 3600:,.3g}"]
        rows.append(tuple(cells))
    return headings, rows


def loss_rows(candidates: Sequence["Candidate"]) -> tuple[str, list[str], list[tuple[str, ...]]]:
    """(unit, headings, rows): what every set-up's step goes to, by cause; causes that cost nobody anything are left
    out."""
    priced = [(c.label, c.estimate) for c in candidates if c.estimate is not None]
    longest = max((found.step_time_s for _, found in priced), default=0.0)
    unit, scale = next((u for u in (("s", 1.0), ("ms", 1e3)) if longest * u[1] >= 10), ("us", 1e6))
    causes = dict.fromkeys(name for _, found in priced for name in found.breakdown)
    names = [n for n in causes if any(found.breakdown.get(n, 0.0) > 1e-3 * found.step_time_s for _, found in priced)]
    rows = [
        (label, *(_three_digits(scale * s) for s in (found.step_time_s, *(found.breakdown.get(n, 0.0) for n in names))))
        for label, found in priced
    ]
    return unit, ["set-up", "step", *names], rows


def _three_digits(value: float) -> str:
    return "0" if value == 0 else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def launch_command(plan: Plan) -> str:
    """The torchrun line that starts train.py on the plan's cluster."""
    machines = plan.cluster.num_machines
    nodes = f"--nnodes {machines} " if machines > 1 else ""
    sizes = {group.devices_per_machine for group in plan.cluster.hosts}
    each = plan.cluster.devices_per_machine if len(sizes) == 1 else "gpu"
    return f"torchrun {nodes}--nproc-per-node {each} train.py"


def hosts_in_order(plan: Plan) -> str:
    """In which order hosts of several kinds are started, which may not be that of the cluster's file; "" for one
    kind."""
    if len(plan.cluster.kinds) == 1:
        return ""
    if len({(group.devices_per_host, group.device.name) for group in plan.cluster.hosts}) == 1:
        alike = all(group.device == plan.cluster.hosts[0].device for group in plan.cluster.hosts)
        what = "links are not equally fast" if alike else "devices have one name but not one speed"
        return f"node ranks in the order of the cluster's hosts, whose {what}"
    kinds = [f"{group.count} with {group.devices_per_host} x {group.device.name}" for group in plan.cluster.hosts]
    return f"node ranks in this order of hosts: {', then '.join(kinds)}"


def json_document(result: "SearchResult", fewer: "Fewer | None" = None) -> dict[str, Any]:
    """What `plan --json` prints: plan, what of it is not run yet, estimate, certificate, alternatives, and fewer GPUs
    that would nearly do."""
    return {
        "plan": result.plan.model_dump(mode="json"),
        "not_run": list(not_run(result.plan)),
        "estimate": result.estimate.model_dump(mode="json"),
        "certificate": result.certificate.model_dump(mode="json"),
        "alternatives": alternatives_document(result.alternatives, result.plan, result.estimate),
        "fewer_gpus": None if fewer is None else asdict(fewer),
    }


def alternatives_document(listed: Sequence["Candidate"], plan: Plan, found: "Estimate") -> list[dict[str, Any]]:
    """What was weighed beside a plan, with what each layout would trade."""
    from ...planner.answers.alternatives import trade

    rows = []
    for each in listed:
        traded = trade(each, plan, found)
        beside = None if traded is None else {"more_bytes": traded.more_bytes, "needs": list(traded.needs)}
        rows.append(candidate_document(each) | {"by_rule": each.by_rule, "trade": beside})
    return rows


def candidate_document(candidate: "Candidate") -> dict[str, Any]:
    """One alternative: its layout, estimate and verdict; nulls where it does not fit or is not legal."""
    plan, estimate = candidate.plan, candidate.estimate
    return {
        "label": candidate.label,
        "verdict": str(candidate.verdict),
        "ratio": None if estimate is None else candidate.verdict.ratio,
        "degrees": None if plan is None else plan.degrees.model_dump(mode="json"),
        "micro_batch": None if plan is None else plan.micro_batch,
        "num_microbatches": None if plan is None else plan.num_microbatches,
        "schedule": None if plan is None else plan.schedule,
        "estimate": None if estimate is None else estimate.model_dump(mode="json"),
    }
