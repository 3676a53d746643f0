"""The documentation: written from code where it can be, linked, and every block of it runs."""

import re
from pathlib import Path

import pytest

from docs.build import DOCS, ORDER, blocks_of, broken_links, problems, references, run_page, steady, write_site


def test_references_are_current_and_links_lead_somewhere() -> None:
    assert problems() == []


def test_the_reference_of_python_shows_methods_and_defaults_as_they_are() -> None:
    shown = references()["reference/api.md"]
    assert 'save(path: str | Path = "plan.json") -> Path' in shown

    assert "explain(*layouts: str, time_limit: float = 60.0) -> Explanation" in shown
    assert "### Trainer.step" in shown
    assert "### Metrics.loss" in shown


def test_planted_faults_are_found(tmp_path: Path) -> None:
    for page in ORDER:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(references().get(page, "# A page\n"))
    assert problems(tmp_path) == []

    (tmp_path / "glossary.md").write_text("# Glossary\n")
    (tmp_path / "more.md").write_text("# More\n")
    (tmp_path / "faq.md").write_text("# A page\n[a](start.md#a-page) [b](start.md#no) [c](none.md) [d](https://x.org)")

    assert [each.partition(": ")[0] for each in problems(tmp_path)] == ["glossary.md", "more.md", "faq.md", "faq.md"]
    assert broken_links(tmp_path / "faq.md") == ["start.md#no", "none.md"]


def test_blocks_are_written_run_and_their_output_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```toml file=a.toml\nx = 1\n```\n```sh\ncat a.toml\n```\n```text output\n```\n```sh exit=3\nexit 3\n```\n"
    )

    assert run_page(page, tmp_path / "scratch", outputs=True) == []

    assert [block.content for block in blocks_of(page.read_text())][2] == "x = 1\n"
    page.write_text("```sh\nexit 4\n```\n")
    assert "page.md:1: exit code 4, not 0" in run_page(page, tmp_path / "again")[0]


def test_a_block_that_needs_what_is_not_installed_is_left_out_with_its_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh needs=pytest\necho b\n```\n```text output\nb\n```\n```sh needs=no_such\nexit 4\n```\n"
                    "```text output\nc\n```\n```sh\necho d\n```\n```text output\nd\n```\n")  # fmt: skip

    assert run_page(page, tmp_path / "scratch") == []


def test_a_quoted_output_that_is_stale_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\necho b\n```\n```text output\na\n```\n```sh\ndate\n```\n```text output measured\nonce\n```\n"
    )

    assert run_page(page, tmp_path / "scratch") == [
        "page.md:4: not what is printed now: run python -m docs.build --run --outputs"
    ]
    proof = "no plan that is searched is more than {}% faster under the cost model (of {} layouts,\n   in {} s)"
    assert steady(proof.format(0.5, 12, 1.25)) == steady(proof.format(0.6, 13, 2.5))


def test_no_page_names_a_path_of_a_machine() -> None:
    for page in (*(DOCS / page for page in ORDER), DOCS.parent / "CONTRIBUTING.md"):
        assert not re.search(r"(?<![\w.])/(work|tmp|home|root|opt)/", page.read_text()), page


def test_contributing_points_to_what_is_there() -> None:
    page = DOCS.parent / "CONTRIBUTING.md"
    roots = ("", "profiler", "profiler/machine")
    named = [name for name in re.findall(r"`([\w/]+(?:\.(?:py|toml|md)|/))`", page.read_text()) if "NAME" not in name]

    assert broken_links(page) == []
    assert len(named) > 20
    assert [n for n in named if not any((DOCS.parent / root / n).exists() for root in roots) and "/" in n] == []


def test_the_site_has_every_page_and_its_links_stay_in_it(tmp_path: Path) -> None:
    write_site(tmp_path)

    for page in ORDER:
        file = tmp_path / page.replace("README", "index").replace(".md", ".html")
        text = file.read_text()
        targets = [link.partition("#")[0] for link in re.findall(r'href="([^"]+)"', text) if "://" not in link]
        assert [t for t in targets if t and not (file.parent / t).exists()] == [], page


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages: each works in a folder of its own, and profiles are made once."""
    return tmp_path_factory.mktemp("pages")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in ORDER if not page.startswith("reference/")])
def test_every_block_runs(page: str, scratch: Path) -> None:
    assert run_page(DOCS / page, scratch, compare=False) == []
