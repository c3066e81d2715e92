"""Tiny random multimodal models with a processor of their own, and prompts with images for them."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

VOCABULARY = 512
SPECIAL = (
    *("<pad>", "<s>", "</s>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<image>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
    *(
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|video|>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
)
ID = {token: number for number, token in enumerate(SPECIAL)}


def tokenizer() -> Any:
    """One word a token, ``w17``: a special one, which every family's tokenizer class leaves whole."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(len(SPECIAL), VOCABULARY)}
    tokens = Tokenizer(models.WordLevel(ID | words, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL[4:], *words]})
    return fast


@dataclass(frozen=True)
class Sight:
    """What a multimodal family has beside its text model.

    Attributes:
        placeholder: stands for an image in a prompt.
        fields: of the configuration, beside those of text and vision.
        text: fields of the text configuration that are special to the family.
        vision: fields of the vision configuration.
        processor: makes the processor, from a tokenizer.
        rotary: dimensions of a head that RoPE turns, and whether it pairs the halves.
    """

    placeholder: str
    fields: Mapping[str, Any]
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    processor: Callable[[Any], Any]
    rotary: tuple[int, bool] = (16, True)


def _qwen(name: str, patch_size: int = 14) -> Callable[[Any], Any]:
    def build(words: Any) -> Any:
        import transformers
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

        sizes = {"patch_size": patch_size, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}
        return getattr(transformers, name)(Qwen2VLImageProcessor(**sizes), words, Qwen2VLVideoProcessor(**sizes))

    return build


def _glm(words: Any) -> Any:
    from transformers import Glm4vProcessor
    from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor

    return Glm4vProcessor(Glm4vImageProcessor(), words, Glm4vVideoProcessor())


def _mistral(words: Any) -> Any:
    from transformers import PixtralProcessor
    from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor

    images = PixtralImageProcessor(size={"longest_edge": 112}, patch_size=14)
    return PixtralProcessor(images, words, patch_size=14, spatial_merge_size=2)


def _gemma(words: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_gemma3 import Gemma3ImageProcessor

    words.boi_token, words.eoi_token, words.image_token = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    words.image_token_id, words.boi_token_id = ID["<image_soft_token>"], ID["<start_of_image>"]
    return Gemma3Processor(Gemma3ImageProcessor(size={"height": 56, "width": 56}), words, image_seq_length=16)


_QWEN_IDS = {
    "image_token_id": ID["<|image_pad|>"],
    "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _sections(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.25,
}
SIGHTS: Mapping[str, Sight] = {
    "qwen2_vl": Sight(
        _QWEN_IMAGE,
        _QWEN_IDS,
        _sections(2, 3, 3),
        {
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "in_chans": 3,
            "num_heads": 4,
            "mlp_ratio": 1,
            "initializer_range": 0.25,
        },
        _qwen("Qwen2VLProcessor"),
    ),
    "qwen2_5_vl": Sight(
        _QWEN_IMAGE,
        _QWEN_IDS,
        _sections(2, 3, 3),
        {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 128,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.25,
        },
        _qwen("Qwen2_5_VLProcessor"),
    ),
    "qwen3_vl": Sight(
        _QWEN_IMAGE,
        _QWEN_IDS,
        _sections(4, 2, 2, mrope_interleaved=True),
        _QWEN3_VISION,
        _qwen("Qwen3VLProcessor", 16),
    ),
    "qwen3_5": Sight(
        _QWEN_IMAGE,
        _QWEN_IDS,
        _sections(2, 1, 1, mrope_interleaved=True, partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.5},
        _QWEN3_VISION | {"deepstack_visual_indexes": []},
        _qwen("Qwen3VLProcessor", 16),
        (8, True),
    ),
    "glm4v": Sight(
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_token_id": ID["<|image|>"],
            "video_token_id": ID["<|video|>"],
            "image_start_token_id": ID["<|begin_of_image|>"],
            "image_end_token_id": ID["<|end_of_image|>"],
            "video_start_token_id": ID["<|begin_of_video|>"],
            "video_end_token_id": ID["<|end_of_video|>"],
        },
        _sections(2, 1, 1, partial_rotary_factor=0.5) | {"pad_token_id": 0},
        {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "image_size": 112,
            "out_hidden_size": 128,
            "intermediate_size": 64,
            "initializer_range": 0.25,
        },
        _glm,
        (8, False),
    ),
    "mistral3": Sight(
        "[IMG]",
        {"image_token_index": ID["[IMG]"], "spatial_merge_size": 2},
        {"model_type": "mistral", "sliding_window": None},
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "head_dim": 16,
            "image_size": 112,
            "patch_size": 14,
            "initializer_range": 0.25,
        },
        _mistral,
    ),
    "gemma3": Sight(
        "<start_of_image>",
        {
            "boi_token_index": ID["<start_of_image>"],
            "eoi_token_index": ID["<end_of_image>"],
            "image_token_index": ID["<image_soft_token>"],
            "mm_tokens_per_image": 16,
        },
        {"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
        },
        _gemma,
    ),
}


def picture(seed: int, width: int = 112, height: int = 84) -> str:
    """A random PNG as a data URL."""
    rng = random.Random(seed)
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
