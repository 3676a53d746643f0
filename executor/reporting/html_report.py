"""The report of a plan as one HTML file that needs no network."""

import re
from collections.abc import Callable, Sequence
from html import escape, unescape
from pathlib import Path

from ...planner.answers.alternatives import in_words
from ...planner.answers.explain import CAUSES, reason
from ...planner.answers.search import Candidate
from ...planner.cost.bands import Band, memory_band, no_time_band, time_band
from ...planner.cost.estimate import MFU_CONVENTION, Estimate
from ...planner.exchange.export import export
from ...planner.exchange.targets import NAMES, TARGETS
from ...planner.plan.document import Plan
from ...planner.plan.not_run import marked
from ...planner.plan.setups import setup_words
from ...profiler.machine.units import GIB, format_bytes, format_count, format_seconds, gpus_in_words
from .choice_charts import scatter, tornado
from .drawing import legend, table, tag
from .glossary import terms_in
from .graph_chart import cut_rows, layer_graph, shared_weights
from .html_page import folded, job_in_words, page, section, verdict_rows, wide
from .place_charts import cluster_map, host_cards, layer_strip, stage_places
from .report import (
    against_others,
    axis_rows,
    certificate_line,
    choice_in_words,
    hosts_in_order,
    launch_command,
    layer_runs,
    proof_sentence,
    splits_in_words,
    stage_names,
)
from .report_facts import Facts
from .step_charts import memory_bars, timeline, waterfall

_TAGS = re.compile(r"<[^>]*>")
_MOST_SHARED = 4
_IN_A_CELL = 3
_TRILLION = 1e12
_DAY_S = 86_400.0


def report_page(facts: Facts, plan_file: str, notes: Sequence[str] = (), run: str = "") -> str:
    """The report of a plan. notes: what could not be cut or recognised; run: markup of a table of a real run."""
    plan = facts.plan
    sections = [
        _where_section(facts),
        _graph_section(facts),
        _memory_section(facts),
        _timeline_section(facts),
        _breakdown_section(facts),
        _alternatives_section(facts),
        _sensitivity_section(facts),
        _proof_section(plan),
        *([section("run", "A real run", "", run)] if run else []),
        _use_section(plan, plan_file, notes),
    ]
    title = f"{plan.model.name} on {plan.cluster.devices.replace(' x ', ' × ')}"
    head = f'<p class="kicker">Training plan</p><h1>{escape(title)}</h1>' + tag(
        "p", escape(job_in_words(plan)), class_="sub"
    )
    links = [
        ("where", "GPUs and layers"),
        ("graph", "The model"),
        ("memory", "Memory"),
        ("time", "One step"),
        ("causes", "Where it goes"),
        ("alternatives", "Alternatives"),
        ("sensitivity", "Sensitivity"),
        ("proof", "Proof"),
        ("use", "Use it"),
        ("words", "Words"),
    ]
    decision = _decision(plan, facts.estimate, facts.alternatives)
    sections.append(_words_section(decision + "".join(sections)))
    return page(title, head + decision + _tiles(plan, facts.estimate), links, sections)


_CELL_STYLE = (
    "<style>.meshwright .tiles{display:flex;flex-wrap:wrap;gap:8px;margin:8px 0}"
    ".meshwright .tile{border:1px solid #8886;border-radius:6px;padding:6px 10px}"
    ".meshwright .tile span,.meshwright .tile small{display:block;opacity:.7}"
    ".meshwright .tile b{font-size:1.3em}</style>"
)


def first_page(plan: Plan, found: Estimate | None, others: Sequence[Candidate]) -> str:
    """What a report says before its sections, for a notebook's cell; of a plan without an estimate, its table."""
    if found is None:
        return plan._repr_html_()
    title = tag("b", escape(f"{plan.model.name} on {plan.cluster.devices.replace(' x ', ' × ')}"))
    rows = [
        (each.name, format_seconds(each.estimate.step_time_s), str(each.verdict))
        for each in others
        if each.estimate is not None
    ][:_IN_A_CELL]
    instead = table(["instead", "step", "verdict"], rows, numeric_from=3) if rows else ""
    shown = title + _decision(plan, found, others) + _tiles(plan, found) + instead
    return _CELL_STYLE + tag("div", shown + tag("p", escape(f"Proof: {proof_sentence(plan)}.")), class_="meshwright")


