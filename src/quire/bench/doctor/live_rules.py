"""Causes that the metrics of a server show. Each rule is a function of what happened during some seconds.

Names of Quire come first and those of vLLM behind them, so that most rules work on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.bench.doctor.cause import Cause
from quire.bench.doctor.metrics_window import Window
from quire.bench.perception import WORD_BY_WORD
from quire.bench.rules import investigate

_FULL = 0.9  # of the KV blocks
_PLAIN = {"/v1/completions", "/completions", "/completion", "/generate", "/generate_stream", "/api/generate"}
_CHATS = {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"}
_WAITING = 0.3  # of the time of steps, for other replicas
_LATE = 0.2  # s to the first token below which nobody looks for a cause


def _both(name: str) -> tuple[str, str]:
    return f"quire_{name}", f"vllm:{name}"


TTFT, QUEUE = _both("time_to_first_token_seconds"), _both("request_queue_time_seconds")
PREFILL, ITL = _both("request_prefill_time_seconds"), _both("inter_token_latency_seconds")
RUNNING, WAITING = _both("num_requests_running"), _both("num_requests_waiting")
USAGE, PREEMPTIONS = _both("kv_cache_usage_perc"), _both("num_preemptions_total")
ENDED = _both("request_success_total")


def diagnose(window: Window) -> list[Cause]:
    """The causes that any rule sees, problems first."""
    found = [cause for rule in RULES for cause in rule(window)]
    return sorted(found, key=lambda cause: not cause.problem)


def where_to_look(window: Window) -> dict[str, float | str] | None:
    """The half of a request to investigate first, by the 95th percentiles of TTFT and ITL (upper ends of buckets); None
    without answers."""
    ttft, itl = window.quantile(0.95, *TTFT), window.quantile(0.95, *ITL)
    if ttft is None or itl is None:
        return None
    first, gap = 1e3 * ttft, 1e3 * itl
    return {"ttft_p95_ms": first, "itl_p95_ms": gap, "says": investigate(first, gap)}


def nothing_asked(w: Window) -> Iterator[Cause]:
    if not w.grown(*ENDED) and not w.gauge(*RUNNING) and not w.gauge(*WAITING):
        yield Cause(
            name="idle", says="The server had nothing to do, so nothing can be said of its speed.", problem=False,
            evidence={"seconds": w.seconds}, suggestions=("run it again under load, or with more --seconds",),
        )  # fmt: skip


def waits_for_a_place(w: Window) -> Iterator[Cause]:
    """Most of the time to the first token is spent in the queue."""
    ttft, queue = w.mean(*TTFT), w.mean(*QUEUE)
    if ttft is None or queue is None or ttft < _LATE or queue < 0.5 * ttft:
        return
    usage = w.gauge(*USAGE)
    evidence = {"queue_s": queue, "ttft_s": ttft, "waiting": w.gauge(*WAITING), "kv_usage": usage}
    if usage > _FULL:
        yield Cause(
            name="queue for memory", evidence=evidence,
            says=f"Requests wait {queue:.2f} s of {ttft:.2f} s for KV blocks: {usage:.0%} are in use.",
            suggestions=("more --memory", "--kv-cache-dtype int8", "a smaller --max-model-len or max_tokens"),
        )  # fmt: skip
    else:
        yield Cause(
            name="queue for a place", evidence=evidence,
            says=f"Requests wait {queue:.2f} s of {ttft:.2f} s for a place in the batch.",
            suggestions=("a higher --max-num-seqs", "another replica", "--max-queue, so that callers are told at once"),
        )  # fmt: skip


def prompts_take_long(w: Window) -> Iterator[Cause]:
    ttft, prefill = w.mean(*TTFT), w.mean(*PREFILL)
    if ttft is not None and prefill is not None and ttft >= _LATE and prefill >= 0.5 * ttft:
        tokens = w.mean(*_both("request_prompt_tokens"))
        yield Cause(
            name="prefill", says=f"The first token waits for the prompt: {prefill:.2f} s of {ttft:.2f} s.",
            evidence={"prefill_s": prefill, "ttft_s": ttft, "prompt_tokens": tokens or 0.0},
            suggestions=(
                "shorter prompts, or a shared beginning that the prefix cache finds",
                "--quantization int8", "a higher --max-num-batched-tokens, if streams may pause longer",
            ),
        )  # fmt: skip


def prompts_stall_streams(w: Window) -> Iterator[Cause]:
    """Some gaps between tokens are many times the usual one while prompts are computed."""
    usual, late = w.quantile(0.5, *ITL), w.quantile(0.99, *ITL)
    prefilled = w.grown("quire_step_prefill_tokens_total", "vllm:prompt_tokens_total")
    if usual and late and late > 4 * usual and late > 0.1 and prefilled:
        yield Cause(
            name="prompts stall streams", says=f"Streams pause for {late:.2f} s where {usual:.3f} s is usual.",
            evidence={"itl_p50_s": usual, "itl_p99_s": late, "prompt_tokens": prefilled},
            suggestions=("a lower --max-num-batched-tokens: shorter chunks of prompts between tokens",),
        )  # fmt: skip


def tokens_come_slowly(w: Window) -> Iterator[Cause]:
    itl, running = w.mean(*ITL), w.gauge(*RUNNING)
    if itl is None or itl <= WORD_BY_WORD / 1e3:
        return
    alone = running < 2
    yield Cause(
        name="decode", evidence={"itl_s": itl, "running": running},
        says=f"A token takes {itl * 1000:.0f} ms with {running:.0f} sequences running: "
        + ("each one reads all weights." if alone else "the batch is larger than the machine bears."),
        suggestions=("--quantization int8 or int4", "speculative decoding: --speculate ngram, --draft-model")
        if alone else ("a lower --max-num-seqs", "--kv-cache-dtype int8 for long contexts", "another replica"),
    )  # fmt: skip


def sequences_are_put_back(w: Window) -> Iterator[Cause]:
    preempted, ended, usage = w.grown(*PREEMPTIONS), w.grown(*ENDED), w.gauge(*USAGE)
    if preempted and preempted > 0.01 * ended:
        yield Cause(
            name="thrash", says=f"{preempted:.0f} times a running sequence gave its memory up and was computed again.",
            evidence={"preemptions": preempted, "ended": ended, "kv_usage": usage},
            suggestions=("more --memory", "a lower --max-num-seqs", "--kv-cache-dtype int8"),
        )  # fmt: skip
    elif usage >= 0.97:
        yield Cause(
            name="no headroom", says=f"{usage:.0%} of the KV blocks are in use: the next longer answers will wait.",
            evidence={"kv_usage": usage}, suggestions=("more --memory", "--kv-cache-dtype int8"), problem=False,
        )  # fmt: skip


def prefixes_are_not_found(w: Window) -> Iterator[Cause]:
    asked, hit = w.grown(*_both("prefix_cache_queries_total")), w.grown(*_both("prefix_cache_hits_total"))
    length = w.mean(*_both("request_prompt_tokens")) or 0.0
    if asked >= 2000 and length >= 200 and hit < 0.05 * asked:
        yield Cause(
            name="cache misses", says=f"The prefix cache had {hit / asked:.1%} of the tokens of prompts.",
            evidence={"queries": asked, "hits": hit, "prompt_tokens": length}, problem=False,
            suggestions=(
                "put what changes (times, names, ids) behind what stays", "the same order of keys and tools each time",
                "the same cache_salt or key for callers that may share",
            ),
        )  # fmt: skip


def answers_never_end(w: Window) -> Iterator[Cause]:
    ended = w.grown_by("finished_reason", *ENDED)
    whole, cut = sum(ended.values()), ended.get("length", 0.0)
    if whole < 10 or cut < 0.9 * whole:
        return
    asked = w.mean(*_both("request_params_max_tokens"))
    counts = w.grown_by("handler", "http_request_duration_seconds_count")
    plain = sum(count for route, count in counts.items() if route in _PLAIN)
    chats = sum(count for route, count in counts.items() if route in _CHATS)
    if plain > 9 * chats:
        yield Cause(
            name="wrong chat template", evidence={"length": cut, "ended": whole, "plain": plain, "chats": chats},
            says=f"{cut / whole:.0%} of the answers were cut by max_tokens, and {plain:.0f} of {plain + chats:.0f} "
            "requests came as plain text: a chat model without its template does not know where to end.",
            suggestions=(
                "the chat route, so that the model's own template is used",
                "the same template in the client: quire tokenize shows what the model reads",
                "nothing, if the model is no chat model and answers are meant to be long",
            ),
        )  # fmt: skip
    else:
        yield Cause(
            name="answers run to max_tokens", evidence={"length": cut, "ended": whole, "max_tokens": asked or 0.0},
            says=f"{cut / whole:.0%} of the answers were cut by max_tokens: the model does not come to an end.",
            suggestions=(
                "the template of the right model",
                "eos_token_id in generation_config.json", "a higher max_tokens, if answers are meant to be long",
            ),
        )  # fmt: skip


def callers_come_one_by_one(w: Window) -> Iterator[Cause]:
    """A good first token, and a machine that waits."""
    running, ended = w.gauge(*RUNNING), w.grown(*ENDED)
    busy = w.grown("quire_step_seconds_total") / w.seconds
    if (
        w.has("quire_step_seconds_total")
        and ended >= 3
        and running < 1.5
        and not w.gauge(*WAITING)
        and busy < 0.7
    ):
        yield Cause(
            name="one request at a time", says=f"The engine worked {busy:.0%} of the time, for one request at a time.",
            evidence={"busy": busy, "running": running, "ended": ended}, problem=False,
            suggestions=("more requests at a time: one stream uses little of what a step can carry",),
        )  # fmt: skip


def readers_are_slow(w: Window) -> Iterator[Cause]:
    """Answers that are made and not yet taken."""
    made, ended = w.mean(*_both("e2e_request_latency_seconds")), w.grown(*ENDED)
    routes = [
        route for route in w.grown_by("handler", "http_request_duration_seconds_count")
        if route.endswith(("completions", "/messages", "/chat", "/generate", "/responses"))
    ]  # fmt: skip
    count = sum(w.grown("http_request_duration_seconds_count", handler=route) for route in routes)
    spent = sum(w.grown("http_request_duration_seconds_sum", handler=route) for route in routes)
    if made is None or not count or ended < 3:
        return
    late = spent / count - made
    if late > 0.5 and late > 0.2 * made:
        yield Cause(
            name="slow readers", says=f"Answers were ready {late:.2f} s before their readers had taken them.",
            evidence={"response_s": spent / count, "generation_s": made},
            suggestions=("clients that read their streams at once", "no buffering in the proxy before the server"),
        )  # fmt: skip


def drafts_do_not_pay(w: Window) -> Iterator[Cause]:
    drafted = w.grown(*_both("spec_decode_num_draft_tokens_total"))
    right = w.grown(*_both("spec_decode_num_accepted_tokens_total"))
    if drafted >= 100 and right < 0.2 * drafted:
        yield Cause(
            name="drafts are wrong", says=f"{right / drafted:.0%} of the drafts were right.", problem=False,
            evidence={"drafted": drafted, "accepted": right, "running": w.gauge(*RUNNING)},
            suggestions=("another method of speculation", "a draft trained for this model: quire train-draft", "none"),
        )  # fmt: skip
    faults = w.grown("quire_draft_faults_total")
    if faults:
        yield Cause(
            name="drafts fail", says=f"{faults:.0f} sequences went on without drafts after a failure.",
            evidence={"faults": faults}, suggestions=("the log of the server names the failure",),
        )  # fmt: skip


def grammars_are_late(w: Window) -> Iterator[Cause]:
    late, compiled = w.grown("quire_late_rows_total"), w.mean("quire_grammar_compile_seconds") or 0.0
    if late > 0.01 * w.grown("quire_step_decode_tokens_total") or compiled > 0.5:
        yield Cause(
            name="grammars", says=f"Structured answers wait for their grammar: {compiled:.2f} s to compile one, "
            f"{late:.0f} rows sat a step out.", evidence={"compile_s": compiled, "late_rows": late},
            suggestions=("the same schema in the same words, which is compiled once", "a smaller schema"),
        )  # fmt: skip


def adapters_take_turns(w: Window) -> Iterator[Cause]:
    evicted, ended = w.grown("quire_adapter_evictions_total"), w.grown(*ENDED)
    if evicted >= 5 and evicted > 0.2 * ended:
        yield Cause(
            name="adapters", says=f"{evicted:.0f} times an adapter was put out of its slot for another.",
            evidence={"evictions": evicted, "ended": ended}, suggestions=("a higher --max-loras",),
        )  # fmt: skip


def replicas_wait_for_each_other(w: Window) -> Iterator[Cause]:
    """Of replicas that share experts, of which a step takes as long as the longest of all."""
    waited, stepped = w.grown("quire_replica_wait_seconds_total"), w.grown("quire_step_seconds_total")
    if stepped and waited > _WAITING * stepped:
        each = w.grown_by("replica", "quire_replica_wait_seconds_total")
        yield Cause(
            name="replicas wait", says=f"Steps wait for replicas that share experts for {waited / stepped:.0%} of "
            "their time. The replica that waits least is the slow one.",
            evidence={f"replica_{number}_waited_s": spent for number, spent in sorted(each.items())},
            suggestions=(
                "a lower --max-num-batched-tokens: prompts of one replica stop the others for less time",
                "processors and memory of its own for each replica",
                "--tensor-parallel-size in place of --data-parallel-size, if one cache is enough",
            ),
        )  # fmt: skip


def requests_fail(w: Window) -> Iterator[Cause]:
    statuses = w.grown_by("status", "http_requests_total")
    asked = sum(statuses.values())
    failed = {status: count for status, count in statuses.items() if status.startswith("5")}
    if failed:
        yield Cause(
            name="server errors", says=f"{sum(failed.values()):.0f} of {asked:.0f} requests failed in the server.",
            evidence=dict(sorted(failed.items())), suggestions=("the log of the server, by the request's id",),
        )  # fmt: skip
    full = statuses.get("429", 0.0)
    if full > 0.05 * asked:
        yield Cause(
            name="refused for load", says=f"{full:.0f} of {asked:.0f} requests were sent away (429).",
            evidence={"429": full, "requests": asked}, suggestions=("another replica", "a longer --max-queue"),
        )  # fmt: skip
    bad = sum(count for status, count in statuses.items() if status[0] == "4" and status != "429")
    if asked >= 10 and bad > 0.2 * asked:
        yield Cause(
            name="client errors", says=f"{bad:.0f} of {asked:.0f} requests were not valid.", problem=False,
            evidence={status: n for status, n in sorted(statuses.items()) if status[0] == "4"},
            suggestions=("the message of the answer names the field",),
        )  # fmt: skip


def engine_began_anew(w: Window) -> Iterator[Cause]:
    """That of another server is seen by the time at which its process began."""
    restarts, again = w.now("quire_engine_restarts_total"), w.changed("process_start_time_seconds")
    if not restarts and not again:
        return
    usage, fresh = w.highest(*USAGE), w.grown("quire_engine_restarts_total") or float(again)
    seen: dict[str, float] = {"restarts": restarts, "in_window": fresh}
    if fresh and usage >= _FULL:  # a loaded server is full also long after a restart
        yield Cause(
            name="memory fails under load", evidence=seen | {"kv_usage": usage},
            says=f"The server was started again, and {usage:.0%} of its KV blocks were in use: context times sequences "
            "is what grows with load.",
            suggestions=(
                "a lower --max-model-len or --max-num-seqs", "--kv-cache-dtype int8", "a bound for max_tokens",
                "a lower --gpu-memory-utilization: 0.97 leaves nothing for activations", "the log, for why it ended",
            ),
        )  # fmt: skip
    else:
        yield Cause(
            name="engine restarts", says=f"The engine has been started again {max(restarts, again):.0f} times.",
            evidence=seen, suggestions=("the log of the server says why it ended",),
        )  # fmt: skip


def answers_depend_on_load(w: Window) -> Iterator[Cause]:
    if w.has("vllm:num_requests_running") and not w.has("quire_build_info"):
        yield Cause(
            name="answers may depend on load", problem=False, evidence={"server": "not Quire"},
            says="On most engines greedy answers change with the batch: sums are made in another order.",
            suggestions=("batch-invariant kernels, where the server has them; Quire has no others",),
        )  # fmt: skip


Rule = Callable[[Window], Iterator[Cause]]
RULES: tuple[Rule, ...] = (
    nothing_asked, engine_began_anew, requests_fail, waits_for_a_place, prompts_take_long, prompts_stall_streams,
    tokens_come_slowly, sequences_are_put_back, prefixes_are_not_found, answers_never_end, callers_come_one_by_one,
    readers_are_slow, drafts_do_not_pay, grammars_are_late, adapters_take_turns, replicas_wait_for_each_other,
    answers_depend_on_load,
)  # fmt: skip
