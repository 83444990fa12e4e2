import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusing import refused

from thinwire.data.documents import DocumentHash, ValidationSplit

documents = st.lists(st.text(min_size=1), min_size=1, max_size=30)


def sided(texts, given=()):
    return [(text, False) for text in texts] + [(text, True) for text in given]


def sides(texts, fraction, given=()):
    split = ValidationSplit(sided(texts, given), fraction)
    result: dict[str, list[str]] = {"train": [], "valid": []}
    for side, text, _ in split.passages(sided(texts, given)):
        result[side].append(text)
    return result


@given(documents, st.floats(0.001, 0.999))
@settings(deadline=None, max_examples=50)
def test_no_document_is_on_both_sides_and_none_is_lost(texts, fraction):
    if len(set(texts)) < 2:
        return
    found = sides(texts, fraction)
    assert found["train"] and found["valid"]
    assert not set(found["train"]) & set(found["valid"])
    assert sorted(found["train"] + found["valid"]) == sorted(texts)


@given(documents, st.floats(0.001, 0.999), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_the_order_of_documents_does_not_matter(texts, fraction, rng):
    if len(set(texts)) < 2:
        return
    shuffled = rng.sample(texts, len(texts))
    assert set(sides(texts, fraction)["valid"]) == set(sides(shuffled, fraction)["valid"])


def test_an_empty_side_gets_exactly_one_document():
    texts = [f"document {i}" for i in range(10)]
    places = {text: DocumentHash.of(text).place for text in texts}
    assert sides(texts, 1e-9)["valid"] == [min(texts, key=places.__getitem__)]
    assert sides(texts, 1 - 1e-9)["train"] == [max(texts, key=places.__getitem__)]


@given(st.text(min_size=2), st.floats(0.001, 0.999))
@settings(deadline=None, max_examples=50)
def test_one_document_is_cut_in_two(text, fraction):
    found = sides([text], fraction)
    (train,), (valid,) = found["train"], found["valid"]
    assert train and valid
    assert train + valid == text


def lines(count, name):
    return "".join(f"line {i} of {name}\n" for i in range(count))


@pytest.mark.parametrize("fraction", [0.02, 0.1])
def test_of_a_long_document_only_the_end_validates(fraction):
    """A whole file of two was a third of the corpus."""
    texts = [lines(20_000, "one"), lines(40_000, "two")]
    found = sides(texts, fraction)
    (valid,) = found["valid"]
    assert sorted(found["train"])[0] + valid in texts or sorted(found["train"])[1] + valid in texts
    assert valid.startswith("line ")
    share = len(valid) / sum(map(len, texts))
    assert fraction * 0.99 < share < fraction * 1.01


def test_a_long_document_among_many_does_not_become_the_validation():
    short = [lines(50, f"document {i}") for i in range(200)]
    long = lines(40_000, "long")
    found = sides([*short, long], 0.9)
    assert long in found["valid"], "it is within what was asked for"
    found = sides([*short, long], 0.05)
    valid = sum(map(len, found["valid"])) / sum(map(len, [*short, long]))
    assert valid < 0.1
    assert "".join(sorted(found["train"] + found["valid"])).count("of long") == 40_000


def test_documents_given_for_validation_and_their_copies_do_not_train():
    found = sides(["a", "b", "c", "b"], 0.5, given=["b", "d", "d"])
    assert found == {"train": ["a", "c"], "valid": ["b", "d", "d"]}


def test_empty_corpus_and_single_character():
    for others in ([], ["a"]):
        refused("the corpus is empty", sides, [], 0.5, others)
    refused("one character", sides, ["x"], 0.5)


def test_a_larger_corpus_keeps_each_document_on_its_side():
    texts = [f"document {i}" for i in range(2000)]
    few, many = sides(texts[:1000], 0.1), sides(texts, 0.1)
    assert set(few["valid"]) == set(many["valid"]) & set(texts[:1000])
