"""Inkling's chat format: messages to token ids and back.

A conversation is a row of blocks, `role [author] kind text <|end_message|>`, where role and kind are special tokens.
One leading system block declares tools, a system block before the first non-system message states the thinking effort,
an assistant turn ends with `<|content_model_end_sampling|>`, and `<|message_model|>` asks the model to go on.

`Renderer` is the definition; `chat_template.jinja` beside the tokenizer gives the same ids (a property test holds the
two together). Rendering goes block by block: special tokens are never parsed out of a user's text.

Source: the public Inkling renderers of vLLM 0.30 (`renderers/inkling_encoding.py`) and sglang, as facts about the wire
format. Departures: text and image parts only (Inkling 2 has no audio).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

ENDOFTEXT = "<|endoftext|>"
MESSAGE_USER = "<|message_user|>"
MESSAGE_MODEL = "<|message_model|>"
MESSAGE_SYSTEM = "<|message_system|>"
MESSAGE_TOOL = "<|message_tool|>"
CONTENT_TEXT = "<|content_text|>"
CONTENT_IMAGE = "<|content_image|>"
END_SAMPLING = "<|content_model_end_sampling|>"
CONTENT_THINKING = "<|content_thinking|>"
END_MESSAGE = "<|end_message|>"
CONTENT_TOOL_ERROR = "<|content_tool_error|>"
CONTENT_XML = "<|content_xml|>"
CONTENT_INVOKE_TOOL_JSON = "<|content_invoke_tool_json|>"
CONTENT_INVOKE_TOOL_TEXT = "<|content_invoke_tool_text|>"
IMAGE_PLACEHOLDER = "<|image_placeholder|>"

# The released tokenizer spells some slots by number only; the renderer tries these in order.
SPELLINGS = {
    CONTENT_XML: (CONTENT_XML, "<|unused_200024|>"),
    IMAGE_PLACEHOLDER: (IMAGE_PLACEHOLDER, "<|unused_200054|>"),
}

MAX_EFFORT = 0.99
EFFORT_BY_NAME = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
ROLE_TOKENS = {
    "system": MESSAGE_SYSTEM,
    "developer": MESSAGE_SYSTEM,
    "user": MESSAGE_USER,
    "assistant": MESSAGE_MODEL,
    "tool": MESSAGE_TOOL,
}


class ChatError(ValueError):
    """A conversation that the format cannot express."""


class Tokenizer(Protocol):
    """What the renderer needs of a tokenizer; any Hugging Face fast tokenizer has it."""

    def encode(self, text: str, *, add_special_tokens: bool = ..., split_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...

    def convert_tokens_to_ids(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One `<|content_invoke_tool_json|>` block. `arguments` is None where the model wrote no valid JSON."""

    name: str
    arguments: dict[str, Any] | None
    raw: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A parsed assistant turn.

    Example: `Completion(content="42", thinking="6*7=42", tool_calls=(), finished=True, well_formed=True)`.
    """

    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finished: bool = False
    """The turn ended with `<|content_model_end_sampling|>` (not cut by a length limit)."""
    well_formed: bool = True
    """Every block opened with a kind token and was closed."""


def effort_text(effort: float | str) -> str:
    """`Thinking effort level: {e}` for a scalar in [0, 0.99] or one of the named levels.

    Raises ChatError for anything else.
    """
    if isinstance(effort, str):
        if effort not in EFFORT_BY_NAME:
            raise ChatError(f"effort must be in [0, 0.99] or one of {', '.join(EFFORT_BY_NAME)}; got {effort!r}.")
        effort = EFFORT_BY_NAME[effort]
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0.0 <= effort <= MAX_EFFORT:
        raise ChatError(f"effort must be in [0, 0.99] or one of {', '.join(EFFORT_BY_NAME)}; got {effort!r}.")
    shown = f"{float(effort):.2f}".rstrip("0").rstrip(".")
    return f"Thinking effort level: {'0.0' if shown in ('0', '-0') else shown}"


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys: the one spelling of tool declarations and arguments."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)


@dataclass(frozen=True)
class Block:
    """One block of a conversation; `end_of_turn` is the lone `<|content_model_end_sampling|>` of an assistant turn."""

    role: str
    kind: str
    text: str
    author: str = ""
    end_of_turn: bool = False


def blocks(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    effort: float | str,
) -> Iterator[Block]:
    """The conversation as blocks, in wire order.

    Raises ChatError for an unknown role, an unsupported content part or a tool call without a name.
    """
    declared = [*(tools or []), *(tool for m in messages for tool in (m.get("tools") or []))]
    if declared:
        yield Block(
            "system", CONTENT_XML, canonical_json([_tool_spec(tool) for tool in declared]), author="tool_declare"
        )
    effort_block = Block("system", CONTENT_TEXT, effort_text(effort))
    effort_is_due = True
    tool_names: dict[str, str] = {}
    for message in messages:
        role = message.get("role")
        if role not in ROLE_TOKENS:
            raise ChatError(f"messages[].role must be one of {', '.join(ROLE_TOKENS)}; got {role!r}.")
        if effort_is_due and role not in ("system", "developer"):
            yield effort_block
            effort_is_due = False
        if role == "tool":
            name = message.get("name") or tool_names.get(str(message.get("tool_call_id") or ""), "")
            yield Block("tool", CONTENT_TEXT, "".join(t for _, t in _parts(message.get("content"))), author=name)
            continue
        yield from _message_blocks(role, message, tool_names)
    if effort_is_due:
        yield effort_block


def _message_blocks(role: str, message: Mapping[str, Any], tool_names: dict[str, str]) -> Iterator[Block]:
    if role == "assistant" and (thinking := message.get("reasoning") or message.get("reasoning_content")):
        yield Block(role, CONTENT_THINKING, thinking)
    for kind, text in _parts(message.get("content")):
        yield Block(role, kind, text)
    if role == "assistant":
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            name, arguments = function.get("name"), function.get("arguments") or {}
            if not isinstance(name, str):
                raise ChatError(f"messages[].tool_calls[].function.name must be a string; got {name!r}.")
            if isinstance(arguments, str):
                arguments = json.loads(arguments) if arguments.strip() else {}
            if call.get("id"):
                tool_names[str(call["id"])] = name
            text = f'{{"name":{json.dumps(name, ensure_ascii=False)},"args":{canonical_json(arguments)}}}'
            yield Block(role, CONTENT_INVOKE_TOOL_JSON, text, author=name)
        yield Block(role, "", "", end_of_turn=True)


def _parts(content: Any) -> Iterator[tuple[str, str]]:
    if content is None or content == "":
        return
    if isinstance(content, str):
        yield CONTENT_TEXT, content
        return
    for part in content:
        part_type = "text" if isinstance(part, str) else part.get("type", "text")
        if part_type in ("text", "input_text"):
            yield CONTENT_TEXT, part if isinstance(part, str) else part.get("text", "")
        elif part_type in ("image", "image_url", "input_image"):
            yield CONTENT_IMAGE, ""
        else:
            raise ChatError(f"messages[].content[].type must be text or image; got {part_type!r}.")


def _tool_spec(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function") or {}
    if "name" not in function:
        raise ChatError(f"tools[].function.name must be given; got {dict(tool)!r}.")
    return {
        "description": function.get("description") or "",
        "name": function["name"],
        "parameters": function.get("parameters") or {},
        "type": tool.get("type", "function"),
    }


@dataclass(frozen=True)
class Renderer:
    """Messages to token ids and back, for one tokenizer."""

    tokenizer: Tokenizer
    _ids: dict[str, int] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        effort: float | str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation. `effort` has no default: every rollout states it.

        Args:
            messages: OpenAI-style messages; an assistant message may carry `reasoning` and `tool_calls`.
            effort: thinking effort, a scalar in [0, 0.99] or a level name.
            tools: OpenAI-style function declarations.
            add_generation_prompt: end with `<|message_model|>`.

        Raises:
            ChatError: unknown role or part, effort out of range, a tool without a name.
        """
        ids: list[int] = []
        for block in blocks(messages, tools, effort):
            if block.end_of_turn:
                ids.append(self.special(END_SAMPLING))
                continue
            ids.append(self.special(ROLE_TOKENS[block.role]))
            ids.extend(self._text(block.author))
            ids.append(self.special(block.kind))
            ids.extend(self._text(block.text))
            ids.append(self.special(END_MESSAGE))
        if add_generation_prompt:
            ids.append(self.special(MESSAGE_MODEL))
        return ids

    def parse(self, token_ids: Sequence[int]) -> Completion:
        """A sampled assistant turn, from the first token after `<|message_model|>`.

        Total: any ids give a Completion; `well_formed` says whether the format was kept.
        """
        found: dict[str, list[str]] = {CONTENT_TEXT: [], CONTENT_THINKING: [], CONTENT_INVOKE_TOOL_JSON: []}
        finished, well_formed = False, True
        kinds = {self.special(kind): kind for kind in found}
        end_sampling, end_message = self.special(END_SAMPLING), self.special(END_MESSAGE)
        rest = list(token_ids)
        if end_sampling in rest:
            finished = True
            well_formed = rest.index(end_sampling) == len(rest) - 1
            rest = rest[: rest.index(end_sampling)]
        for position, block in enumerate(_split(rest, end_message)):
            if position > 0:
                well_formed &= block.ids[:1] == [self.special(MESSAGE_MODEL)]
                block.ids[:1] = []
            starts = [i for i, token in enumerate(block.ids) if token in kinds]
            well_formed &= block.closed and len(starts) == 1
            if starts:
                text = self.tokenizer.decode(block.ids[starts[0] + 1 :], skip_special_tokens=True)
                found[kinds[block.ids[starts[0]]]].append(text)
        return Completion(
            content="".join(found[CONTENT_TEXT]),
            thinking="".join(found[CONTENT_THINKING]),
            tool_calls=tuple(_tool_call(raw) for raw in found[CONTENT_INVOKE_TOOL_JSON]),
            finished=finished,
            well_formed=well_formed and bool(rest),
        )

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an assistant turn."""
        return [self.special(END_SAMPLING)]

    def special(self, token: str) -> int:
        """Id of a special token. Raises ChatError if the tokenizer has none under any of its spellings."""
        if token not in self._ids:
            for spelling in SPELLINGS.get(token, (token,)):
                token_id = self.tokenizer.convert_tokens_to_ids(spelling)
                if isinstance(token_id, int) and token_id >= 0:
                    self._ids[token] = token_id
                    break
            else:
                raise ChatError(f"tokenizer must have the special token {token}; got none. Use an Inkling tokenizer.")
        return self._ids[token]

    def _text(self, text: str) -> list[int]:
        if not text:
            return []
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


@dataclass
class _RawBlock:
    ids: list[int]
    closed: bool


def _split(ids: list[int], end_message: int) -> Iterator[_RawBlock]:
    while ids:
        if end_message not in ids:
            yield _RawBlock(ids, closed=False)
            return
        cut = ids.index(end_message)
        yield _RawBlock(ids[:cut], closed=True)
        ids = ids[cut + 1 :]


def _tool_call(raw: str) -> ToolCall:
    try:
        value = json.loads(raw)
        name, arguments = value["name"], value["args"]
    except (ValueError, KeyError, TypeError):
        return ToolCall(name="", arguments=None, raw=raw)
    return ToolCall(name=str(name), arguments=arguments if isinstance(arguments, dict) else None, raw=raw)
