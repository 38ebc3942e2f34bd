"""Read the other files of a tokenizer folder: special tokens and chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from tokenizers import AddedToken

from quire.records import dataclass
from quire.text.growth import check_normalizer
from quire.text.tokenizer_files import (
    OTHER_VOCABULARIES,
    LoadBudget,
    check_tokenizer_json,
    read_bounded,
    read_json_object,
    read_text,
)
from quire.types import CheckpointError
from quire.util.lfs import POINTER, is_pointer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_MAX_ADDED_TOKENS = 100_000
_MAX_TEMPLATES = 32


@dataclass(slots=True)
class TokenizerFolder:
    """The contents of a tokenizer folder, checked for shape.

    `llama_prefix` is the Metaspace scheme of a Llama-family pipeline that replaces that of tokenizer.json, else None.
    `response_template` says how answers are read, as in transformers.
    """

    tokenizer_json: bytes
    special_tokens: dict[str, str] = field(default_factory=dict)
    named_tokens: list[AddedToken] = field(default_factory=list)
    added_tokens: dict[int, AddedToken] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    llama_prefix: str | None = None
    response_template: dict[str, object] | None = None


def read_folder(path: Path, budget: LoadBudget) -> TokenizerFolder:
    """Read a folder within the budget. Raises CheckpointError naming a missing or malformed file."""
    if not path.is_dir():
        raise CheckpointError(f"tokenizer folder {path} does not exist")
    data = _read_tokenizer_json(path, budget)
    config = read_json_object(path / "tokenizer_config.json", budget.side_file_bytes)
    folder = TokenizerFolder(data)
    named, extra = _special_tokens(path, config, budget)
    folder.special_tokens = {name: token.content for name, token in named.items()}
    folder.named_tokens = [*named.values(), *extra]
    folder.added_tokens = _added_tokens(path, config, folder, budget)
    folder.chat_templates = _chat_templates(path, config, budget)
    folder.llama_prefix = _llama_prefix(path, config, data, budget)
    declared = config.get("response_template")
    folder.response_template = declared if isinstance(declared, dict) else None
    if folder.llama_prefix is not None:
        for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>")):
            if name not in config:
                folder.special_tokens.setdefault(name, text)
    return folder


def _read_tokenizer_json(path: Path, budget: LoadBudget) -> bytes:
    file = path / "tokenizer.json"
    if not file.exists():
        for name, what in OTHER_VOCABULARIES.items():
            if (path / name).exists():
                raise CheckpointError(
                    f"{path} has {what} ({name}) but no tokenizer.json, the only supported "
                    "format; write one with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
                )
        raise CheckpointError(f"{path} has no tokenizer.json")
    data = read_bounded(file, budget.tokenizer_bytes)
    if is_pointer(data):
        raise CheckpointError(f"tokenizer.json {POINTER}")
    check_tokenizer_json(data, budget)
    check_normalizer(data)
    return data


def _special_tokens(
    path: Path, config: dict[str, object], budget: LoadBudget
) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    """Tokens with a role by name, and other special tokens, from the config or (older) special_tokens_map.json."""
    source = dict(config)
    if "added_tokens_decoder" not in config:
        source.update(read_json_object(path / "special_tokens_map.json", budget.side_file_bytes))
    named: dict[str, AddedToken] = {}
    for name, value in source.items():
        if not name.endswith("_token") or value is None or isinstance(value, bool):
            continue
        if name in _NAMED or isinstance(value, str | dict):
            named[name] = _added_token(value, name)
    extra = source.get("extra_special_tokens") or source.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named.update({str(name): _added_token(value, str(name)) for name, value in extra.items()})
        return named, []
    if not isinstance(extra, list) or len(extra) > _MAX_ADDED_TOKENS:
        raise CheckpointError(
            "tokenizer_config.json: extra_special_tokens must be a list or an object of tokens"
        )
    return named, [_added_token(value, "extra_special_tokens") for value in extra]


def _added_tokens(
    path: Path, config: dict[str, object], folder: TokenizerFolder, budget: LoadBudget
) -> dict[int, AddedToken]:
    declared = config.get("added_tokens_decoder")
    if declared is None:
        legacy = read_json_object(path / "added_tokens.json", budget.side_file_bytes)
        special = {token.content for token in folder.named_tokens}
        declared = {
            str(token_id): {"content": text, "special": text in special, "normalized": text not in special}
            for text, token_id in legacy.items()
        }
    if not isinstance(declared, dict) or len(declared) > _MAX_ADDED_TOKENS:
        raise CheckpointError(
            f"tokenizer_config.json: added_tokens_decoder must have at most {_MAX_ADDED_TOKENS} tokens by id"
        )
    tokens: dict[int, AddedToken] = {}
    for key, value in declared.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder has the invalid token id {key[:40]!r}"
            )
        if not isinstance(value, dict):
            raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder[{key}] must be an object")
        tokens[int(key)] = _added_token(value, f"added_tokens_decoder[{key}]", special=False)
    return tokens


def _added_token(value: object, name: str, *, special: bool = True) -> AddedToken:
    """Parse a token: its text, or an object with `content` and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise CheckpointError(
            f"tokenizer_config.json: {name} must be a string or an object with a string content"
        )
    flags = {flag: value[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized") if flag in value}
    flags["special"] = value.get("special", special)
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(f"tokenizer_config.json: the flags of {name} must be booleans")
    return AddedToken(value["content"], **flags)


def _chat_templates(path: Path, config: dict[str, object], budget: LoadBudget) -> dict[str, str]:
    """Name -> source. Template files override the config, which overrides a processor's chat_template.json."""
    templates: dict[str, str] = {}
    file = path / "chat_template.jinja"
    if file.exists():
        templates["default"] = read_text(file, budget.template_bytes)
    for extra in sorted((path / "additional_chat_templates").glob("*.jinja"))[:_MAX_TEMPLATES]:
        templates[extra.name.removesuffix(".jinja")] = read_text(extra, budget.template_bytes)
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        value = read_json_object(path / "chat_template.json", budget.template_bytes).get("chat_template")
    for name, source in _named_templates(value):
        if len(source) > budget.template_bytes:
            raise CheckpointError(
                f"chat template {name!r} has {len(source)} characters, more than the limit of {budget.template_bytes}"
            )
        templates[name] = source
    return templates


def _named_templates(value: object) -> Iterator[tuple[str, str]]:
    """Yield the templates of a config entry: a string, a list of {"name", "template"}, or an object by name."""
    if value is None:
        return
    if isinstance(value, str):
        yield "default", value
        return
    pairs: list[tuple[object, object]] = []
    if isinstance(value, dict):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = [(item.get("name"), item.get("template")) for item in value if isinstance(item, dict)]
    if not pairs or len(pairs) > _MAX_TEMPLATES:
        raise CheckpointError(
            f"tokenizer_config.json: chat_template must be text or at most {_MAX_TEMPLATES} named texts"
        )
    for name, source in pairs:
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError("tokenizer_config.json: a chat_template entry needs a name and a template")
        yield name, source


def _llama_prefix(path: Path, config: dict[str, object], data: bytes, budget: LoadBudget) -> str | None:
    """The Metaspace scheme that transformers uses for this folder's Llama tokenizer, None if it uses tokenizer.json
    unchanged.

    transformers 5 rebuilds the pipeline of class LlamaTokenizer for model type "llama" (and folders without a config);
    other types with this class, and byte-level vocabularies, keep theirs.
    """
    if str(config.get("tokenizer_class")) not in _LLAMA_CLASSES or b'"ByteLevel"' in data:
        return None
    model_type = read_json_object(path / "config.json", budget.side_file_bytes).get("model_type")
    if model_type not in (None, "llama"):
        return None
    if config.get("add_prefix_space", True) is False:
        return "never"
    return "always" if config.get("legacy", False) else "first"
