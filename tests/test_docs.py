"""The documentation says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stretto.settings import settings_page

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "protocol/SPEC.md",
]


def test_the_page_of_settings_is_what_the_command_prints():
    assert (ROOT / "docs" / "config.md").read_text() == settings_page(), "run: stretto settings > docs/config.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_every_message_is_in_the_specification():
    from protocol.messages import BODIES

    text = (ROOT / "protocol" / "SPEC.md").read_text()
    inner = {"leased_group", "round"}
    assert not [name for name in BODIES if name not in inner and f"`{name}`" not in text]
