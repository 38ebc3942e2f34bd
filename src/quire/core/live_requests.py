"""The live requests, and which of their samples wait.

Samples of one request share the blocks of its prompt: the first one queued computes the prompt, the others are held
back until it has, and then find the blocks in the prefix cache. If the first ends before that, the next one leads.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.block_pool import AuditError
from quire.core.guidance import negative_of
from quire.core.guided_pairs import link
from quire.core.policy import Policies
from quire.core.scheduler_config import SchedulerConfig
from quire.core.sequence import NEVER, RequestState, Sequence, Status
from quire.core.service_estimates import ServiceEstimates
from quire.core.soft_tokens import block_marks
from quire.core.tier import space_of
from quire.core.waiting_queues import Queue
from quire.types import Request, RequestError


class Requests:
    """Live requests by id, and their waiting sequences."""

    def __init__(
        self, config: SchedulerConfig, queue: Queue, policies: Policies, estimates: ServiceEstimates
    ) -> None:
        self.waiting = queue
        self._config, self._policies, self._estimates = config, policies, estimates
        self._states: dict[str, RequestState] = {}
        self._held_back = 0
        self._next_seq_id = 0
        self._private_namespaces = 0
        self.num_guided = 0  # live requests that are pairs
        self.num_special = 0  # with an adapter or a grammar

    @property
    def num_waiting(self) -> int:
        """Sequences queued or held back."""
        return len(self.waiting) + self._held_back

    def get(self, request_id: str) -> RequestState | None:
        """A live request, or None."""
        return self._states.get(request_id)

    def use(self, queue: Queue, policies: Policies) -> None:
        """From now on sequences wait in another queue; those that wait are the caller's to move."""
        self.waiting, self._policies = queue, policies

    def sequences(self) -> Iterator[Sequence]:
        """All that have not ended."""
        for state in self._states.values():
            yield from (seq for seq in state.sequences if seq.status is not Status.ENDED)

    def add(self, request: Request, *, limit: int, seed: int) -> None:
        """Create and queue the sequences of a request. Raises RequestError when its id is in use."""
        state = self._add(request, limit=limit, seed=seed)
        if request.negative_prompt is not None:
            negative = negative_of(request, limit, seed)
            ends = limit - len(request.prompt_token_ids) + len(negative.prompt_token_ids)
            other = self._add(negative, limit=ends, seed=seed)
            link(state.sequences, other.sequences)
            self._let_in(other, 1)
            self.num_guided += 1
        self._let_in(state, 1)

    def _add(self, request: Request, *, limit: int, seed: int) -> RequestState:
        if request.request_id in self._states:
            raise RequestError("request_id", f"{request.request_id!r} is already in use")
        state = self._states[request.request_id] = self._make_state(request)
        if self._policies.of(request).order == "sjf":
            self._estimates.arrived(request)
        self.num_special += _is_special(request)
        if request.soft_tokens:
            state.marks = block_marks(request.soft_tokens, self._config.block_size)
        for index in range(request.params.n):
            seq = Sequence(self._next_seq_id, index, state, limit=limit, seed=seed)
            seq.rank = self._policies.rank(seq, self._estimates)
            seq.status = Status.HELD_BACK
            state.sequences.append(seq)
            self._next_seq_id += 1
        state.held_back.extend(state.sequences)
        state.live = len(state.sequences)
        self._held_back += state.live
        return state

    def prompt_computed(self, seq: Sequence) -> None:
        """A sequence has computed its prompt: queue the siblings that waited for it, those of a pair together."""
        other = seq.partner
        if other is None or other.computed >= other.prompt_len:
            for half in (seq,) if other is None else (seq, other):
                self._let_in(half.state, len(half.state.held_back))

    def end(self, seq: Sequence) -> bool:
        """Mark a sequence as ended and remove it from the queues; True for the last one of its request."""
        state, was = seq.state, seq.status
        if was is Status.HELD_BACK:
            state.held_back.remove(seq)
            self._held_back -= 1
        elif was is Status.WAITING:
            self.waiting.discard(seq)
        seq.status = Status.ENDED
        state.live -= 1
        if state.live:
            if was is not Status.HELD_BACK and state.held_back:
                self._let_in(state, 1)
            return False
        del self._states[state.request.request_id]
        self.num_special -= _is_special(state.request)
        self.num_guided -= state.request.negative_prompt is not None
        state.sequences = []  # they refer to each other: without this their tokens would wait for the garbage collector
        return True

    def audit(self, running: list[Sequence], fetching: int) -> None:
        """Check that every live sequence is in exactly one place; raises AuditError. O(sequences)."""
        seqs = [seq for state in self._states.values() for seq in state.sequences]
        for seq in seqs:
            computed, known = seq.computed, len(seq.tokens)
            if not computed < known < seq.limit and seq.status is not Status.ENDED:
                raise AuditError(f"sequence {seq.seq_id}: {computed} of {known} computed, limit {seq.limit}")
        statuses = [seq.status for seq in seqs]
        queued = list(self.waiting)
        said = {
            Status.HELD_BACK: self._held_back,
            Status.WAITING: len(queued),
            Status.FETCHING: fetching,
            Status.RUNNING: len(running),
        }
        for status, count in said.items():
            found = statuses.count(status)
            if found != count:
                raise AuditError(f"{found} sequences are {status.name}, {count} are counted")
        if len(set(queued)) != len(self.waiting):
            raise AuditError("a sequence waits twice, or the count of the queue is wrong")
        for state in self._states.values():
            statuses = [seq.status for seq in state.sequences]
            if state.live != len(statuses) - statuses.count(Status.ENDED):
                raise AuditError(f"request {state.request.request_id!r} has a wrong count of samples")

    def _make_state(self, request: Request) -> RequestState:
        if self._config.enable_prefix_caching:
            space = space_of(request.adapter, request.namespace)
            return RequestState(request, request.tenant, space, NEVER)
        if request.params.n == 1:
            return RequestState(request, "", None, 0)
        # Its samples still share the prompt, in a namespace that ends with the request.
        self._private_namespaces += 1
        name = f"request:{self._private_namespaces}"
        return RequestState(request, "", name, len(request.prompt_token_ids) // self._config.block_size)

    def _let_in(self, state: RequestState, count: int) -> None:
        for _ in range(count):
            self._held_back -= 1
            self.waiting.push(state.held_back.popleft())


def _is_special(request: Request) -> bool:
    return request.adapter != "" or request.grammar is not None
