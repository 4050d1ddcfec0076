r"""Turn a conversation into token ids, and say which of them are learnt.

The format is the one that Qwen2.5-VL was trained with (ChatML): `<|im_start|>role\n...<|im_end|>\n`
for each turn, media as `<|vision_start|><|image_pad|>...<|vision_end|>`. Learnt are the content and
the `<|im_end|>` of assistant turns, without their media. A conversation whose first turn is not the
system's gets the family's default system turn, as the released chat template does, unless it is
nothing but assistant turns: those are documents, and taken as they are. A `chat_template` in the
model folder's tokenizer_config.json is not read.

Text is text: special tokens spelled out in it are encoded as ordinary characters, so a sample
cannot forge a turn or a placeholder.

The index counts with the same function that the loader renders with, so planned tokens are the
materialised ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dynapar.data.records import Record, Turn
from dynapar.errors import ModelError
from dynapar.shapes import IMAGE_KIND, ModelShape

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Rendered(NamedTuple):
    """A sample of L tokens."""

    ids: IntArray
    """(L,) token ids."""
    kinds: IntArray
    """(L,) 0 text, 1 placeholder of an image, 2 of a video."""
    learnt: BoolArray
    """(L,) whether the token itself is to be predicted."""

    @property
    def label_tokens(self) -> int:
        """Targets: learnt tokens that are not at position 0."""
        return int(self.learnt[1:].sum())


class ChatTokenizer:
    """The tokenizer of a model folder, and the format around it; thread-safe."""

    def __init__(self, shape: ModelShape) -> None:
        """Load `tokenizer.json` of the shape's folder.

        Raises:
            ModelError: The shape has no folder, the file is missing or broken, or its special
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
            self._tokenizer = Tokenizer.from_buffer(data)
        except ValueError as error:
            raise ModelError(f"{path} is no tokenizer: {error}") from None
        self.fingerprint = hashlib.sha256(data).hexdigest()[:16]
        """Of tokenizer.json."""
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

    def render(self, record: Record, media_tokens: Sequence[int]) -> Rendered:
        """Render a record.

        Args:
            record: The conversation.
            media_tokens: For each media item of the record, its LLM tokens.
        """
        pieces = _Pieces()
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
                self._add_media(pieces, record.media[part].kind, media_tokens[part])
            self._add_text(pieces, text, len(head), learnt)
            pieces.add([self._end], 0, learnt)
            pieces.add(self._newline, 0, False)
        return pieces.joined()

    def _add_text(self, pieces: _Pieces, text: str, head: int, learnt: bool) -> None:
        """Tokenise `text`, whose first `head` characters belong to the format, not to the turn."""
        if not text:
            return
        ids, starts = self._encode(text)
        pieces.add(ids, 0, (starts >= head) & learnt)

    def _add_media(self, pieces: _Pieces, kind: int, tokens: int) -> None:
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
            raise ModelError(f"{path} has no token {token!r}; expected the ChatML special tokens")
        return int(found)


class _Pieces:
    """Parts of a rendered sample, joined once at the end."""

    def __init__(self) -> None:
        self._ids: list[IntArray] = []
        self._kinds: list[IntArray] = []
        self._learnt: list[BoolArray] = []

    def add(self, ids: Sequence[int] | IntArray, kind: int, learnt: bool | BoolArray) -> None:
        self._ids.append(np.asarray(ids, np.int64))
        self._kinds.append(np.full(len(ids), kind, np.int64))
        self._learnt.append(np.broadcast_to(np.asarray(learnt, np.bool_), len(ids)))

    def joined(self) -> Rendered:
        return Rendered(
            np.concatenate(self._ids), np.concatenate(self._kinds), np.concatenate(self._learnt)
        )
