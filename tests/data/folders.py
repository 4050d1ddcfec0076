"""Model folders of many families: released shapes, tiny tokenizers, chat templates of our own.

The templates do what released ones do: begin with a token, strip what is said, rename roles, move a
system turn, put pictures first, refuse turns that do not alternate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from dynapar.families.presets import RELEASED

LIKE_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\n\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<|image|>' }}"
    "{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|eot|>' }}{% endfor %}"
)
LIKE_GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = (messages[0]['content'] if messages[0]['content'] is string else "
    "messages[0]['content'][0]['text']) + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
    "+ (first if loop.first else '') }}{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '<end>\n' }}{% endfor %}"
)
LIKE_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}{% else %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
PICTURES_FIRST = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' }}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}"
    "{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'video') %}"
    "{{ '<video>\n' }}{% endfor %}{% for c in m['content'] | selectattr('type', 'equalto', 'text')"
    " %}{{ '\n' + c['text'] }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def in_order(marks: dict[str, str]) -> str:
    """A template of ChatML that writes parts as they come."""
    chosen = "".join(
        f"{{% elif c['type'] == '{kind}' %}}{{{{ '{mark}' }}}}" for kind, mark in marks.items()
    )
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'text' %}{{ c['text'] }}"
        + chosen
        + "{% endif %}{% endfor %}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
    )


CHATML = ("<|im_start|>", "<|im_end|>")
IDEFICS = ("<fake_token_around_image>", "<global-img>")
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "qwen2.5-vl-3b": (
        ("<|image_pad|>", "<|video_pad|>"),
        (*CHATML, "<|vision_start|>", "<|vision_end|>"),
        in_order(
            {
                "image": "<|vision_start|><|image_pad|><|vision_end|>",
                "video": "<|vision_start|><|video_pad|><|vision_end|>",
            }
        ),
    ),
    "qwen3-vl-2b": (
        ("<|image_pad|>", "<|video_pad|>"),
        (*CHATML, "<|vision_start|>", "<|vision_end|>"),
        in_order(
            {
                "image": "<|vision_start|><|image_pad|><|vision_end|>",
                "video": "<|vision_start|><|video_pad|><|vision_end|>",
            }
        ),
    ),
    "qwen2.5-omni-3b": (
        ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>"),
        (*CHATML, "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>"),
        in_order(
            {
                "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
                "video": "<|vision_bos|><|VIDEO|><|vision_eos|>",
                "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
            }
        ),
    ),
    "internvl3-1b": (
        ("<IMG_CONTEXT>",),
        (*CHATML, "<img>", "</img>", "<video>"),
        in_order({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
    ),
    "llava-onevision-0.5b": (("<image>", "<video>"), CHATML, PICTURES_FIRST),
    "gemma-3-4b": (
        ("<soft>",),
        ("<bos>", "<start>", "<end>", "<start_of_image>", "<end_of_image>"),
        LIKE_GEMMA,
    ),
    "llama-3.2-11b-vision": (
        ("<|image|>",),
        ("<bos>", "<|start|>", "<|end|>", "<|eot|>"),
        LIKE_LLAMA,
    ),
    "llama-4-scout": (
        ("<|patch|>",),
        (
            *("<bos>", "<|start|>", "<|end|>", "<|eot|>", "<|image|>", "<|image_start|>"),
            *("<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        LIKE_LLAMA,
    ),
    "pixtral-12b": (
        ("[IMG]",),
        ("<bos>", *CHATML, "[IMG_BREAK]", "[IMG_END]"),
        in_order({"image": "[IMG]"}),
    ),
    "mistral-small-3.1-24b": (
        ("[IMG]",),
        ("<bos>", *CHATML, "[IMG_BREAK]", "[IMG_END]"),
        in_order({"image": "[IMG]"}),
    ),
    "idefics3-8b": (("<image>",), (*CHATML, *IDEFICS), in_order({"image": "<image>"})),
    "smolvlm-256m": (
        ("<image>",),
        (*CHATML, *IDEFICS, "<video>"),
        in_order({"image": "<image>", "video": "<video>"}),
    ),
}
"""By preset: tokens that embeddings take the place of, in the order image, video, audio; other
special tokens; the chat template."""


IMAGE_FILES: dict[str, dict[str, object]] = {
    "pixtral-12b": {"image_processor_type": "PixtralImageProcessor"},
    "qwen3-vl-2b": {"patch_size": 16},
}
"""What released processor files say beside what presets need."""


def write_tokenizer(folder: Path, specials: Sequence[str], *, begins: str = "") -> Tokenizer:
    """Bytes and a few words; `begins` stands before every text that is encoded with specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {byte: number for number, byte in enumerate(alphabet)}
    merges = [("\u010a", "\u010a"), ("H", "i"), ("\u0120", "y"), ("\u0120y", "e"), ("a", "s")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begins} $A", special_tokens=[(begins, tokenizer.token_to_id(begins))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_family(folder: Path, name: str) -> Path:
    """The folder of a preset."""
    folder.mkdir(parents=True, exist_ok=True)
    pads, specials, template = FAMILIES[name]
    begins = "<bos>" if "<bos>" in specials else ""
    tokenizer = write_tokenizer(folder, (*specials, *pads), begins=begins)
    preset = RELEASED[name]
    config = dict(preset.config)
    ids = {
        f"{kind}_token_{what}": tokenizer.token_to_id(pad)
        for kind, pad in zip(("image", "video", "audio"), pads, strict=False)
        for what in ("id", "index")
    }
    if name.startswith(("qwen2.5-vl", "qwen3-vl")):
        for kind in ("start", "end"):
            ids[f"vision_{kind}_token_id"] = tokenizer.token_to_id(f"<|vision_{kind}|>")
    if "thinker_config" in config:
        config["thinker_config"] = {**config["thinker_config"], **ids}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps({**config, **ids}, default=dict))
    image = {**preset.image, **IMAGE_FILES.get(name, {})}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    if preset.video is not None:
        video = {**preset.video, **IMAGE_FILES.get(name, {})}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    if name.startswith("mistral"):
        merged = {"patch_size": 14, "spatial_merge_size": 2}
        (folder / "processor_config.json").write_text(json.dumps(merged))
    (folder / "chat_template.jinja").write_text(template)
    own = {"tokenizer_class": "PreTrainedTokenizerFast"}
    own |= {"bos_token": "<bos>"} if begins else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


def write_text_family(folder: Path, template: str, specials: Sequence[str], **tokens: str) -> Path:
    """A Llama with a chat template in tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, specials)
    config = RELEASED["llama-3.2-1b"].config
    (folder / "config.json").write_text(json.dumps(dict(config)))
    settings = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
