"""A model without media is indexed, loaded and verified like any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from dynapar.catalog import load_model_shape
from dynapar.data.index import build_index, read_index
from dynapar.data.materialize import Materializer
from dynapar.data.sources import open_source
from dynapar.errors import SampleError
from dynapar.verify import verify_command
from tests.data.small import noise, said, write_lines
from tests.train.tiny import write_config

ASKED = {"role": "user", "content": "say it"}
CLASSES = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def write_text_model(folder: Path, family: str) -> Path:
    """Its tokens are bytes and the two marks of ChatML, none for media."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_text_run(folder: Path, family: str) -> Path:
    model = write_text_model(folder / "model", family)
    (folder / "data").mkdir()
    samples = [
        {"id": f"s{n}", "messages": [ASKED, said("red " * n)]} for n in (1, 2, 5, 12, 30, 60)
    ]
    source = write_lines(folder / "data" / "data.jsonl", samples)
    build_index(open_source(str(source)), load_model_shape(str(model)), folder / "index.parquet")
    verify = {"steps": 1, "plans": 1, "ranks": 2}
    return write_config(folder, batch={"samples": 6}, verify=verify)


def test_samples_have_one_row_of_positions(tmp_path: Path) -> None:
    write_text_run(tmp_path, "qwen2")
    index = read_index(tmp_path / "index.parquet")
    source = open_source(str(tmp_path / "data" / "data.jsonl"))
    materializer = Materializer(load_model_shape(str(tmp_path / "model")), source, index)
    for row in range(len(index.table)):
        length = int(index.table.llm_tokens[row])
        sample = materializer.load(row, units=frozenset())
        stub = materializer.stub(row, units=frozenset(), reason="why")
        assert not sample.stub
        assert len(sample.input_ids) == length
        for loaded in (sample, stub):
            assert torch.equal(loaded.positions, torch.arange(length)[None])


@pytest.mark.parametrize("family", list(CLASSES))
def test_layouts_leave_the_gradient_alone(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verify_command(write_text_run(tmp_path, family), dtype=None, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["batches"][0]["samples"] == {"text": 6}
    assert "2" in {degree for plan in found["plans"] for degree in plan["degrees"]}


def test_a_sample_with_media_is_named(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model", "qwen2")
    noise(16, 16).save(tmp_path / "a.png")
    asked = {"role": "user", "content": "<image>"}
    sample = {"id": "odd", "messages": [asked, said("it")], "images": ["a.png"]}
    source = open_source(str(write_lines(tmp_path / "a.jsonl", [sample])))
    with pytest.raises(SampleError, match=r"a\.jsonl line 1 \(sample 'odd'\): .*images"):
        build_index(source, load_model_shape(str(model)), tmp_path / "i.parquet")
