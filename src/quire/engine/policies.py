"""The policies that options name."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.schema import POLICIES
from quire.core.policy import Policies
from quire.objectives import class_policies, parse_classes


def named_policies(text: str, slo: Sequence[str], overtake_ms: float) -> Policies:
    """Those of --scheduling-policy, for the classes of --slo. Raises ValueError naming the part that is wrong."""
    return Policies.parse(*class_policies(text, parse_classes(slo), POLICIES), overtake_ms / 1e3)
