"""Show a model without loading its weights: spec, ops, bytes, and the cost of a step; or an adapter."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from quire.cache_kinds import CacheGroup, StateGroup
from quire.cli import inspect_packed, inspect_ranks, inspect_scheme, kv_users, quality, speculation
from quire.cli.inspect_scheme import schemes, stored_lines
from quire.cli.options import add_engine_options, add_model_argument, engine_config, named_model
from quire.cli.parallel_auto import add_parallel_option, with_parallel
from quire.config.serving import ServingConfig
from quire.types import MemoryBudgetError
from quire.util.printable import printable
from quire.util.sizes import format_size

if TYPE_CHECKING:
    from quire.config.schema import EngineConfig, ResolvedConfig
    from quire.engine.build.drafts import Draft
    from quire.engine.build.opening import Model
    from quire.executor.base import ExecutorKind
    from quire.loader import Source
    from quire.program.cost import Machine, Row
    from quire.program.op import Op
    from quire.program.program import Program
    from quire.program.tensors import Param
    from quire.spec import ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--ops", action="store_true", help="list every op of every layer")
    parser.add_argument(
        "--prefill", type=int, default=512, metavar="N", help="prompt of the sample prefill step"
    )
    parser.add_argument(
        "--context", type=int, default=1024, metavar="N", help="context of the sample decode step"
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="sequences of the sample decode step"
    )
    parser.add_argument(
        "--no-measure",
        action="store_true",
        help="do not measure this machine's limits; no bounds are printed",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no notes")
    quality.add_arguments(parser)
    parser.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="hosts like this one that the ranks are on"
    )
    add_parallel_option(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    gc.disable()  # a large checkpoint has 10^5 tensors, and their objects are no garbage
    try:
        return _run(args)
    finally:
        gc.enable()


def _run(args: argparse.Namespace) -> int:
    from quire.cli.inspect_adapter import adapter_named, inspect_adapter

    name = named_model(args.model, quiet=args.quiet)
    adapter = adapter_named(name)
    if adapter is not None:
        return inspect_adapter(adapter, as_json=args.json)
    report = describe_named(name, args)
    if args.json:
        json.dump(report, sys.stdout)
        print()
    else:
        print("\n".join(map(printable, report_lines(report, all_ops=args.ops))))
    return 0


def describe_named(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """`describe` a model, with what else the command line asks for."""
    from quire.engine.build.opening import open_model

    model, asked = open_model(name, tokenizer=args.quality), engine_config(args)
    if "parallel" in args:
        asked = with_parallel(asked, name, quiet=args.quiet, hosts=args.nnodes)
    if args.nnodes < 1 or (args.nnodes > 1 and asked.parallel.ranks == 1):
        raise ValueError(
            f"nnodes: {args.nnodes} hosts cannot share the ranks of a model of {asked.parallel.ranks}"
        )
    replicas, memory = asked.parallel.data_parallel_size, asked.limits.memory
    asked = asked.of_replica(0).replace(memory=None if memory is None else memory // replicas)
    report = describe(model, asked, args)
    if replicas > 1:
        report["replicas"] = replicas
        report["notices"].append(f"of {replicas} replicas this is one, with its part of --memory")
    found = quality.report(model, asked, args)
    if found is not None:
        report["quality"] = found
    return report


def describe(model: Model, asked: EngineConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that `quire inspect` shows, as plain JSON values. Times are seconds."""
    from quire.engine.build.assemble import open_weights
    from quire.types import QuireError

    weights, problem = None, None
    with ExitStack() as stack:
        try:
            weights = stack.enter_context(open_weights(model))
        except QuireError as error:
            problem = str(error)
        return _report(model, asked, args, weights, problem)


