"""Request fields that others know and Quire does not act on: harmless values pass, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.server.errors import ApiError, shorten
from quire.types import PARAMETERS, parameter_names

# Fields that change neither the answer nor what it costs here: accepted and ignored (docs/server.md says why).
IGNORED = frozenset((
    "user", "metadata", "store", "safety_identifier", "prediction", "parallel_tool_calls",
    "prompt_cache_key", "cache_control", "session_id", "include_reasoning", "truncation_side",
    "spaces_between_special_tokens", "logprobs_mode", "cache_prompt", "id_slot", "n_cache_reuse",
    "timings_per_token", "return_progress", "sse_ping_interval",
))  # fmt: skip

# Fields that would change the result: name -> values that ask for what happens anyway (null always does).
Refused = Mapping[str, tuple[Any, ...]]
_COMMON: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "max_cost": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in-memory", "in_memory"),
    "service_tier": ("auto", "default"),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
# Ollama's, llama-server's and TGI's, on the same routes.
_COMMON |= {
    "adapter_id": (),
    "do_sample": (True,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "format": ("",),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "options": ({},),
    "raw": (False,),
    "samplers": (),
    "system": ("",),
    "t_max_predict_ms": (0,),
    "template": ("",),
    "think": (),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "watermark": (False,),
    "xtc_probability": (0, 0.0),
}
_CHAT: Refused = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"], []),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_COMPLETION: Refused = {"suffix": ("",), "top_logprobs": (0,)}
_WHY = {
    "chat_template": "templates are part of the model and are never taken from a request",
    "prompt_embeds": "prompts are text or token ids",
    "max_cost": "requests have no price here; bound them by max_tokens and deadline_ms",
    "options": "its fields stand beside the others here: temperature, top_k, seed, …",
    "prompt_cache_retention": "cached prefixes stay until others need their blocks",
    "service_tier": "there is one tier; send auto or default",
    "system": "send it as a message with the role system",
    "template": "templates are part of the model and are never taken from a request",
    "think": "templates that can think read a variable of chat_template_kwargs, such as enable_thinking",
}

# Parameters under the names that they have there.
for _name, _here in (parameter_names("llama-server") | parameter_names("TGI")).items():
    _default = PARAMETERS[_here].default
    _forms = () if _default is None else (float(_default), int(_default))
    _COMMON[_name] = tuple(same for same in _forms if same == _default)
    _WHY[_name] = f"it is {_here} here"

CHAT: Refused = {**_COMMON, **_CHAT}
COMPLETION: Refused = {**_COMMON, **_COMPLETION}
CONVERSATION: Refused = {"chat_template": (), "tools": ([],)}  # of one that is rendered and not answered


class Unsupported:
    """The fields that one route refuses, and how to look at their values in a body."""

    def __init__(self, request: type[msgspec.Struct], refused: Refused) -> None:
        self._known = frozenset(request.__struct_encode_fields__)
        self._refused = refused
        self._values = msgspec.json.Decoder(
            msgspec.defstruct("Values", [(name, Any, None) for name in refused])
        )

    def check(self, names: set[str], body: bytes, *, refuse_unknown: bool) -> None:
        """Raise ApiError 400 naming the first field of a body that would change the result, or that nobody knows."""
        extra = names - self._known
        if extra & self._refused.keys():
            values = self._values.decode(body)
            for name in sorted(extra & self._refused.keys()):
                self._check_value(name, getattr(values, name))
        unknown = sorted(extra - IGNORED - self._refused.keys())
        if refuse_unknown and unknown:
            name = shorten(unknown[0], 100)
            raise ApiError(400, f"{name}: unknown field", code="unknown_field", param=name)

    def _check_value(self, name: str, value: Any) -> None:
        if value is None or any(type(value) is type(same) and value == same for same in self._refused[name]):
            return
        why = _WHY.get(name, "not supported yet")
        raise ApiError(400, f"{name}: {why}", code="unsupported_parameter", param=name)
