"""Moving the KV cache of a prompt from one device to another, and whether that pays."""

from __future__ import annotations

from quire.records import dataclass

_LEARNING = 0.2  # weight of the newest answer in a mean
_LEAST = 64.0  # tokens of which a time is learned


def transfer_seconds(size: float, gb_s: float, latency: float = 0.0) -> float:
    """Seconds for `size` bytes over a link of `gb_s`, 1e9 bytes a second. Raises ValueError unless that is above 0."""
    if gb_s <= 0:
        raise ValueError(f"link_gb_s: {gb_s:g} must be above 0")
    return latency + size / gb_s / 1e9


def layout(interference_ms: float, transfer_ms: float) -> str:
    """Choose a layout: separate prefill and decode pay for moving the KV cache, joint ones for interference."""
    return "separate prefill and decode pools" if transfer_ms < interference_ms else "keep phases colocated"


@dataclass(slots=True)
class MovingCosts:
    """Seconds to compute a token of a prompt, to move its keys and values, and `hop` for each prompt that is moved. The
    first two are learned from answers."""

    compute: float = 1e-3
    move: float = 2e-5
    hop: float = 5e-3
    learned: bool = False

    def pays(self, tokens: float, ahead: float, streams: int) -> bool:
        """Whether `tokens` of a prompt should be computed where `ahead` tokens wait, for a server with so many streams:
        each of them would be held up while the prompt is computed beside it."""
        interference = streams * tokens * self.compute
        return interference > self.hop + tokens * self.move + ahead * self.compute

    def computed(self, tokens: float, seconds: float) -> None:
        """A server took so long for tokens of a prompt."""
        if tokens >= _LEAST:
            self.compute += (_LEARNING if self.learned else 1.0) * (seconds / tokens - self.compute)
            self.learned = True

    def moved(self, tokens: float, seconds: float) -> None:
        """It took so long until a server began to answer that had got tokens of a prompt."""
        if tokens >= _LEAST:
            self.move += _LEARNING * (max(seconds - self.hop, 0.0) / tokens - self.move)
