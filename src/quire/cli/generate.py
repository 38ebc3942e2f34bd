"""Generate from a prompt and print the text, or one JSON object with --json."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quire.cli.adapter_option import adapter_fields, add_adapter_option, chosen_adapter, take_adapter_name
from quire.cli.kv_quality import check_kv_quality
from quire.cli.notices import notice
from quire.cli.options import (
    add_chat_options,
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    answer_fields,
    chat_fields,
    engine_config,
    named_model,
    sampling_params,
    structure,
    text_of,
)
from quire.logprobs import PositionLogprobs, TokenLogprob
from quire.outputs import RequestOutput
from quire.types import FinishReason, RequestError
from quire.util.standard_error import say

if TYPE_CHECKING:
    from quire.llm import LLM

SpellToken = Callable[[int], str]
# Counts of usage that are shown where there were drafts.
_DRAFTS = (
    "draft_tokens", "accepted_draft_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", "-p", help="text to continue; - reads standard input")
    source.add_argument("--prompt-token-ids", metavar="IDS", help="token ids to continue, like 1,2,3")
    parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user message, using the chat template"
    )
    parser.add_argument(
        "--prediction", metavar="FILE", help="file with the text that the answer may turn out to be"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress and no memory report")
    add_adapter_option(parser)
    add_sampling_options(parser)
    add_chat_options(parser)
    add_engine_options(parser, seed=False)


def run(args: argparse.Namespace) -> int:
    gc.disable()  # imports leave no garbage, and collecting takes a tenth of the time
    from quire.engine.build.opening import find_model, has_tokenizer
    from quire.llm import LLM

    gc.freeze()  # the collector skips modules from now on
    gc.enable()
    take_adapter_name(args)
    asked, structured = _prompt(args), structure(args)
    predicted = args.prediction and text_of("prediction", args.prediction)
    name = named_model(args.model, quiet=args.quiet)
    folder = find_model(name)
    if (
        isinstance(asked, str)
        and folder.is_dir()
        and (folder / "config.json").exists()
        and not has_tokenizer(folder)
    ):
        raise RequestError("prompt", f"{folder} has no tokenizer: pass token ids with --prompt-token-ids")
    fields, adapter = {**engine_fields(args), **adapter_fields(args)}, chosen_adapter(args)
    check_kv_quality(name, engine_config(args), quiet=args.quiet)
    with LLM(name, progress=not args.quiet, **answer_fields(args), **fields) as llm:
        if not args.quiet:
            notice(llm)
        prompt = _rendered(llm, args, asked) if args.chat else asked
        params = sampling_params(args, llm.default_params(), structured)
        if args.json:
            (output,) = llm.generate([prompt], params, prediction=predicted, use_tqdm=False, adapter=adapter)
            found = {**to_json(output, _piece_of(llm)), "startup": llm.startup}
            json.dump(found, sys.stdout, ensure_ascii=False)
            print()
        elif params.n == 1 and params.logprobs is params.prompt_logprobs is None:
            stream = llm.stream(prompt, params, prediction=predicted, adapter=adapter)
            for delta in stream:
                print(delta.text, end="", flush=True)
            print()
            output = stream.output
        else:
            (output,) = llm.generate([prompt], params, prediction=predicted, use_tqdm=False, adapter=adapter)
            for sample in output.outputs:
                print(sample.text if params.n == 1 else f"[{sample.index}] {sample.text}")
            for line in _tables(output, _piece_of(llm)):
                print(line)
    return _status(output, structured=structured is not None, quiet=args.quiet)


def _rendered(llm: LLM, args: argparse.Namespace, asked: str | list[int]) -> list[int]:
    """The prompt as the message of a user."""
    return llm.encode_chat([{"role": "user", "content": asked}], **chat_fields(args))


def _status(output: RequestOutput, *, structured: bool, quiet: bool) -> int:
    """The exit status: 1 if a sample failed. Says so, and what is not as it was asked for unless `quiet`."""
    reasons = [sample.finish_reason for sample in output.outputs if sample.finish_reason is not None]
    failed = [reason for reason in reasons if reason not in {FinishReason.STOP, FinishReason.LENGTH}]
    for reason in failed:
        say(f"quire: the answer ended with an error: {reason.replace('_', ' ')}")
    if structured and FinishReason.LENGTH in reasons and not quiet:
        say("quire: the answer was cut off by its length and is not complete: raise --max-tokens")
    return 1 if failed else 0


def engine_fields(args: argparse.Namespace) -> dict[str, Any]:
    return engine_config(args).values()


def _prompt(args: argparse.Namespace) -> str | list[int]:
    if not args.chat and any(chat_fields(args).values()):
        raise RequestError("chat", "--chat-template-kwargs, --enable-thinking and --reasoning-effort need it")
    if args.prompt_token_ids is not None:
        if args.chat:
            raise RequestError("chat", "needs --prompt, not --prompt-token-ids")
        try:
            return [int(token) for token in args.prompt_token_ids.split(",")]
        except ValueError:
            raise RequestError("prompt-token-ids", "must be integers separated by commas") from None
    return sys.stdin.read() if args.prompt == "-" else str(args.prompt)


def _piece_of(llm: LLM) -> SpellToken:
    """Return a function from token id to text; the text is empty without a tokenizer."""
    tokenizer = llm.built.model.tokenizer
    return lambda token: "" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")


def _tables(output: RequestOutput, piece: SpellToken) -> Iterator[str]:
    """Yield the requested logprobs, one line per token: its logprob, its rank, and the most likely tokens."""
    found = [(f"sample {s.index}" if len(output.outputs) > 1 else "", s.logprobs) for s in output.outputs]
    for name, positions in (("prompt", output.prompt_logprobs), *found):
        known = [position for position in positions or () if position]
        if known:
            yield ""
            likely = "  most likely" if len(known[0]) > 1 else ""
            yield f"{name or 'token':<20} {'logprob':>9} {'rank':>6}{likely}"
        for chosen, *top in known:
            shown = "  ".join(f"{_shown(c, piece)} {c.logprob:.3f}" for c in top)
            yield f"{_shown(chosen, piece):<20} {chosen.logprob:>9.3f} {chosen.rank:>6}  {shown}".rstrip()


def _shown(token: TokenLogprob, piece: SpellToken) -> str:
    return repr(piece(token.token_id)) if piece(token.token_id) else str(token.token_id)


def to_json(output: RequestOutput, piece: SpellToken) -> dict[str, Any]:
    """Return the output of a request as plain JSON values. Times are seconds; logprobs are natural logarithms."""
    timings, usage = output.timings, output.usage
    decoded = usage.completion_tokens - len(output.outputs)
    decode_seconds = timings.finished - timings.first_token
    result: dict[str, Any] = {
        "id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {
                "index": sample.index,
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                **(
                    {}
                    if sample.logprobs is None
                    else {"logprobs": [_logprobs(p, piece) for p in sample.logprobs]}
                ),
            }
            for sample in output.outputs
        ],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            **{name: count for name in _DRAFTS if (count := getattr(usage, name))},
        },
        "timings": {
            "queue_seconds": timings.scheduled - timings.arrival,
            "time_to_first_token_seconds": timings.first_token - timings.arrival,
            "prefill_seconds": timings.first_token - timings.scheduled,
            "decode_seconds": decode_seconds,
            "total_seconds": timings.finished - timings.arrival,
            "decode_tokens_per_second": decoded / decode_seconds
            if decoded > 0 and decode_seconds > 0
            else None,
        },
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [p and _logprobs(p, piece) for p in output.prompt_logprobs]
    return result


def _logprobs(position: PositionLogprobs, piece: SpellToken) -> dict[str, Any]:
    chosen, *top = [
        {"token_id": c.token_id, "token": piece(c.token_id), "logprob": c.logprob, "rank": c.rank}
        for c in position
    ]
    return {**chosen, "top": top}
