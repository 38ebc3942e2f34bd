"""Say where the time of a request went: of a running server, or of a log that `quire serve --record` has written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from quire.cli.options import add_engine_options, engine_config, named_model
from quire.cli.running_server import ServerRefusedError, add_client_options, ask_as_client
from quire.util.printable import printable

if TYPE_CHECKING:
    from quire.steplog.explain import Explanation
    from quire.steplog.log_rows import AnyRow

_SLOWEST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", help="the id of an answer; without one, the slowest requests of a log"
    )
    add_client_options(parser)
    parser.add_argument("--log", metavar="FILE", help="a log, in place of a server")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--steps", action="store_true",
        help="FLOP, bytes, FLOP/byte and the binding bound of each step that computed something of the request",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="MODEL", help="the server's model, for --steps (default: the one shipped)"
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.log is None:
        if args.id is None:
            raise ValueError("id: the id of an answer is needed, or --log FILE")
        steps = "?steps=1" if args.steps else ""
        body = ask_as_client(args, f"/v1/requests/{quote(args.id, safe='')}/explain{steps}")
        text, parts = body["text"], [(one["number"], one["ms"] / 1e3, one["rows"]) for one in body["steps"]]
        if cache := body["cache"]:
            text += "\n\n" + "\n".join(miss_lines(cache))
    else:
        body, text, parts = _from_log(args)
    if args.json:
        print(json.dumps(body))
    else:
        print("\n".join(map(printable, text.split("\n"))))
        if args.steps:
            print("\n" + "\n".join(_step_lines(args, parts)))
    return 0


def miss_lines(miss: dict[str, Any]) -> list[str]:
    """A miss of the cache, as /v1/requests/{id}/explain has it."""
    lines = [f"cache: {miss['hit_tokens']} tokens found, {miss['lost_tokens']} not: {miss['kind']}"]
    if miss["ours"]:
        lines[0] += f" at token {miss['differs_at']} ({miss['changes']})"
        lines += [f"  here    {miss['ours']!r}"] + (
            [f"  cached  {miss['theirs']!r}"] if miss["theirs"] else []
        )
    return lines


_Steps = list[tuple[int, float, Sequence[Sequence[int]]]]


def _from_log(args: argparse.Namespace) -> tuple[Any, str, _Steps]:
    from quire.steplog.explain import explain, text_of
    from quire.steplog.log_files import read_log
    from quire.steplog.log_rows import Arrived

    log = read_log(Path(args.log))
    names = {row.number: row.request_id for row in log.rows if isinstance(row, Arrived)}
    notes = f"\n\nnote: {log.damage}" if log.damage else ""
    if args.id is None:
        found = sorted(_all(log.rows), key=lambda one: -one.total)[:_SLOWEST]
        lines = [f"{one.total / 1e6:>10.1f} ms  {one.request_id}  {one.cause()}" for one in found]
        body: Any = [{"id": one.request_id, "ms": one.total / 1e6, "cause": one.cause()} for one in found]
        return body, "\n".join(lines or ["no request has ended in this log"]) + notes, []
    one = explain(log.rows, args.id)
    if one is None:
        raise ServerRefusedError(f"{args.log}: no request {args.id!r}{notes}")
    body = {
        "id": one.request_id,
        "finished": one.finished,
        "total_ms": one.total / 1e6,
        "cause": one.cause(),
        "parts": {name: time / 1e6 for name, time in one.parts().items()},
        "timeline": [[span.start / 1e9, span.end / 1e9, span.part, span.detail] for span in one.spans],
    }
    steps: _Steps = [
        (s.number, s.updated / 1e9, [(s.rows[i + 1], s.rows[i + 2]) for i in range(0, len(s.rows), 4)])
        for s in one.took_part
    ]
    return body, text_of(one, names) + notes, steps


def _all(log: Sequence[AnyRow]) -> list[Explanation]:
    from quire.steplog.explain import explain
    from quire.steplog.log_rows import Arrived

    ids = [row.request_id for row in log if isinstance(row, Arrived)][-500:]
    return [one for one in (explain(log, name) for name in ids) if one is not None and one.finished]


def _step_lines(args: argparse.Namespace, steps: _Steps) -> list[str]:
    """What each step computed and moved, and the time that this machine's limits allow."""
    from quire.cli.inspect import measure_machine
    from quire.engine.build.assemble import choose, machine_facts
    from quire.engine.build.opening import find_model, open_model
    from quire.program.cost import Row, step_cost

    config = engine_config(args)
    model = open_model(find_model(named_model(args.model)), tokenizer=False)
    resolved, program = choose(model, config, machine_facts(config.execution.executor))
    machine = measure_machine(resolved)
    lines = [
        f"limits of this machine: {machine.flops:.3g} FLOP/s, {machine.bandwidth:.3g} B/s",
        f"{'step':>8} {'rows':>5} {'tokens':>6} {'ms':>8} {'FLOP':>8} {'bytes':>8} {'FLOP/byte':>9} "
        f"{'bound ms':>8}  bound",
    ]
    for number, seconds, rows in steps:
        total = step_cost(program, [Row(tokens, first) for first, tokens in rows], len(rows)).total
        compute, memory = total.flops / machine.flops, total.bytes / machine.bandwidth
        lines.append(
            f"{number:>8} {len(rows):>5} {sum(tokens for _, tokens in rows):>6} {1e3 * seconds:>8.2f} "
            f"{total.flops:>8.3g} {total.bytes:>8.3g} {total.intensity:>9.2f} "
            f"{1e3 * max(compute, memory):>8.2f}  {'compute' if compute >= memory else 'memory bandwidth'}"
        )
    return lines
