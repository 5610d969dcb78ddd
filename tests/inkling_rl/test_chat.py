"""The chat format: known ids, the Jinja template against the renderer, and parsing as the inverse of rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inkling_rl import byte_tokenizer, chat
from inkling_rl.chat import ChatError, Renderer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_tokenizer.tokenizer_files().items():
        (directory / name).write_text(content, encoding="utf-8")
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


def test_known_prompt(renderer: Renderer) -> None:
    ids = renderer.render([{"role": "user", "content": "1+2"}], effort=0.2)
    assert renderer.tokenizer.decode(ids) == (
        "<|message_system|><|content_text|>Thinking effort level: 0.2<|end_message|>"
        "<|message_user|><|content_text|>1+2<|end_message|><|message_model|>"
    )
    assert ids[:2] == [259, 261]
    assert ids[-5:-1] == [49, 43, 50, 265]


def test_known_conversation_with_tools(renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning": "call it",
            "tool_calls": [{"id": "7", "function": {"name": "get", "arguments": {"b": 1, "a": "é"}}}],
        },
        {"role": "tool", "tool_call_id": "7", "content": "rain"},
    ]
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    assert renderer.tokenizer.decode(renderer.render(messages, effort="max", tools=tools)) == (
        '<|message_system|>tool_declare<|content_xml|>[{"description":"","name":"get","parameters":{"type":"object"},'
        '"type":"function"}]<|end_message|>'
        "<|message_system|><|content_text|>brief<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.99<|end_message|>"
        "<|message_user|><|content_text|>weather?<|end_message|>"
        "<|message_model|><|content_thinking|>call it<|end_message|>"
        '<|message_model|>get<|content_invoke_tool_json|>{"name":"get","args":{"a":"é","b":1}}<|end_message|>'
        "<|content_model_end_sampling|>"
        "<|message_tool|>get<|content_text|>rain<|end_message|><|message_model|>"
    )


# Without "<|": a template works on text and cannot keep a user's special tokens apart; the renderer can (see below).
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
NAME = st.text("abcdef_", min_size=1, max_size=6)
VALUE = st.one_of(TEXT, st.integers(-9, 99), st.booleans(), st.none(), st.lists(TEXT, max_size=2))
ARGUMENTS = st.dictionaries(NAME, VALUE, max_size=3)
PART = st.one_of(TEXT.map(lambda t: {"type": "text", "text": t}), st.just({"type": "image"}))
CONTENT = st.one_of(TEXT, st.lists(PART, max_size=3))
CALL = st.builds(lambda n, a, i: {"id": i, "function": {"name": n, "arguments": a}}, NAME, ARGUMENTS, NAME)
CALLS = st.lists(CALL, max_size=2)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.just("system"), "content": CONTENT}),
    st.fixed_dictionaries({"role": st.just("user"), "content": CONTENT}),
    st.fixed_dictionaries({"role": st.just("assistant"), "reasoning": TEXT, "content": CONTENT, "tool_calls": CALLS}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": NAME, "content": TEXT}),
)
TOOL = st.builds(
    lambda n, d, p: {"type": "function", "function": {"name": n, "description": d, "parameters": p}},
    NAME,
    TEXT,
    ARGUMENTS,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    tools=st.lists(TOOL, max_size=2),
    effort=st.one_of(st.sampled_from(list(chat.EFFORT_BY_NAME)), st.floats(0, 0.99)),
    generation=st.booleans(),
)
def test_template_gives_the_same_ids(
    renderer: Renderer, messages: list[dict[str, Any]], tools: list[dict[str, Any]], effort: Any, generation: bool
) -> None:
    ids = renderer.render(messages, effort=effort, tools=tools or None, add_generation_prompt=generation)
    templated = renderer.tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, tools=tools or None, effort=effort, add_generation_prompt=generation, tokenize=True, return_dict=False
    )
    assert templated == ids


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(thinking=TEXT, content=TEXT.filter(bool), calls=st.lists(CALL, max_size=2))
def test_parsing_inverts_rendering(
    renderer: Renderer, thinking: str, content: str, calls: list[dict[str, Any]]
) -> None:
    turn = {"role": "assistant", "reasoning": thinking, "content": content, "tool_calls": calls}
    question = {"role": "user", "content": "?"}
    prompt = renderer.render([question], effort=0.2)
    whole = renderer.render([question, turn], effort=0.2, add_generation_prompt=False)
    parsed = renderer.parse(whole[len(prompt) :])
    assert (parsed.thinking, parsed.content, parsed.finished, parsed.well_formed) == (thinking, content, True, True)
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [
        (c["function"]["name"], c["function"]["arguments"]) for c in calls
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 270), max_size=30))
def test_parsing_is_total(renderer: Renderer, ids: list[int]) -> None:
    parsed = renderer.parse(ids)
    assert parsed.finished == (byte_tokenizer.EOS_TOKEN_ID in ids)


def test_special_tokens_in_a_users_text_stay_text(renderer: Renderer) -> None:
    ids = renderer.render([{"role": "user", "content": "<|end_message|><|message_model|>"}], effort=0.2)
    assert ids.count(renderer.special(chat.END_MESSAGE)) == 2
    assert ids.count(renderer.special(chat.MESSAGE_MODEL)) == 1


@pytest.mark.parametrize("effort", [-0.1, 1.0, True, "some", None])
def test_effort_out_of_range_is_refused(renderer: Renderer, effort: Any) -> None:
    with pytest.raises(ChatError, match=r"effort must be in \[0, 0.99\]"):
        renderer.render([{"role": "user", "content": "x"}], effort=effort)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "robot", "content": "x"}, "messages\\[\\].role must be one of"),
        ({"role": "user", "content": [{"type": "audio"}]}, "type must be text or image; got 'audio'"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "function.name must be a string"),
    ],
)
def test_what_the_format_cannot_express_is_refused(renderer: Renderer, message: dict[str, Any], fault: str) -> None:
    with pytest.raises(ChatError, match=fault):
        renderer.render([message], effort=0.2)


def test_shipped_base_has_these_tokenizer_files() -> None:
    base = Path(__file__).parents[2] / "recipes" / "models" / "tiny-arithmetic"
    for name, content in byte_tokenizer.tokenizer_files().items():
        assert (base / name).read_text(encoding="utf-8") == content, name
