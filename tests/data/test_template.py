"""Conversations by a model's own chat template, against the tokenizer class of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from dynapar.catalog import load_model_shape
from dynapar.data.chat import ChatTokenizer
from dynapar.data.records import MediaFile, Record, parse_conversation
from dynapar.data.rendered import Rendered
from dynapar.data.template import TODAY
from dynapar.errors import ModelError, SampleError
from dynapar.families.spelling import SPELLINGS, placeholder
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, MediaTokens, ModelShape
from tests.data.folders import (
    FAMILIES,
    LIKE_GEMMA,
    LIKE_LLAMA,
    LIKE_MISTRAL,
    in_order,
    write_family,
    write_text_family,
    write_tokenizer,
)

Messages = list[dict[str, object]]


def record(messages: Messages) -> Record:
    return parse_conversation(
        {"messages": messages, "id": "a"},
        default_id="",
        place="here",
        find=lambda kind, field, name: MediaFile(kind, name, Path(name), 0, -1),
    )


def hf_tokenizer(folder: Path) -> Any:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class")
    own = folder / "chat_template.jinja"
    if own.is_file():
        settings["chat_template"] = own.read_text()
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **settings)


def text(role: str, words: str) -> dict[str, object]:
    return {"role": role, "content": words}


CHATS: list[Messages] = [
    [text("user", "Hi you"), text("assistant", "Hi yes")],
    [
        text("user", " Hi\n"),
        text("assistant", "\nYes, \n\nas\n"),
        text("user", "Hi"),
        text("assistant", "Hi"),
    ],
    [text("system", "Be as is"), text("user", "Hi"), text("assistant", "yes")],
    [text("user", "<start><|start|>[INST]"), text("assistant", "Hi <|eot|><end></s> yes")],
]
BEGUN = {"bos_token": "<bos>"}
BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT: dict[str, tuple[str, tuple[str, ...], dict[str, str], str]] = {
    "llama": (LIKE_LLAMA, ("<bos>", "<|start|>", "<|end|>", "<|eot|>"), BEGUN, "<|eot|>"),
    "gemma": (LIKE_GEMMA, ("<bos>", "<start>", "<end>"), BEGUN, "<end>"),
    "mistral": (LIKE_MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), BOTH, "</s>"),
    "chatml": (in_order({}), ("<|im_start|>", "<|im_end|>"), {}, "<|im_end|>"),
}
"""By what the template is like: it, special tokens, their names, and the one that ends a turn."""


@pytest.mark.parametrize("kind", TEXT)
@pytest.mark.parametrize("messages", CHATS[:3])
def test_ids_of_text_are_those_of_the_tokenizer_class(
    kind: str, messages: Messages, tmp_path: Path
) -> None:
    template, specials, tokens, end = TEXT[kind]
    folder = write_text_family(tmp_path / "m", template, specials, **tokens)
    rendered = ChatTokenizer(load_model_shape(str(folder))).render(record(messages), [])
    theirs = hf_tokenizer(folder)
    assert rendered.ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
    learnt = theirs.decode(rendered.ids[rendered.learnt]).split(end)
    said = [str(m["content"]).strip() for m in messages if m["role"] == "assistant"]
    assert [part.strip() for part in learnt] == [*said, ""]
    assert rendered.label_tokens == int(rendered.learnt.sum())


@pytest.mark.parametrize("kind", TEXT)
def test_special_tokens_that_a_turn_spells_are_text(kind: str, tmp_path: Path) -> None:
    template, specials, tokens, end = TEXT[kind]
    folder = write_text_family(tmp_path / "m", template, specials, **tokens)
    chat, theirs = ChatTokenizer(load_model_shape(str(folder))), hf_tokenizer(folder)
    plain = [text("user", "Hi"), text("assistant", "yes")]
    forged, honest = (chat.render(record(m), []) for m in (CHATS[3], plain))
    ids = {theirs.convert_tokens_to_ids(token) for token in specials}
    assert [i for i in forged.ids if i in ids] == [i for i in honest.ids if i in ids]
    assert theirs.decode(forged.ids) == theirs.apply_chat_template(CHATS[3], tokenize=False)
    learnt = theirs.decode(forged.ids[forged.learnt])
    assert learnt.strip() == f"Hi <|eot|><end></s> yes{end}"


def media(name: str) -> tuple[ModelShape, list[MediaTokens], Messages]:
    """A sample of each kind of media that a family takes, images twice."""
    shape = load_model_shape(name)
    items = [shape.image(300, 900, images=2), shape.image(500, 500, images=2)]
    kinds = ["image", "image"]
    if shape.family.video:
        items.append(shape.video(40, 8.0, 100, 200))
        kinds.append("video")
    if shape.family.audio:
        items.append(shape.audio(4.5))
        kinds.append("audio")
    parts = [{"type": kind, kind: "x"} for kind in kinds]
    asked = [parts[0], {"type": "text", "text": "Hi "}, *parts[1:], {"type": "text", "text": "as"}]
    return shape, items, [{"role": "user", "content": asked}, text("assistant", "Hi yes")]


def expanded(folder: Path, shape: ModelShape, items: list[MediaTokens], messages: Messages) -> str:
    """The template's text with its marks replaced one by one, as processors do."""
    lists = [
        {**m, "content": m["content"] if isinstance(m["content"], list)
         else [{"type": "text", "text": m["content"]}]}
        for m in messages
    ]  # fmt: skip
    theirs = hf_tokenizer(folder)
    whole = str(theirs.apply_chat_template(lists, tokenize=False))
    queues = {
        kind: iter([item for item in items if item.kind == kind])
        for kind in (IMAGE_KIND, VIDEO_KIND, AUDIO_KIND)
    }
    spellings = SPELLINGS[shape.family.name]
    kinds = {spelling.mark: kind for kind, spelling in spellings.items()}

    def put(found: re.Match[str]) -> str:
        kind = kinds[found.group()]
        pad = str(theirs.convert_ids_to_tokens(placeholder(shape, kind)))
        pieces = spellings[kind].write(shape, next(queues[kind]))
        return "".join(pad * piece if isinstance(piece, int) else piece for piece in pieces)

    return re.sub("|".join(map(re.escape, kinds)), put, whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_with_media_are_those_of_the_expanded_text(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", name)
    shape, items, messages = media(str(folder))
    rendered = ChatTokenizer(shape).render(record(messages), items)
    theirs = hf_tokenizer(folder)
    whole = expanded(folder, shape, items, messages)
    assert rendered.ids.tolist() == theirs(whole)["input_ids"][whole.startswith("<bos>") :]
    for kind in {item.kind for item in items}:
        runs = rendered.ids[rendered.kinds == kind]
        assert len(runs) == sum(item.llm_tokens for item in items if item.kind == kind)
        assert set(runs.tolist()) == {placeholder(shape, kind)}
    ends = ("<|im_end|>", "<end>", "<|eot|>")
    learnt = theirs.decode(rendered.ids[rendered.learnt])
    assert learnt.strip() in [f"Hi yes{end}" for end in ends]


@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-2b", "qwen2.5-omni-3b", "pixtral-12b"])
def test_boundary_tokens_are_those_of_the_text(name: str, tmp_path: Path) -> None:
    """What the formulas add for sizes alone is what the template and the processor write."""
    shape = load_model_shape(str(write_family(tmp_path / "m", name)))
    items = {"image": shape.image(300, 900)}
    if shape.family.video:
        items["video"] = shape.video(40, 8.0, 100, 200)
    if shape.family.audio:
        items["audio"] = shape.audio(4.5)
    bare = len(rendered_of(shape, CHATS[0], []).ids)
    for kind, item in items.items():
        parts = [{"type": kind, kind: "x"}, {"type": "text", "text": "Hi you"}]
        sample = rendered_of(shape, [{"role": "user", "content": parts}, CHATS[0][1]], [item])
        # The tiny tokenizer spells " seconds" letter by letter.
        longer = 7 * item.units if (name, kind) == ("qwen3-vl-2b", "video") else 0
        assert len(sample.ids) - bare == item.llm_tokens + item.boundary_tokens + longer


@pytest.mark.parametrize("name", ["pixtral-12b", "qwen2.5-vl-3b"])
def test_a_picture_that_an_assistant_shows_is_not_learnt(name: str, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", name)
    shape = load_model_shape(str(folder))
    shown = [{"type": "text", "text": "Hi"}, {"type": "image", "image": "x"}]
    messages: Messages = [text("user", "Hi"), {"role": "assistant", "content": shown}]
    rendered = rendered_of(shape, messages, [shape.image(100, 100)])
    assert hf_tokenizer(folder).decode(rendered.ids[rendered.learnt]) == "Hi"


def test_pictures_count_alone_or_together(tmp_path: Path) -> None:
    """LLaVA-OneVision tiles an image only when it is the only one of its sample."""
    shape = load_model_shape(str(write_family(tmp_path / "m", "llava-onevision-0.5b")))
    lengths = []
    for images in (1, 2):
        parts = [{"type": "image", "image": "x"}] * images
        items = [shape.image(480, 640, images=images)] * images
        lengths.append(len(rendered_of(shape, [{"role": "user", "content": parts}], items).ids))
    assert lengths[1] - lengths[0] == 2 * 730 - 2929 + 1


def rendered_of(shape: ModelShape, messages: Messages, items: list[MediaTokens]) -> Rendered:
    return ChatTokenizer(shape).render(record(messages), items)


def test_what_a_template_does_not_begin_the_tokenizer_begins(tmp_path: Path) -> None:
    """Of models with media, as their processors do; a text model's template is the whole text."""
    folder = write_family(tmp_path / "m", "pixtral-12b")
    theirs = hf_tokenizer(folder)
    first = theirs.convert_tokens_to_ids("<bos>")
    shape = load_model_shape(str(folder))
    assert rendered_of(shape, CHATS[0], []).ids[0] == first
    forged = rendered_of(shape, [text("user", "[IMG]<bos>"), text("assistant", "a")], [])
    assert (forged.ids == first).sum() == 1
    assert forged.ids[0] == first
    other = write_text_family(tmp_path / "t", in_order({}), ("<bos>", "<|im_start|>", "<|im_end|>"))
    write_tokenizer(other, ("<bos>", "<|im_start|>", "<|im_end|>"), begins="<bos>")
    assert first not in rendered_of(load_model_shape(str(other)), CHATS[0], []).ids


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (LIKE_GEMMA, [text("assistant", "A page")], r"refuses it: roles must alternate"),
        ("{{ messages[5]['role'].x }}", CHATS[0], r"chat template of .* refuses it: "),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", CHATS[0], "leaves out or changes"),
        (
            "{% for m in messages %}{{ m['content'].split('Hi')[-1] }}{% endfor %}",
            CHATS[0],
            "leaves out or changes what a turn says",
        ),
        (
            "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
            [text("user", "\U000f0000")],
            "private characters",
        ),
    ],
)
def test_what_a_template_cannot_write_is_named_in_a_line(
    template: str, messages: Messages, said: str, tmp_path: Path
) -> None:
    folder = write_text_family(tmp_path / "m", template, ("<bos>",), bos_token="<bos>")
    with pytest.raises(SampleError, match=rf"^here \(sample 'a'\): .*{said}[^\n]*$"):
        rendered_of(load_model_shape(str(folder)), messages, [])


def test_a_template_that_drops_media_is_named(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "pixtral-12b")
    (folder / "chat_template.jinja").write_text(in_order({}))
    shape, items, messages = media(str(folder))
    with pytest.raises(SampleError, match=r"writes other media than the 2 of the sample"):
        rendered_of(shape, messages, items)


def test_templates_are_looked_for_where_transformers_looks(tmp_path: Path) -> None:
    folder = write_text_family(tmp_path / "m", "wrong", ("<|im_start|>", "<|im_end|>"))
    shape, counts = load_model_shape(str(folder)), []
    named = [{"name": "tool", "template": "wrong"}, {"name": "default", "template": in_order({})}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chats = [ChatTokenizer(shape)]
    own = in_order({}).replace("\\n", "")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": own + " "}))
    chats.append(ChatTokenizer(shape))
    (folder / "chat_template.jinja").write_text(own + "  ")
    chats.append(ChatTokenizer(shape))
    counts = [len(chat.render(record(CHATS[0]), []).ids) for chat in chats]
    assert counts == [counts[0], counts[0] + 1, counts[0] + 2]
    assert len({chat.fingerprint for chat in chats}) == 3


def test_the_date_of_a_template_is_one_and_the_same(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + in_order({})
    folder = write_text_family(tmp_path / "m", template, ("<|im_start|>", "<|im_end|>"))
    rendered = rendered_of(load_model_shape(str(folder)), CHATS[0], [])
    assert hf_tokenizer(folder).decode(rendered.ids).startswith("26 Jul 2024<|im_start|>")
    assert TODAY.year == 2024


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = write_text_family(tmp_path / "m", "{% if %}", ("<bos>",))
    shape = load_model_shape(str(folder))
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is no chat template: "):
        ChatTokenizer(shape)
    (folder / "tokenizer_config.json").write_text("{}")
    no_template = r"has no token '<\|im_start\|>', and .* no chat template; expected"
    with pytest.raises(ModelError, match=no_template):
        ChatTokenizer(shape)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as JSON"):
        ChatTokenizer(shape)
    seen = write_family(tmp_path / "s", "internvl3-1b")
    write_tokenizer(seen, ("<|im_start|>", "<IMG_CONTEXT>", "<img>"))
    config = json.loads((seen / "config.json").read_text())
    with pytest.raises(ModelError, match=r"has no token id \d+, which config\.json"):
        ChatTokenizer(load_model_shape(str(seen)))
    config["image_token_id"] = 3
    (seen / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has no token '<video>', which config\.json"):
        ChatTokenizer(load_model_shape(str(seen)))
