"""Admission to the queue: impossible requests are refused at once, and the queue is bounded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

from quire.config.live import LiveConfig
from quire.config.schema import SchedulerOptions
from quire.core.beam_search import check_beams
from quire.core.given_output import first_tokens
from quire.core.policy import BACKGROUND
from quire.engine.api import EngineStats, GenerateAsk, OverloadedError
from quire.engine.front.outlook import Outlook
from quire.engine.front.stream import LiveRequest
from quire.engine.host.messages import Ready, StepReport
from quire.engine.policies import named_policies
from quire.engine.request_forms import check_given, check_prediction
from quire.types import Request, RequestError

_WINDOW_SECONDS = 30.0
_WINDOW_STARTS = 8  # the latest starts count, however long ago they were
_MIN_RETRY, _MAX_RETRY = 1.0, 600.0


class Admission:
    """The queue as the API process sees it: requests that no step has started yet.

    A request sent to an engine with idle slots is not queued. Only requests that the engine reported as waiting, and
    those sent since in excess of its idle slots, count towards `max_requests`. `max_tokens` limits the prompt tokens of
    all requests not yet started, with the output that is given to them; one request is always admitted when none waits.

    A tenant may use at most as many waiting places, and as many prompt tokens, as it leaves free: a tenant that floods
    the queue leaves half of it to the others, two leave a third. Running requests do not count.
    """

    def __init__(
        self,
        facts: Ready,
        max_requests: int,
        max_tokens: int,
        scheduling: SchedulerOptions | None = None,
    ) -> None:
        self.outlook = Outlook(facts.scheduler, scheduling or SchedulerOptions())
        self.waiting_tokens = 0
        self._facts, self._scheduler = facts, facts.scheduler
        self._policies = self._scheduler.policies()
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._waiting: dict[int, tuple[int, str]] = {}  # by handle, in order: prompt tokens, tenant
        self._requests: Counter[str] = Counter()  # tenant -> number of its requests among these
        self._tokens: Counter[str] = Counter()  # tenant -> number of its prompt tokens among these
        self._sent: dict[
            int, int
        ] = {}  # handle -> samples, for requests the engine had not seen at its last step
        self._sent_samples = 0
        self._idle = facts.scheduler.max_num_seqs  # slots for sequences
        self._engine_waits = False
        self._starts: deque[tuple[float, int]] = deque()  # time and prompt tokens of recent starts

    def configure(self, live: LiveConfig) -> None:
        """Go by another configuration from now on; what was admitted stays."""
        facts = self._facts.scheduler
        blocks = {name: int(share * facts.num_blocks) for name, share in live.cache_shares.items()}
        policies = self._policies = named_policies(live.scheduling_policy, live.slo, live.overtake_ms)
        by_class = tuple(policy.text for policy in policies.by_class)
        self._scheduler = replace(
            facts,
            policy=policies.usual.text,
            class_policies=by_class,
            overtake=live.overtake_ms / 1e3,
            floors=blocks,
        )
        self._max_requests, self._max_tokens = live.max_num_queued_reqs, live.max_num_queued_tokens
        self.outlook.configure(self._scheduler, live)

    @property
    def waiting(self) -> int:
        """Number of requests that no step has started yet."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise RequestError, naming field and limit, for a request that this engine could never run."""
        facts = self._facts
        self._scheduler.length_limit(request)
        if request.priority not in {0, BACKGROUND} and not self._policies.of(request).levels:
            raise RequestError(
                "priority",
                "priorities need --scheduling-policy priority; this server runs requests in order of arrival",
            )
        prompts = {
            "prompt_token_ids": request.prompt_token_ids,
            "negative_prompt": request.negative_prompt or (0,),
        }
        for name, ids in prompts.items():
            if (highest := max(ids)) >= (facts.ids or facts.vocab):
                raise RequestError(
                    name, f"{highest} is not a token id below the vocabulary size {facts.vocab}"
                )
        allowed = request.params.allowed_token_ids
        if allowed is not None and len(allowed) > facts.vocab:
            raise RequestError(
                "allowed_token_ids", f"{len(allowed)} tokens exceed the vocabulary size {facts.vocab}"
            )
        request.params.check_vocab(facts.vocab, facts.eos_token_ids)
        if request.beams is not None:
            check_beams(request)
        if request.given:
            check_given(request, facts.vocab)
        if request.prediction:
            check_prediction(request.prediction, facts.vocab, facts.scheduler.max_model_len)

    def admit(
        self,
        handle: int,
        ask: GenerateAsk,
        now: float,
        lives: Iterable[LiveRequest] = (),
        stats: EngineStats | None = None,
    ) -> None:
        """Add a request to the queue, behind `lives`. Raises OverloadedError, with the numbers, when it is full, or
        when by the engine's latest `stats` what the request wants cannot be kept."""
        prediction = None if stats is None else self.outlook.check(ask, lives, now, stats)
        request = ask.request
        tokens, samples = first_tokens(request), request.params.n
        if request.negative_prompt is not None:
            tokens, samples = tokens + len(request.negative_prompt), 2 * samples
        if self._engine_waits:
            queued = len(self._waiting)
        else:
            queued = min(len(self._sent), max(0, self._sent_samples - self._idle))
        if queued >= self._max_requests:
            raise OverloadedError(
                f"the queue is full: {queued} requests are waiting (limit {self._max_requests})",
                self._wait(requests=queued - self._max_requests + 1, tokens=0, now=now),
            )
        if self._waiting and self.waiting_tokens + tokens > self._max_tokens:
            excess = self.waiting_tokens + tokens - self._max_tokens
            raise OverloadedError(
                f"the queue is full: {self.waiting_tokens} prompt tokens are waiting, and {tokens} more exceed the"
                f" limit of {self._max_tokens}",
                self._wait(requests=0, tokens=excess, now=now),
            )
        if ask.tenant and queued:
            self._check_share(ask.tenant, queued, tokens, now)
        self._waiting[handle] = tokens, ask.tenant
        self._requests[ask.tenant] += 1
        self._tokens[ask.tenant] += tokens
        self.waiting_tokens += tokens
        self._sent[handle] = samples
        self._sent_samples += samples
        self.outlook.admitted(ask, prediction, now)

    def _check_share(self, tenant: str, queued: int, tokens: int, now: float) -> None:
        """Raise OverloadedError when the waiting requests of a tenant reach what is left for the others."""
        own, left = min(self._requests[tenant], queued), self._max_requests - queued
        if own and own >= left:
            raise OverloadedError(
                f"the share of this API key is full: {own} of its requests are waiting, and {left} of"
                f" {self._max_requests} places are left for other keys",
                self._wait(requests=own - left + 1, tokens=0, now=now),
            )
        own, left = self._tokens[tenant], self._max_tokens - self.waiting_tokens
        if own and own + tokens > left:
            raise OverloadedError(
                f"the share of this API key is full: {own} of its prompt tokens are waiting, and {tokens} more exceed"
                f" the {left} of {self._max_tokens} that are left for other keys",
                self._wait(requests=0, tokens=own + tokens - left, now=now),
            )

    def remove(self, handle: int) -> None:
        """Remove a request that has ended or was refused; does nothing if it does not wait."""
        self._end_wait(handle)
        self._sent_samples -= self._sent.pop(handle, 0)

    def started(self, handle: int, now: float) -> None:
        """A step has started the request."""
        tokens = self._end_wait(handle)
        if tokens is not None:
            self._starts.append((now, tokens))
            self._forget_starts(now)

    def stepped(self, step: StepReport, now: float) -> None:
        """Take the engine's report on a step and its queue."""
        seen, running, waiting = step.seen, step.running, step.waiting
        while self._sent and (first := next(iter(self._sent))) <= seen:
            self._sent_samples -= self._sent.pop(first)
        self.outlook.stepped(step, now, busy=bool(running or waiting or self._sent))
        self._engine_waits = waiting > 0
        self._idle = max(0, self._facts.scheduler.max_num_seqs - running)

    def _end_wait(self, handle: int) -> int | None:
        """Remove a request from the queue; returns its prompt tokens, None if it did not wait."""
        waited = self._waiting.pop(handle, None)
        if waited is None:
            return None
        tokens, tenant = waited
        self.waiting_tokens -= tokens
        self._tokens[tenant] -= tokens
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]
        return tokens

    def _wait(self, *, requests: int, tokens: int, now: float) -> float:
        """Estimated seconds until this many requests, or prompt tokens, have started at the recent rate."""
        self._forget_starts(now)
        recent = self._starts
        if not recent:
            return _MIN_RETRY
        span = max(now - recent[0][0], 0.1)
        # Everyone refused now gets the same estimate: wait for an eighth of the queue, not for one place.
        requests = max(requests, self.waiting // 8 if requests else 0)
        rates = requests * span / len(recent), tokens * span / max(1, sum(size for _, size in recent))
        return min(_MAX_RETRY, max(_MIN_RETRY, *rates))

    def _forget_starts(self, now: float) -> None:
        starts = self._starts
        while len(starts) > _WINDOW_STARTS and starts[0][0] < now - _WINDOW_SECONDS:
            starts.popleft()
