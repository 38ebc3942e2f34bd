"""Limits of one tenant: requests and tokens in any minute, requests at once, and tokens a day.

A limit of N in a minute means: in no span of 60 seconds, wherever it begins, are more than N admitted. So it keeps
when the admitted ones leave the window, and a refused request knows to the nanosecond when it would be admitted. All
times are monotonic nanoseconds, integers: a clock that is set does not matter, and nothing is rounded at the boundary.

Tokens are those of the prompt and, where a request states it, its `max_tokens`; when it has ended, those that it used.
"""

from __future__ import annotations

from collections import deque

from quire.records import dataclass

NANO = 10**9
MINUTE, DAY = 60 * NANO, 86_400 * NANO
CONCURRENT, REQUESTS = "concurrent_requests", "requests_per_minute"
TOKENS, DAILY = "tokens_per_minute", "tokens_per_day"


@dataclass(slots=True, eq=False)
class Charge:
    """What was taken of a window: so much since then."""

    at: int
    amount: int


class SlidingWindow:
    """At most `limit` in any span of `length` nanoseconds; None for no limit. O(1) amortised."""

    def __init__(self, limit: int | None, length: int = MINUTE) -> None:
        self.limit, self._length = limit, length
        self._charges: deque[Charge] = deque()  # oldest first
        self._used = 0

    def used(self, now: int) -> int:
        """How much of the window is taken."""
        charges = self._charges
        while charges and charges[0].at + self._length <= now:
            self._used -= charges.popleft().amount
        return self._used

    def wait(self, amount: int, now: int) -> int:
        """Nanoseconds until so much could be taken, if nothing else is: 0 for now. More than the limit is not asked."""
        if self.limit is None:
            return 0
        excess = self.used(now) + amount - self.limit
        if excess <= 0:
            return 0
        for charge in self._charges:
            excess -= charge.amount
            if excess <= 0:
                return charge.at + self._length - now
        return self._length

    def take(self, amount: int, now: int) -> Charge:
        """Take so much, whether there is room or not."""
        charge = Charge(now, amount)
        if self.limit is not None:
            self.used(now)
            self._charges.append(charge)
            self._used += amount
        return charge

    def correct(self, charge: Charge, amount: int, now: int) -> None:
        """A charge turns out to be another amount; one that has left the window does not matter."""
        self.used(now)
        if self.limit is not None and charge.at + self._length > now:
            self._used += amount - charge.amount
        charge.amount = amount

    def reset(self, now: int) -> int:
        """Nanoseconds until all of the window is free, if nothing more is taken."""
        self.used(now)
        return self._charges[-1].at + self._length - now if self._charges else 0


