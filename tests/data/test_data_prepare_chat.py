"""From files of conversations to a corpus of which only the answers are learned."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusing import refused

from thinwire.data import DataConfig, Tokenizer
from thinwire.data.chat import CHATML_TOKENS, Chat
from thinwire.errors import ConfigError, DataError

VOCAB = 400


def talk(number):
    said = (("system", "Be brief."), ("user", f"What is {number} and {number}?"),
            ("assistant", f"It is {2 * number}."), ("user", "Sure?"),
            ("assistant", "Yes."))  # fmt: skip
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def config_of(path, **changes):
    return DataConfig(source="chat", path=str(path), valid_fraction=0.2, **changes)


@pytest.fixture
def chats(tmp_path):
    folder = tmp_path / "chats"
    folder.mkdir()
    written(folder / "a.jsonl", [talk(i) for i in range(30)])
    return folder


def learned(corpus, side):
    ids, mask = getattr(corpus, side), getattr(corpus, f"{side}_learned")
    return corpus.tokenizer().decode(ids[mask == 1])


def test_answers_are_learned_and_the_rest_is_read(chats, made):
    corpus = made(config_of(chats))
    tokenizer = corpus.tokenizer()
    said = learned(corpus, "train") + learned(corpus, "valid")
    expected = [text for i in range(30) for text in (f"It is {2 * i}.", "Yes.")]
    assert sorted(filter(None, said.split("<|im_end|>"))) == sorted(expected)
    whole = tokenizer.decode(np.concatenate([corpus.train, corpus.valid]))
    assert whole.count("<|im_start|>user\n") == 60 and whole.count("<|endoftext|>") == 30
    assert corpus.documents == 30 and "30 conversations" in corpus.summary()
    assert "learned" in corpus.summary()
    assert corpus.notes[0] == "conversations by their form: 30 messages; chat template: chatml"
    sides = [
        set(tokenizer.decode(getattr(corpus, side)).split("<|endoftext|>")[:-1])
        for side in ("train", "valid")
    ]  # none is on both, and none is cut in two
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 30
    assert all(text.startswith("<|im_start|>system") for side in sides for text in side)
    ends = corpus.train == tokenizer.end_of_text
    assert ends.any() and not corpus.train_learned[ends].any()
    assert np.isin(tokenizer.id_of("<|im_end|>"), corpus.train[corpus.train_learned == 1])


def test_the_same_conversations_in_any_form_are_the_same_corpus(chats, made, tmp_path):
    first = made(config_of(chats))
    lines = (chats / "a.jsonl").read_bytes()
    folders = packed, listed, table, shared = [tmp_path / name for name in ("p", "l", "t", "s")]
    for folder in folders:
        folder.mkdir()
    (packed / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (listed / "a.json").write_text(json.dumps([talk(i) for i in range(30)], indent=1))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.Table.from_pylist([{"id": i, **talk(i)} for i in range(30)])
    parquet.write_table(rows, table / "a.parquet")
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    written(shared / "a.jsonl", [
        {"conversations": [{"from": names[m["role"]], "value": m["content"]}
                           for m in talk(i)["messages"]]}
        for i in range(30)
    ])  # fmt: skip
    for folder in folders:
        assert made(config_of(folder)).fingerprint == first.fingerprint, folder


def test_forms_are_said_and_conversations_without_an_answer_left_out(chats, made, tmp_path):
    asked = {"messages": [{"role": "user", "content": "Anybody there?"}]}
    empty = {"prompt": "Say nothing.", "completion": " "}
    mixed = [{"instruction": f"Say {i}.", "input": "", "output": f"{i}"} for i in range(4)]
    mixed += [{"prompt": f"Count {i}", "completion": f"{i} {i}"} for i in range(3)]
    written(chats / "b.jsonl", [asked, *mixed, empty])
    corpus = made(config_of(chats))
    assert corpus.documents == 37
    assert "30 messages, 4 Alpaca, 3 prompt and completion" in corpus.notes[0]
    assert corpus.notes[1].startswith("2 conversations without an answer")
    only = written(tmp_path / "only.jsonl", [asked, empty])
    refused(r"no conversation to learn from: 2 without an answer", made, config_of(Path(only)))


def test_the_template_of_a_tokenizer_is_used_and_kept(chats, made, tmp_path):
    given = Tokenizer.train(["What is 1 and 2? It is 3. Sure? Yes."], 290, ["<|eot|>"])
    given.save(tmp_path / "tokenizer.json")
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot|>{% endfor %}" \
             "{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip
    own = {"chat_template": source, "eos_token": "<|eot|>", "model_max_length": 512}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    config = config_of(chats, tokenizer=str(tmp_path / "tokenizer.json"))
    corpus = made(config)
    assert set(learned(corpus, "valid").split("<|eot|>")) >= {" Yes."}
    assert json.loads((corpus.folder / "tokenizer_config.json").read_text()) == own
    chat = Chat.open(corpus.folder)
    ids = chat.prompt_ids([{"role": "user", "content": "Sure?"}])
    assert chat.tokenizer.decode(ids) == "user: Sure?<|eot|>assistant: "
    assert given.id_of("<|eot|>") in chat.end_ids
    other = {**own, "chat_template": source.replace(": ", " - ")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(other))
    assert made(config).fingerprint != corpus.fingerprint
    chatml = made(replace(config, template="chatml"))
    assert chatml.vocab == given.vocab_size + 2
    assert chatml.tokenizer().id_of(CHATML_TOKENS[0]) == given.vocab_size


def test_a_tokenizer_without_room_for_the_template_is_refused(chats, made, tmp_path):
    Tokenizer.train(["some text"], 300).save(tmp_path / "t.json")
    size = Tokenizer.load(tmp_path / "t.json").vocab_size
    config = config_of(chats, tokenizer=str(tmp_path / "t.json"))
    refused(rf"<\|im_start\|>, <\|im_end\|>.* at least {size + 2}", made, config, size)
    with pytest.raises(DataError, match=r"no chat template is beside the tokenizer"):
        made(replace(config, template="tokenizer"))
    with pytest.raises(DataError, match=r"cannot read .*gone.jinja"):
        made(replace(config, template=str(tmp_path / "gone.jinja")))
    refused(r"at least 259 \(256 bytes and .*<\|im_end\|>\)", made, config_of(chats), 258)


@pytest.mark.parametrize(("line", "words"), [
    ('{"text": "x"}', r'b.jsonl, line 1 is not a conversation: it has the keys "text"'),
    ("[1]", r"b.jsonl, entry 1 is not a conversation: it is not an object"),
    ('{"messages": [{"role": "user"', r"b.jsonl, line 1, as JSON: Expecting"),
    ('{"messages": [{"role": "wizard", "content": "x"}]}', r"the role 'wizard'; known: "),
])  # fmt: skip
def test_records_that_cannot_be_used_are_named(line, words, chats, cache, made):
    (chats / "b.jsonl").write_text(line + "\n")
    refused(words, made, config_of(chats))
    assert not list(cache.glob("*/manifest.json"))


def test_files_that_cannot_be_used_are_named(tmp_path, made):
    (tmp_path / "a.txt").write_text("x")
    refused(r"no chat to read under .*only \.txt; supported: \.jsonl", made, config_of(tmp_path))
    refused(r"not a kind of file that can be read as chat", made, config_of(tmp_path / "a.txt"))
    written(tmp_path / "one.jsonl", [talk(1)])
    refused("is one conversation", made, config_of(tmp_path / "one.jsonl"))
    (tmp_path / "none.jsonl").write_text("")
    refused("there are no records", made, config_of(tmp_path / "none.jsonl"))


def test_a_text_corpus_keeps_the_template_of_its_tokenizer(text_folder, made, tmp_path):
    Tokenizer.train(["some text"], 300).save(tmp_path / "tokenizer.json")
    config = DataConfig(source="text", path=str(text_folder), valid_fraction=0.2,
                        tokenizer=str(tmp_path / "tokenizer.json"))  # fmt: skip
    before = made(config)
    assert before.template() is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    after = made(config)
    assert after.template().source == "{{ messages }}"
    assert after.fingerprint == before.fingerprint


@pytest.fixture
def offline(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    return datasets


def test_datasets_of_hugging_face(chats, made, tmp_path, offline):
    ours = made(config_of(chats))
    offline.disable_progress_bars()
    rows = offline.Dataset.from_list([talk(i) for i in range(30)])
    held = offline.Dataset.from_list([talk(i) for i in range(100, 104)])
    rows.save_to_disk(tmp_path / "saved")
    offline.DatasetDict({"train": rows, "test": held}).save_to_disk(tmp_path / "both")
    for name in ("parquet", "json"):
        (tmp_path / name).mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train-0.parquet")
    rows.to_json(tmp_path / "json" / "train.jsonl")
    for name in ("saved", "both", "parquet", "json"):
        config = DataConfig(source="hf", path=str(tmp_path / name), valid_fraction=0.2)
        corpus = made(config)
        assert corpus.fingerprint == ours.fingerprint, name
        assert "30 messages" in corpus.notes[0]
    config = replace(config, path=str(tmp_path / "both"), valid_split="test")
    assert learned(made(config), "valid").count("It is 20") == 4
    with pytest.raises(DataError, match=r'no split "dev", only train, test: set data\.split'):
        made(replace(config, split="dev"))
    with pytest.raises(ConfigError, match=r"use valid_split"):
        made(replace(config, valid_path="x"))
    with pytest.raises(DataError, match=r"cannot read .*dev.*check data\.path and data\.split"):
        made(replace(config, path=str(tmp_path / "json"), split="dev"))


def test_texts_of_hugging_face_and_what_changes_them(made, tmp_path, offline, text_of):
    folder = tmp_path / "texts"
    folder.mkdir()

    def corpus_of(first):
        rows = [{"prompt": "unused", "body": text_of(i)} for i in range(first, first + 20)]
        written(folder / "train.jsonl", rows)
        config = DataConfig(source="hf", path=str(folder), text_key="body", valid_fraction=0.2)
        return made(config)

    one, other = corpus_of(0), corpus_of(20)
    assert one.train_learned is None and one.fingerprint != other.fingerprint
    assert corpus_of(0).fingerprint == one.fingerprint
    with pytest.raises(DataError, match=r'needs an object with the key "text".*data\.text_key'):
        made(DataConfig(source="hf", path=str(folder)))


@pytest.mark.parametrize(("path", "words"), [
    ("", r'data\.source = "hf" needs data\.path'),
    ("./nowhere", r"is not a folder that holds a dataset"),
    ("nobody/nothing", r"cannot read nobody/nothing: .*reach"),
    ("nobody/nothing@main:part", r"cannot read nobody/nothing@main:part: .*reach"),
])  # fmt: skip
def test_datasets_that_cannot_be_had(path, words, made, offline):
    refused(words, made, DataConfig(source="hf", path=path))