def _decision(plan: Plan, found: Estimate, alternatives: Sequence[Candidate]) -> str:
    hosts = plan.cluster.num_hosts
    unit = "tokens" if plan.training.seq_len is not None else "samples"
    peak = max(found.memory, key=lambda stage: stage.device_bytes / stage.budget_bytes)
    sentences = [
        f"Train <b>{escape(plan.model.name)}</b> on {escape(plan.cluster.devices.replace(' x ', ' '))} "
        f"({hosts:,} host{'s' if hosts > 1 else ''}) with <b>{escape(choice_in_words(plan))}</b>.",
        *([f"<b>{escape(marked(plan).capitalize())}.</b>"] if marked(plan) else []),
        *(escape(f"{name.capitalize()}: {words}.") for name, words in splits_in_words(plan).items()),
        f"One optimizer step is predicted to take <b>{format_seconds(found.step_time_s).replace(' ', '&nbsp;')}</b>: "
        f"{format_count(found.tokens_per_s)} {unit} per second at {found.mfu:.0%} of the GPUs' peak.",
        f"The fullest GPU holds {format_bytes(peak.device_bytes)} of the {format_bytes(peak.budget_bytes)} it may use.",
    ]
    why = reason(plan, found, next((c.verdict for c in alternatives if c.label == "DDP"), None))
    sentences.append(escape(f"Why: {why}."))
    if alternatives:
        sentences.append(escape(against_others(plan, found.step_time_s, alternatives).sentence))
    return tag("p", " ".join(sentences[:3]), class_="lead") + tag("p", " ".join(sentences[3:]))


def _between(band: Band | None, predicted: float, words: Callable[[float], str]) -> str:
    """The band around a prediction: where 8 of 10 published runs of the kind fell."""
    return "" if band is None else "{} to {} in 8 of 10 runs; ".format(*map(words, band.around(predicted)))


def _tiles(plan: Plan, found: Estimate) -> str:
    unit = "tokens/s" if plan.training.seq_len is not None else "samples/s"
    fullest = max(found.memory, key=lambda stage: stage.device_bytes / stage.budget_bytes)
    peak, budget = fullest.device_bytes, fullest.budget_bytes
    tiles = [
        (
            "step time",
            format_seconds(found.step_time_s),
            _between(time_band(plan), found.step_time_s, format_seconds)
            + f"{plan.num_microbatches} × micro-batch {plan.micro_batch} per data rank",
        ),
        (
            unit,
            format_count(found.tokens_per_s),
            f"{format_count(found.tokens_per_s / plan.degrees.num_devices)} per GPU",
        ),
        ("MFU", f"{found.mfu:.1%}", "of dense peak FLOP/s"),
        (
            "memory",
            f"{peak / GIB:.1f} GiB",
            _between(memory_band(plan), peak, format_bytes) + f"{peak / budget:.0%} of the budget on the fullest GPU",
        ),
    ]
    price = plan.cluster.price_per_hour
    if plan.training.seq_len is not None:
        days = _TRILLION / found.tokens_per_s / _DAY_S
        cost = ""
        if price is not None:
            cost = f", ${format_count(days * 24 * price * plan.degrees.num_devices)}"
        tiles.append(("a trillion tokens", _days(days), f"on {gpus_in_words(plan.degrees.num_devices)}{cost}"))
    if price is not None:
        hourly = price * plan.degrees.num_devices
        tiles.append(("cost", f"${hourly:,.2f}/h", f"${hourly * found.step_time_s / 3600:,.4g} per step"))
    cells = (
        tag("div", tag("span", name) + tag("b", value) + tag("small", escape(below)), class_="tile")
        for name, value, below in tiles
    )
    why = no_time_band(plan)
    unknown = tag("p", escape(f"How far off these may be is not known: {why}."), class_="sub") if why else ""
    return tag("div", "".join(cells), class_="tiles") + unknown


def _days(days: float) -> str:
    return f"{days:,.0f} days" if days >= 10 else f"{days:.1f} days" if days >= 1 else f"{24 * days:.1f} h"


def _where_section(facts: Facts) -> str:
    plan = facts.plan
    picture, names = layer_strip(plan)
    content = tag("h3", "The model's layers") + names + wide(picture)
    if any(layer.recompute != "none" for layer in plan.layers):
        content += tag("p", "Hatched layers run their forward again during backward (recompute).", class_="sub")
    whole = cluster_map(facts)
    content += tag("h3", "The whole cluster") + wide(whole) if whole else ""
    kinds = "Every host" if len(facts.patterns) == 1 else "Each kind of host"
    content += tag("h3", kinds) + wide(host_cards(facts))
    places = table(["stage", "where", "layers"], stage_places(plan), numeric_from=3)
    treated = [
        (stage_names(plan, position), run.names, str(run.num_layers), run.treatment)
        for position in range(plan.degrees.pipeline)
        for run in layer_runs(plan, position)
    ]
    axes = [(row.axis.replace("_", " "), f"{row.degree:,}", row.first_group, row.where) for row in axis_rows(plan)]
    content += folded("Stages in a table", places)
    content += folded(
        "Layers and their treatment", table(["stage", "layers", "count", "treatment"], treated, numeric_from=4)
    )
    if axes:
        content += folded(
            "Mesh axes, outermost first",
            table(["axis", "ways", "ranks of the first group", "each group sits"], axes, numeric_from=4),
        )
    below = {
        True: "Colours are pipeline stages: which layers each holds, and which GPUs hold it.",
        False: "Every GPU works on all layers; what is split are samples, parameters or single layers.",
    }[plan.degrees.pipeline > 1]
    return section("where", "Which layer lives on which GPU", below, content)