@dataclass(slots=True)
class Quota:
    """At most `limit` in each period; the first one ends at `ends`."""

    limit: int | None
    length: int
    ends: int
    used: int = 0

    def turn(self, now: int) -> None:
        """Begin the period of `now`."""
        if now >= self.ends:
            self.ends += ((now - self.ends) // self.length + 1) * self.length
            self.used = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Which limit, what is asked and what is left, and the nanoseconds after which it is worth another try; None: never
    with this request."""

    limit: str
    message: str
    wait: int | None


@dataclass(slots=True, eq=False)
class TokenCharge:
    """What a request was charged, until it is settled."""

    window: Charge
    day: int  # the end of the quota's period
    tokens: int
    member: str = ""  # what it is called where several servers count together


class TenantLimits:
    """The counts of one tenant. `day_ends`: when its daily quota begins anew, on the clock of all times here."""

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        concurrent: int | None = None,
        daily: int | None = None,
        day_ends: int = DAY,
    ) -> None:
        self.requests, self.tokens = SlidingWindow(requests), SlidingWindow(tokens)
        self.concurrent, self.running = concurrent, 0
        self.day = Quota(daily, DAY, day_ends)

    def change(
        self, requests: int | None, tokens: int | None, concurrent: int | None, daily: int | None
    ) -> None:
        """New limits. What was counted under the old ones counts."""
        for window, limit in ((self.requests, requests), (self.tokens, tokens)):
            window.limit = limit
        self.concurrent, self.day.limit = concurrent, daily

    def enter(self, now: int) -> Refusal | None:
        """Begin a request, or say which limit is in its way. One that began must `leave`."""
        if self.concurrent is not None and self.running >= self.concurrent:
            return refusal_of(CONCURRENT, self.concurrent, self.running, 1, NANO)
        if wait := self.requests.wait(1, now):
            return refusal_of(REQUESTS, self.requests.limit, self.requests.used(now), 1, wait)
        self.count_request(now)
        return None

    def count_request(self, now: int) -> None:
        """A request begins, whatever the limits are. It must `leave`."""
        self.requests.take(1, now)
        self.running += 1

    def leave(self) -> None:
        """A request has ended."""
        self.running -= 1

    def charge(self, tokens: int, now: int, *, background: bool = False) -> TokenCharge | Refusal:
        """Take the tokens of a request, or say which limit is in its way. One in the background has the daily quota."""
        window, day = self.tokens, self.day
        day.turn(now)
        if (found := too_large(tokens, None if background else window.limit, day.limit)) is not None:
            return found
        if day.limit is not None and day.used + tokens > day.limit:
            return refusal_of(DAILY, day.limit, day.used, tokens, day.ends - now)
        if not background and (wait := window.wait(tokens, now)):
            return refusal_of(TOKENS, window.limit, window.used(now), tokens, wait)
        return self.count_tokens(tokens, now, background=background)

    def count_tokens(self, tokens: int, now: int, *, background: bool = False) -> TokenCharge:
        """Take the tokens of a request, whatever the limits are."""
        self.day.turn(now)
        self.day.used += tokens
        taken = Charge(now - MINUTE, tokens) if background else self.tokens.take(tokens, now)
        return TokenCharge(taken, self.day.ends, tokens)

    def settle(self, charge: TokenCharge, tokens: int, now: int) -> None:
        """A request has ended, and used so many tokens."""
        self.tokens.correct(charge.window, tokens, now)
        self.day.turn(now)
        if charge.day == self.day.ends:
            self.day.used += tokens - charge.tokens

    def headers(self, now: int) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of the limits that there are."""
        found = []
        for name, window in ((b"requests", self.requests), (b"tokens", self.tokens)):
            if window.limit is not None:
                found += headers_of(name, window.limit, window.used(now), window.reset(now))
        return found


def headers_of(name: bytes, limit: int, used: int, reset: int) -> list[tuple[bytes, bytes]]:
    """OpenAI's headers of a limit of requests or tokens; `reset`: nanoseconds until all of it is free."""
    return [
        (b"x-ratelimit-limit-" + name, str(limit).encode()),
        (b"x-ratelimit-remaining-" + name, str(max(0, limit - used)).encode()),
        (b"x-ratelimit-reset-" + name, duration(reset)),
    ]


def too_large(tokens: int, minute: int | None, day: int | None) -> Refusal | None:
    """The refusal of a request that no window of its tenant can ever take, if it is one."""
    for name, limit, period in ((TOKENS, minute, "a minute"), (DAILY, day, "a day")):
        if limit is not None and tokens > limit:
            text = f"prompt and max_tokens are {tokens} tokens, over the {limit} that this tenant has in {period}"
            return Refusal(name, text, None)
    return None


def refusal_of(name: str, limit: int | None, used: int, amount: int, wait: int) -> Refusal:
    """The refusal by one limit, of which so much is used; `wait` in nanoseconds."""
    left = max(0, (limit or 0) - used)
    asked = f"prompt and max_tokens are {amount} tokens, {left} of {limit} are left of"
    text = {
        CONCURRENT: f"{used} requests of this tenant run, its limit is {limit}",
        REQUESTS: f"{limit} requests in a minute are the limit of this tenant",
        TOKENS: f"{asked} this minute's",
        DAILY: f"{asked} the day's quota",
    }[name]
    return Refusal(name, text, wait)


def duration(nanoseconds: int) -> bytes:
    """A time in OpenAI's form, rounded up to milliseconds: 20ms, 1.5s, 6m0s."""
    millis = -(-nanoseconds // 1_000_000)
    if millis < 1000:
        return f"{millis}ms".encode()
    minutes, rest = divmod(millis, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return (f"{minutes}m" if minutes else "").encode() + f"{seconds}s".encode()
