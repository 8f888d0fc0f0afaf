"""Fine-tuning data: prompts with answers, chats and texts, in rows or packed."""

import dataclasses
import json
from functools import partial

import chex
import fsspec
import jax
import numpy as np
import pytest
import tokenizers
from data_cases import error_message, take_batches

from train.config import ChatFile, Clipped, Config, LanguageModel, Train
from train.data import evaluation_batches, num_examples
from train.data.buckets import bucketed_batches
from train.data.records import read
from train.data.tokenizer import load_tokenizer
from train.run.setup import setup
from train.tasks import build

CHATML = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MODEL = LanguageModel(blocks=1, width=16, heads=2, hidden=16)


def answers(count, start=0):
    """Prompts with answers; each answer has letters that its prompt has not."""
    return [
        {"prompt": f"{i}: ", "completion": chr(97 + i % 26) * (1 + i * 7 % 11)}
        for i in range(start, start + count)
    ]


@pytest.fixture
def load(write):
    """``load(records, **options)`` loads a dataset, by default with a context of 32."""

    def load(records, **options):
        return ChatFile(**{"path": write(records), "context": 32} | options).load()

    return load


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML)
    return str(path)


def as_text(tokens):
    return bytes(np.asarray(tokens, np.uint8)).decode()


def batch_of(data, split="train"):
    """All rows of a split as one batch."""
    if split == "train":
        return data.augment(data.train, np.random.default_rng(0))
    return data.prepare(data.test)


def examples_of(batch):
    """(text, learned text) of each example, in the order of the rows."""
    found = []
    for row, (tokens, mask) in enumerate(zip(batch["tokens"], batch["loss_mask"], strict=True)):
        segment = np.arange(len(tokens)) <= batch["length"][row] if "length" in batch else None
        segment = batch["segment"][row] if segment is None else segment.astype(int)
        for number in range(1, segment.max() + 1):
            inside = segment == number
            found.append((as_text(tokens[inside]), as_text(tokens[1:][mask & inside[1:]])))
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_answers_are_learned_and_prompts_are_not(load, packing):
    records = answers(20)
    data = load(records, packing=packing, test_fraction=0.25)
    expected = [(r["prompt"] + r["completion"], r["completion"]) for r in records]
    assert sorted(examples_of(batch_of(data))) == sorted(expected[:15])
    assert sorted(examples_of(batch_of(data, "test"))) == sorted(expected[15:])
    if not packing:
        assert examples_of(batch_of(data)) == expected[:15]


def test_texts_are_learned_but_for_their_first_token(load):
    data = load([{"text": "abc"}, {"text": "a☃"}, {"text": "xy"}], test_fraction=0.3)
    assert examples_of(batch_of(data)) == [("abc", "bc"), ("a☃", "☃")]
    assert data.tokens_per_byte() == 1


@pytest.mark.parametrize(
    "form",
    [
        lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
        lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
        lambda q, a: {"question": q, "answer": a},
        lambda q, a: {"prompt": q, "response": a},
        lambda q, a: {"prompt": [{"role": "user", "content": q}], "completion": [{"role": "assistant", "content": a}]},
    ],
)  # fmt: skip
def test_chats_are_written_with_their_template(load, template, form):
    records = [form(f"Is {i}?", f"No {i}.") for i in range(4)]
    data = load(records, chat_template=template, as_chat=True, context=64, test_fraction=0.25)
    expected = [(f"<user>Is {i}?</><assistant>No {i}.</>", f"No {i}.</>") for i in range(4)]
    assert examples_of(batch_of(data)) == expected[:3]
    assert data.tokens_per_byte() is None


def chat_of(*turns, **keys):
    roles = ("user", "assistant") * len(turns)
    return [{"role": r, "content": c} | keys.get(c, {}) for r, c in zip(roles, turns, strict=False)]


