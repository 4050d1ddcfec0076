"""The command `dynapar verify-lengths`: planned lengths against transformers' own processors.

Planned are the counts from headers and of the tokenizer, or those of an index; real is what the
processors of the model folder make of decoded media, and its tokenizer's class of the text of
samples without media. Differences are listed, and what could not be compared is named.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dynapar.catalog import load_model_shape
from dynapar.console import Advance, Cell, progress, show_json, show_table
from dynapar.data.chat import ChatTokenizer
from dynapar.data.index import Index, read_index
from dynapar.data.indexfile import Medium, media_tokens
from dynapar.data.media import media_size
from dynapar.data.records import MediaFile, Record
from dynapar.data.sources import Source, open_source
from dynapar.errors import CheckFailedError, ModelError, SampleError, SourceError
from dynapar.real_counts import Lengths
from dynapar.real_lengths import NAMES, Processors, real_media
from dynapar.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A media item, or a text, that became something else than planned."""

    id: str
    item: str
    planned: Lengths
    real: Lengths


def verify_lengths_command(
    source: str,
    *,
    model: str,
    samples: int = 200,
    seed: int = 0,
    index: Path | None = None,
    json: bool = False,
) -> None:
    """Compare planned with real lengths of some samples of a source.

    Args:
        source: A conversation file or webdataset shards.
        model: A model's folder.
        samples: How many are compared; all where there are fewer.
        seed: Of their choice.
        index: An index of the source, whose rows are compared; None: headers are read anew.
        json: Print JSON instead of a table.

    Raises:
        CheckFailedError: A length differs.
        DynaparError: Source, index or model cannot be used.
    """
    shape = load_model_shape(model)
    if shape.folder is None:
        raise ModelError(
            f"model {model!r} is a preset; expected a model folder, whose processor is run. Point "
            "--model at one."
        )
    opened = open_source(source)
    planned = read_index(index) if index is not None else None
    checker = Checker(shape, opened, planned)
    with progress(f"comparing {source}") as advance:
        differences = list(checker.differences(samples, seed, advance))
    row: dict[str, Cell] = {
        "samples": checker.samples,
        "compared": sum(checker.compared.values()),
        "differences": len(differences),
        "not compared": sum(checker.left.values()),
    }
    if json:
        left = dict(sorted(checker.left.items()))
        show_json({**row, "left": left, "list": [asdict(item) for item in differences]})
    else:
        show_table(f"{source} by the processor of {shape.name}", [row])
        for reason, count in sorted(checker.left.items()):
            print(f"not compared: {count} items: {reason}")
        if differences:
            show_table("differences", [_row(item) for item in differences])
    if differences:
        raise CheckFailedError(
            f"{len(differences)} of {sum(checker.compared.values())} items differ from what is "
            "planned; expected none. Index again, or use the processor's own settings."
        )
    if not checker.compared and checker.left:
        raise CheckFailedError("nothing could be compared; see why above")


def _row(item: Difference) -> dict[str, Cell]:
    return {
        "sample": item.id,
        "item": item.item,
        "planned LLM tokens": item.planned.llm_tokens,
        "real": item.real.llm_tokens,
        "planned units": f"{item.planned.units} x {item.planned.unit_tokens}",
        "real units": f"{item.real.units} x {item.real.unit_tokens}",
    }


class Checker:
    """Compares samples of one source."""

    def __init__(self, shape: ModelShape, source: Source, index: Index | None) -> None:
        """Find the samples.

        Raises:
            ModelError: The folder has no tokenizer, or an unfit one, and no index is given.
            SourceError: The index has other samples than the source.
        """
        self._shape, self._source, self._index = shape, source, index
        self._locators = source.locate()
        if index is not None and len(index) != len(self._locators):
            raise SourceError(
                f"{index.path} has {len(index)} samples, the source {len(self._locators)}; "
                "expected an index of this source, without samples left out. Run dynapar index."
            )
        self._processors = Processors(shape)
        self._chat: ChatTokenizer | str | None = None
        self.samples = 0
        self.compared: Counter[str] = Counter()
        """Items compared, by kind: "image", "video", "audio", "text"."""
        self.left: Counter[str] = Counter()
        """Items that were not, by the reason."""

    def differences(self, samples: int, seed: int, advance: Advance) -> Iterator[Difference]:
        """The media items and texts that differ, among some samples."""
        rows = range(len(self._locators))
        chosen = sorted(random.Random(seed).sample(rows, min(samples, len(rows))))
        for done, row in enumerate(chosen, start=1):
            record = self._source.record(self._locators[row])
            self.samples += 1
            yield from self._media(row, record) if record.media else self._text(row, record)
            advance(done, len(chosen))

    def _media(self, row: int, record: Record) -> Iterator[Difference]:
        sizes = (
            [_medium(f) for f in record.media] if self._index is None else self._index.media(row)
        )
        planned = media_tokens(sizes, self._shape)
        found = real_media(self._processors, self._shape, record, sizes)
        for file, tokens, real in zip(record.media, planned, found, strict=True):
            if isinstance(real, str):
                self.left[real] += 1
                continue
            wanted = Lengths(tokens.llm_tokens, tokens.units, tokens.unit_tokens)
            self.compared[NAMES[file.kind]] += 1
            if real != wanted:
                yield Difference(id=record.id, item=file.name, planned=wanted, real=real)

    def _text(self, row: int, record: Record) -> Iterator[Difference]:
        try:
            if self._index is not None:
                planned = int(self._index.table.llm_tokens[row])
            else:
                planned = len(self._tokenizer().render(record, []).ids)
            real = self._processors.text(record)
        except (ModelError, SampleError) as error:
            self.left[str(error)] += 1
            return
        self.compared["text"] += 1
        if real != planned:
            before, after = Lengths(planned, 0, 0), Lengths(real, 0, 0)
            yield Difference(id=record.id, item="text", planned=before, real=after)

    def _tokenizer(self) -> ChatTokenizer:
        """Made once; so is the error that it cannot be."""
        if self._chat is None:
            try:
                self._chat = ChatTokenizer(self._shape)
            except ModelError as error:
                self._chat = str(error)
        if isinstance(self._chat, str):
            raise ModelError(self._chat)
        return self._chat


def _medium(file: MediaFile) -> Medium:
    size = media_size(file)
    return Medium(file.kind, size.height, size.width, size.frames, size.fps, size.seconds)
