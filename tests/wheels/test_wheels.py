"""The wheels: built without the machine's compiler, installed where there is none, as small as promised.

`make test-wheels`; the speed is measured by `python -m benchmarks.wheels`.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tools import image
from tools.wheels import MAX_WHEEL, build

from helpers.checkpoints import TINY_MODELS, TinyModel, save
from helpers.sums import ask_a_sum

pytestmark = pytest.mark.wheels
ROOT = Path(__file__).parents[2]
MAX_MODEL = 16_000_000  # bytes of a wheel that are the model's
MAX_ADAPTERS = 4_000_000  # that are its adapters'
MAX_ENVIRONMENT = 185_000_000  # bytes of site-packages, byte code included, pip and setuptools left out
PYTHONS = os.environ.get("PYTHONS", sys.executable).split()  # as `make wheels` names them
GROUPED = TinyModel("formats", "Qwen3Config", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64})


@pytest.fixture(scope="module", params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if subprocess.run([name, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"PYTHONS names {name}, which does not run")
    return name


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(lambda python: build(python, tmp_path_factory.mktemp("dist")))


@pytest.fixture(scope="module")
def wheel(builds: Any, python: str) -> Path:
    return builds(python)


@pytest.fixture(scope="module")
def installed(wheel: Path, python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and what it depends on."""
    env = tmp_path_factory.mktemp("env")
    subprocess.run([python, "-m", "venv", str(env)], check=True)
    pip = [str(env / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    command = [*pip, "-c", str(ROOT / "constraints.txt"), "--only-binary=:all:", str(wheel)]
    subprocess.run(command, check=True)
    return env / "bin"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("checkpoints")
    for model in (*TINY_MODELS, GROUPED):
        save(model, root / model.name)
    return [str(ROOT / "src/quire/models/quire-mini"), *map(str, sorted(root.iterdir()))]


def hashes(python: Path | str, checkpoints: list[str]) -> dict[str, str]:
    command = [str(python), str(Path(__file__).with_name("bits.py")), *checkpoints]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def compiled(checkpoints: list[str]) -> dict[str, str]:
    return hashes(sys.executable, checkpoints)


def test_a_wheel_contains_only_what_runs(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_WHEEL
    assert "manylinux_2_28" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "quire/py.typed" in names
    assert any(name.endswith("share/doc/quire-llm/server.md") for name in names)
    sizes: Counter[str] = Counter()
    for entry in zipfile.ZipFile(wheel).infolist():
        _, found, path = entry.filename.partition("quire/models/")
        if found and not entry.is_dir():
            sizes[path.partition("/")[0]] += entry.compress_size
    assert sizes.keys() == {"quire-mini", "quire-mini-adapters"}
    assert 0 < sizes["quire-mini"] <= MAX_MODEL
    assert 0 < sizes["quire-mini-adapters"] <= MAX_ADAPTERS
    for unwanted in ("__pycache__", ".pyc", "tests/", "csrc/"):
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


def test_same_bits_as_the_build_of_the_machine_s_compiler(
    installed: Path, checkpoints: list[str], compiled: dict[str, str]
) -> None:
    """On the same instruction sets, too: an empty list of what differs would say little of a wheel without AVX."""
    found = hashes(installed / "python", checkpoints)
    assert found.keys() == compiled.keys()
    assert not [name for name, value in compiled.items() if found[name] != value]


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


def test_an_image_runs_by_itself(installed: Path, tmp_path: Path) -> None:
    """A server answers in a chroot, with nothing of this machine but its kernel, a null device and /proc, as a user
    without rights."""
    out, root = tmp_path / "quire.tar", tmp_path / "root"
    assert image.build(installed.parent, out) <= image.MOST_BYTES
    with tarfile.open(out) as archive:
        files = {Path(each.name).name: archive.extractfile(each) for each in archive.getmembers()}
        data = {name: file.read() for name, file in files.items() if file is not None}
    for name, content in data.items():
        assert len(name) != 64 or hashlib.sha256(content).hexdigest() == name
    (manifest,) = json.loads(data["index.json"])["manifests"]
    parts = json.loads(data[manifest["digest"].partition(":")[2]])
    config = json.loads(data[parts["config"]["digest"].partition(":")[2]])
    layer = gzip.decompress(data[parts["layers"][0]["digest"].partition(":")[2]])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    if os.geteuid():
        pytest.skip("chroot needs root")
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        archive.extractall(root, filter="fully_trusted")
    mounted = '/bin/mount -t proc proc "$1/proc" && shift && exec "$@"'
    isolated = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c", mounted, "sh", str(root)]
    try:
        os.mknod(root / "dev/null", stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("a device needs CAP_MKNOD")
    tried = subprocess.run([*isolated, "/bin/true"], stderr=subprocess.PIPE, text=True, check=False)
    if any(each in tried.stderr.lower() for each in ("not permitted", "permission denied")):
        pytest.skip(f"a mount needs CAP_SYS_ADMIN: {tried.stderr.strip()}")
    (root / "dev/null").chmod(0o666)
    run = config["config"]
    environment = dict(each.split("=", 1) for each in run["Env"])
    inside = [f"--userspec={run['User']}", str(root), *run["Entrypoint"]]
    command = [*isolated, "/usr/sbin/chroot", *inside]
    words = ["serve", "--port", "0", "--memory", "700MiB"]
    with subprocess.Popen([*command, *words], env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            said = []
            for line in server.stderr:
                said.append(line)
                if line.startswith("quire: serving"):
                    break
            assert server.poll() is None, "".join(said)
            status, said_of_it = ask_a_sum(f"http://127.0.0.1:{said[-1].rpartition(':')[2].strip()}")
            assert (status, "5" in said_of_it) == (200, True), said_of_it
        finally:
            server.terminate()
    assert server.returncode == 0