def _graph_section(facts: Facts) -> str:
    plan, graph = facts.plan, facts.graph
    dtype = "fp32" if plan.training.compute_bytes == 4 else "bf16"
    words = "".join(tag("p", escape(f"Shared: {told}."), class_="sub") for told in shared_weights(graph)[:_MOST_SHARED])
    if len(plan.stages) > 1:
        words += table(["cut", "tensors", "bytes a sample"], cut_rows(plan, graph))
    below = (
        f"Equal layers in a row are one box. Bytes are those of one sample in {dtype}. Arcs are tensors that pass by "
        "layers; a cut between stages carries all that lies across it."
    )
    picture = tag("div", layer_graph(plan, graph), class_="graph")
    content = tag("div", picture + tag("div", words, class_="rest"), class_="beside")
    return section("graph", "The model as a graph", below, content)


def _memory_section(facts: Facts) -> str:
    picture, names = memory_bars(facts)
    memory = facts.estimate.memory
    items = list(memory[0].items)
    rows = [
        (
            str(i),
            *(f"{stage.items[name] / GIB:.2f}" for name in items),
            f"{stage.device_bytes / GIB:.2f}",
            f"{-stage.over_bytes / GIB:.2f}",
            *([f"{stage.budget_bytes / GIB:.2f}", escape(stage.device)] if stage.device else []),
        )
        for i, stage in enumerate(memory)
    ]
    more = ["budget", "device"] if memory[0].device else []
    below = f"Peak of one GPU, itemised. {facts.plan.training.memory_margin:.0%} of the device is left free on purpose."
    details = folded("Every rank in a table (GiB)", table(["rank", *items, "total", "free", *more], rows))
    return section("memory", "Memory against the budget", below, names + wide(picture) + details)


def _timeline_section(facts: Facts) -> str:
    plan, played = facts.plan, facts.played
    picture, names = timeline(facts)
    left_out = plan.num_microbatches - played.num_microbatches
    below = "The plan's own schedule by event simulation, whole."
    if left_out:
        full = "" if played.num_microbatches > plan.degrees.pipeline else " (which is not reached in the picture)"
        below = (
            f"The plan's own schedule by event simulation. {played.num_microbatches} of its {plan.num_microbatches} "
            f"micro-batches are drawn: the other {left_out} repeat the middle{full}, and the real step takes "
            f"{format_seconds(facts.estimate.step_time_s)}."
        )
    below += (
        " A bar is one pass of a micro-batch, whose number it bears. Point at it, or tap it, for its times; Ctrl and "
        "the wheel zoom in, a drag moves, a double click shows all of it again."
    )
    return section("time", "One training step", below, names + wide(picture))


def _breakdown_section(facts: Facts) -> str:
    found = facts.estimate
    rows = [
        (CAUSES.get(name, name), format_seconds(s), f"{s / found.step_time_s:.1%}")
        for name, s in found.breakdown.items()
    ]
    moved = [
        (
            traffic.axis.replace("_", " "),
            traffic.kind.replace("_", "-"),
            format_bytes(traffic.bytes),
            f"{traffic.calls:,.0f}",
        )
        for traffic in found.collectives
    ]
    details = folded("The causes in a table", table(["cause", "seconds", "of the step"], rows))
    if moved:
        below = "What one rank passes to collectives in a step; full tensors, not shards"
        details += folded("Communication by axis", table(["axis", "collective", "bytes", "calls"], moved, 2, below))
    below = (
        "From what the model's arithmetic takes at the GPUs' peak to the step, on the busiest stage. "
        f"MFU: {MFU_CONVENTION}."
    )
    return section("causes", "Where the step goes", below, wide(waterfall(facts)) + details)


def _alternatives_section(facts: Facts) -> str:
    marks = legend(
        [("the plan", "var(--accent)"), ("what people usually try", "var(--orange)"), ("other layouts", "var(--slate)")]
    )
    below = (
        "Each point is a layout with its best micro-batch, schedule and recompute; the line joins those that none "
        "beats in both time and memory. Layouts over four times as slow are left out."
    )
    headings, more = ("set-up", "layout", "verdict"), verdict_rows(facts.others)
    rows = verdict_rows(facts.alternatives, lambda c: in_words(c, facts.plan, facts.estimate))
    weighed = tag("h3", "What was weighed, and what it would trade") + table(headings, rows, numeric_from=3)
    details = folded("The other points and why they lost", table(headings, more, numeric_from=3)) if more else ""
    return section("alternatives", "Time against memory", below, marks + wide(scatter(facts)) + weighed + details)


