"""Cells in a kernel of IPython, whose loop runs while a cell does. `make test-clients`; it needs package indexes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_clients import PATHS, report

pytestmark = pytest.mark.clients
PACKAGES = ("ipykernel", "nbclient", "ipywidgets")
CELLS = (
    "import asyncio; from quire import LLM, AsyncLLM, SamplingParams; asyncio.get_running_loop();"
    " params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)",
    "llm = LLM('quire-mini', max_model_len=256)\n"
    "texts = [out.outputs[0].text for out in llm.generate(['Once', 'Twice', 'Often'], params)]; len(texts)",
    "''.join(delta.text for delta in llm.stream('Once', params)) == texts[0]",
    "engine = await AsyncLLM('quire-mini', max_model_len=256).__aenter__()\n"
    "(await engine.generate('Once', params))[0].outputs[0].text == texts[0]",
    "found = await asyncio.gather(*(engine.generate(prompt, params) for prompt in ('Twice', 'Often')))\n"
    "[outs[0].outputs[0].text for outs in found] == texts[1:]",
    "await engine.__aexit__(None, None, None); llm.close()",
)
# Runs the cells of a notebook in a kernel, and writes what each shows and how it ended.
RUN = """
import json, sys
import ipykernel, ipywidgets, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
print("ipykernel", ipykernel.__version__, "nbclient", nbclient.__version__, "ipywidgets", ipywidgets.__version__,
      file=sys.stderr)
"""


def test_a_notebook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside `LLM` in a cell `AsyncLLM` with await; the bar of a call is a widget."""
    folder = tmp_path / "packages"  # beside this interpreter, which has what Quire needs
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), *PACKAGES]
    subprocess.run(command, check=True)
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Python", "language": "python"})
    )
    paths = os.pathsep.join((PATHS["PYTHONPATH"], str(folder)))
    environment = os.environ | {"PYTHONPATH": paths, "JUPYTER_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=environment, input=json.dumps(CELLS), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    shown = [[output["data"]["text/plain"] for output in cell if output["output_type"] == "execute_result"]
             for cell in outputs]  # fmt: skip
    assert shown[1:5] == [["3"], ["True"], ["True"], ["True"]], outputs
    widgets = [
        output
        for output in outputs[1]
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {})
    ]
    assert widgets, outputs[1]
    report(done.stderr, capsys)
