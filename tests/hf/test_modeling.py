"""The registered class as a user of transformers meets it."""

import pytest
import torch
from moving import exported
from transformers import AutoModelForCausalLM, pipeline

from settings_values import narrow
from thinwire.codec import PluginError
from thinwire.hf.cuts import settings_of
from thinwire.settings import Settings


@pytest.fixture
def folder(trained, tmp_path):
    place = trained(**narrow("projected", anchor="per-stage"))
    exported(place, tmp_path / "exported", verify=False)
    return tmp_path / "exported"


def test_it_says_losses_batches_and_what_it_cannot_do(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[7, 3, 11, 250, 9], [31, 8, 77, 5, 2]])
    output = model(ids, labels=ids)
    shifted = output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    expected = torch.nn.functional.cross_entropy(*shifted)
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    output.loss.backward()
    assert model.get_input_embeddings().weight.grad is not None
    both = model.generate(ids, do_sample=False, max_new_tokens=4)
    for row in range(2):
        alone = model.generate(ids[row : row + 1], do_sample=False, max_new_tokens=4)
        assert torch.equal(alone[0], both[row])
    behind = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = model(ids, attention_mask=behind).logits
    assert torch.equal(padded[1, :3], model(ids).logits[1, :3])
    with torch.no_grad():  # a past may grow by several tokens
        first = model(ids[:, :2], use_cache=True)
        rest = model(ids[:, 2:], past_key_values=first.past_key_values)
        parts = torch.cat([first.logits, rest.logits], 1)
        assert (parts - model(ids).logits).abs().max() < 1e-5
    with pytest.raises(ValueError, match="no padding before"):
        model(ids, attention_mask=behind.flip(1))
    with pytest.raises(ValueError, match="context of 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_a_pipeline_writes_text_and_a_saved_copy_is_the_same(folder, tmp_path):
    write = pipeline("text-generation", model=str(folder))
    (first,) = write("stage link", max_new_tokens=4, do_sample=False)
    assert first["generated_text"].startswith("stage link")
    write.model.save_pretrained(tmp_path / "copy")
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    for name, tensor in write.model.state_dict().items():
        assert torch.equal(tensor, copy.state_dict()[name])
    ids = torch.tensor([[7, 3, 11]])
    assert torch.equal(copy(ids).logits, write.model(ids).logits)


def test_a_config_cannot_name_code_to_run(tmp_path, monkeypatch):
    """Plugins of codecs are modules: who opens a folder of another's must not import them."""
    (tmp_path / "named_in_a_config.py").write_text("raise RuntimeError('it ran')")
    monkeypatch.syspath_prepend(tmp_path)
    plain = {"codec": {"plugins": ["named_in_a_config"]}, "model": {"preset": "tiny"}}
    with pytest.raises(PluginError, match="it ran"):
        Settings.from_plain(plain)
    assert settings_of(plain).codec.plugins == []
