"""Links between pages, and what GitHub shows of a page; Sphinx checks only what is in ``docs``."""

import re

import pytest

from tests.docs.code_blocks import ROOT, pages

ALL = [*pages(), *sorted((ROOT / "slurm").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(without_code(page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"no {path}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"no #{anchor} in {target.name}"


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_github_shows_no_directive_as_code(page):
    assert "```{" not in page.read_text(), "a link or a comment does it: see CONTENTS in docs/conf.py"
