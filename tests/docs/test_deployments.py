"""Examples for systemd and Kubernetes: their commands are ones of Quire, and their names and ports fit together."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import quire
from quire.cli.main import command_parser
from quire.cli.router import settings as router_settings
from quire.cli.serve import settings
from quire.config.kv_tiers import parse_tiers
from quire.server.status import READY_PATHS
from quire.util.sizes import parse_size

EXAMPLES = Path(quire.__file__).parents[2] / "examples"
if not EXAMPLES.exists():  # an installed package
    pytest.skip("the examples are not here", allow_module_level=True)
KUBERNETES = EXAMPLES / "kubernetes"
FILES = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
OBJECTS = [each for name in FILES for each in yaml.safe_load_all((KUBERNETES / name).read_text())]
PODS = {each["metadata"]["name"]: each for each in OBJECTS if "template" in each["spec"]}
SERVICES = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "Service"}
BACKENDS = tomllib.loads((KUBERNETES / "backends.toml").read_text())["backend"]


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for each in PODS.values():
        spec = each["spec"]["template"]["spec"]
        yield from ((spec, container) for container in spec["containers"])


@pytest.mark.parametrize("container", [each for _, each in containers()], ids=lambda each: each["name"])
def test_commands_are_ones_of_quire(container: dict[str, Any]) -> None:
    name, *words = container["args"]
    given = vars(command_parser(name).parse_args(words))
    given.pop("environment", None)
    given.pop("config", None)
    if name == "router":
        router_settings(given)
    elif name == "serve":
        _, engine, serving = settings(given, {})
        assert engine.limits.memory is not None
        assert (
            parse_size(container["resources"]["limits"]["memory"].replace("Mi", "MiB")) > engine.limits.memory
        )
        assert container["readinessProbe"]["httpGet"]["path"] in READY_PATHS
        assert serving.port == container["ports"][0]["containerPort"]
    else:
        assert parse_size(container["resources"]["limits"]["memory"].replace("Mi", "MiB")) > given["size"]


@pytest.mark.parametrize(("spec", "container"), list(containers()), ids=lambda each: each.get("name", ""))
def test_mounts_have_volumes_and_ports_have_names(spec: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {each["name"] for each in spec.get("volumes", ())}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == volumes
    files = [word.partition("=")[2] for word in container["args"] if "/etc/quire" in word]
    assert files
    for file in files:
        assert any(f"{mount}/" in file for mount in mounts.values())
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for each in container.get(probe, {}).values():
            assert not isinstance(each, dict) or each["port"] in ports
    assert spec["enableServiceLinks"] is False, "QUIRE_KV_PORT would be taken for an option"


def test_services_select_pods_and_routers_know_them_all() -> None:
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in PODS.items()}
    for spec in SERVICES.values():
        assert sum(found == spec["selector"] for found in labels.values()) == 1
    for name, each in PODS.items():
        assert each["spec"]["selector"]["matchLabels"] == labels[name]
    named = [
        (f"http://{name}-{number}.{each['spec']['serviceName']}:8000", labels[name]["part"])
        for name, each in PODS.items() if each["kind"] == "StatefulSet"
        for number in range(each["spec"]["replicas"])
    ]  # fmt: skip
    assert [(each["url"], each["role"]) for each in BACKENDS] == named
    for name, each in PODS.items():
        if each["kind"] == "StatefulSet":
            assert each["spec"]["serviceName"] in SERVICES
            (container,) = each["spec"]["template"]["spec"]["containers"]
            (tiers,) = [word for word in container["args"] if word.startswith("--kv-tiers=")]
            found = parse_tiers(tiers.removeprefix("--kv-tiers="))
            assert found.role == labels[name]["part"]
            assert found.remote is not None
            host, port = found.remote
            assert SERVICES[host]["ports"][0]["port"] == port
    policies = [each["spec"]["podSelector"] for each in OBJECTS if each["kind"] == "NetworkPolicy"]
    parts = {each["part"] for each in labels.values()}
    for each in policies:
        chosen = {each["matchLabels"].get("part")} - {None}
        for expression in each.get("matchExpressions", ()):
            chosen |= set(expression["values"])
        assert chosen
        assert chosen <= parts


def test_they_are_rendered(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    folder = tmp_path / "kubernetes"
    shutil.copytree(KUBERNETES, folder)
    (folder / "kv.key").write_text("0123456789abcdef0123456789abcdef\n")
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout
    found = list(yaml.safe_load_all(made))
    assert len(found) == len(OBJECTS) + 2
    assert all(each["metadata"]["namespace"] == "quire" for each in found)
    (router,) = [
        each for each in found if each["metadata"]["name"] == "quire-router" and each["kind"] == "Deployment"
    ]
    volumes = {each["name"]: each for each in router["spec"]["template"]["spec"]["volumes"]}
    assert volumes["backends"]["configMap"]["name"] != "quire-backends", "it changes with the content"
    assert router["spec"]["template"]["spec"]["containers"][0]["image"] == "quire:0.1.0"


@pytest.mark.parametrize("unit", sorted(EXAMPLES.glob("systemd/*.service")), ids=lambda path: path.name)
def test_units_are_ones_of_systemd(tmp_path: Path, unit: Path) -> None:
    text = unit.read_text()
    (line,) = [each for each in text.splitlines() if each.startswith("ExecStart=")]
    program, *words = line.removeprefix("ExecStart=").split()
    parsed = command_parser(words[0]).parse_args([word.replace("%i", "name") for word in words[1:]])
    assert str(getattr(parsed, "config", None) or parsed.file).startswith("/etc/quire/")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    made = tmp_path / unit.name
    made.write_text(text.replace(program, sys.executable))
    checked = subprocess.run(["systemd-analyze", "verify", made], capture_output=True, text=True, check=False)
    stem = unit.stem.partition("@")[0]  # it also warns of units of this machine
    assert (checked.returncode, [each for each in checked.stderr.splitlines() if stem in each]) == (0, [])
