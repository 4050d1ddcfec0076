"""What samples cost in FLOPs, module by module, forward and backward.

One multiply-add is 2 FLOPs. Counted are matrices with weights and attention scores; norms,
activations and embedding look-ups are not. Attention counts what the masks let be seen: half the
square of a causal sample, windows of windowed layers, each encoder unit alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from dynapar.shapes import (
    AUDIO_KIND,
    AudioShape,
    MediaTokens,
    ModelShape,
    Projection,
    TextShape,
    VisionShape,
)

Part = Literal["vision", "audio", "merger", "llm"]
"""What is trained, or not, as one."""
PARTS: tuple[Part, ...] = ("vision", "audio", "merger", "llm")
"""In the order of the forward pass."""
_BEFORE: Mapping[Part, tuple[Part, ...]] = MappingProxyType(
    {"vision": (), "audio": (), "merger": ("vision", "audio"), "llm": ("vision", "audio", "merger")}
)
"""Parts whose output a part takes in."""
ModuleName = Literal["patch_embedding", "attention", "mlp", "merger", "head"]


class Matrix(NamedTuple):
    """Weights of one shape, and how many rows pass each of them."""

    rows: int
    inputs: int
    outputs: int
    copies: int = 1

    @property
    def flops(self) -> int:
        """Forward."""
        return 2 * self.rows * self.inputs * self.outputs * self.copies


class Work(NamedTuple):
    """What one kind of module does for some samples."""

    part: Part
    module: ModuleName
    matrices: tuple[Matrix, ...]
    scores: int = 0
    """FLOPs of queries against keys and of weights against values, forward."""

    @property
    def linear(self) -> int:
        """FLOPs of the matrices, forward."""
        return sum(matrix.flops for matrix in self.matrices)

    @property
    def forward(self) -> int:
        """FLOPs forward."""
        return self.linear + self.scores


class Lora(NamedTuple):
    """Frozen weights beside trained ones of low rank."""

    rank: int
    modules: tuple[ModuleName, ...] = ("attention", "mlp")
    """Modules whose matrices are adapted."""


Tuning = Literal["full", "frozen"] | Lora
"""How a part is trained."""


def sample_work(
    shape: ModelShape,
    tokens: int,
    media: Sequence[MediaTokens] = (),
    *,
    head_rows: int | None = None,
    square: bool = False,
) -> tuple[Work, ...]:
    """What one sample costs.

    Args:
        shape: The model.
        tokens: Its LLM tokens, those of its media among them.
        media: Its media.
        head_rows: Tokens whose logits are computed; None: all.
        square: Count masked scores too, as a kernel without a mask's shape computes them.

    Returns:
        Rows of distinct (part, module), in the order of the forward pass; none for absent parts.
    """
    seen = [item for item in media if item.kind != AUDIO_KIND]
    heard = [item for item in media if item.kind == AUDIO_KIND]
    rows = list(_vision_work(shape.vision, seen)) if seen else []
    if heard and shape.audio_encoder is not None:
        rows += _audio_work(shape.audio_encoder, heard)
    if media:
        rows.append(Work("merger", "merger", tuple(_merger(shape, seen, heard))))
    text = shape.text
    rows += _text_work(text, tokens, media, tokens if head_rows is None else head_rows, square)
    return tuple(row for row in rows if row.forward)


def encoder_segments(vision: VisionShape, item: MediaTokens) -> tuple[tuple[int, ...], ...]:
    """Encoder tokens that attend to each other, inside one encoder unit.

    Args:
        vision: The encoder.
        item: The image or video.

    Returns:
        The segments of layers that attend over the whole unit, then those of windowed layers;
        each sums to the unit's tokens.

    >>> from dynapar.catalog import load_model_shape
    >>> shape = load_model_shape("qwen2.5-vl-7b")
    >>> full, windows = encoder_segments(shape.vision, shape.image(480, 640))
    >>> full, len(windows), sum(n * n for n in windows)
    ((1564,), 30, 92560)
    """
    whole = (item.unit_tokens,)
    if vision.window == 0:
        return whole, whole
    high, wide = (_cuts(side, vision.window) for side in item.grid[1:])
    return whole, tuple(rows * columns for rows in high for columns in wide)


def audio_segments(encoder: AudioShape, item: MediaTokens) -> tuple[int, ...]:
    """Positions of a clip that attend to each other; they sum to its encoder tokens."""
    return tuple((frames - 1) // 2 + 1 for frames in _cuts(item.size[1], encoder.window))


def _cuts(length: int, window: int) -> list[int]:
    return [min(window, length - start) for start in range(0, length, window)]


def _layers(rows: int, width: int, mlp: int, matrices: int, copies: int) -> tuple[Matrix, Matrix]:
    """The four projections of attention, and the MLP, of an encoder."""
    return Matrix(rows, width, width, 4 * copies), Matrix(rows, width, mlp, matrices * copies)


def _vision_work(vision: VisionShape, media: Sequence[MediaTokens]) -> Iterable[Work]:
    patches = sum(item.grid[0] * item.grid[1] * item.grid[2] for item in media)
    tokens = sum(item.units * item.unit_tokens for item in media)
    windowed = vision.layers - len(vision.full_layers) if vision.window else 0
    pairs = 0
    for item in media:
        full, windows = encoder_segments(vision, item)
        squares = [sum(n * n for n in segments) for segments in (full, windows)]
        pairs += item.units * ((vision.layers - windowed) * squares[0] + windowed * squares[1])
    attention, mlp = _layers(
        tokens, vision.width, vision.mlp_width, vision.mlp_matrices, vision.layers
    )
    embedding = Matrix(patches, vision.patch_width, vision.width)
    yield Work("vision", "patch_embedding", (embedding,))
    yield Work("vision", "attention", (attention,), 4 * pairs * vision.width)
    yield Work("vision", "mlp", (mlp,))


def _audio_work(audio: AudioShape, media: Sequence[MediaTokens]) -> Iterable[Work]:
    tokens = sum(item.unit_tokens for item in media)
    pairs = sum(n * n for item in media for n in audio_segments(audio, item))
    # Convolved in chunks of one length: the last one of a clip is filled up.
    frames = sum(
        item.size[1]
        if item.size[1] < audio.window
        else -(-item.size[1] // audio.window) * audio.window
        for item in media
    )
    attention, mlp = _layers(tokens, audio.width, audio.mlp_width, 2, audio.layers)
    convolutions = (
        Matrix(frames, 3 * audio.mels, audio.width),
        Matrix((frames + 1) // 2, 3 * audio.width, audio.width),
    )
    yield Work("audio", "patch_embedding", convolutions)
    yield Work("audio", "attention", (attention,), 4 * pairs * audio.width * audio.layers)
    yield Work("audio", "mlp", (mlp,))


def _merger(
    shape: ModelShape, seen: Sequence[MediaTokens], heard: Sequence[MediaTokens]
) -> Iterable[Matrix]:
    for projection in shape.vision.projections:
        yield _projected(projection, seen)
    if shape.audio_encoder is not None:
        for projection in shape.audio_encoder.projections:
            yield _projected(projection, heard)


def _projected(projection: Projection, media: Sequence[MediaTokens]) -> Matrix:
    if projection.rows == "llm":
        rows = sum(item.llm_tokens for item in media)
    elif projection.rows == "key":
        rows = sum(item.keys for item in media)
    else:
        rows = sum(item.grid[0] * item.grid[1] * item.grid[2] for item in media)
    return Matrix(rows, projection.inputs, projection.outputs)


def _text_work(
    text: TextShape, tokens: int, media: Sequence[MediaTokens], head_rows: int, square: bool
) -> Iterable[Work]:
    keys = sum(item.keys for item in media)
    # Layers of cross-attention are passed over where there is nothing to attend to.
    layers = text.layers - text.cross_layers
    cross = text.cross_layers if keys else 0
    queries, shared = text.heads * text.head_width, text.kv_heads * text.head_width
    matrices = (
        Matrix(tokens, text.width, queries, 2 * (layers + cross)),
        Matrix(tokens, text.width, shared, 2 * layers),
        Matrix(keys, text.width, shared, 2 * cross),
    )
    full = layers - text.window_layers
    pairs = full * _twice_pairs(text, tokens, media, 0, square)
    pairs += text.window_layers * _twice_pairs(text, tokens, media, text.window, square)
    scores = 2 * queries * (pairs + 2 * cross * tokens * keys)
    yield Work("llm", "attention", matrices, scores)
    dense = layers + cross - text.expert_layers
    mlp = [Matrix(tokens, text.width, text.mlp_width, text.mlp_matrices * dense)]
    if text.expert_layers:
        routed = tokens * text.active_experts
        copies = text.mlp_matrices * text.expert_layers
        mlp += [
            Matrix(tokens, text.width, text.experts, text.expert_layers),
            Matrix(routed, text.width, text.expert_width, copies),
            Matrix(tokens, text.width, text.shared_width, copies),
        ]
    yield Work("llm", "mlp", tuple(mlp))
    yield Work("llm", "head", (Matrix(head_rows, text.width, text.vocabulary),))


def _twice_pairs(
    text: TextShape, tokens: int, media: Sequence[MediaTokens], window: int, square: bool
) -> int:
    """Twice the pairs of a query and a key that it sees, in one layer; `window` 0: all before."""
    if square:
        return 2 * tokens * tokens
    if window == 0 or tokens <= window:
        pairs = tokens * tokens
    elif text.chunked:
        pairs = tokens // window * window**2 + (tokens % window) ** 2
    else:
        pairs = 2 * window * tokens - window * window
    if text.two_way_media:
        spans = (item.units * (item.llm_tokens // item.units) ** 2 for item in media)
        pairs += sum(spans)
    return pairs


class TrainingWork(NamedTuple):
    """FLOPs of one kind of module in a training step."""

    part: Part
    module: ModuleName
    forward: int
    backward: int


def training_flops(
    work: Iterable[Work], tuning: Mapping[Part, Tuning] | None = None
) -> tuple[TrainingWork, ...]:
    """Forward and backward FLOPs of each module, by how its part is trained.

    Backward passes each trained matrix twice (for its weights and for its input), a frozen one
    once; scores cost twice their forward. Nothing is passed back into a frozen part that has
    nothing trained before it, nor into the input of the model.

    Args:
        work: From `sample_work`.
        tuning: How the parts are trained; parts that are not named are trained in full.
    """
    rows = list(work)
    chosen = {part: (tuning or {}).get(part, "full") for part in PARTS}
    trained = {row.part for row in rows if chosen[row.part] != "frozen"}
    result = []
    for row in rows:
        mode = chosen[row.part]
        passed = row.linear
        if row.module == "patch_embedding":
            # Pixels and sounds need no gradient.
            passed -= row.matrices[0].flops
        forward, backward = row.forward, 0
        if trained & {row.part, *_BEFORE[row.part]}:
            backward = passed + 2 * row.scores
        if mode == "full":
            backward += row.linear
        elif isinstance(mode, Lora) and row.module in mode.modules:
            extra = sum(
                2 * m.rows * mode.rank * (m.inputs + m.outputs) * m.copies for m in row.matrices
            )
            forward, backward = forward + extra, backward + 2 * extra
        result.append(TrainingWork(row.part, row.module, forward, backward))
    return tuple(result)


def linear_parameters(text: TextShape) -> int:
    """Weights that a token passes in the language model, without embedding and output layer.

    >>> from dynapar.catalog import load_model_shape
    >>> linear_parameters(load_model_shape("qwen2.5-vl-7b").text)
    6525288448
    """
    one = _text_work(text, 1, (), 0, square=False)
    return sum(row.linear for row in one) // 2
