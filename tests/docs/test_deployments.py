"""Examples for systemd and Kubernetes: their commands are ones of Quire, and their names and ports fit together."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import chart

import quire
from quire.cli.main import command_parser
from quire.cli.router import settings as router_settings
from quire.cli.serve import settings
from quire.config.kv_tiers import parse_tiers
from quire.config.routing import discovered_services
from quire.server.status import READY_PATHS
from quire.util.sizes import parse_size

EXAMPLES = Path(quire.__file__).parents[2] / "examples"
if not EXAMPLES.exists():  # an installed package
    pytest.skip("the examples are not here", allow_module_level=True)
KUBERNETES = EXAMPLES / "kubernetes"
# Values of the chart, beside its own.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"prefill": {"replicas": 0}, "router": {"apiKeySecret": "key"}},
    "scaled": {"keda": {"enabled": True, "min": 0}, "inferencePool": {"enabled": True}},
    "ranks": {"ranks": {"enabled": True}, "serve": {"args": ["--max-num-seqs=4"]}},
}
Objects = list[dict[str, Any]]


def read(text: str) -> Objects:
    """The objects of a file."""
    return [each for each in yaml.safe_load_all(text) if each]


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    """What makes pods, by name and place: template with labels and spec."""
    found = {}
    for each in objects:
        made = each.get("spec", {})
        if "template" in made:
            found[each["metadata"]["name"]] = made["template"]
        for kind in ("leaderTemplate", "workerTemplate"):
            if kind in made.get("leaderWorkerTemplate", {}):
                found[f"{each['metadata']['name']} {kind}"] = made["leaderWorkerTemplate"][kind]
    return found


def named(objects: Objects, kind: str) -> dict[str, dict[str, Any]]:
    """The objects of a kind, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def check(objects: Objects) -> None:
    """Commands are ones of Quire, and what objects name is there."""
    labels = {name: each["metadata"]["labels"] for name, each in pods(objects).items()}
    for name, each in pods(objects).items():
        spec = each["spec"]
        (container,) = spec["containers"]
        check_command(container)
        check_mounts(spec, container)
        assert spec["enableServiceLinks"] is False, "QUIRE_KV_PORT would be taken for an option"
        assert spec["automountServiceAccountToken" if "router" not in name else "serviceAccountName"] in (
            False, "quire-router"
        )  # fmt: skip
    parts = {each["part"] for each in labels.values()}
    for each in named(objects, "Service").values():
        selector = {name: value for name, value in each["spec"]["selector"].items() if "/" not in name}
        assert selector in labels.values()
    for each in [*named(objects, "NetworkPolicy").values(), *named(objects, "PodDisruptionBudget").values()]:
        chosen = each["spec"].get("podSelector") or each["spec"]["selector"]
        found = {chosen["matchLabels"].get("part")} - {None}
        for expression in chosen.get("matchExpressions", ()):
            found |= set(expression["values"])
        assert found
        assert found <= parts | {"prefill"}
    check_servers(objects)


def check_command(container: dict[str, Any]) -> None:
    name, *words = [word.replace("$(LWS_WORKER_INDEX)", "1") for word in container["args"]]
    given = vars(command_parser(name).parse_args(words))
    for other in ("environment", "config", "nnodes", "node_rank", "master_addr"):
        given.pop(other, None)
    limit = parse_size(container["resources"]["limits"]["memory"].replace("Mi", "MiB"))
    if name == "router":
        routing, _ = router_settings(given)
        assert routing.discover
    elif name == "serve":
        _, engine, serving = settings(given, {})
        assert engine.limits.memory is not None
        assert limit > engine.limits.memory
        assert serving.port == container["ports"][0]["containerPort"]
        if "readinessProbe" in container:
            assert container["readinessProbe"]["httpGet"]["path"] in READY_PATHS
    else:
        assert limit > given["size"]


