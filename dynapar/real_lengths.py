"""What transformers' own processors make of decoded media and of text: the other side of the count.

Image processors run without torchvision where transformers has a twin of them for Pillow, which is
all families but Llama 4. Video processors, and Llama 4, need torchvision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from dynapar.data.header import Pixels
from dynapar.data.indexfile import Medium
from dynapar.data.records import Record
from dynapar.errors import ModelError, SampleError
from dynapar.modelfiles import Section, read_section
from dynapar.real_counts import IMAGE_COUNTERS, VIDEO_COUNTERS, Lengths, Made, llava_together
from dynapar.shapes import AUDIO_KIND, IMAGE_KIND, VIDEO_KIND, ModelShape

if TYPE_CHECKING:
    from transformers import BaseVideoProcessor, PreTrainedTokenizerFast

    from dynapar.data.audio import FloatArray


Run = Callable[..., Made]
"""A processor, called with media."""


class Processors:
    """The processors of a model folder, loaded when they are first needed."""

    def __init__(self, shape: ModelShape) -> None:
        """For a shape that was read from a folder."""
        assert shape.folder is not None
        self._shape, self._folder = shape, Path(shape.folder)
        self._images: Run | None = None
        self._videos: BaseVideoProcessor | None = None
        self._sounds: Run | None = None
        self._text: PreTrainedTokenizerFast | None = None

    def images(self, pictures: Sequence[Pixels]) -> list[Lengths]:
        """What the images of one sample become.

        Raises:
            ModelError: There is no processor, or it cannot be loaded.
        """
        from PIL import Image

        if self._images is None:
            self._images = _image_processor(self._shape, self._folder)
        run, family = self._images, self._shape.family.name
        asked: dict[str, object] = {"return_tensors": "pt" if family == "llama4" else "np"}
        if family in ("idefics3", "smolvlm"):
            asked["return_row_col_info"] = True
        if family in ("llava", "mistral3"):
            asked["patch_size"] = _pixtral_patch(self._folder)
        found = [Image.fromarray(pixels) for pixels in pictures]
        if family == "llava_onevision" and len(found) > 1:
            made = run(images=[found], **asked)
            return [llava_together(self._shape, made)] * len(found)
        count = IMAGE_COUNTERS[family]
        return [count(self._shape, run(images=[one], **asked)) for one in found]

    def sampled(self, size: Medium) -> list[int]:
        """Which frames the video processor takes when it is asked to sample.

        It is asked for the catalog's frames a second where its own files name neither a rate nor a
        number, and for all frames where the catalog knows no rate either.

        Raises:
            ModelError: There is no processor, or it cannot be loaded.
        """
        from transformers.video_utils import VideoMetadata

        processor = self._video_processor()
        meta = VideoMetadata(
            total_num_frames=size.frames, fps=size.fps, duration=size.frames / size.fps
        )
        asked = None
        if not getattr(processor, "num_frames", None):
            asked = getattr(processor, "fps", None) or self._shape.frame_rules.fps
            if not asked:
                return list(range(size.frames))
        return [int(frame) for frame in processor.sample_frames(meta, fps=asked)]

    def video(self, frames: Sequence[Pixels]) -> Lengths:
        """What a video becomes whose frames were taken as `sampled` says."""
        stacked = np.stack(frames).transpose(0, 3, 1, 2)
        made = self._video_processor()(
            videos=[stacked],
            do_sample_frames=False,
            return_tensors="pt",
            input_data_format="channels_first",
        )
        return VIDEO_COUNTERS[self._shape.family.name](self._shape, cast(Made, made))

    def audio(self, sound: FloatArray) -> Lengths:
        """What a clip becomes.

        Args:
            sound: (samples,) float32, at the extractor's rate.
        """
        from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import (
            _get_feat_extract_output_lengths,
        )

        if self._sounds is None:
            self._sounds = _extractor(self._folder)
        encoder = self._shape.audio_encoder
        assert encoder is not None
        made = self._sounds(
            sound,
            sampling_rate=encoder.sample_rate,
            padding="max_length",
            return_attention_mask=True,
        )
        frames = int(np.asarray(made["attention_mask"]).sum())
        return Lengths(int(_get_feat_extract_output_lengths(frames)), 1, (frames - 1) // 2 + 1)

    def text(self, record: Record) -> int:
        """Tokens of a sample without media, by the tokenizer's class and chat template.

        Raises:
            ModelError: It cannot be loaded, or has no chat template.
        """
        if self._text is None:
            self._text = _tokenizer(self._folder)
        listed = self._shape.has_media
        messages = []
        for turn in record.turns:
            said = "".join(map(str, turn.parts))
            content = [{"type": "text", "text": said}] if listed else said
            messages.append({"role": turn.role, "content": content})
        write = cast(Callable[..., str], self._text.apply_chat_template)
        written = write(messages, tokenize=False)
        bos = self._text.bos_token
        begun = not listed or (bos is not None and written.startswith(bos))
        return len(self._text(written, add_special_tokens=not begun)["input_ids"])

    def _video_processor(self) -> BaseVideoProcessor:
        if self._videos is None:
            self._videos = _video_processor(self._folder)
        return self._videos


def _pixtral_patch(folder: Path) -> int:
    """What the processor hands to its image processor: of its own file, else of its class."""
    path = folder / "processor_config.json"
    own = read_section(path, defaults={}).values if path.is_file() else {}
    section = Section(
        place=str(path), values=own, defaults={"patch_size": 16, "spatial_merge_size": 1}
    )
    return section.integer("patch_size", least=1) * section.integer("spatial_merge_size", least=1)


def _image_processor(shape: ModelShape, folder: Path) -> Run:
    if shape.family.name == "llama4":
        _need_torchvision(folder, "images of Llama 4")
    from transformers import AutoImageProcessor

    try:
        loaded = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(folder, "image processor", error) from None
    return cast(Run, loaded)


def _video_processor(folder: Path) -> BaseVideoProcessor:
    _need_torchvision(folder, "videos")
    from transformers import AutoVideoProcessor

    try:
        loaded = AutoVideoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(folder, "video processor", error) from None
    return cast("BaseVideoProcessor", loaded)


def _extractor(folder: Path) -> Run:
    from transformers import AutoFeatureExtractor

    try:
        loaded = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(folder, "feature extractor", error) from None
    return cast(Run, loaded)


def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _cannot_load(folder, "tokenizer", error) from None
    if loaded.chat_template is None:
        raise ModelError(f"{folder} has no chat template that transformers could run on text")
    return cast("PreTrainedTokenizerFast", loaded)


def _need_torchvision(folder: Path, what: str) -> None:
    if importlib.util.find_spec("torchvision") is None:
        raise ModelError(
            f"{folder}: the processor of {what} needs torchvision, which is not installed: pip "
            "install torchvision"
        )


def _cannot_load(folder: Path, what: str, error: Exception) -> ModelError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(f"{folder}: its {what} cannot be loaded: {reason}")


NAMES = {IMAGE_KIND: "image", VIDEO_KIND: "video", AUDIO_KIND: "audio"}


def real_media(
    processors: Processors,
    shape: ModelShape,
    record: Record,
    sizes: Sequence[Medium],
) -> list[Lengths | str]:
    """Decode the media of one sample and run the processors on them.

    Args:
        processors: Those of the shape's folder.
        shape: The model.
        record: The sample.
        sizes: Of its media, as headers say.

    Returns:
        For each media item, what it becomes, or why that cannot be said.
    """
    found: list[Lengths | str] = [""] * len(record.media)
    try:
        places = [n for n, file in enumerate(record.media) if file.kind == IMAGE_KIND]
        images = _images(processors, record) if places else []
        for place, lengths in zip(places, images, strict=True):
            found[place] = lengths
    except (ModelError, SampleError) as error:
        for place in places:
            found[place] = str(error)
    for place, (file, size) in enumerate(zip(record.media, sizes, strict=True)):
        try:
            if file.kind == VIDEO_KIND:
                found[place] = _video(processors, record, place, size)
            if file.kind == AUDIO_KIND:
                found[place] = _audio(processors, shape, record, place)
        except (ModelError, SampleError) as error:
            found[place] = str(error)
    return found


def _images(processors: Processors, record: Record) -> list[Lengths]:
    from dynapar.data.media import decode_image

    return processors.images([decode_image(f) for f in record.media if f.kind == IMAGE_KIND])


def _video(processors: Processors, record: Record, place: int, size: Medium) -> Lengths:
    from dynapar.data.media import decode_frames

    used = processors.sampled(size)
    pixels = decode_frames(record.media[place], sorted(set(used)))
    return processors.video([pixels[frame] for frame in used])


def _audio(processors: Processors, shape: ModelShape, record: Record, place: int) -> Lengths:
    from dynapar.data.audio import decode_audio

    assert shape.audio_encoder is not None
    return processors.audio(decode_audio(record.media[place], shape.audio_encoder.sample_rate))
