r"""Turn a conversation into token ids, and say which of them are learnt.

The format is the model's own: that of the chat template in its folder (`dynapar.data.template`),
with media as its processor spells them (`dynapar.families.spelling`). A folder without a template
gets the one that Qwen2.5-VL was trained with (ChatML): `<|im_start|>role\n...<|im_end|>\n` for each
turn, media as `<|vision_start|><|image_pad|>...<|vision_end|>`; there a conversation whose first
turn is not the system's gets the family's default system turn, unless it is nothing but assistant
turns: those are documents, and taken as they are.

Learnt are the words of assistant turns, without their media, and the special token that ends them.

Text is text: special tokens spelled out in it are encoded as ordinary characters, so a sample
cannot forge a turn or a placeholder.

The index counts with the same function that the loader renders with, so planned tokens are the
materialised ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer

from dynapar.data.records import Record, Turn
from dynapar.data.rendered import IntArray, Pieces, Rendered
from dynapar.data.template import read_template
from dynapar.data.templated import Templated
from dynapar.errors import ModelError
from dynapar.shapes import IMAGE_KIND, MediaTokens, ModelShape


class Format(Protocol):
    """A way to write conversations."""

    def render(self, record: Record, media: Sequence[MediaTokens]) -> Rendered:
        """See `ChatTokenizer.render`."""


class ChatTokenizer:
    """The tokenizer of a model folder, and the format around it; thread-safe."""

    def __init__(self, shape: ModelShape) -> None:
        """Load `tokenizer.json` of the shape's folder, and its chat template.

        Raises:
            ModelError: The shape has no folder, a file is missing or broken, or its special
                tokens are not those of config.json.
        """
        if shape.folder is None:
            raise ModelError(
                f"model {shape.name!r} is a preset without a tokenizer; expected a model folder to "
                "count the tokens of text. Point --model at one."
            )
        path = Path(shape.folder) / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{path} does not exist; expected the model's tokenizer there")
        data = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except ValueError as error:
            raise ModelError(f"{path} is no tokenizer: {error}") from None
        digest = hashlib.sha256(data)
        template = read_template(Path(shape.folder), listed=shape.has_media)
        self._format: Format
        if template is None:
            self._format = _ChatMl(shape, tokenizer, path)
        else:
            digest.update(template.source.encode())
            self._format = Templated(shape, tokenizer, template, path)
        self.fingerprint = digest.hexdigest()[:16]
        """Of tokenizer.json and the chat template."""

    def render(self, record: Record, media: Sequence[MediaTokens]) -> Rendered:
        """Render a record.

        Args:
            record: The conversation.
            media: What each media item of the record becomes.

        Raises:
            SampleError: The model's chat template refuses it.
        """
        return self._format.render(record, media)


class _ChatMl:
    """The format of Qwen2.5-VL."""

    def __init__(self, shape: ModelShape, tokenizer: Tokenizer, path: Path) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._default_system = shape.family.default_system
        self._start, self._end = self._id("<|im_start|>", path), self._id("<|im_end|>", path)
        self._newline = self._encode("\n")[0].tolist()
        media = (
            ("<|image_pad|>", shape.tokens.image),
            ("<|video_pad|>", shape.tokens.video),
            ("<|vision_start|>", shape.tokens.vision_start),
            ("<|vision_end|>", shape.tokens.vision_end),
        )
        for name, wanted in media if shape.has_media else ():
            if self._id(name, path) != wanted:
                raise ModelError(
                    f"{path} has {name} as {self._id(name, path)}, config.json as {wanted}; "
                    "expected equal ids. Take both files from one model."
                )
        self._tokens = shape.tokens

    def render(self, record: Record, media: Sequence[MediaTokens]) -> Rendered:
        pieces = Pieces()
        turns = record.turns
        documents = all(turn.role == "assistant" for turn in turns)
        if self._default_system and turns[0].role != "system" and not documents:
            turns = (Turn("system", (self._default_system,)), *turns)
        for turn in turns:
            learnt = turn.role == "assistant"
            pieces.add([self._start], 0, False)
            head, text = f"{turn.role}\n", f"{turn.role}\n"
            for part in turn.parts:
                if isinstance(part, str):
                    text += part
                    continue
                self._add_text(pieces, text, len(head), learnt)
                head = text = ""
                self._add_media(pieces, record.media[part].kind, media[part].llm_tokens)
            self._add_text(pieces, text, len(head), learnt)
            pieces.add([self._end], 0, learnt)
            pieces.add(self._newline, 0, False)
        return pieces.joined()

    def _add_text(self, pieces: Pieces, text: str, head: int, learnt: bool) -> None:
        """Tokenise `text`, whose first `head` characters belong to the format, not to the turn."""
        if not text:
            return
        ids, starts = self._encode(text)
        pieces.add(ids, 0, (starts >= head) & learnt)

    def _add_media(self, pieces: Pieces, kind: int, tokens: int) -> None:
        token = self._tokens.image if kind == IMAGE_KIND else self._tokens.video
        pieces.add([self._tokens.vision_start], 0, False)
        pieces.add(np.full(tokens, token, np.int64), kind, False)
        pieces.add([self._tokens.vision_end], 0, False)

    def _encode(self, text: str) -> tuple[IntArray, IntArray]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        return np.array(encoding.ids, np.int64), starts

    def _id(self, token: str, path: Path) -> int:
        if (found := self._tokenizer.token_to_id(token)) is None:
            raise ModelError(
                f"{path} has no token {token!r}, and {path.parent} no chat template; expected the "
                "ChatML special tokens, or a template (chat_template.jinja, chat_template.json, or "
                "chat_template in tokenizer_config.json). Take the model's own files."
            )
        return int(found)