def _sensitivity_section(facts: Facts) -> str:
    overtaken = [f"{shift.name}: {shift.overtaken_by}" for shift in facts.shifts if shift.overtaken_by]
    verdict = (
        f"A layout that is slower today would be more than 1% faster in these cases: {'; '.join(overtaken)}."
        if overtaken
        else "No layout that is slower today would then be more than 1% faster than this plan."
    )
    below = "The same plan, priced again with one number of the cluster 20% lower or higher."
    return section(
        "sensitivity",
        "What if the hardware is not what we think",
        below,
        wide(tornado(facts)) + tag("p", escape(f"{verdict} {facts.spare_memory}")),
    )


def _proof_section(plan: Plan) -> str:
    certificate = plan.certificate
    if certificate is None:
        return section("proof", "Proof", "", tag("p", escape(certificate_line(plan))))
    shapes = certificate.shapes
    badge = tag("span", certificate.status, class_="badge" if certificate.status == "optimal" else "badge weak")
    rows = [
        ("step of this plan, by event simulation", format_seconds(certificate.step_s)),
        ("step of the fastest plan found", format_seconds(certificate.fastest_s)),
        ("proven bound: no plan in the space is below", format_seconds(certificate.bound)),
        ("gap between the last two", f"{certificate.gap:.2%}"),
        ("layouts in the space", f"{shapes['total']:,}"),
        ("rejected by a rule", f"{shapes['rejected']:,}"),
        ("pruned by their bound", f"{shapes['pruned']:,}"),
        ("solved", f"{shapes['solved']:,}"),
        ("solver", certificate.solver),
        ("time of the search", format_seconds(certificate.search_seconds)),
    ]
    content = tag("p", badge + " " + escape(certificate_line(plan).partition(": ")[2].partition(" (")[0] + "."))
    content += table(["", ""], rows)
    if certificate.rejected:
        rejected = sorted(certificate.rejected.items(), key=lambda item: -item[1])
        content += folded(
            "Rules that rejected layouts", table(["rule", "layouts"], [(rule, f"{n:,}") for rule, n in rejected])
        )
    below = "The proof is about the cost model, not about your cluster; plan compare --measure tells how far it is off."
    return section("proof", "Proof", below, content)


def _words_section(markup: str) -> str:
    """What the words of a page mean: those of the glossary that stand in it."""
    found = terms_in(unescape(_TAGS.sub(" ", markup)))
    rows = [(each.name, each.says) for each in found]
    return section("words", "Words on this page", "", folded("What they mean", table(["word", "means"], rows, 2)))


def _use_section(plan: Plan, plan_file: str, notes: Sequence[str]) -> str:
    name = Path(plan_file).name
    script = (
        "import meshwright as mw\n\n"
        f'trainer = mw.parallelize(MyModel, "{name}", lambda p: torch.optim.AdamW(p, lr=3e-4), loss)\n'
        "for batch in trainer.loader(dataset):\n    metrics = trainer.step(batch)"
    )
    commands = (
        f"plan verify {name}      # same numbers as one device, on processes of this machine\n"
        f"{launch_command(plan)}\n"
        + (f"# {hosts_in_order(plan)}\n" if hosts_in_order(plan) else "")
        + f"plan report {name} --trace trace.json      # this step for ui.perfetto.dev"
    )
    content = tag("h3", "train.py") + tag("pre", escape(script)) + tag("h3", "Commands") + tag("pre", escape(commands))
    flags = " ".join(setup_words(plan))
    content += tag("h3", "The same layout in words, for plan compare --setup") + tag("pre", escape(flags))
    content += tag("h3", "The same layout for other frameworks, as plan export writes it") + _exports(plan)
    content += (
        tag("p", escape("Made for: " + ", ".join(f"{k} {v}" for k, v in plan.versions.items())), class_="sub")
        if plan.versions
        else ""
    )
    if notes:
        content += tag("h3", "Notes on the model") + tag("ul", "".join(tag("li", escape(note)) for note in notes))
    return section("use", "Use it", "", content)


def _exports(plan: Plan) -> str:
    """The plan as settings of every target, folded; or why the target cannot run it."""
    shown = []
    for target in TARGETS:
        try:
            found = export(plan, target)
        except ValueError as refusal:
            words, content = "not possible", tag("p", escape(f"{refusal}."), class_="sub")
        else:
            count = len(found.notes)
            left = f", {count} thing{'s' if count > 1 else ''} it cannot say" if count else ""
            words, content = f"plan export --to {target}{left}", tag("pre", escape(found.text.rstrip("\n")))
        shown.append(folded(f"{NAMES[target]}: {words}", content))
    return "".join(shown)