def _report(
    model: Model, asked: EngineConfig, args: argparse.Namespace, weights: Source | None, problem: str | None
) -> dict[str, Any]:
    """`problem` says why there are no `weights`."""
    from quire.engine.build.assemble import choose, choose_ranks, choose_with_draft, machine_facts
    from quire.engine.build.opening import tokenizer_memory
    from quire.engine.build.rank_processes import other_processes
    from quire.engine.host.held import memory_beside
    from quire.executor.kinds import executor_kind
    from quire.program.cost import Row

    facts = dataclasses.replace(machine_facts(asked.execution.executor), nodes=args.nnodes)
    config, program, draft = choose_with_draft(model, asked, facts, weights)
    leading, programs = program, choose_ranks(model, asked, facts, weights)
    if programs:
        program = choose(model, asked, facts, weights)[1]
    kind = executor_kind(config, programs)
    files = model.gguf.files if model.gguf else None
    process = facts.resident_memory + (0 if model.tokenizer else tokenizer_memory(model.folder, files))
    machine = None
    if not args.no_measure:
        machine = measure_machine(config, asked.parallel.ranks // config.nodes)
    steps = {"prefill": [Row(args.prefill, 0)], "decode": [Row(1, args.context)] * args.batch}
    others = other_processes(config)
    beside = others | memory_beside(model.folder, files, ServingConfig())
    memory = _memory(leading, config, kind, process, others, draft)
    stored, problem = ({}, problem) if weights is None else _stored(model, program, weights)
    spec = dataclasses.asdict(model.facts.spec)
    layers = spec.pop("layers")
    return {
        "model": str(model.folder),
        "architecture": model.facts.architecture,
        "notices": [*model.facts.notices, *config.notices],
        "config_sha256": model.facts.config_sha256,
        "spec": {**spec, "layers": _runs(layers)},
        "tokenizer": _tokenizer(model),
        "eos_token_ids": list(model.facts.generation.eos_token_ids),
        "formats": {
            "weights": config.quantized or config.weights,
            "head": config.head or config.weights,
            "kv": config.kv,
        },
        "stored": stored,
        "scheme": schemes(model, program, None if problem else weights),
        "problem": problem,
        "params": [_param(param) for param in program.params],
        "parameters": sum(p.rows * max(p.cols, 1) for p in program.params),
        "active": _active(program),
        "ops": [_op(op) for op in program.ops],
        "body_ops": len(program.body),
        "kv": _kv(program) | _kv_shares(model.facts.spec),
        "memory": memory,
        "server_memory": _memory(leading, config, kind, process, beside, draft),
        "users": kv_users.report(model, asked, program, memory, args.context),
        "speculation": speculation.report(program, config, draft, memory),
        "packed": inspect_packed.report(model, program, config),
        "machine": machine and dataclasses.asdict(machine),
        "steps": {name: _step(program, rows, machine) for name, rows in steps.items()},
        "ranks": inspect_ranks.report(model.facts.spec, programs, config.threads, memory, steps, machine, config.nodes),
    }  # fmt: skip


def _param(param: Param) -> dict[str, Any]:
    from quire.program.memory import param_bytes

    return {
        "name": param.name, "kind": param.kind,
        "shape": [param.rows, param.cols] if param.cols else [param.rows],
        "dtype": param.dtype, "groups": param.groups and dataclasses.asdict(param.groups),
        "bytes": param_bytes(param), "tensors": [part.tensor for part in param.parts],
    }  # fmt: skip


def _tokenizer(model: Model) -> dict[str, Any] | None:
    """Kind, tokens, chat templates (name -> characters) and formats of answers, read without the merges; None without
    a tokenizer.
    """
    from quire.engine.build.opening import tokenizer_outline
    from quire.text.regions.detect import found_regions
    from quire.types import QuireError

    try:
        outline = tokenizer_outline(model)
    except QuireError as error:
        return {"error": str(error)}
    if outline is None:
        return None
    templates = {name: len(source) for name, source in outline.chat_templates.items()}
    answers = found_regions(outline).facts()
    return {"kind": outline.kind, "tokens": outline.size, "chat_templates": templates, "answers": answers}


def _active(program: Program) -> dict[str, int]:
    """Per token: parameters in use, counting only the experts that it selects, and weight bytes read."""
    from quire.program.cost import Row, active_parameters, step_cost

    read = step_cost(program, [Row(1, 0)], 1).total.weight_bytes
    return {"parameters": active_parameters(program), "weight_bytes": read}


def _stored(model: Model, program: Program, source: Source) -> tuple[dict[str, Any], str | None]:
    """The stored formats of the weights: tensors and bytes of each, and how many are converted to floats;
    and why the weights cannot be loaded, as far as headers show.
    """
    from quire.engine.build.assemble import weight_origin
    from quire.loader.load import check_headers
    from quire.loader.source import CodesSource
    from quire.program.formats import CODE_BITS
    from quire.types import QuireError

    computed = {part.tensor: param.format for param in program.params if param.groups for part in param.parts}
    formats: dict[str, dict[str, Any]] = {}
    try:
        rules = weight_origin(model).rules
        firsts = {stack.name: stack.experts[0][0] for stack in rules.stacks}
        codes = source if isinstance(source, CodesSource) else None
        for name in source.names():
            info = source.info(name)
            entry = formats.setdefault(
                info.stored or info.dtype, {"tensors": 0, "bytes": 0, "dequantized": 0}
            )
            if info.stored:
                packed = codes.packed(name) if codes is not None else None
                entry["dequantized"] += packed is None or computed.get(firsts.get(name, name)) != packed
                if packed is not None:
                    entry["code_bits"] = CODE_BITS[packed.dtype]
            entry["tensors"] += 1
            entry["bytes"] += info.stored_bytes or info.nbytes
        check_headers(program.params, source, rules)
    except QuireError as error:
        return formats, str(error)
    return formats, None


def measure_machine(config: ResolvedConfig, ranks: int = 1) -> Machine:
    """Measure the limits of this machine with the threads of an engine of so many ranks here: the best of three."""
    from quire import _native
    from quire.program.cost import Machine

    core = _native.Executor(config.isa, config.threads * ranks)
    # Only just larger than the caches: new memory takes longer to get than to read.
    probe = _native.BandwidthProbe(core, 64 * 2**20)
    bf16 = config.weights == "bf16"  # float16 is multiplied as float32
    dtype = _native.DType.i8 if config.quantized else _native.DType.bf16 if bf16 else _native.DType.f32
    bandwidth = max(probe.measure() for _ in range(3))
    return Machine(max(_native.measure_flops(core, dtype, 2_000_000) for _ in range(3)), bandwidth)


def _runs(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join equal neighbouring layers: {"first", "last", **layer}."""
    runs: list[dict[str, Any]] = []
    for i, layer in enumerate(layers):
        if runs and {k: v for k, v in runs[-1].items() if k not in {"first", "last"}} == layer:
            runs[-1]["last"] = i
        else:
            runs.append({"first": i, "last": i, **layer})
    return runs


def _op(op: Op) -> dict[str, Any]:
    return {"op": type(op).__name__, **dataclasses.asdict(op)}


def _kv(program: Program) -> dict[str, Any]:
    from quire.program.memory import kv_bytes_per_token, kv_group_bytes, kv_scale_bytes, kv_token_bytes

    kept = [layer for layer in program.kv_layers if not layer.recent]
    recent = [layer for layer in program.kv_layers if layer.recent]
    return {
        "dtype": program.kv_type,
        "bytes_per_token": kv_bytes_per_token(program),
        "scale_bytes_per_token": sum(map(kv_scale_bytes, kept)),
        "recent_bytes_per_token": sum(kv_token_bytes(layer, layer.head_dim) for layer in recent),
        "block_bytes_of_16_tokens": kv_group_bytes(program, 16),
        "state_bytes_per_sequence": sum(layer.bytes for layer in program.state_layers),
        "groups": [_group(group) for group in program.cache_groups],
    }


def _group(group: CacheGroup) -> dict[str, Any]:
    if isinstance(group, StateGroup):
        return {"layers": list(group.layers), "state_bytes": group.bytes}
    return {"layers": list(group.layers), "window": group.window}


def _kv_shares(spec: ModelSpec) -> dict[str, float]:
    """Of the bytes that a token adds to the cache: the share of full layers, and the ratio to MHA."""
    from quire.spec.describe import kv_elements, mha_elements

    every = kv_elements(spec)
    return {
        "share_beyond_windows": kv_elements(spec, lambda att: att.window == 0) / every,
        "share_of_mha": every / mha_elements(spec),
    }


def _memory(
    program: Program,
    config: ResolvedConfig,
    kind: ExecutorKind,
    process: int,
    beside: dict[str, int],
    draft: Draft | None,
) -> dict[str, Any]:
    """The memory plan of one process; `beside` is what other processes hold."""
    from quire.engine.build.budget import plan_memory

    try:
        plan = plan_memory(program, config, kind, process, beside, draft=draft)
    except MemoryBudgetError as error:
        return {"error": str(error)}
    return {
        "bound": plan.bound,
        "sum": plan.total,
        "parts": plan.parts,
        "limits": dataclasses.asdict(plan.limits),
        "kv_tokens": plan.limits.num_blocks * plan.limits.block_size,
    }


def _step(program: Program, rows: list[Row], machine: Machine | None) -> dict[str, Any]:
    from quire.program.cost import step_cost

    total = step_cost(program, rows, len(rows)).total
    result: dict[str, Any] = {
        "rows": len(rows),
        "query_len": rows[0].query_len,
        "context_len": rows[0].context_len,
        "flops": total.flops,
        "bytes": total.bytes,
        "weight_bytes": total.weight_bytes,
        "kv_bytes": total.kv_read_bytes + total.kv_written_bytes,
        "intensity": total.intensity,
    }
    if machine is not None:
        seconds = total.bound(machine)
        compute = total.flops / machine.flops >= total.bytes / machine.bandwidth
        result |= {
            "bound_seconds": seconds,
            "bound_by": "compute" if compute else "memory bandwidth",
            "bound_tokens_per_second": sum(r.query_len for r in rows) / seconds,
        }
    return result


def report_lines(report: dict[str, Any], *, all_ops: bool) -> list[str]:
    from quire.text.regions.detect import facts_text

    spec = report["spec"]
    lines = [
        f"{report['architecture']}  {report['model']}",
        f"  {report['parameters'] / 1e6:.1f} M parameters, vocabulary {spec['vocab']}, width {spec['dim']}, "
        f"context {spec['max_positions']}, {'tied' if spec['tied'] else 'untied'} embeddings, stored {spec['dtype']}",
    ]
    active = report["active"]
    if active["parameters"] < report["parameters"]:
        share = active["parameters"] / report["parameters"]
        lines.append(
            f"  {active['parameters'] / 1e6:.1f} M active parameters per token ({share:.1%}), "
            f"{format_size(active['weight_bytes'])} of weights read"
        )
    lines += _layer_lines(spec)
    lines.append(f"  {_tokenizer_line(report)}")
    if answers := (report["tokenizer"] or {}).get("answers"):
        lines.append(f"  answers: {facts_text(answers)}")
    lines += [f"note: {text}" for text in report["notices"]]
    lines += ["", "stored weights", *stored_lines(report["stored"], report["formats"]["weights"])]
    lines += [f"  cannot be loaded: {report['problem']}"] if report["problem"] else []
    lines += ["", *inspect_scheme.lines(report["scheme"])]
    lines += ["", f"ops ({len(report['ops'])}; weights {report['formats']['weights']}, sums float32)"]
    lines += _op_lines(report, all_ops=all_ops)
    lines += ["", "parameters"]
    lines += _param_lines(report["params"], all_params=all_ops)
    kv = report["kv"]
    scales = f", {kv['scale_bytes_per_token']} of them scales" if kv["scale_bytes_per_token"] else ""
    lines += [
        "",
        f"KV cache ({kv['dtype']}): {kv['bytes_per_token']} bytes per token{scales}, {len(kv['groups'])} group(s)",
    ]
    if kv["recent_bytes_per_token"]:
        lines.append(
            f"  the latest 65 to 128 tokens also in bf16: {kv['recent_bytes_per_token']} bytes per token"
        )
    for group in kv["groups"]:
        lines.append(f"  {len(group['layers'])} layers, {_group_text(group)}")
    kept = round(kv["bytes_per_token"] * kv["share_beyond_windows"])
    beyond = f"; {kept} bytes per token beyond the windows" if kv["share_beyond_windows"] < 1 else ""
    lines.append(f"  {kv['share_of_mha']:.3g} of the bytes of multi-head attention{beyond}")
    lines += ["", "memory of generate and chat", *_memory_lines(report["memory"])]
    lines += [kv_users.line(report["users"], kv["dtype"])] if report["users"] else []
    lines += ["", "memory of serve", *_memory_lines(report["server_memory"])]
    if report["speculation"]:
        lines += ["", *speculation.lines(report["speculation"])]
    if report["ranks"]:
        lines += ["", *inspect_ranks.lines(report["ranks"])]
    lines += ["", inspect_packed.line(report["packed"]), "", "steps", *_step_lines(report)]
    if "quality" in report:
        lines += ["", *quality.lines(report["quality"])]
    return lines


def _group_text(group: dict[str, Any]) -> str:
    if "state_bytes" in group:
        return f"states of {group['state_bytes']} bytes per sequence, kept where a block ends"
    return f"window {group['window']}" if group["window"] else "full attention"


def _tokenizer_line(report: dict[str, Any]) -> str:
    found = report["tokenizer"]
    if found is None:
        return "no tokenizer: the model takes token ids only"
    if "error" in found:
        return f"the tokenizer cannot be used: {found['error']}"
    templates = ", ".join(f"{name} ({size} characters)" for name, size in found["chat_templates"].items())
    ends = ", ".join(map(str, report["eos_token_ids"])) or "none"
    return (
        f"tokenizer {found['kind']}, {found['tokens']} tokens, ends {ends}; "
        f"chat template: {templates or 'none'}"
    )


def _layer_lines(spec: dict[str, Any]) -> list[str]:
    """One line for all equal layers, wherever they are, and the model's multipliers."""
    from quire.spec.describe import ranges

    found: list[tuple[dict[str, Any], list[int]]] = []
    for run in spec["layers"]:
        layer = {key: value for key, value in run.items() if key not in {"first", "last"}}
        numbers = next((n for other, n in found if other == layer), None)
        if numbers is None:
            found.append((layer, numbers := []))
        numbers.extend(range(run["first"], run["last"] + 1))
    lines = [f"  layers {ranges(numbers)}: {_layer_line(layer)}" for layer, numbers in found]
    scales = [
        f"{words} {spec[key]:g}"
        for key, off, words in (
            ("embed_scale", 1, "embeddings x"), ("residual_scale", 1, "branches x"),
            ("logits_scale", 1, "logits x"), ("logits_cap", 0, "logits soft cap"),
        )
        if spec[key] != off
    ]  # fmt: skip
    return lines + ([f"  {', '.join(scales)}"] if scales else [])


def _layer_line(run: dict[str, Any]) -> str:
    mixer = _mixer_text(run["mixer"]) if run["mixer"] else "no mixer"
    mlp = _mlp_text(run["mlp"]) if run["mlp"] else "no feed-forward"
    order = {(True, False): "pre-norm", (True, True): "sandwich norms", (False, True): "post-norm"}
    block = "norms of sums" if run["sum_norm"] else order[run["pre_norm"], run["post_norm"]]
    block += ", parallel" if run["parallel"] else ""
    return f"{mixer}; {mlp}; {block}"


def _mlp_text(mlp: dict[str, Any]) -> str:
    from quire.spec import MLP, MoE, Router
    from quire.spec.describe import experts_text
    from quire.spec.model import ClampedSwiGLU

    act = mlp["act"] if isinstance(mlp["act"], str) else ClampedSwiGLU(**mlp["act"])
    if "router" not in mlp:
        return f"{'gated ' if mlp['gated'] else ''}{act} MLP of {mlp['width']}"
    shared = mlp["shared"] and MLP(**mlp["shared"])
    moe = MoE(**mlp | {"router": Router(**mlp["router"]), "shared": shared, "act": act})
    return f"gated {act} MLPs, {experts_text(moe)}"


def _mixer_text(att: dict[str, Any]) -> str:
    from quire.spec import Attention, LatentAttention, Rope
    from quire.spec.describe import attention_text, rope_text

    kind = LatentAttention if "kv_rank" in att else Attention
    mixer = kind(**att | {"rope": att["rope"] and Rope(**att["rope"])})
    extras = "".join(
        text
        for on, text in (
            (att.get("window"), f", window {att.get('window')}"),
            (att.get("qk_norm"), ", q/k norm"),
            (att.get("qkv_bias"), ", q/k/v bias"),
            (att.get("softcap"), f", soft cap {att.get('softcap', 0):g}"),
            (att.get("sinks"), ", sinks"),
            (not att.get("causal", True), ", both directions"),
        )
        if on
    )
    return f"{attention_text(mixer)}{extras}, {rope_text(mixer)}"


def _op_lines(report: dict[str, Any], *, all_ops: bool) -> list[str]:
    shapes = {p["name"]: p["shape"] for p in report["params"]}
    ops = report["ops"]
    body = report["body_ops"]
    before = next(i for i, op in enumerate(ops) if op["op"] == "Norm")  # embedding, and its multiplier
    mixers = [i for i, op in enumerate(ops) if op["op"] in {"Attend", "LatentAttend"}]
    layers = len(mixers)
    first = mixers[1] - mixers[0] if layers > 1 else body - before  # ops of the first layer
    same = "the same" if before + first * layers == body else "the same or other (see --ops)"
    shown = range(len(ops)) if all_ops else [*range(before + first), *range(body, len(ops))]
    lines = []
    for i in shown:
        if i == body and not all_ops:
            lines.append(f"  … {same} {first} ops in each of {layers} layers, then the head:")
        op = ops[i]
        weight = op.get("weight") or op.get("table")
        shape = f" {weight} {shapes[weight]}" if weight else ""
        inputs, outputs = (
            ("x", "qkv", "gate_up", "logits", "kv", "q_latent"),
            ("out", "qkv", "ids", "q_nope", "x"),
        )
        source, out = (next((op[n] for n in names if op.get(n)), "") for names in (inputs, outputs))
        lines.append(f"  {i:>4}  {op['op']:<10} {source:>8} -> {out}{shape}")
    return lines


def _held(param: dict[str, Any]) -> str:
    groups = param["groups"]
    if not groups:
        return str(param["dtype"])
    offsets = "" if groups["offsets"] == "none" else f"+{groups['offsets']}"
    return f"{param['dtype']} / {groups['size']} {groups['scales']}{offsets}"


def _param_lines(params: list[dict[str, Any]], *, all_params: bool) -> list[str]:
    if all_params:
        return [
            f"  {p['name']:<28} {p['shape']!s:<16} {_held(p):<22}  {format_size(p['bytes'])}" for p in params
        ]
    kinds: dict[str, tuple[int, int]] = {}
    for p in params:
        name = p["name"].split(".")[-1] if p["name"].startswith("layers.") else p["name"]
        count, total = kinds.get(name, (0, 0))
        kinds[name] = (count + 1, total + p["bytes"])
    return [f"  {name:<12} x{count:<4} {format_size(total):>11}" for name, (count, total) in kinds.items()]


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    if "error" in memory:
        return [f"  {memory['error']}"]
    lines = [f"  {name:<12} {format_size(size):>11}" for name, size in memory["parts"].items()]
    lines.append(f"  {'sum':<12} {format_size(memory['sum']):>11}  of {format_size(memory['bound'])}")
    limits = memory["limits"]
    lines.append(
        f"  {memory['kv_tokens']} tokens of KV; sequences up to {limits['max_len']}, "
        f"{limits['max_rows']} at once, {limits['max_tokens']} tokens per step"
    )
    return lines


def _step_lines(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    lines = []
    if machine:
        lines.append(
            f"  this machine: {machine['bandwidth'] / 1e9:.1f} GB/s, {machine['flops'] / 1e9:.0f} GFLOP/s"
            f" ({report['formats']['weights']})"
        )
    for name, step in report["steps"].items():
        bound = ""
        if machine:
            bound = (
                f"; at least {step['bound_seconds'] * 1e3:.2f} ms by {step['bound_by']}"
                f" ({step['bound_tokens_per_second']:.1f} tokens/s)"
            )
        lines.append(
            f"  {name}: {step['rows']} x {step['query_len']} tokens after {step['context_len']}: "
            f"{step['flops'] / 1e9:.3f} GFLOP, {step['bytes'] / 1e9:.4f} GB, "
            f"{step['intensity']:.1f} FLOP/byte{bound}"
        )
    return lines
