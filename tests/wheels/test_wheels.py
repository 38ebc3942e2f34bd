"""The wheels: built without the machine's compiler, installed where there is none, as small as promised.

`make test-wheels`; the speed is measured by `python -m benchmarks.wheels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tools.wheels import MAX_WHEEL, build

pytestmark = pytest.mark.wheels
ROOT = Path(__file__).parents[2]
MAX_ENVIRONMENT = 185_000_000  # bytes of site-packages, byte code included, pip and setuptools left out
ISAS = ("baseline", "avx2", "avx512")
_BITS = """
import json, sys
from quire import LLM, SamplingParams
with LLM(progress=False, memory="1GiB", threads=2, quantization=sys.argv[1]) as llm:
    outputs = llm.generate(["What is", "Once upon a time there was"], SamplingParams(
        temperature=0.0, max_tokens=24, logprobs=4))
print(json.dumps([[o.outputs[0].token_ids, [p.token.logprob for p in o.outputs[0].logprobs]] for o in outputs]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(sys.executable, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it depends on."""
    env = tmp_path_factory.mktemp("env")
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
    pip = [str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "--only-binary=:all:", str(wheel)], check=True)
    return env / "bin"


def test_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_WHEEL
    assert "manylinux_2_28" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "quire/py.typed" in names
    assert any(name.endswith("share/doc/quire-llm/server.md") for name in names)
    assert any("quire/models/quire-mini/" in name for name in names)
    for unwanted in ("__pycache__", ".pyc", "tests/", "csrc/", "quire-mini-draft", "quire-mini-adapters"):
        assert not [name for name in names if unwanted in name], unwanted
    (metadata,) = (name for name in names if name.endswith("dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Name: quire-llm\n" in text
    assert "Project-URL: Documentation" in text


def test_wheel_generates_where_no_compiler_is(installed: Path) -> None:
    environment = {
        "PATH": str(installed),
        "HOME": os.environ.get("HOME", "/"),
        "QUIRE_CACHE_DIR": str(installed),
    }
    command = [installed / "quire", "generate", "--chat", "--prompt", "What is TTFT?", "--max-tokens", "8"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout.splitlines()[0])["outputs"][0]["token_ids"]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_as_the_build_of_the_machine_s_compiler(
    installed: Path, isa: str, quantization: str
) -> None:
    def bits(python: Path | str) -> str:
        environment = {**os.environ, "QUIRE_ISA": isa}
        command = [str(python), "-c", _BITS, quantization]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout

    assert bits(installed / "python") == bits(sys.executable)


def test_environment_stays_small(installed: Path) -> None:
    packages = next(installed.parent.glob("lib/python*/site-packages"))
    by_package: dict[str, int] = {}
    for file in packages.rglob("*"):
        if file.is_file():
            top = file.relative_to(packages).parts[0]
            by_package[top] = by_package.get(top, 0) + file.stat().st_size
    for tool in ("pip", "setuptools", "_distutils_hack", "pkg_resources"):
        by_package.pop(tool, None)
    assert sum(by_package.values()) <= MAX_ENVIRONMENT, sorted(by_package.items(), key=lambda item: -item[1])[
        :12
    ]
