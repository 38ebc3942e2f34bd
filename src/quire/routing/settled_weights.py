"""Which version of the weights of a model clients get, where several are served at once: during an update, or by places
that are not updated together. Nothing here has a clock or a socket.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSION = "x-quire-model-version"  # header with the version that an answer has, or has to have


class SettledWeights:
    """The version of each model. It stays while a server has it, unless another one has more capacity: an update of one
    server after the other changes it once, and a server that is gone for a moment and comes back does not change it
    twice."""

    def __init__(self) -> None:
        self._settled: dict[str, str] = {}
        self.changes = 0

    def of(self, model: str) -> str | None:
        """The version of a model; None if none was settled yet."""
        return self._settled.get(model)

    def settle(self, model: str, capacity: Mapping[str, float]) -> str | None:
        """The version of a model from now on, by the capacity of the servers that have each and can be asked; the one
        before if there are none."""
        now = self._settled.get(model)
        if not capacity:
            return now
        most = max(sorted(capacity), key=lambda version: capacity[version])
        if now is not None and capacity.get(now, 0.0) >= capacity[most]:
            return now
        self.changes += now is not None
        self._settled[model] = most
        return most
