"""Makes the demo model, its texts and its questions from a seed.

    python scripts/demo/make.py

The script draws a small world of people and towns (`world.py`), describes it in English
(`telling.py`, `stories.py`), and trains a tokenizer and a small Llama on this text (`train.py`). It
writes the model to `scripts/demo/model/`, a calibration text to `calibration/demo.txt`, a held-out
text to `eval/demo/heldout.txt`, and multiple-choice questions (`questions.py`) to
`eval/demo/*.jsonl`. This takes about 20 minutes on two CPU cores with bfloat16 instructions.
`--texts-only` rewrites the texts and questions in a minute and leaves the model unchanged.

The same seed gives the same world, texts, tokenizer and questions. It also gives the same weights,
on the same machine with the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
from pathlib import Path

import torch
from questions import TASKS, Question, balanced
from stories import document
from telling import TELLERS
from train import Schedule, Tokens, encode, held_out_loss, make_model, make_tokenizer, train
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, __version__
from world import World, build_world

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 512


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. The defaults make the demo in the repository."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=7, help="of the world, the texts and the training"
    )
    parser.add_argument("--people", type=int, default=480, help="people in the world")
    parser.add_argument(
        "--steps", type=int, default=Schedule.steps, help="training steps; the time is proportional"
    )
    parser.add_argument("--learning-rate", type=float, default=Schedule.learning_rate)
    parser.add_argument(
        "--corpus-characters",
        type=int,
        default=80_000_000,
        help="length of the training text; it may repeat",
    )
    parser.add_argument("--vocab", type=int, default=1536)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--questions", type=int, default=240, help="in each task")
    parser.add_argument(
        "--texts-only", action="store_true", help="write texts and questions, and train nothing"
    )
    parser.add_argument("--out", type=Path, default=ROOT, help="root folder of the output")
    return parser.parse_args(arguments)


def tell(world: World, seed: str, characters: int) -> list[str]:
    """Documents about the world, together at least this many characters long."""
    rng = random.Random(seed)
    documents = []
    length = 0
    while length < characters:
        text = document(rng, world, TELLERS)
        if text:
            documents.append(text)
            length += len(text) + 2
    return documents


def stream_pieces(documents: list[str], size: int = 2000) -> list[str]:
    """The documents joined to long pieces, separated by empty lines as in the plain texts.

    Every sixteenth document begins after </s><s>, so that a prompt may begin with <s> too.
    """
    chunks = (documents[i : i + size] for i in range(0, len(documents), size))
    return [
        "".join(("</s><s>" if i % 16 == 0 else "\n\n") + text for i, text in enumerate(chunk))
        for chunk in chunks
    ]


def unseen(questions: list[Question], corpus: str) -> list[Question]:
    """The distinct questions whose context and answer do not occur in the training text."""
    distinct = {q["context"] + q["choices"][q["label"]]: q for q in questions}
    return [question for answered, question in distinct.items() if answered not in corpus]


def write_texts(world: World, corpus: list[str], options: argparse.Namespace) -> str:
    """Write the calibration text, the held-out text and the questions. Returns the held-out
    text.
    """
    known = set(corpus)
    calibration = "\n\n".join(tell(world, f"{options.seed}/calibration", 200_000)) + "\n"
    held_out = (
        "\n\n".join(d for d in tell(world, f"{options.seed}/held out", 300_000) if d not in known)
        + "\n"
    )
    for path, text in (("calibration/demo.txt", calibration), ("eval/demo/heldout.txt", held_out)):
        (options.out / path).parent.mkdir(parents=True, exist_ok=True)
        (options.out / path).write_text(text, encoding="utf-8")
    joined = "\n\n".join(corpus)
    for name, ask in TASKS.items():
        rng = random.Random(f"{options.seed}/{name}")
        # Twice as many as needed, because some occur in the training text.
        questions = unseen(ask(rng, world, 2 * options.questions), joined)[: options.questions]
        lines = [json.dumps(q, ensure_ascii=False) for q in balanced(rng, questions)]
        (options.out / f"eval/demo/{name}.jsonl").write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )
        print(f"{name}: {len(lines)} questions")
    return held_out


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    record: dict[str, object],
    folder: Path,
) -> None:
    """Write the model in two shards, so that it has an index like a large model."""
    shutil.rmtree(folder, ignore_errors=True)
    model.set_attn_implementation("sdpa")
    half = sum(p.numel() * p.element_size() for p in model.parameters()) * 0.6
    model.save_pretrained(folder, max_shard_size=int(half))
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def make_the_model(
    world: World, corpus: list[str], held_out: str, options: argparse.Namespace
) -> None:
    """Train the tokenizer and the model, and write both."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    tokenizer = make_tokenizer("\n\n".join(corpus[:20_000]).split("\n\n"), options.vocab)
    stream: Tokens = encode(tokenizer, stream_pieces(corpus))
    model = make_model(
        len(tokenizer), options.hidden, options.intermediate, options.layers, CONTEXT
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.2f} M parameters, {len(stream) / 1e6:.1f} M tokens of text", flush=True
    )
    schedule = Schedule(steps=options.steps, learning_rate=options.learning_rate)
    record: dict[str, object] = {
        "made_by": "scripts/demo/make.py",
        "seed": options.seed,
        "people": len(world.people),
        "towns": len(world.towns),
        "parameters": parameters,
        "corpus_tokens": len(stream),
        "schedule": vars(schedule),
    }
    record |= train(model, stream, schedule, options.seed)
    record["held_out_loss"] = round(held_out_loss(model, encode(tokenizer, [held_out]), CONTEXT), 4)
    record |= {
        "hardware": f"{options.threads} CPU cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": __version__,
    }
    save(model, tokenizer, record, options.out / "scripts/demo/model")
    print(json.dumps(record, indent=2))


def main() -> None:
    """Make the demo."""
    options = parse()
    world = build_world(options.seed, options.people)
    corpus = tell(world, f"{options.seed}/training", options.corpus_characters)
    held_out = write_texts(world, corpus, options)
    if not options.texts_only:
        make_the_model(world, corpus, held_out, options)


if __name__ == "__main__":
    main()