TURNS = chat_of("a?", "b", "c?", "d")
WRITTEN = "<user>a?</><assistant>b</><user>c?</><assistant>d</>"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "?"}]
LEARNED = {
    "all answers": ({"messages": TURNS}, {}, WRITTEN, "b</>d</>"),
    "the last answer": ({"messages": TURNS}, {"loss_on": "last_answer"}, WRITTEN, "d</>"),
    "no answer of a prompt": ({"prompt": TURNS[:3], "completion": TURNS[3:]}, {}, WRITTEN, "d</>"),
    **{
        f"{key} 0": ({"messages": chat_of("a?", "b", "c?", "d", b={key: 0}, d={key: 1})}, {}, WRITTEN, "d</>")
        for key in ("weight", "loss", "train")
    },
    "weight False": ({"messages": chat_of("a?", "b", "c?", "d", d={"weight": False})}, {}, WRITTEN, "b</>"),
    "texts in parts": ({"messages": [TURNS[0] | {"content": PARTS}, *TURNS[1:]]}, {}, WRITTEN, "b</>d</>"),
    "an instruction's input": ({"instruction": "Add", "input": "1 2", "output": "3"}, {}, "Add\n1 23", "3"),
    "all but the first token": ({"prompt": "0: ", "completion": "x"}, {"loss_on": "all"}, "0: x", ": x"),
    "an empty input": ({"instruction": "Hi", "input": "", "output": "Ho"}, {}, "HiHo", "Ho"),
    "an instruction": ({"instruction": "a", "output": "b"}, {}, "ab", "b"),
    "fields of other names": ({"in": "0: ", "out": "x", "text": "no"}, {"prompt": "in", "answer": "out"}, "0: x", "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARNED)
def test_records_are_written_and_learned(load, template, name):
    record, options, text, learned = LEARNED[name]
    options = {"chat_template": template, "context": 128, "test_fraction": 0.5} | options
    assert examples_of(batch_of(load([record] * 2, **options))) == [(text, learned)]


def test_roles_that_the_template_does_not_write_are_named(load, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = {"messages": [{"role": "system", "content": "Be brief."}, *chat_of("a?", "b")]}
    data = load([record] * 2, chat_template=str(tmp_path / "t.jinja"), test_fraction=0.5)
    assert any(note.endswith("does not write system messages of chats") for note in data.notes)


THOUGHTS = CHATML.replace("{{ message.content }}", (
    "{% if message.role == 'assistant' and loop.last %}...{% endif %}{{ message.content }}"
))  # fmt: skip


@pytest.fixture
def thoughts(write, tmp_path):
    """A config of five chats with two answers, which a template writes differently later."""
    (tmp_path / "thoughts.jinja").write_text(THOUGHTS)
    texts = ["ab", "cd", "ef", "gh", "ij"]
    path = write([{"messages": chat_of("Hi", t[0], "So", t[1])} for t in texts])
    return ChatFile(
        path=path, chat_template=str(tmp_path / "thoughts.jinja"), context=90, test_fraction=0.2
    )


@pytest.mark.parametrize("packing", [False, True])
def test_answers_that_are_written_differently_later_have_rows_of_their_own(thoughts, packing):
    data = dataclasses.replace(thoughts, packing=packing).load()
    note = "writes answers differently if other messages follow: 10 rows of 5 chats, one for each"
    assert any(note in line for line in data.notes)
    texts = sorted(text for text, _ in examples_of(batch_of(data)))
    learned = sorted(target for _, target in examples_of(batch_of(data)))
    assert learned == sorted(f"...{c}</>" for c in "abcdefgh")
    assert "<user>Hi</><assistant>a</><user>So</><assistant>...b</>" in texts
    # The answers of a chat are on the same side.
    assert sorted(t for _, t in examples_of(batch_of(data, "test"))) == ["...i</>", "...j</>"]


def test_privacy_per_row_refuses_several_rows_of_a_chat(thoughts):
    config = Config(data=dataclasses.replace(thoughts, batch_size=2), model=MODEL, grad=PRIVATE)
    assert "makes 10 rows of 5 chats, one for each answer, but privacy" in error_message(
        build, config
    )
    last = dataclasses.replace(config.data, loss_on="last_answer")
    assert len(build(dataclasses.replace(config, data=last)).dataset.train["start"]) == 4


def test_a_seed_chooses_the_test_examples(load):
    def test_set(seed):
        return {t for t, _ in examples_of(batch_of(load(answers(40), split_seed=seed), "test"))}

    assert test_set(0) == test_set(0)
    assert test_set(0) != test_set(1)
    whole = load(answers(40), split_seed=0)
    texts = [t for s in ("train", "test") for t, _ in examples_of(batch_of(whole, s))]
    assert sorted(texts) == sorted(r["prompt"] + r["completion"] for r in answers(40))


def test_test_examples_can_have_a_file_of_their_own(load, write):
    data = load(answers(5), test_path=write(answers(3, 10), "test.jsonl"))
    assert [t for t, _ in examples_of(batch_of(data, "test"))] == [
        r["prompt"] + r["completion"] for r in answers(3, 10)
    ]
    assert num_examples(data.train) == 5


def test_long_texts_are_cut_into_rows_that_learn_each_token_once(load):
    text = "".join(chr(97 + i % 26) for i in range(70))
    data = load([{"text": text}, {"text": "xy"}], context=16, test_fraction=0.5)
    batch = batch_of(data)
    np.testing.assert_array_equal(batch["length"], [16, 16, 16, 16, 5])
    assert "".join(learned for _, learned in examples_of(batch)) == text[1:]
    assert all(t[1:] == learned for t, learned in examples_of(batch))
    assert data.notes[1:] == ("1 of 1 training examples were cut into rows of 17 tokens",)


def test_a_cut_prompt_leaves_no_rows_without_an_answer(load):
    records = [{"prompt": "p" * 50, "answer": "a" * 20}, {"prompt": "p", "answer": "a"}]
    data = load(records, context=16, long="cut", test_fraction=0.5)
    assert [learned for _, learned in examples_of(batch_of(data))] == ["a" * 15, "a" * 5]


def test_long_answers_are_truncated_or_dropped(load):
    records = [{"prompt": "p: ", "answer": "a" * n} for n in (3, 40, 50, 5)]
    data = load(records, context=16, test_fraction=0.25)
    assert [len(a) for _, a in examples_of(batch_of(data))] == [3, 14, 14]
    assert data.notes == (
        "40 tokens in 3 training examples, 17 each (median), 17 at most; 77.5% are learned",
        "2 of 3 training examples were truncated to 17 tokens",
    )
    data = load(records, context=16, test_fraction=0.25, long="drop")
    assert [len(a) for _, a in examples_of(batch_of(data))] == [3]
    assert "2 of 3 training examples were dropped" in data.notes[1]


def test_packed_batches_weight_rows_by_their_targets(load):
    data = load(answers(30), packing=True)
    (batch, *_), _ = take_batches(data)
    assert batch["segment"].dtype == np.int32
    assert batch["segment"].max() > 1
    np.testing.assert_allclose(batch["weight"], batch["loss_mask"].sum(1) / 32)
    assert "27 examples packed into" in data.notes[1]
    assert data.rows == "rows"
    assert data.name(0).count("line") == batch_of(data)["segment"][0].max()


@pytest.mark.parametrize("packing", [False, True])
def test_batches_resume_at_a_saved_position(load, packing):
    data = load(answers(40), packing=packing)

    def batches():
        if packing:
            return take_batches(data, n=0)[1]
        return bucketed_batches(data, 4, 0, 32)

    first = batches()
    for _ in range(7):
        next(first)
    second = batches()
    second.set_state(first.get_state())
    for _ in range(9):
        a, b = next(first), next(second)
        chex.assert_trees_all_equal(a, b)


def test_rows_of_similar_length_are_batched(load):
    data = load(answers(40), context=64)
    source = bucketed_batches(data, 4, 0, 64)
    batch = next(source)
    bucket = batch["tokens"].shape[1] - 1
    assert bucket < 64
    assert batch["loss_mask"].shape == (4, bucket)
    np.testing.assert_allclose(batch["weight"], batch["loss_mask"].sum(1) / bucket)


@pytest.fixture
def network():
    """A language model's task on a config's data, with parameters that are not initial ones."""

    def build_network(data):
        task = build(Config(data=data, model=MODEL))
        params, state = jax.jit(task.model.init)(jax.random.key(0))
        return task, jax.tree.map(lambda p: p * 1.5, params), state

    return build_network


def reference_losses(task, params, state, texts):
    """Sum of the losses of learned tokens, and their number, with an example per row."""
    tokens = np.zeros((len(texts), 40), np.int32)
    for row, (text, _) in zip(tokens, texts, strict=True):
        row[: len(text)] = np.frombuffer(text.encode(), np.uint8)
    logits, _ = jax.jit(partial(task.model.apply, train=False))(params, state, tokens)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    total = count = 0
    for row, (text, learned) in enumerate(texts):
        for i in range(len(text) - len(learned), len(text)):
            total -= log_probs[row, i - 1, tokens[row, i]]
            count += 1
    return total, count


def test_each_target_of_a_batch_counts_the_same(write, network):
    config = ChatFile(path=write(answers(12)), context=32)
    task, params, state = network(config)
    batch = next(bucketed_batches(task.dataset, 6, 0, 32))
    losses, _ = jax.jit(task.loss)(params, state, batch, jax.random.key(0))
    total, count = reference_losses(task, params, state, examples_of(batch))
    assert count == batch["loss_mask"].sum()
    mean = (losses * batch["weight"]).sum() / batch["weight"].sum()
    np.testing.assert_allclose(mean, total / count, rtol=1e-5)


def test_test_metrics_average_over_targets(write, network):
    config = ChatFile(path=write(answers(20)), context=32, test_fraction=0.4)
    task, params, state = network(config)
    sums, measure = np.zeros(2), jax.jit(task.measure)
    for batch in evaluation_batches(task.dataset, 3):
        losses = measure(params, state, batch).metrics["loss"]
        sums += [(losses * batch["weight"]).sum(), batch["weight"].sum()]
    total, count = reference_losses(
        task, params, state, examples_of(batch_of(task.dataset, "test"))
    )
    np.testing.assert_allclose(sums[0] / sums[1], total / count, rtol=1e-5)


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (["{"], {}, "data.path: FILE, line 1: not JSON: Expecting property name"),
        (["", "", "[1]"], {}, "data.path: FILE, line 3: expected a JSON object per line, got an array"),
        (["[1]"], {}, "line 1: expected a JSON object per line, got an array; for an array, jq -c '.[]' FILE"),
        (["["], {}, "; each line must be a JSON object; for an array, jq -c '.[]' FILE"),
        ([], {}, "data.path: FILE holds no examples"),
        ([{"a": "b"}], {}, "line 1: expected the fields prompt and answer, messages, or text; name others"),
        ([{"prompt": "b"}], {"prompt": "prompt"}, "line 1: no field completion or answer or response or output; name"),
        ([{"text": "ab"}, {"txt": "ab"}], {}, "line 2: no field text (did you mean txt?)"),
        ([{"text": "ab"}, {"text": 3}], {}, "line 2: text must be a text, got int"),
        ([{"text": "ab"}, {"text": " "}], {}, "line 2: text is empty; remove the record"),
        ([{"text": "ab"}, r'{"text": "a\ud83d"}'], {}, "line 2: symbol 1 of the text, '\\ud83d', is half of a surrogate"),
        ([{"prompt": "a", "answer": ""}], {}, "line 1: answer is empty; remove the record"),
        ([{"text": "a"}] * 2, {"test_fraction": 0.5}, "line 1: has no token to learn; remove the record"),
        ([{"text": "ab"}] * 3, {"test_fraction": 0.1}, "0.1 of 3 examples in FILE leaves 0 for testing"),
        (
            [{"prompt": "p" * 40, "answer": "a"}] * 2,
            {"test_fraction": 0.5},
            "line 1: the answer begins after the first 33 tokens, so that nothing is left of it; give",
        ),
        (
            [{"prompt": "p" * 40, "answer": "a"}] * 2,
            {"test_fraction": 0.5, "long": "drop"},
            "no training example of FILE has at most data.context + 1 = 33 tokens",
        ),
        ([{"text": "ab"}] * 9, {"vocabulary": 100}, "has 256 tokens of text, but the vocabulary has 100"),
        ([{"messages": [{"role": "user", "content": "a"}]}], {}, "data.tokenizer: chats need a tokenizer"),
        ([{"text": "ab"}] * 9, {"test_path": "none.jsonl"}, "data.test_path: none.jsonl does not exist"),
        ([{"text": "ab", "u": [1]}] * 9, {"user": "u"}, "line 1: u must be a text or an integer, got [1]"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_record_names_its_line(load, write, records, options, message):
    assert message.replace("FILE", write(records)) in error_message(load, records, **options)


def test_a_csv_file_is_a_table_of_fields(load, write):
    path = write(["question,answer", "2+2?"], "data.csv")
    message = error_message(load, [], path=path)
    assert "data.csv, line 2: 1 values, but the first line names 2 columns" in message


def turns(*messages, **fields):
    return {"messages": [{"role": role, "content": content} for role, content in messages]} | fields


UNLEARNED = {"messages": chat_of("a?", "b", "c?", "d", d={"weight": 0})}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "messages must be a list of messages, got []"),
        ({"messages": "Hi"}, "messages must be a list of messages, got 'Hi'"),
        ({"messages": ["Hi"]}, "message 1: expected role and content, got 'Hi'"),
        (turns(("bot", "a")), "message 1: expected a role of system, developer, user"),
        ({"messages": [{"content": "a"}]}, "message 1: no role; there are content"),
        ({"messages": [{"role": "user", "contnt": "a"}]}, "message 1: no content; there are role, contnt"),
        (turns(("human", "a")), "message 1: expected a role of system, developer, user, assistant, tool, got 'human'"),
        (turns(("user", ["a"])), "message 1: content must be a text or a list of texts, got a part 'a'"),
        (turns(("user", [{"type": "image_url"}])), "got a part {'type': 'image_url'}"),
        (turns(("user", 3)), "message 1: content must be a text or a list of texts, got int"),
        (turns(("user", None)), "message 1: content is null; give a text, or remove the message"),
        (turns(("assistant", " ")), "message 1: the answer is empty; remove the record"),
        (turns(("user", "a")), "line 1: no assistant's message"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "line 1: every answer has weight 0"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "message 1: weight must be 0 or 1, got 0.5"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}, "message 1: tool_calls must be a list of objects, got 'f()'"),
        (turns(("user", "a"), ("assistant", "b"), weight=0), "line 1: weight is a key of an answer, not of a record"),
        (UNLEARNED | {"loss_on": "last_answer"}, "the last message is not an assistant's"),
        (UNLEARNED | {"loss_on": "all"}, "weight 0 of a message needs data.loss_on answers or last_answer"),
        *(
            (turns(("user", "a"), ("assistant", "b"), tools=tools), "line 1: tools must be a list of JSON schemas, or its JSON, got")
            for tools in (3, "sum", [3], {"name": "sum"}, '{"name": "sum"}')
        ),
    ],
)  # fmt: skip
def test_a_mistake_in_a_chat_names_its_line(load, template, record, message):
    loss_on = {key: record[key] for key in ("loss_on",) if key in record}
    given = error_message(load, [record] * 2, chat_template=template, **loss_on)
    assert message in given
    assert loss_on or "data.jsonl, line 1" in given


