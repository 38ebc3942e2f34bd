"""Decides which tokens of which sequences run in the next step.

A step is `out = schedule()`, the executor's work, `events = update(out, result)`. `add`, `abort` and `finish`
may be called at any point in between. Not thread-safe.

With two steps in flight the second is scheduled while the first runs:

    sequence    knows     step 1, runs        step 2, scheduled          or, where the host must see x first
       a        t t t     row t     -> x      row NEXT_TOKEN, which is x  no row: it sits the step out
       b        t t t t   row t t             row t t   -> y

The result of step 1 may end a sequence: then its row of step 2 is wasted. Where sequences take turns, `a` sits step 2
out, too; see core.step_sharing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from functools import partial
from itertools import count
from operator import attrgetter

from quire.core.cached_prefix import Hit
from quire.core.guided_pairs import follow, halved, halves, hold_back
from quire.core.scheduler_state import SchedulerState
from quire.core.sequence import NEVER, Sequence, Status
from quire.core.step_plan import (
    Blocked,
    Flight,
    StepPlan,
    add_drafts,
    after,
    check_result,
    check_stepwise,
    features_of,
    final_event,
    first_end,
    new_seq,
    take_drafts,
    take_prompt_logprobs,
)
from quire.core.step_sharing import CHUNK, passed_over, share_of_streams
from quire.core.streams import decoding, most_tokens_of
from quire.core.waiting_queues import OUTPUT_PRICE
from quire.types import (
    NEXT_TOKEN,
    FinishReason,
    Request,
    ScheduledSeq,
    SchedulerOutput,
    SeqEvent,
    StepOutput,
)

LOOK_AGAIN_STEPS = 16

_by_rank = attrgetter("rank")
unmade = object.__new__


class Scheduler(SchedulerState):
    """Decides what runs next.

    Promises: every sample that `add` accepts ends with exactly one final event; no sequence starves within its level
    (core.policy); while there is work, every step runs at least one token.
    """

    def add(self, request: Request) -> None:
        """Queue a request, one sequence per sample.

        Raises RequestError naming the field and the limit when a sample could never complete, or when the id is in
        use. Samples after the first wait until it has computed the prompt, then share its blocks.
        """
        seed = request.params.seed
        seed = self._rng.getrandbits(64) if seed is None else seed % 2**64
        self._requests.add(request, limit=self.config.length_limit(request), seed=seed)

    def abort(self, request_id: str) -> list[SeqEvent]:
        """End every live sample of a request; returns their final events (none if the request is unknown)."""
        state = self._requests.get(request_id)
        if state is None:
            return []
        events = []
        # Siblings waiting for the first one end before it, so that none of them is queued.
        for seq in reversed(state.sequences):
            if seq.status is not Status.ENDED:
                self._end(seq)
                events.append(final_event(seq, FinishReason.ABORT))
        self._sweep()
        return events[::-1]

    def finish(self, request_id: str, sample_index: int, reason: FinishReason) -> SeqEvent | None:
        """End one sample now, for example because its text contains a stop string; returns its final event.

        Returns None when that sample has already ended or does not exist.
        """
        state = self._requests.get(request_id)
        if state is None or not 0 <= sample_index < len(state.sequences):
            return None
        seq = state.sequences[sample_index]
        if seq.status is Status.ENDED:
            return None
        self._end(seq)
        self._sweep()
        return final_event(seq, reason)

    def schedule(self) -> SchedulerOutput:
        """The next step. It is empty only when there is no work, or when nothing can run before a step in flight is
        passed to `update` or moves have ended.

        Raises ValueError when the maximum number of steps is in flight.
        """
        flights = self._flights
        if len(flights) >= self.config.steps_in_flight:
            raise ValueError(f"step {flights[0].step} has not been passed to update")
        ahead = dict(zip(flights[0].seqs, flights[0].rows, strict=True)) if flights else self._none_ahead
        tokens, streams, passed = min(self.limits.tokens, self.caps.tokens), NEVER, self._none_passed
        if shares := self.shares:
            streams = share_of_streams(self._running, ahead)
            passed = passed if ahead else passed_over(self._running, self._had_turn)
            if self.config.enable_chunked_prefill:
                tokens = min(tokens, streams + CHUNK)
        step = StepPlan(tokens, ahead, streams, passed)
        # The only rule: a sequence has computed < len(tokens); spend the token budget until it is used up.
        # A prompt, a chunk of one, a decoded token, the rest after a hit, resuming: all are a sequence catching up.
        if self._resumed:
            self._resumed.look()
        self._blocks.caches.pass_time()
        self._advance_running(step)
        if step.passed and not step.rows:
            step.passed = self._none_passed  # they may hold what the others wait for
            self._advance_running(step)
        if (
            self._resumed
            and self._running
            and not (step.rows or step.ahead or step.preempted or self._fetches)
        ):
            self._resumed.clear()  # shares of tenants and drafts may take what was kept
            self._advance_running(step)
        if self._waiting and not step.preempted:
            self._admit_waiting(step)
        if self._requests.num_guided:
            hold_back(step)
        self.step_counts, drafts = step.counts(tokens), 0
        if self._drafts_wait:
            drafts, seen = add_drafts(step, self._blocks, self.caps.drafts)
            self.step_counts = self.step_counts.with_drafts(drafts, seen)
        self.step_drafts = drafts
        self.step_features = features_of(step, self.step_counts, drafts, self._requests.num_special)
        self._all_decode = step.decode == len(step.rows) == len(self._running)
        self._step += 1
        if step.rows:
            usual = step.usual == len(step.rows) and not self._requests.num_guided
            flights.append(Flight(self._step, step.rows, step.seqs, usual))
            if shares:
                self._had_turn = {seq.seq_id for seq in step.seqs}
        gone, self._gone = self._gone, []
        caches = self._blocks.caches
        caches.save(idle=not (step.rows or ahead))
        moves, caches.moves = caches.moves, []
        copies, self._blocks.copies = self._blocks.copies, []
        return SchedulerOutput(self._step, step.rows, step.new, gone, moves, copies)

    def update(
        self, out: SchedulerOutput, result: StepOutput, usual_rows: list[int] | None = None
    ) -> list[SeqEvent]:
        """Commit the result of step `out`; returns what changed for callers, in row order. With `usual_rows`, the ids
        of sequences that got one token and go on are put there in place of events: a simulation has many of them.

        Rows of sequences that ended while the step ran are ignored. Raises ValueError, without changing anything, when
        `out` is not the oldest step in flight or `result` does not fit it.
        """
        seqs = self._land(out, result)
        if self._fetches is not None:
            for seq in self._fetches.end(result.filled):
                self._waiting.push(seq)
        running, logged, tables = Status.RUNNING, result.logprobs, result.prompt_logprobs
        usual = not (result.failed or result.pooled or result.complete or result.drafted)
        special = self._requests.num_guided > 0 or tables.count(None) < len(tables)
        line, made = self.usage.only, 0  # tokens counted there
        events: list[SeqEvent] = []
        ended = False
        for i, seq, new in zip(count(), seqs, result.token_ids, strict=False):
            if seq.status is not running:
                continue
            tokens = seq.tokens
            if (
                usual
                and len(new) == 1
                and (end := len(tokens)) + 1 < seq.limit
                and (token := new[0]) not in seq.stop_ids
                and not (special and (seq.follows or tables[i] is not None))
            ):  # most rows of most steps; what follows does the same for any row
                tokens.append(token)
                seq.computed = end
                if line is not None:
                    made += 1
                elif (other := seq.state.line) is not None:
                    other.generated += 1
                if (account := seq.account) is not None:
                    account.served += seq.price
                if end >= seq.wake:
                    self._reach_wake(seq)
                if usual_rows is not None:
                    usual_rows.append(seq.seq_id)
                    continue
                event = unmade(SeqEvent)  # its constructor takes twice as long
                event.request_id, event.sample_index, event.new_token_ids = (
                    seq.request_id,
                    seq.sample_index,
                    new,
                )
                event.logprobs, event.cached_tokens = logged[i], seq.state.cached_tokens
                event.prompt_logprobs = event.finish_reason = event.stop_token_id = event.drafts = None
                event.pooled = b""
                events.append(event)
                continue
            ended = self._take_row(i, seqs, out, result, events) or ended
        if line is not None:
            line.generated += made
        if ended:
            self._sweep()
        return events

    def _take_row(
        self, i: int, seqs: list[Sequence], out: SchedulerOutput, result: StepOutput, events: list[SeqEvent]
    ) -> bool:
        """Commit row i of a step, whose sequence runs; whether it ended."""
        seq, row = seqs[i], out.scheduled[i]
        if seq.follows:
            follow(seq)
            self._ran(seq, row, [])
            return False
        if (failure := result.failed.get(i)) is not None:
            events.append(self._fail(seq, failure))
            return True
        if (numbers := result.pooled.get(i)) is not None:
            events.append(self._pooled(seq, row, numbers))
            return True
        new, logprobs = result.token_ids[i], result.logprobs[i]
        reason = stop = prompt_logprobs = None
        if new:
            kept, reason, stop = seq.append(new, complete=i in result.complete)
            if kept < len(new):
                new, logprobs = new[:kept], logprobs[:kept] if logprobs is not None else None
        self._ran(seq, row, new)
        if row.prompt_logprobs:
            prompt_logprobs = take_prompt_logprobs(seq, row, result.prompt_logprobs[i])
        elif not new:
            return False
        state, drafted = seq.state, result.drafted.get(i)
        events.append(
            SeqEvent(
                state.request.request_id, seq.sample_index, new, logprobs, prompt_logprobs, reason, stop,
                state.cached_tokens, drafted,
            )
        )  # fmt: skip
        if reason is None:
            return False
        self.estimates.ended(state.request, len(seq.tokens) - seq.prompt_len)
        self._end_pair(seq, seqs, out.scheduled)
        return True

    def _ran(self, seq: Sequence, row: ScheduledSeq, new: list[int]) -> None:
        """Count what is in the cache after a row, of whose tokens `new` were accepted.

        Tokens past the known ones are there only if the row ran them and they were accepted; the newest token never is.
        """
        end, last = row.start + len(row.token_ids), len(seq.tokens) - 1
        if row.parents is not None:
            end -= row.drafts - len(row.path(new))
        seq.computed = end = end if end < last else last
        if new:
            if (line := seq.state.line) is not None:
                line.generated += len(new)
            if (account := seq.account) is not None:
                account.served += seq.price * len(new)
        if end >= seq.wake:
            self._reach_wake(seq)

    def _end_pair(self, seq: Sequence, seqs: list[Sequence], rows: list[ScheduledSeq]) -> None:
        """End a sequence that sampled its last token. A follower did so in the same step: its blocks stay findable."""
        if (follower := seq.partner) is not None:
            follow(follower)
            self._ran(follower, rows[seqs.index(follower)], [])
        self._end(seq)

    def _pooled(self, seq: Sequence, row: ScheduledSeq, numbers: bytes) -> SeqEvent:
        """End a sequence whose whole prompt has been computed and pooled."""
        seq.computed = row.start + len(row.token_ids)
        self._end(seq)
        return final_event(seq, FinishReason.STOP, numbers)

    def _land(self, out: SchedulerOutput, result: StepOutput) -> list[Sequence]:
        """Take a step out of flight; returns the sequences of its rows, which keep what their next start at a worker
        needs. Raises as described at `update`."""
        if self._fetches is not None:
            self._fetches.check(result.filled)
        if not out.scheduled:
            return []  # an empty step is never in flight
        flights = self._flights
        if not flights or flights[0].step != out.step:
            raise ValueError(f"step {out.step} is not the oldest one in flight")
        seqs = flights[0].seqs
        check_result(out, seqs, result, usual=flights[0].usual)
        if self.config.steps_in_flight > 1 and not self.config.takes_turns:
            check_stepwise(seqs, result)
        if self._drafts_wait or result.drafts:
            take_drafts(out, seqs, result)
            self._drafts_wait = len(flights) > 1 or any(seq.drafts for seq in self._running)
        flights.popleft()
        if self._gone or self.config.steps_in_flight > 1:  # else none has ended since the step was scheduled
            running = Status.RUNNING
            self.wasted_rows += sum([seq.status is not running for seq in seqs])
        for i, surprise in result.surprises.items():
            seqs[i].surprise = surprise
        return seqs

    def _advance_running(self, step: StepPlan) -> None:
        rows, seqs, no_blocks = step.rows, step.seqs, self._no_blocks
        usual, most = not (step.ahead or step.passed), min(step.budget, step.streams - step.decode)
        taken = context = 0
        kept = None if self._by_arrival or self._all_decode else decoding(self._running)
        for seq in self._running:  # a preemption shortens this list at its end, never before the cursor
            tokens, start = seq.tokens, seq.computed
            end = len(tokens)
            if (
                usual
                and end - start == 1
                and start >= seq.prompt_len
                and end <= seq.table.capacity
                and taken < most
            ):  # most rows of most steps; `_catch_up` does the same for any row
                taken += 1
                context += end
                row = unmade(ScheduledSeq)  # its constructor takes twice as long
                row.seq_id = seq.seq_id
                row.start = start
                row.token_ids = [tokens[start]]
                row.new_blocks = no_blocks
                row.logits = 1
                row.prompt_logprobs = False
                row.depth = 0
                row.parents = None
                rows.append(row)
                seqs.append(seq)
                continue
            step.add_usual(taken, context)
            if not self._catch_up(seq, step, kept):
                return
            taken = context = 0
            most = min(step.budget, step.streams - step.decode)
        step.add_usual(taken, context)

    def _catch_up(self, seq: Sequence, step: StepPlan, kept: Counter[float] | None) -> bool:
        """Add the row of a running sequence, if it has one; whether those behind it may have any. `kept`: see
        core.streams."""
        tokens, start, ahead = seq.tokens, seq.computed, step.ahead
        end = known = len(tokens)
        if ahead and seq in ahead:
            start, end = after(ahead[seq], seq, takes_turns=self.config.takes_turns)
            known = end
        decodes = start >= seq.prompt_len
        if start == end or (decodes and (step.decode >= step.streams or seq.seq_id in step.passed)):
            return True
        most = step.budget if kept is None else most_tokens_of(seq, step.budget, kept)
        if end - start > most:
            if not step.budget:
                return False
            end = start + most
        new_blocks = self._no_blocks
        if end > seq.table.capacity:
            end = self._make_room(seq, start, end, step)
            if end == start:
                if seq.status is not Status.RUNNING:  # it was preempted itself, being the last
                    return False
                step.owed += self._blocks.outstanding(seq, start)
                return True
            if end > seq.table.capacity:
                new_blocks = self._blocks.grow(seq, end)
        step.budget -= end - start
        step.context += end
        step.decode += decodes and end == start + 1
        if end < known:
            step.owed += self._blocks.outstanding(seq, end)
        wants = seq.prompt_logprobs_left > 0 and end > seq.prompt_logprobs_from and start < seq.prompt_len - 1
        ids = tokens[start:end] or [NEXT_TOKEN]
        step.rows.append(ScheduledSeq(seq.seq_id, start, ids, new_blocks, end == known, wants))
        step.seqs.append(seq)
        return True

    def _make_room(self, seq: Sequence, start: int, end: int, step: StepPlan) -> int:
        """The position, at most `end`, up to which a running sequence can go from `start` with the available blocks.

        Prefers a shorter chunk to a preemption; if there is room for no token at all, others are preempted, last in
        rank first. If `seq` itself is the last, it is preempted and `start` is returned. If there are blocks but they
        are the share of other tenants, the last of its own tenant is preempted. If that is `seq` itself, it stays and
        `start` is returned, unless it is first of all. Those that resumed are passed over; see core.resumed.
        """
        blocks, kept = self._blocks, self._resumed.kept(seq)
        while blocks.missing(seq, end) > (room := blocks.room(seq) - kept):
            reach = blocks.reachable_end(seq, room)
            if reach > start:
                return min(end, reach)
            # Its running row may release blocks behind a window. A fetch releases its blocks by itself.
            pair = halves(seq, Status.RUNNING)
            if any(half in step.ahead for half in pair) or (self._fetches and self._running[-1] in pair):
                return start
            bounded = blocks.reachable_end(seq, blocks.caches.available - kept) > start
            last_to_give = partial(self._resumed.last_to_give, self._running, seq)
            victim = last_to_give(seq.state.tenant if bounded else None)
            if bounded and victim in pair:
                victim = last_to_give() if self._running[0] in pair else None
            first = victim is self._running[0] and len(self._running) > 1
            if victim is None or first or (seq.partner is not None and victim in pair):
                return start  # until one that resumed has got further; a pair waits for those ahead of it
            self._preempt(victim, step)
            if seq.status is not Status.RUNNING:
                return start
        return end

    def _admit_waiting(self, step: StepPlan) -> None:
        # Strictly in rank: if the first one does not fit, all wait for it, so none is overtaken for ever.
        blocks = self._blocks
        while step.budget:
            seq = self._waiting.peek()
            # A preempted sequence does not start again before its running row has been passed to `update`.
            pair = [] if seq is None else halves(seq, Status.WAITING)
            if seq is None or (step.ahead and any(half in step.ahead for half in pair)):
                return
            if not self._may_have_slots(seq, len(pair)):
                if self._part(step):
                    continue
                return
            room = self._room(seq, step)
            blocked = self._blocked
            if blocked and blocked.seq is seq and blocked.needs > room and self._step < blocked.until:
                return  # looking up a long prompt in every step would cost more than the step
            hit = blocks.find(seq)
            if first_end(self.config, seq, hit, step.budget) == hit.length:
                return
            needs = blocks.needs(seq, hit)
            for half in pair[1:]:
                # As much is kept for the first when the second starts.
                needs += blocks.needs(half, blocks.find(half)) + blocks.num_groups
            if needs <= room and self._num_placed + len(pair) <= self._slots:
                if seq.follows and blocks.room(seq) - blocks.unheld(hit) < blocks.num_groups:
                    return  # its leader holds all blocks until its chunk has run
                self._blocked = None
                self._waiting.pop()
                fetches = None if seq.partner is not None else self._fetches
                if fetches is None or not fetches.begin(seq, hit, room, len(self._running)):
                    self._start(seq, hit, step)
            elif self._can_displace(seq, needs - room) and (
                victim := self._resumed.first_to_yield(self._running, seq)
            ):
                # Look again: the blocks found may have been evicted.
                self._preempt(victim, step)
            elif not self._part(step):
                self._blocked = Blocked(seq, needs, self._step + LOOK_AGAIN_STEPS)
                return

    def _part(self, step: StepPlan) -> bool:
        """Preempt leaders whose followers wait, as what waits ahead cannot start: they hold what it waits for, and
        could not go on. Whether there was one."""
        parted = halved(self._running, step) if self._requests.num_guided else []
        for seq in parted:
            self._preempt(seq, step)
        return bool(parted)

    @property
    def _slots(self) -> int:
        """Sequences that may run at once; a pair is never kept out."""
        return min(self.caps.sequences, max(self.limits.sequences, 1 + (self._requests.num_guided > 0)))

    @property
    def _num_placed(self) -> int:
        """Sequences that run, or will when their blocks have arrived."""
        return len(self._running) + (0 if self._fetches is None else len(self._fetches))

    def _may_have_slots(self, seq: Sequence, count: int) -> bool:
        """Whether there may be room for `count` sequences more, of which this is the first."""
        if self._num_placed + count <= self._slots:
            return True
        return self._resumed.first_to_yield(self._running, seq) is not None

    def _room(self, seq: Sequence, step: StepPlan) -> int:
        """Blocks for all known tokens of a newly admitted sequence.

        That is what its tenant may take, less what the running ones still need and one more block per group for each of
        them: admitting a sequence for its first chunk alone would soon preempt it again. A single sequence always has
        room, since `add` refuses requests that cannot run alone.
        """
        running = len(self._running)
        if running == len(halves(seq, Status.RUNNING)) - 1 and not self._fetches:
            return NEVER
        return self._blocks.room(seq) - step.owed - running * self._blocks.growth(seq)

    def _can_displace(self, seq: Sequence, short: int) -> bool:
        """Whether a slot and `short` more blocks would be available if less urgent running sequences were preempted."""
        places = self._num_placed + len(halves(seq, Status.WAITING)) - self._slots
        alone, found = self._resumed.would_free(self._running, seq, short, places)
        return found or (alone and not self._fetches)

    def _start(self, seq: Sequence, hit: Hit, step: StepPlan) -> None:
        blocks, state = self._blocks, seq.state
        end = first_end(self.config, seq, hit, step.budget)
        blocks.start(seq, hit)
        end = min(end, blocks.reachable_end(seq, blocks.room(seq)))
        source, part = self.part(seq, end)
        found = min(hit.length + part, seq.prompt_len)
        if not state.started:
            state.started = True
            state.cached_tokens = found
            state.line = line = self.usage.line(state.request.terms)
            line.prompt += seq.prompt_len
            line.cached += found
            may_hit = not seq.prompt_logprobs_left or seq.prompt_logprobs_from > 0
            if self.config.enable_prefix_caching and may_hit:
                self.prefix_stats.queried_tokens += len(seq.tokens)
                self.prefix_stats.hit_tokens += hit.length + part
                self.prefix_stats.copied_tokens += part
        if (account := seq.account) is not None and not seq.preemptions:
            account.served += (len(seq.tokens) - hit.length - part) * seq.price / OUTPUT_PRICE
        seq.status = Status.RUNNING
        insort(self._running, seq, key=_by_rank)
        self._resumed.started(seq)
        step.new.append(new_seq(seq))
        new_blocks = blocks.grow(seq, end)
        if part:
            blocks.copy_part(seq, source, part)
        if end < len(seq.tokens):
            step.owed += blocks.outstanding(seq, end)
        start, sample = seq.computed, end == len(seq.tokens)
        wants = seq.prompt_logprobs_left > 0 and end > seq.prompt_logprobs_from
        step.rows.append(ScheduledSeq(seq.seq_id, start, seq.tokens[start:end], new_blocks, sample, wants))
        step.seqs.append(seq)
        step.budget -= end - start
        step.context += end
        step.decode += start >= seq.prompt_len and end == start + 1

    def _preempt(self, victim: Sequence, step: StepPlan) -> None:
        """A running sequence, and that of its pair, release everything and wait again; they will be recomputed.

        Only sequences known to the worker are preempted: one started in this step outranks them all.
        """
        for seq in halves(victim, Status.RUNNING):
            self._preempt_one(seq, step)

    def _preempt_one(self, seq: Sequence, step: StepPlan) -> None:
        self._running.remove(seq)
        self._resumed.preempted(seq)
        row = step.take_out(seq)
        if row is not None and not row.sample:
            step.owed -= self._blocks.outstanding(seq, row.start + len(row.token_ids))
        self._blocks.give_back(seq)
        self._gone.append(seq.seq_id)
        self._waiting.push(seq)
        seq.drafts = []
        seq.unsent = None
        seq.fetched = False
        seq.preemptions += 1
        step.preempted += 1
        self.num_preemptions += 1

    def _reach_wake(self, seq: Sequence) -> None:
        self._blocks.publish_and_release(seq)
        if seq.computed >= seq.prompt_len and (seq.state.held_back or seq.partner is not None):
            self._requests.prompt_computed(seq)

    def _fail(self, seq: Sequence, reason: FinishReason) -> SeqEvent:
        node = seq.node
        self._end(seq)
        # Its published blocks may hold the same NaN: keep them from requests with the same prompt.
        if node is not None and reason is FinishReason.ERROR:
            self._blocks.caches.of(seq.state.tenant).forget(node)
        return final_event(seq, reason)

    def _end(self, seq: Sequence) -> None:
        """Release everything that a sequence, and that of its pair, hold. One that ran stays in the running list until
        `_sweep`."""
        pair, seq.partner = [seq, seq.partner], None
        for half in pair:
            if half is None:
                continue
            half.partner = None  # they refer to each other
            if half.status is Status.RUNNING:
                self._blocks.keep(half)
                self._blocks.give_back(half)
                self._gone.append(half.seq_id)
            if self._requests.end(half):
                self._blocks.end_request(half.state)

    def _sweep(self) -> None:
        running = Status.RUNNING
        self._running = [seq for seq in self._running if seq.status is running]
        self._resumed.look()
        if self._next_floors is not None:
            self._raise_floors()
