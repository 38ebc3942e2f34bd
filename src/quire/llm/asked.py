"""Check arguments of the Python API: each error names the argument and its valid values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from quire.config.schema import OPTIONS, EngineConfig
from quire.types import RequestError
from quire.util.sizes import parse_size

if TYPE_CHECKING:
    from quire.lora.adapter import Adapter
    from quire.lora.adapter_service import AdapterService, Open
    from quire.text.tools import ToolUse

TextOrIds = str | Sequence[int]
# Also in a dictionary, as vLLM takes it: {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = TextOrIds | Mapping[str, Any]
Message = Mapping[str, Any]
T = TypeVar("T")


def engine_options(options: Mapping[str, Any]) -> EngineConfig:
    """Build the engine config; sizes may be strings like "6GiB", and options of vLLM's LLM are taken for what they mean
    here. Raises ValueError naming the option.
    """
    if not options.keys() <= OPTIONS.keys():
        from quire.llm.foreign_options import own_options

        options = own_options(options)
    if options.get("quantization", "") is None:  # vLLM's default
        options = {**options, "quantization": "auto"}
    sizes = {
        name: parse_size(value)
        for name, value in options.items()
        if isinstance(value, str) and OPTIONS[name].metadata["size"]
    }
    return EngineConfig(**{**options, **sizes})


# Arguments of calls of vLLM that have no counterpart: the values that ask for nothing, and why others are refused.
_OTHERS: dict[str, tuple[tuple[object, ...], str]] = {
    "lora_request": ((None,), "an adapter is loaded with LLM(adapters=…) and named with adapter=…"),
    "chat_template": ((None,), "a template belongs to the model: LLM(chat_template=…)"),
    "chat_template_content_format": (("auto",), "it is read from the template"),
    "mm_processor_kwargs": ((None,), "images and other media are not accepted"),
    "tokenization_kwargs": ((None,), "texts are tokenized as the checkpoint says"),
    "pooling_params": ((None,), "its fields are arguments of the call"),
}


def refuse_others(call: str, others: Mapping[str, object]) -> None:
    """Refuse arguments of vLLM's calls that ask for what Quire does not have.

    Raises RequestError naming one, TypeError for one that vLLM does not have either.
    """
    for name, value in others.items():
        if name not in _OTHERS:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        nothing, why = _OTHERS[name]
        if value not in nothing:
            raise RequestError(name, f"is not supported: {why}")


def prompt_list(
    prompts: Prompt | Sequence[Prompt], field: str = "prompts", embed_dim: int | None = None
) -> list[TextOrIds]:
    """Return one prompt or several as a list; a string or a list of integers is one prompt.

    `embed_dim`: of rows that may be in place of tokens, 0 for a model that takes none; None where they have no meaning.
    Raises RequestError.
    """
    if isinstance(prompts, str | Mapping):
        return [_prompt(prompts, field, "", embed_dim)]
    items = _listed(prompts)
    if items is None:
        raise RequestError(
            field, f"must be a string, a list of token ids or a list of those, not {_kind(prompts)}"
        )
    if items and _is_id(items[0]):
        return [_ids(items, field)]
    return [_prompt(item, f"{field}[{i}]", f"item {i} ", embed_dim) for i, item in enumerate(items)]


def _prompt(item: Any, field: str, place: str, embed_dim: int | None) -> TextOrIds:
    """One prompt, unpacked and checked. `place` tells it from the others."""
    if isinstance(item, Mapping):
        given = {name: value for name, value in item.items() if value is not None}
        if embed_dim is not None and given.keys() == {"prompt_embeds"}:
            from quire.engine.front.prompt_embeds import from_array

            return from_array(given["prompt_embeds"], embed_dim)
        strange = sorted(given.keys() - {"prompt", "prompt_token_ids"})
        if strange or not given:
            raise RequestError(field, f"{strange[0]!r} is not supported" if strange else "has no prompt")
        item = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(item, str):
        return item
    ids = _listed(item)
    if ids is None:
        name = field.partition("[")[0]
        raise RequestError(name, f"{place}must be a string or a list of token ids, not {_kind(item)}")
    return _ids(ids, field)


def one_prompt(prompt: Prompt, embed_dim: int | None = None) -> TextOrIds:
    """Check a prompt to stream; see prompt_list. Raises RequestError."""
    items = prompt_list(prompt, "prompt", embed_dim)
    if len(items) != 1:
        raise RequestError("prompt", f"a stream takes one prompt, not {len(items)}")
    return items[0]


def priority_list(priority: Sequence[int] | None, count: int, policy: str) -> list[int]:
    """Return a priority per prompt. Raises RequestError, also if the scheduling policy ignores priorities."""
    if priority is not None and "priority" not in policy.split(",", maxsplit=1)[0].split("+"):
        raise RequestError("priority", f"the scheduling policy is {policy}: use scheduling_policy='priority'")
    return one_each("priority", priority, count, int, int)


def asks_beside(
    count: int,
    prediction: Prompt | Sequence[Prompt] | None = None,
    negative_prompt: Prompt | Sequence[Prompt] | None = None,
    adapter: str | Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """The fields of an Ask beside each of so many prompts, each given as one for all, or one per prompt.

    Raises RequestError.
    """
    return [
        {"prediction": predicted, "negative_prompt": negative, "adapter": name}
        for predicted, negative, name in zip(
            _texts_beside("prediction", prediction, count),
            _texts_beside("negative_prompt", negative_prompt, count),
            one_each("adapter", adapter, count, str, str),
            strict=True,
        )
    ]


def chats_beside(count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """`asks_beside` from the options of a chat, which it takes out."""
    return asks_beside(
        count, *(options.pop(name, None) for name in ("prediction", "negative_prompt", "adapter"))
    )


def _texts_beside(name: str, given: Prompt | Sequence[Prompt] | None, count: int) -> list[TextOrIds]:
    """Return a text per prompt; "" is none. `name` is that of the argument. Raises RequestError."""
    found: list[TextOrIds] = [""] if given is None else prompt_list(given, name)
    if len(found) not in {1, count}:
        raise RequestError(name, f"got {len(found)} for {count} prompts")
    return found if len(found) == count else found * count


def adapter_opener(name: str, given: object, service: AdapterService) -> Open:
    """What reads an adapter: its path, or its numbers. Raises ValueError."""
    if _is_adapter(given):
        return lambda: nullcontext(given)
    return service.opener(name, adapter_path(name, given))


def _is_adapter(given: object) -> TypeGuard[Adapter]:
    from quire.lora.adapter import Adapter

    return isinstance(given, Adapter)


def adapter_sources(adapters: Mapping[str, object]) -> Iterator[str | Adapter]:
    """Paths of adapters, or their numbers. Raises ValueError."""
    for name, given in adapters.items():
        yield given if _is_adapter(given) else adapter_path(name, given)


def adapter_path(name: str, given: object) -> str:
    """The path of an adapter. Raises ValueError for anything else."""
    if not isinstance(given, str | Path):
        raise ValueError(f"adapters: {name}: must be a path or an Adapter, not {_kind(given)}")
    return str(given)


def check_salt(cache_salt: object) -> None:
    """Raise RequestError unless a cache salt is a string."""
    if not isinstance(cache_salt, str):
        raise RequestError("cache_salt", f"must be a string, not {_kind(cache_salt)}")


def one_each(
    field: str, values: T | Sequence[T] | None, count: int, kind: type[T], default: Callable[[], T]
) -> list[T]:
    """Return a value per prompt from one for all, or one per prompt. Raises RequestError."""
    if values is None:
        return [default()] * count
    if isinstance(values, kind):
        return [values] * count
    items = _listed(values)
    if items is None or not all(isinstance(item, kind) for item in items):
        wrong = values if items is None else next(item for item in items if not isinstance(item, kind))
        raise RequestError(
            field, f"must be {kind.__name__} or a list with one per prompt, not {_kind(wrong)}"
        )
    if len(items) != count:
        raise RequestError(field, f"got {len(items)} for {count} prompts")
    return items


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Return one conversation or several as a list. Raises RequestError."""
    items = _listed(messages)
    if items is None:
        raise RequestError(
            "messages", f"must be a list of messages or of conversations, not {_kind(messages)}"
        )
    if items and isinstance(items[0], Mapping):
        return [items]
    for i, item in enumerate(items):
        if _listed(item) is None:
            raise RequestError(
                "messages", f"item {i} must be a message or a list of messages, not {_kind(item)}"
            )
    return items


def taken_tools(options: dict[str, Any]) -> ToolUse | None:
    """The tools of a chat. Takes their options out, and puts in the functions that the template renders.

    Arguments of vLLM without a counterpart are taken out too, or refused.
    """
    from quire.text.tools import read_tools

    refuse_others("chat", {name: options.pop(name) for name in options.keys() & _OTHERS.keys()})
    given = options.pop("tools", None), options.pop("tool_choice", None)
    tools = read_tools(*given, parallel=options.pop("parallel_tool_calls", None))
    if tools is not None:
        options["tools"] = tools.rendered
    return tools


def _listed(value: Any) -> list[Any] | None:
    """Convert a sequence, an array or a tensor to a list; None for anything else."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    made = value.tolist() if hasattr(value, "tolist") else None  # numpy, torch
    return made if isinstance(made, list) else None


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _ids(items: list[Any], field: str) -> list[int]:
    for item in items:
        if not _is_id(item):
            raise RequestError(field, f"{item!r} is not a token id")
    return [item.__index__() for item in items]


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
