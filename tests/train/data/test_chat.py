"""Chat templates, the answers that they enclose, and generation settings."""

import datetime
import json
from pathlib import Path

import pytest

from train.data.chat import (
    DATA_DATE,
    ChatTemplate,
    GenerationSettings,
    load_generation_settings,
    load_template,
)
from train.errors import UserError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Written after the formats that the models' documentation describes.
LLAMA3 = Path(__file__).with_name("llama3.jinja").read_text()
QWEN = Path(__file__).with_name("qwen.jinja").read_text()
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token}}"
    "{% endif %}{% endfor %}"
)
GENERATION = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>\n{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Qwen3 does, it drops the thoughts of all turns but the last.
THOUGHTLESS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Phi-3 does, it ends a text that nobody continues.
PHI3 = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n"
    "{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
TEMPLATES = {
    "llama3": LLAMA3,
    "qwen": QWEN,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "generation": GENERATION,
}


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


CHAT = chat("Hi <b>you</b> & é.", "Hello.", "  Why?\n", "Because.\n\nIt is ☃.")


def template(source, **options):
    return ChatTemplate(source, TOKENS, "x.jinja", lambda: DATA_DATE)._replace(**options)


@pytest.fixture
def peer():
    """``peer(source)`` returns a tokenizer of transformers with a chat template."""
    tokenizers, transformers = (pytest.importorskip(n) for n in ("tokenizers", "transformers"))
    model = tokenizers.models.BPE(
        {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<s>", "</s>", "<|im_end|>"])

    def load(source):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **TOKENS)
        fast.chat_template = source
        return fast

    return load


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(peer, name, add_generation_prompt):
    now = datetime.datetime.now()
    options = {"add_generation_prompt": add_generation_prompt}
    for messages in (CHAT, CHAT[:1], CHAT[:3]):
        expected = peer(TEMPLATES[name]).apply_chat_template(messages, tokenize=False, **options)
        text = template(TEMPLATES[name], now=lambda: now).render(messages, **options)
        assert text == expected
        assert "Hi" in text


def test_lists_tools_as_transformers_does(peer):
    tools = [{"name": "add", "text": "<é>", "parameters": {"b": 1, "a": [True, None]}}]
    expected = peer(QWEN).apply_chat_template(CHAT, tools=tools, tokenize=False)
    assert template(QWEN).render(CHAT, tools=tools) == expected
    assert '{"name": "add", "text": "<é>"' in expected


def test_finds_the_answers_that_transformers_finds(peer):
    fast = peer(GENERATION)
    expected = fast.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    ((text, spans),) = template(GENERATION).render_answers(CHAT)
    encoding = fast(text, return_offsets_mapping=True, add_special_tokens=False)
    assert encoding["input_ids"] == expected["input_ids"]
    found = [
        int(any(start < s.stop and end > s.start for s in spans))
        for start, end in encoding["offset_mapping"]
    ]
    assert found == expected["assistant_masks"]
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("llama3", ["Hello.<|eot_id|>", "Because.\n\nIt is ☃.<|eot_id|>"]),
        ("qwen", ["Hello.<|im_end|>\n", "Because.\n\nIt is ☃.<|im_end|>\n"]),
        ("gemma", ["Hello.<end_of_turn>\n", "Because.\n\nIt is ☃.<end_of_turn>\n"]),
        ("mistral", [" Hello.</s>", " Because.\n\nIt is ☃.</s>"]),
        ("generation", ["Hello.</s>", "Because.\n\nIt is ☃.</s>"]),
    ],
)
def test_answers_are_what_an_assistant_writes(name, answers):
    ((text, spans),) = template(TEMPLATES[name]).render_answers(CHAT)
    assert text == template(TEMPLATES[name]).render(CHAT)
    assert [text[s.start : s.stop] for s in spans] == answers
    ((_, last),) = template(TEMPLATES[name]).render_answers(CHAT, last=True)
    assert last == spans[1:]


def test_a_namespace_keeps_values_between_turns():
    source = (
        "{% set n = namespace(count=0, last='') %}{% for m in messages %}"
        "{% set n.count = n.count + 1 %}{% set n.last = m.role %}{% endfor %}{{ n.count }}{{ n.last }}"
    )
    assert template(source).render(CHAT) == "4assistant"


def test_a_chat_that_ends_with_a_user_has_no_last_answer():
    for source in (QWEN, GENERATION):
        ((_, spans),) = template(source).render_answers(CHAT[:3], last=True)
        assert spans == []


@pytest.mark.parametrize("source", [THOUGHTLESS, PHI3])
def test_answers_that_a_template_writes_differently_later_have_texts_of_their_own(source):
    rows = template(source).render_answers(CHAT)
    assert len(rows) == 2
    for end, (text, (span,)) in zip((2, 4), rows, strict=True):
        prompt = template(source).render(CHAT[: end - 1], add_generation_prompt=True)
        assert text == template(source).render(CHAT[:end])
        assert (span.start, span.stop) == (len(prompt), len(text))
        assert text.startswith(prompt)
    assert template(source).render_answers(CHAT, last=True) == rows[1:]
    (one,) = template(source).render_answers(CHAT[:3])
    assert one == rows[0] or source == THOUGHTLESS


def test_an_answer_that_does_not_continue_its_prompt_is_refused():
    # As that of DeepSeek-R1: the prompt opens thoughts, which the answer does not have.
    source = QWEN.replace(r"assistant\n' }}", r"assistant\n<think>' }}")
    assert source != QWEN
    with pytest.raises(UserError, match=r"x\.jinja writes message 2 differently than the start of"):
        template(source).render_answers(CHAT)


