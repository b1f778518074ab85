"""The operator's page of an engine's metrics says what the engine exposes."""

import re
from pathlib import Path

from kvloop.connector.metrics import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_lists_every_metric_with_its_meaning() -> None:
    """The same names in the same order, and the help text that Prometheus gets."""
    rows = re.findall(r"^\| `(kvloop_\w+)` \|[^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(FAMILIES.items())
