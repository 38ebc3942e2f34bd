"""Servers of a Service of Kubernetes, followed through a small API server, with what goes wrong there."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.fake_llm import Behaviour, FakeLLM, Socket
from helpers.kube_api import KubeApi, endpoint_slice
from helpers.process import until
from helpers.routed import Routed, routed
from quire.config.routing import DiscoveredService, RouterConfig, discovered_services
from quire.router import discovery
from quire.router.backends import Backends
from quire.router.discovery import Slice, servers_of

if shutil.which("openssl") is None:
    pytest.skip("needs openssl", allow_module_level=True)

HOST = {"pod-1": "127.0.0.1"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    made = KubeApi(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(made.port))
    monkeypatch.setattr(discovery.ServiceWatch.__init__, "__defaults__", (tmp_path,))
    monkeypatch.setattr(discovery, "_PAUSES", (0.02, 0.1))
    monkeypatch.setattr(discovery, "_SHORTEST", 0.0)
    yield made
    made.close()


def names(router: Routed) -> list[str]:
    """The servers that the router has."""
    return [each.name for each in router.backends.all]


def discovering(**more: Any) -> Routed:
    """A router whose only servers are those of a service."""
    return routed(discover=("kubernetes:servers",), **more)


def server(router: Routed) -> int:
    """The port of one more server."""
    fake = FakeLLM(Behaviour(ttft=0.0, itl=0.0))
    ports: list[int] = []

    async def listen() -> None:
        listener = await router.loop.create_server(lambda: Socket(fake), "127.0.0.1", 0)
        router.listeners.append(listener)
        ports.append(listener.sockets[0].getsockname()[1])

    router.do(lambda: router.loop.create_task(listen()))
    until(lambda: bool(ports))
    return ports[0]


def test_endpoints_are_servers_as_they_come_and_go(api: KubeApi) -> None:
    with discovering(hold_seconds=300.0) as router:
        assert names(router) == []
        assert api.seen[0] == "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
        port = server(router)
        api.set("one", endpoint_slice("one", HOST, port))
        until(lambda: names(router) == ["pod-1"])
        assert router.chat("hello").headers["x-quire-backend"] == "pod-1"
        api.set("two", endpoint_slice("two", {"pod-2": "127.0.0.1"}, server(router)))
        until(lambda: names(router) == ["pod-1", "pod-2"])
        gone = endpoint_slice("one", HOST, port)
        gone["endpoints"][0]["conditions"] = {"ready": False, "serving": True, "terminating": True}
        api.set("one", gone)
        until(lambda: names(router) == ["pod-2"])
        assert router.chat("hello").headers["x-quire-backend"] == "pod-2"
        api.remove("two")
        until(lambda: names(router) == [])
        assert api.lists == 1, "a watch says all this"


def test_a_request_for_a_model_waits_for_the_first_endpoint(api: KubeApi) -> None:
    """Nobody knows yet what a service without endpoints has; and the load is counted, so that one is started."""
    with discovering(hold_seconds=300.0) as router, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(router.chat, "hello", model="fake-model")
        until(lambda: router.backends.held == 1)
        assert router.request("GET", "/health").json["replicas_needed"] == 1.0
        api.set("one", endpoint_slice("one", HOST, server(router)))
        assert asked.result().status == 200
        assert router.chat("hello", model="other").status == 404, "now it is known"


def test_a_watch_goes_on_where_it_was_cut_off(api: KubeApi) -> None:
    api.set("one", endpoint_slice("one", HOST, 9))
    with discovering() as router:
        for number in range(4):
            before = api.watches
            until(lambda: bool(api._writers))
            api.cut()
            api.set("two", endpoint_slice("two", {f"pod-{number}": "127.0.0.9"}, 9))
            until(lambda number=number: f"pod-{number}" in names(router))  # type: ignore[misc]
            until(lambda before=before: api.watches > before)  # type: ignore[misc]
        assert api.lists == 1


def test_a_version_that_is_too_old_is_listed_again(api: KubeApi) -> None:
    api.set("one", endpoint_slice("one", HOST, 9))
    with discovering() as router:
        until(lambda: names(router) == ["pod-1"])
        until(lambda: bool(api._writers))
        api.oldest = api.version + 1
        api.slices.clear()  # nobody tells the router
        api.cut()
        api.set("two", endpoint_slice("two", {"pod-2": "127.0.0.1"}, 9))
        until(lambda: names(router) == ["pod-2"])
        assert api.lists > 1


def test_what_is_known_holds_while_nothing_can_be_learned(api: KubeApi) -> None:
    with discovering() as router:
        api.set("one", endpoint_slice("one", HOST, server(router)))
        until(lambda: names(router) == ["pod-1"])
        (api.account / "token").write_text("wrong")
        until(lambda: bool(api._writers))
        api.cut()
        before = len(api.seen)
        until(lambda: len(api.seen) > before + 2)
        assert router.chat("hello").status == 200
        (api.account / "token").write_text("a-token")
        api.refuse = 2
        api.set("two", endpoint_slice("two", {"pod-2": "127.0.0.9"}, 9))
        until(lambda: names(router) == ["pod-1", "pod-2"])


@pytest.mark.parametrize("line", [b"no json\n", b'{"type": 3}\n', b'{"type": "ADDED", "object": 3}\n'])
def test_events_that_are_none_lead_to_a_new_list(api: KubeApi, line: bytes) -> None:
    with discovering() as router:
        until(lambda: bool(api._writers))

        async def say() -> None:
            api.say(line)

        api.do(say())
        api.cut()
        api.events.clear()
        until(lambda: api.lists > 1)
        api.set("one", endpoint_slice("one", HOST, 9))
        until(lambda: names(router) == ["pod-1"])


def test_an_api_server_of_another_authority_is_not_believed(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.router.backends._FIRST_LIST", 0.1)
    other = tmp_path / "other"
    other.mkdir()
    KubeApi(other).close()
    (tmp_path / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    api.set("one", endpoint_slice("one", HOST, 9))
    with discovering(hold_seconds=0.0) as router:
        until(lambda: caplog.text.count("cannot be followed") > 1)
        assert names(router) == []
        assert api.seen == [], "and gets no token"


def test_any_history_of_changes_ends_where_the_cluster_is(api: KubeApi) -> None:
    """Slices that come, change and go, with watches that are cut off and versions that are forgotten."""
    noise = random.Random(11)
    with discovering() as router:
        for _ in range(60):
            name = f"slice-{noise.randrange(4)}"
            act = noise.random()
            if act < 0.15:
                api.cut()
            elif act < 0.2:
                api.oldest = api.version
            elif act < 0.4 and name in api.slices:
                api.remove(name)
            else:
                pods = {f"{name}-{noise.randrange(5)}": "127.0.0.9" for _ in range(noise.randrange(4))}
                api.set(name, endpoint_slice(name, pods, 9))
        wanted = sorted({
            each["targetRef"]["name"] for made in api.slices.values() for each in made["endpoints"]
        })  # fmt: skip
        until(lambda: names(router) == wanted)


def test_addresses_of_slices() -> None:
    def read(**more: Any) -> dict[str, Slice]:
        return {"s": msgspec.convert(endpoint_slice("s", HOST, 8000, **more), Slice)}

    service = DiscoveredService("servers")
    assert servers_of(read(), service) == {"pod-1": "http://127.0.0.1:8000"}
    assert servers_of(read(), DiscoveredService("s", port="metrics")) == {"pod-1": "http://127.0.0.1:9"}
    assert servers_of(read(), DiscoveredService("s", port="8000")) == {"pod-1": "http://127.0.0.1:8000"}
    assert servers_of(read(), DiscoveredService("s", port="grpc")) == {}
    assert servers_of(read(ports=[{"port": 7}]), service) == {"pod-1": "http://127.0.0.1:7"}
    assert servers_of(read(ports=None, endpoints=None), service) == {}
    six = [{"addresses": ["fd00::1"], "conditions": {}}]
    assert servers_of(read(endpoints=six), service) == {"fd00::1:8000": "http://[fd00::1]:8000"}


@pytest.mark.parametrize(
    "text", ["servers", "kubernetes:", "kubernetes:a/b/c", "kubernetes:A", "kubernetes:a:b:c"]
)
def test_services_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"discover: .* does not have the form"):
        RouterConfig(discover=(text,))
    made = RouterConfig(discover=("kubernetes:ns/some:8000",))
    assert discovered_services(made) == [DiscoveredService("some", "ns", "8000")]


def test_outside_of_kubernetes_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST is not set"):
        Backends(RouterConfig(discover=("kubernetes:servers",)))
