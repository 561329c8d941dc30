"""A tiny LLaVA with a processor of images, and a data set of pictures in several forms, for the
tests of images.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
import transformers
from multimodal import FAMILIES
from PIL import Image

ROWS = 6
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'image' "
    "%}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXTS = [f"The {i}th picture, " + "seen from afar. " * i for i in range(ROWS)]
CHATS = [
    [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": f"What is in picture {i}?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A lamp."}]},
    ]
    for i in range(ROWS)
]


def make_images() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (ROWS, 20, 30, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


def make_processor(template: str | None = None) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(**sizes),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,  # CLIP's class token, which LLaVA leaves out again
        chat_template=template,
    )


def make_llava(folder: Path) -> Path:
    """A random LLaVA in float32 with its processor, which has no chat template; returns its
    folder.
    """
    config = transformers.LlavaConfig(**FAMILIES["llava"].values | {"image_token_index": 256})
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.save_pretrained(folder, max_shard_size="60KB")
    make_processor().save_pretrained(folder)
    return folder


def make_pictures(folder: Path) -> Path:
    """The same rows in several forms, and some that cannot be used; returns the folder."""
    import datasets

    (folder / "pictures").mkdir()
    images = make_images()
    stored = []
    for number, image in enumerate(images):
        image.save(folder / "pictures" / f"{number}.png")
        buffer = io.BytesIO()
        image.save(buffer, "png")
        stored.append({"bytes": buffer.getvalue(), "path": None})
    paths = [f"pictures/{number}.png" for number in range(ROWS)]
    write_lines(folder / "rows.jsonl", text=TEXTS, picture=paths)
    write_lines(folder / "chats.jsonl", messages=CHATS, pictures=[[path] for path in paths])
    marked = [
        [
            {"from": "human", "value": f"<image>\nWhat is in picture {i}?"},
            {"from": "gpt", "value": "A lamp."},
        ]
        for i in range(ROWS)
    ]
    write_lines(folder / "marked.jsonl", conversations=marked, picture=paths)
    plain = datasets.Dataset.from_dict({"text": TEXTS, "picture": stored})
    plain.to_parquet(folder / "bytes.parquet")
    (folder / "hub").mkdir()
    plain.cast_column("picture", datasets.Image()).to_parquet(folder / "hub" / "train.parquet")
    recipe = f'dataset = "{folder / "hub"}"\nimage = "picture"\n'
    (folder / "hub.toml").write_text(recipe)
    (folder / "streamed.toml").write_text(f"{recipe}stream = true\n")
    stored[1] = {"bytes": b"no image", "path": None}
    broken = datasets.Dataset.from_dict({"text": TEXTS, "picture": stored})
    broken.cast_column("picture", datasets.Image()).to_parquet(folder / "damaged.parquet")
    (folder / "rows.txt").write_text("A text.")
    write_lines(folder / "numbers.jsonl", text=TEXTS, picture=list(range(ROWS)))
    write_lines(folder / "missing.jsonl", text=TEXTS, picture=[paths[0], "nowhere.png", *paths[2:]])
    return folder


def write_lines(path: Path, **columns: list[Any]) -> None:
    rows = zip(*columns.values(), strict=True)
    path.write_text(
        "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    )
