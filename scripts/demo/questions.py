"""Multiple-choice questions about the demo world, in wordings that the training text does not use.

A question is a context and several continuations of the same form. The answer is the continuation
that is true in the world.
"""

from __future__ import annotations

import random
from typing import Any

from stories import STORIES, day
from telling import value_of
from world import Person, World, article, derived

Question = dict[str, Any]
# Each ends where the fact begins. None is the beginning of a sentence in templates.FACTS.
CLOZE: dict[str, list[str]] = {
    "home": [
        "Everybody knows that the home of {N} is in",
        "If you want to visit {N}, you go to",
        "The house of {N} stands in",
    ],
    "job": [
        "For many years {N} has worked as",
        "In town they say that {N} is",
        "When {he} grew up, {N} became",
    ],
    "pet": [
        "The neighbours say that {N} has",
        "In {his} house {N} keeps",
        "The animal that belongs to {N} is",
    ],
    "pet_name": [
        "The name that {N} gave {his} pet is",
        "At home the pet of {N} is called",
        "{N} has an animal, and its name is",
    ],
    "food": [
        "When {he} is hungry, {N} likes to eat",
        "The favourite food of {N} is",
        "Of all food {N} likes best",
    ],
    "colour": [
        "The colour that {N} likes best is",
        "The favourite colour of {N} is",
        "The coat of {N} is",
    ],
    "hobby": ["When work is done, {N} enjoys", "Every Sunday {N} likes", "The hobby of {N} is"],
    "fear": [
        "The greatest fear of {N} is",
        "At night {N} is afraid of",
        "The neighbours know that {N} is scared of",
    ],
    "drink": [
        "In the morning {N} likes to drink",
        "The favourite drink of {N} is",
        "At the inn {N} always orders",
    ],
    "month": [
        "The birthday of {N} is in",
        "The mother of {N} says that {he} was born in",
        "Every year {N} has {his} birthday in",
    ],
    "friend": [
        "The best friend of {N} is",
        "Every Sunday {N} visits {his} friend",
        "The person whom {N} trusts most is",
    ],
}
CONCLUSIONS: dict[str, list[str]] = {
    "place": [
        "{N} works as {ajob}, so every morning {he} goes to",
        "{N} is {ajob}, so you can find {him} in",
    ],
    "tool": ["{N} is {ajob}, so {he} needs", "{N} works as {ajob}, so {he} works with"],
    "eats": ["{N} keeps {apet}, so {he} buys", "{N} has {apet}. {He} feeds it"],
    "bed": ["{N} keeps {apet}, so at night it sleeps", "{N} has {apet}. At night it lies"],
    "sound": ["{N} keeps {apet}, and all day it", "{N} has {apet}, and in the morning it"],
    "taste": [
        "{N} likes {food} best, so {he} likes things that taste",
        "{N} loves {food}, so {his} favourite taste is",
    ],
    "terrain": [
        "{N} has a house in {home}, so {he} lives by",
        "{N} lives in {home}, so the house of {N} is near",
    ],
    "landmark": [
        "{N} has a house in {home}, so every day {he} walks past",
        "{N} lives in {home}, where you can see",
    ],
}


def _asked(template: str, person: Person) -> str:
    v = person.values
    text = template.format(
        N=person.name,
        he=person.he,
        He=person.he.capitalize(),
        him=person.him,
        his=person.his,
        home=v["home"],
        food=v["food"],
        ajob=article(v["job"]),
        apet=article(v["pet"]),
    )
    return text[0].upper() + text[1:]


def _choose(rng: random.Random, context: str, right: str, pool: list[str], count: int) -> Question:
    """A question whose wrong choices are close to the right one in length, so that the length
    does not give it away.
    """
    wrong = sorted({w for w in pool if w != right}, key=lambda w: (abs(len(w) - len(right)), w))[
        : 4 * count
    ]
    choices = [right, *rng.sample(wrong, min(count - 1, len(wrong)))]
    rng.shuffle(choices)
    return {
        "context": context,
        "choices": [f" {c}" for c in choices],
        "label": choices.index(right),
    }


def facts(rng: random.Random, world: World, count: int) -> list[Question]:
    """Questions with four options: the value of an attribute of a person."""
    questions = []
    for i in range(count):
        attribute = list(CLOZE)[i % len(CLOZE)]
        person = rng.choice(world.people)
        form = article if attribute in ("job", "pet") else str
        pool = [form(value_of(p, attribute)) for p in world.people]
        questions.append(
            _choose(
                rng,
                _asked(rng.choice(CLOZE[attribute]), person),
                form(value_of(person, attribute)),
                pool,
                4,
            )
        )
    return questions


def inference(rng: random.Random, world: World, count: int) -> list[Question]:
    """Questions with four options: a conclusion about a person that the training text never
    states.
    """
    questions = []
    for i in range(count):
        kind = list(CONCLUSIONS)[i % len(CONCLUSIONS)]
        person = rng.choice([p for p in world.people if p.withheld(kind)])
        pool = [derived(p)[kind] for p in world.people]
        questions.append(
            _choose(
                rng, _asked(rng.choice(CONCLUSIONS[kind]), person), derived(person)[kind], pool, 4
            )
        )
    return questions


def stories(rng: random.Random, world: World, count: int) -> list[Question]:
    """Questions with two to four options: the ending of a story."""
    tellers = [s for s in STORIES if s is not day]
    questions = []
    for i in range(count):
        story = tellers[i % len(tellers)](rng, world)
        questions.append(
            _choose(rng, story.body, story.ending, story.others, 1 + len(story.others))
        )
    return questions


def balanced(rng: random.Random, questions: list[Question]) -> list[Question]:
    """The same questions with the answers spread evenly over the places, for each number of
    choices.
    """
    turns: dict[int, int] = {}
    for question in questions:
        size = len(question["choices"])
        place = turns[size] = (turns.get(size, -1) + 1) % size
        right = question["choices"].pop(question["label"])
        question["choices"].insert(place, right)
        question["label"] = place
    rng.shuffle(questions)
    return questions


TASKS = {"facts": facts, "inference": inference, "stories": stories}