def test_training_data_have_a_fixed_date():
    assert "Today Date: 26 Jul 2024" in template(LLAMA3).render(CHAT)
    today = template(LLAMA3, now=lambda: datetime.datetime(2001, 2, 3)).render(CHAT)
    assert "Today Date: 03 Feb 2001" in today


def test_missing_values_are_not_written():
    messages = [{"role": "user", "content": "a", "name": None}]
    assert template("{{ messages[0].name is defined }}").render(messages) == "False"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GEMMA, "x.jinja refuses the chat: System role not supported"),
        ("a\n{% if %}", "x.jinja, line 2: Expected an expression"),
        ("{{ messages[0].content + 1 }}", "x.jinja refuses the chat: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "x.jinja refuses the chat: .*__class__.* is unsafe"),
        ("{{ messages.append(1) }}", "x.jinja refuses the chat: .*append.* is unsafe"),
        ("{{ missing.field }}", "x.jinja refuses the chat: 'missing' is undefined"),
        ("{% set n = namespace(__html__=1) %}", "a namespace cannot hold '__html__'"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "a namespace cannot hold '_x'"),
    ],
)
def test_a_bad_template_is_one_line(source, message):
    with pytest.raises(UserError, match=message) as error:
        template(source).render([{"role": "system", "content": "a"}])
    assert "\n" not in str(error.value)


@pytest.fixture
def folder(tmp_path):
    def write(**files):
        for name, content in files.items():
            name, text = name.replace("__", "."), content
            if not isinstance(content, str):
                text = json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_loads_the_template_and_special_tokens_of_a_folder(folder):
    eos = {"content": "</s>", "lstrip": False}
    settings = {"bos_token": "<s>", "eos_token": eos, "pad_token": None, "chat_template": MISTRAL}
    path = folder(tokenizer_config__json=settings)
    loaded = load_template(path)
    assert loaded.tokens == TOKENS
    assert loaded.render(CHAT[:2]) == "<s>[INST] Hi <b>you</b> & é. [/INST] Hello.</s>"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    path = folder(tokenizer_config__json={"chat_template": named})
    assert load_template(path).render(CHAT) == "y"
    folder(chat_template__jinja="z", special_tokens_map__json={"eos_token": "<end>"})
    assert load_template(path).render(CHAT) == "z"  # the newer way to save it
    assert load_template(path).tokens == {"eos_token": "<end>"}
    folder(own__jinja="{{ eos_token }}")
    assert load_template(path, path / "own.jinja").render(CHAT) == "<end>"
    assert load_template(None, path / "own.jinja").render(CHAT) == ""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no chat template, neither chat_template.jinja nor"),
        ({"tokenizer_config__json": "{"}, "cannot read .*tokenizer_config.json: Expecting"),
        ({"tokenizer_config__json": [1]}, "expected a JSON object, got list"),
        (
            {"tokenizer_config__json": {"chat_template": [{"name": ["rag"], "template": ""}]}},
            r"has no chat template named default; there are \['rag'\]",
        ),
    ],
)
def test_refuses_folders_without_a_template(folder, files, message):
    with pytest.raises(UserError, match=message):
        load_template(folder(**files))


def test_refuses_a_missing_template_file(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none.jinja: No such file.*Jinja template"):
        load_template(tmp_path, tmp_path / "none.jinja")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token_id": 2}, {"temperature": 0.0, "end_tokens": (2,)}),
        (
            {"do_sample": True, "eos_token_id": [2, 7]},
            {"temperature": 1.0, "top_k": 50, "end_tokens": (2, 7)},
        ),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "min_p": 0.1},
            {"temperature": 0.6, "top_p": 0.9, "min_p": 0.1},
        ),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        (
            {"do_sample": True, "top_k": 20, "top_p": 1.0, "repetition_penalty": 1.0},
            {"temperature": 1.0, "top_k": 20},
        ),
        (
            {"num_beams": 4, "typical_p": 1.0, "suppress_tokens": [], "min_length": 0},
            {"temperature": 0.0, "not_applied": ("num_beams 4",)},
        ),
    ],
)
def test_reads_generation_settings(folder, settings, expected):
    path = folder(generation_config__json=settings)
    assert load_generation_settings(path) == GenerationSettings(**expected)


def test_without_generation_settings_the_model_names_the_end_tokens(folder):
    for given, tokens in ([5, 0], (5, 0)), (0, (0,)), (None, ()):
        path = folder(config__json={"eos_token_id": given})
        assert load_generation_settings(path) == GenerationSettings(end_tokens=tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0}, "top_p must be a number in .0, 1., got 0"),
        ({"min_p": 2}, "min_p must be a number in .0, 1., got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be a number > 0, got 0"),
        ({"temperature": "warm"}, "temperature must be a number >= 0, got 'warm'"),
        ({"top_k": 1.5}, "top_k must be an integer >= 0, got 1.5"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token or a list of tokens"),
        ({"eos_token_id": [True]}, "eos_token_id must be a token or a list of tokens"),
        ({"eos_token_id": -1}, "eos_token_id must be a token or a list of tokens"),
        ({"temperature": [[1] * 99] * 99}, r"temperature must be a number >= 0, got .{,200}$"),
    ],
)
def test_refuses_generation_settings_of_a_wrong_type(folder, settings, message):
    with pytest.raises(UserError, match=f"generation_config.json: {message}"):
        load_generation_settings(folder(generation_config__json=settings))