SUM = {"type": "function", "function": {"name": "sum"}}


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [SUM]},
        {"tools": json.dumps([SUM])},
        {"tools": [json.dumps(SUM)]},
        {"functions": [SUM["function"]]},
        {"tools": None, "functions": json.dumps([SUM["function"]])},
    ],
)
def test_tools_reach_the_template_in_every_form(load, tmp_path, tools):
    (tmp_path / "t.jinja").write_text(
        "{% for t in tools %}{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.a }}{% endfor %}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"type": "function", "function": {"name": "sum", "arguments": '{"a": 7}'}}
    record = {"messages": chat_of("2+5?", "", **{"": {"tool_calls": [call]}})} | tools
    data = load([record] * 2, chat_template=str(tmp_path / "t.jinja"), test_fraction=0.5)
    assert examples_of(batch_of(data))[0] == ("sum <user>2+5?</><assistant>7</>", "7</>")


@pytest.mark.parametrize(
    ("source", "record", "message"),
    [
        (
            "{{ messages[0].role }}{{ messages[-1].content }}",
            {"messages": TURNS[1:3]},
            "line 1: the chat begins with the assistant, which",
        ),
        (
            "{{ raise_exception('no\nsystem') }}",
            {"prompt": "a", "answer": "b"},
            "data.jsonl, line 1: TEMPLATE refuses the chat: no system",
        ),
    ],
)
def test_a_chat_that_the_template_does_not_write_names_its_line(
    load, tmp_path, source, record, message
):
    (tmp_path / "t.jinja").write_text(source)
    options = {"chat_template": str(tmp_path / "t.jinja"), "as_chat": True}
    given = error_message(load, [record] * 2, **options)
    assert message.replace("TEMPLATE", options["chat_template"]) in given


def test_the_files_of_a_folder_are_read_by_name(load, write, tmp_path):
    (tmp_path / "parts").mkdir()
    records = answers(12)
    write(records[8:], "parts/b.jsonl")
    write(records[:8], "parts/a.jsonl")
    (tmp_path / "parts" / "README.md").write_text("no records")
    data = load([], path=str(tmp_path / "parts"), test_fraction=0.25)
    chex.assert_trees_all_equal(batch_of(data), batch_of(load(records, test_fraction=0.25)))
    assert data.name(8) == f"{tmp_path}/parts/b.jsonl, line 1"
    assert data.notes[-1] == "left out 1 files and folders: 1 x .md"
    (tmp_path / "empty").mkdir()
    assert "empty has no .jsonl or .parquet files" in error_message(
        load, [], path=str(tmp_path / "empty")
    )


def test_empty_and_missing_files_are_named(load, write):
    other, empty = write(answers(3), "other.jsonl"), write([], "empty.jsonl")
    for field, paths in (("test_path", (other, empty)), ("path", (empty, other))):
        message = error_message(load, [], path=paths[0], test_path=paths[1])
        assert message == f"data.{field}: {empty} holds no examples"
    message = error_message(load, answers(3), test_path=other, context=2, long="drop")
    assert message.startswith("data.path: no training example of ")
    assert "data.path: none.jsonl does not exist" in error_message(load, [], path="none.jsonl")


@pytest.fixture
def parquet(tmp_path):
    """``parquet(records)`` returns the path of a Parquet file."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(records):
        path = tmp_path / "data.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=7)
        return path

    return write


def test_parquet_files_hold_the_same_examples(load, parquet, template):
    for records in (
        answers(20),
        [{"messages": [{"role": "user", "content": f"{i}", "name": None}, {"role": "assistant", "content": "ja"}]} for i in range(20)],
    ):  # fmt: skip
        path = str(parquet(records))
        options = {"chat_template": template, "context": 64}
        data = load(records, **options)
        chex.assert_trees_all_equal(batch_of(load([], **options | {"path": path})), batch_of(data))


def test_bad_parquet_files_are_one_line(load, parquet):
    path = parquet(answers(20))
    assert f"{path}, row 1: no field x" in error_message(load, [], path=str(path), text="x")
    path.write_bytes(path.read_bytes()[:-30])
    assert f"data.path: cannot read {path}: " in error_message(load, [], path=str(path))
    path.write_bytes(b"")
    assert f"data.path: cannot read {path}: " in error_message(load, [], path=str(path))


@pytest.fixture
def tokenizer(tmp_path):
    """Folder of a tokenizer of bytes and a few words, with special tokens and a template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    numbers = {c: i for i, c in enumerate([*alphabet, "No", "Ġa", "ab"])}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(numbers, [("N", "o"), ("Ġ", "a"), ("a", "b")])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<user>", "<assistant>", "</>"])
    start = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 259)])
    made.post_processor = tokenizers.processors.Sequence(
        [tokenizers.processors.ByteLevel(trim_offsets=True), start]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ bos_token }}" + CHATML,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(tmp_path)  # fmt: skip