def check_mounts(spec: dict[str, Any], container: dict[str, Any]) -> None:
    volumes = {each["name"] for each in spec["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == volumes
    for file in (word.partition("=")[2] for word in container["args"] if "/etc/quire" in word):
        assert any(f"{mount}/" in file for mount in mounts.values())
    ports = {each["name"] for each in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        for each in container.get(probe, {}).values():
            assert not isinstance(each, dict) or each["port"] in ports


def check_servers(objects: Objects) -> None:
    """Routers find all servers: those of the service, and those of the file by the names that pods keep."""
    services, sets = named(objects, "Service"), named(objects, "StatefulSet")
    (container,) = pods(objects)["quire-router"]["spec"]["containers"]
    routing, _ = router_settings(given_of(container))
    (found,) = discovered_services(routing)
    assert found.name in services
    (rule,) = named(objects, "Role")["quire-router"]["rules"]
    assert (rule["apiGroups"], rule["resources"]) == (["discovery.k8s.io"], ["endpointslices"])
    assert {"get", "list", "watch"} <= set(rule["verbs"])
    file = named(objects, "ConfigMap").get("quire-backends")
    backends = tomllib.loads(file["data"]["backends.toml"])["backend"] if file else []
    assert [each["url"] for each in backends] == [
        f"http://{name}-{number}.{each['spec']['serviceName']}:8000"
        for name, each in sets.items() for number in range(each["spec"]["replicas"])
    ]  # fmt: skip
    for name, each in pods(objects).items():
        (container,) = each["spec"]["containers"]
        for word in container["args"]:
            if word.startswith("--kv-tiers="):
                tiers = parse_tiers(word.removeprefix("--kv-tiers="))
                assert tiers.role == each["metadata"]["labels"]["part"], name
                assert tiers.remote is not None
                assert services[tiers.remote[0]]["spec"]["ports"][0]["port"] == tiers.remote[1]


def given_of(container: dict[str, Any]) -> dict[str, Any]:
    """The options of a container's command."""
    given = vars(command_parser(container["args"][0]).parse_args(container["args"][1:]))
    return {name: value for name, value in given.items() if name not in {"environment", "config"}}


def test_what_kubectl_applies_fits_together() -> None:
    objects = read((KUBERNETES / "quire.yaml").read_text())
    check(objects)
    assert {"Deployment", "StatefulSet", "Role", "NetworkPolicy"} <= {each["kind"] for each in objects}


def test_the_chart_is_what_kubectl_applies() -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: see tools/chart.py")
    assert read(chart.rendered({})) == read((KUBERNETES / "quire.yaml").read_text())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_chart_fits_together_with_other_values(name: str) -> None:
    pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: see tools/chart.py")
    objects = read(chart.rendered(VARIANTS[name]))
    check(objects)
    deployments = named(objects, "Deployment")
    if name == "scaled":
        (target,) = named(objects, "ScaledObject").values()
        assert "replicas" not in deployments[target["spec"]["scaleTargetRef"]["name"]]["spec"]
        (trigger,) = target["spec"]["triggers"]
        assert "quire_router_replicas_needed" in trigger["metadata"]["query"]
        (pool,) = named(objects, "InferencePool").values()
        assert pool["spec"]["selector"]["matchLabels"] in [
            each["metadata"]["labels"] for each in pods(objects).values()
        ]
        (route,) = named(objects, "HTTPRoute").values()
        assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == pool["metadata"]["name"]
    elif name == "ranks":
        assert "quire-serve" not in deployments
        (ranks,) = named(objects, "LeaderWorkerSet").values()
        size = ranks["spec"]["leaderWorkerTemplate"]["size"]
        for kind in ("leaderTemplate", "workerTemplate"):
            (container,) = ranks["spec"]["leaderWorkerTemplate"][kind]["spec"]["containers"]
            assert f"--nnodes={size}" in container["args"]
            assert ("readinessProbe" in container) == (kind == "leaderTemplate"), "one of them serves"
    else:
        assert not named(objects, "StatefulSet")
        (container,) = pods(objects)["quire-router"]["spec"]["containers"]
        assert "--api-key-file=/etc/quire/api/api.key" in container["args"]


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
