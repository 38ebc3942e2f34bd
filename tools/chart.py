"""Write examples/kubernetes/quire.yaml: what the chart beside it is with its own values.

    python -m pip install --target build/helm helm-python-sdk==0.2.2
    PYTHONPATH=build/helm python -m tools.chart

The package has Helm's own engine, so that neither a helm program nor a cluster is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KUBERNETES = Path(__file__).parents[1] / "examples/kubernetes"
_HEAD = "# Made by tools/chart.py from the chart beside it, for those without Helm: docs/kubernetes.md.\n"


def rendered(values: dict[str, Any]) -> str:
    """The objects of the chart with these values over its own. Raises ImportError without the package."""
    from helm_python.chart import Chart  # type: ignore[import-not-found]

    with Chart.load(str(KUBERNETES / "chart")) as chart:
        files = chart.render(values=values, name="quire", namespace="quire")
    texts = (text.strip() for name, text in sorted(files.items()) if name.endswith(".yaml"))
    return _HEAD + "\n---\n".join(text.removeprefix("---").strip() for text in texts if text) + "\n"


if __name__ == "__main__":
    (KUBERNETES / "quire.yaml").write_text(rendered({}))