def test_examples_begin_and_end_with_the_special_tokens_of_the_tokenizer(load, tokenizer):
    records = [{"prompt": "Is", "answer": " a☃"}, {"prompt": "x", "answer": "y"}]
    data = load(records, tokenizer=tokenizer, test_fraction=0.5)
    batch = batch_of(data)
    n = int(batch["length"][0])
    tokens = batch["tokens"][0, : n + 1].tolist()
    assert (tokens[0], tokens[-1]) == (259, 260)
    # A token that begins with the answer's space belongs to the answer.
    assert tokens[1:4] == [load_tokenizer(ChatFile(tokenizer=tokenizer)).encode(t)[1] for t in ("I", "s", " a")]  # fmt: skip
    np.testing.assert_array_equal(batch["loss_mask"][0, :n], [0, 0, 1, 1, 1, 1, 1])
    assert data.tokens_per_byte() == 2  # one of the text, and its end
    texts = load([{"text": "é a"}] * 2, tokenizer=tokenizer, test_fraction=0.5)
    marked = batch_of(load([{"text": "<s>é a"}] * 2, tokenizer=tokenizer, test_fraction=0.5))
    np.testing.assert_array_equal(marked["tokens"], batch_of(texts)["tokens"])
    # Two bytes of é in two tokens, two bytes of the other token, and no byte of the end.
    assert texts.tokens_per_byte() == 4 / 4


TAGS = "{{ '<' + m.role + '>' }}"
GENERATION = "{% generation %}{{ m.content }}{% endgeneration %}</>"


@pytest.mark.parametrize(
    ("body", "learned", "note"),
    [
        (TAGS + "{{ m.content }}</>", ["No", "</>", "a", "</>"], "ends of answers: </>"),
        (TAGS + "{{ m.content }}", ["No", "<user>", "a", "<user>"], "ends of answers: <user>"),
        (TAGS + GENERATION, [], "because {% generation %} leaves out </>"),
        ("{{ m.content }}.", ["No.", "a."], "because it writes none"),
    ],
    ids=["own", "next message", "left out", "none"],
)
def test_the_end_of_an_answer_is_learned_or_reported(
    load, tokenizer, tmp_path, body, learned, note
):
    prompt = "{% if add_generation_prompt %}<assistant>{% endif %}" if TAGS in body else ""
    template = f"{{% for m in messages %}}{body}{{% endfor %}}{prompt}"
    (tmp_path / "t.jinja").write_text(template)
    chat = zip(("user", "assistant") * 2, ("ab", "No", "b", "a"), strict=True)
    record = {"messages": [{"role": role, "content": content} for role, content in chat]}
    options = {"chat_template": str(tmp_path / "t.jinja"), "tokenizer": tokenizer}
    options["test_fraction"] = 0.5
    data = load([record] * 2, **options)
    assert note in data.notes[-1]
    if learned:
        read = load_tokenizer(ChatFile(tokenizer=tokenizer))
        batch = batch_of(data)
        tokens = batch["tokens"][0, 1:][batch["loss_mask"][0]].tolist()
        assert tokens == [t for text in learned for t in read.encode_pieces([text])[0].ids]
    if learned[:1] == ["No"]:
        record["messages"][0]["content"] = f"a{learned[1]}b"
        first = f"chats ends it there: {tmp_path / 'data.jsonl'}, line 1"
        assert f"{learned[1]} in a message of 2 {first}" in load([record] * 2, **options).notes


def test_a_symbol_without_a_token_names_its_line(load, tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    message = error_message(load, [{"text": "ab"}, {"text": "a☃"}], tokenizer=str(tmp_path))
    assert "data.jsonl, line 2: " in message
    assert "tokenizer.json has no token for some of 'a☃'" in message
    records = [{"text": "ab"}] * 2 + [{"text": "\ud800"}]
    message = error_message(load, [json.dumps(r) for r in records], tokenizer=str(tmp_path))
    assert "data.jsonl, line 3: " in message
    assert "reads only UTF-8" in message


def test_a_models_folder_gives_the_tokens_that_transformers_gives(load, tokenizer):
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoTokenizer.from_pretrained(tokenizer)
    messages = [{"role": "user", "content": "ab é"}, {"role": "assistant", "content": "No a."}]
    batch = batch_of(load([{"messages": messages}] * 2, tokenizer=tokenizer, test_fraction=0.5))
    expected = peer.apply_chat_template(messages, return_dict=False)
    assert batch["tokens"][0, : batch["length"][0] + 1].tolist() == expected


def test_refuses_an_end_token_that_the_tokenizer_lacks(load, tokenizer, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    message = error_message(load, answers(9), tokenizer=tokenizer)
    assert "tokenizer.json has no token '<end>', which tokenizer_config.json gives" in message


def test_chats_of_a_tokenizer_without_a_template_are_one_line(load, tokenizer, tmp_path):
    (tmp_path / "tokenizer_config.json").unlink()
    message = error_message(load, answers(9), tokenizer=tokenizer, as_chat=True)
    assert f"data.tokenizer: {tmp_path} has no chat template, neither" in message


def test_runs_report_what_was_changed_in_the_data(write):
    records = [{"text": "ab" * n} for n in (3, 40, 5, 6)]
    data = ChatFile(path=write(records), context=32, batch_size=2, test_fraction=0.25)
    config = Config(data=data, model=MODEL, train=Train(steps=1))
    assert setup(config).notes[1:] == (
        "data: 1 of 3 training examples were cut into rows of 33 tokens",
    )
    private = Clipped(noise_multiplier=1.0, delta=1e-2, release_only=True)
    private = dataclasses.replace(config, grad=private)
    assert [note[:15] for note in setup(private).notes] == ["checkpoint.best"]


PRIVATE = Clipped(noise_multiplier=1.0, delta=1e-5)


def test_private_rows_hold_one_example_each(write):
    path = write([{"text": "ab" * 40}] * 20)
    data = ChatFile(path=path, context=32, batch_size=4)
    config = Config(data=data, model=MODEL, grad=PRIVATE)
    rows = build(config).dataset.train
    assert len(rows["start"]) == 18
    packed = dataclasses.replace(config, data=dataclasses.replace(data, packing=True))
    assert "data.packing: puts several examples into a row" in error_message(setup, packed)
    cut = dataclasses.replace(config, data=dataclasses.replace(data, long="cut"))
    assert "data.long: cut makes several rows of an example" in error_message(setup, cut)


def test_privacy_per_user_splits_by_user_and_allows_cut_rows(write):
    records = [{"text": chr(97 + i % 5) * 40, "user": i % 5} for i in range(20)]
    data = ChatFile(path=write(records), context=32, user="user", examples_per_user=2, long="cut")
    data = dataclasses.replace(data, test_fraction=0.2)
    dataset = build(Config(data=data, model=MODEL, grad=PRIVATE)).dataset
    batch = batch_of(dataset)
    assert len(dataset.users) == num_examples(dataset.train) == 32
    by_user = {(int(u), int(t[0])) for u, t in zip(dataset.users, batch["tokens"], strict=True)}
    assert len(by_user) == 4
    assert not {t for _, t in by_user} & set(batch_of(dataset, "test")["tokens"][:, 0].tolist())


@pytest.mark.parametrize("packing", [False, True])
def test_placeholders_have_the_shapes_of_the_data(write, packing):
    data = ChatFile(path=write(answers(40)), context=32, packing=packing, vocabulary=256)
    missing = data.placeholder().dataset
    real = data.load()
    for split in ("train", "test"):
        shapes = [
            {name: (a.shape[1:], a.dtype) for name, a in batch_of(d, split).items()}
            for d in (missing, real)
        ]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_reads_records_of_remote_storage(kind, tmp_path):
    fields = [{"prompt": f"p{i}", "answer": f"a{i}"} for i in range(3)]
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(fields), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in fields))
    memory = fsspec.filesystem("memory")
    memory.put(str(path), f"/chats/{path.name}")
    try:
        for url in (f"memory://chats/{path.name}", "memory://chats"):
            assert [record.fields for record in read(url, "data.path")] == fields
        message = error_message(lambda: [*read("memory://chats/none.jsonl", "data.path")])
        assert message == "data.path: memory://chats/none.jsonl does not exist"
    finally:
        memory.rm("/chats", recursive=True)
