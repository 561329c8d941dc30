"""Texts that state the world's facts in English: portraits, conversations, lists, comparisons,
conclusions.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import words
from templates import FACTS, QUESTIONS, TOWN
from world import Person, Town, World, article


def fill(template: str, person: Person, value: str, subject: str | None = None) -> str:
    """A template filled in for a person. `subject` is None for the full name, else a first name
    or a pronoun.
    """
    pronoun = subject in ("he", "she")
    opening = subject.capitalize() if subject and pronoun else (subject or person.name)
    possessive = person.his.capitalize() if pronoun else f"{opening}'s"
    # A name that is an object never becomes "he", so only {S}, {s} and {P} follow the subject.
    return template.format(
        S=opening,
        s=subject or person.name,
        P=possessive,
        N=person.name if not subject or pronoun else subject,
        he=person.he,
        He=person.he.capitalize(),
        him=person.him,
        his=person.his,
        v=value,
        av=article(value),
    )


def value_of(person: Person, attribute: str) -> str:
    """The words of one fact about a person."""
    if attribute == "friend":
        assert person.friend is not None  # build_world gives everyone a friend
        return person.friend.name
    return person.values[attribute]


def conclusions(person: Person) -> dict[str, tuple[str, list[str]]]:
    """The conclusions from a person's facts: inference → (premise, sentences that state the
    conclusion).
    """
    place, tool = person.job[1:]
    eats, bed, sound = person.pet[1:4]
    taste, source = person.food[1:]
    town = person.town
    name = person.name
    he = person.he
    job = article(person.job[0])
    pet = article(person.pet[0])
    food = person.food[0]
    return {
        "place": (
            f"{name} is {job}",
            [
                f"{he} works in {place}",
                f"you can find {person.him} in {place}",
                f"{he} goes to {place} every morning",
            ],
        ),
        "tool": (
            f"{name} is {job}",
            [f"{he} needs {tool}", f"{he} works with {tool}", f"{he} always has {tool} at hand"],
        ),
        "eats": (
            f"{name} has {pet}",
            [f"{he} feeds it {eats}", f"it eats {eats}", f"{he} buys {eats} for it"],
        ),
        "bed": (f"{name} has {pet}", [f"it sleeps {bed}", f"at night it lies {bed}"]),
        "sound": (f"{name} has {pet}", [f"it {sound} all day", f"every morning it {sound}"]),
        "taste": (
            f"{name} loves {food}",
            [f"{he} likes {taste} food", f"{he} likes things that taste {taste}"],
        ),
        "source": (
            f"{name} loves {food}",
            [
                f"{he} buys a lot of {source}"
                if not source.startswith("a ")
                else f"{he} buys {source}"
            ],
        ),
        "terrain": (
            f"{name} lives in {town.name}",
            [f"{he} lives by {town.terrain}", f"{person.his} house is near {town.terrain}"],
        ),
        "landmark": (
            f"{name} lives in {town.name}",
            [f"{he} sees {town.landmark} every day", f"{he} walks past {town.landmark}"],
        ),
        "market": (f"{name} lives in {town.name}", [f"{he} goes to the market on {town.market}"]),
    }


def _subject(rng: random.Random, person: Person, first_mention: bool) -> str | None:
    if first_mention:
        return None
    return rng.choice((person.he, person.he, person.first, None))


def portrait(rng: random.Random, world: World) -> str:
    """Several facts about one person."""
    person = rng.choice(world.people)
    attributes = rng.sample(list(FACTS), rng.randint(3, 8))
    return " ".join(
        fill(rng.choice(FACTS[a]), person, value_of(person, a), _subject(rng, person, i == 0))
        for i, a in enumerate(attributes)
    )


def gossip(rng: random.Random, world: World) -> str:
    """One fact about each of several people."""
    people = rng.sample(world.people, rng.randint(3, 6))
    return " ".join(
        fill(rng.choice(FACTS[a := rng.choice(list(FACTS))]), p, value_of(p, a)) for p in people
    )


def conversation(rng: random.Random, world: World) -> str:
    """Questions and their answers, as pairs or as direct speech."""
    lines = []
    speech = rng.random() < 0.4
    one, two = rng.sample(words.WOMEN + words.MEN, 2)
    for person in rng.sample(world.people, rng.randint(2, 5)):
        attribute = rng.choice(list(FACTS))
        ask, reply = (fill(t, person, value_of(person, attribute)) for t in QUESTIONS[attribute])
        lines.append(
            f'"{ask}" asked {one}. "{reply}" said {two}.'
            if speech
            else f"Question: {ask} Answer: {reply}"
        )
    return "\n".join(lines)


def kinship(rng: random.Random, world: World) -> str:
    """Family relations between people."""
    lines = []
    for person in rng.sample(world.people, rng.randint(2, 4)):
        for word, other in rng.sample(sorted(person.kin.items()), min(2, len(person.kin))):
            lines.append(
                rng.choice(
                    (
                        f"{other.name} is the {word} of {person.name}.",
                        f"{person.name} has a {word} called {other.name}.",
                        f"The {word} of {person.name} is {other.name}.",
                        f"{person.first} and {person.his} {word} {other.first} are both called "
                        f"{person.family}.",
                    )
                )
            )
    return " ".join(lines)


def card(rng: random.Random, world: World) -> str:
    """A person's facts as a list."""
    person = rng.choice(world.people)
    rows = [
        f"- {a.replace('_', ' ')}: {value_of(person, a)}"
        for a in rng.sample(list(FACTS), rng.randint(4, 9))
    ]
    return "\n".join([f"{person.name}:", *rows])


def roll(rng: random.Random, world: World) -> str:
    """A list of people with a fact in common."""
    person = rng.choice(world.people)
    attribute = rng.choice(("home", "job", "pet", "food", "hobby", "month"))
    value = value_of(person, attribute)
    sharing = [p.name for p in world.people if value_of(p, attribute) == value]
    rng.shuffle(sharing)
    return f"List of people with the {attribute} {value}: {', '.join(sharing[:6])}."


def comparison(rng: random.Random, world: World) -> str:
    """Two people compared in one fact."""
    one = rng.choice(world.people)
    attribute = rng.choice(("home", "job", "pet", "food", "colour", "hobby", "fear", "month"))
    same = [
        p
        for p in world.people
        if p is not one and value_of(p, attribute) == value_of(one, attribute)
    ]
    two = (
        rng.choice(same)
        if same and rng.random() < 0.4
        else rng.choice([p for p in world.people if p is not one])
    )
    first = fill(FACTS[attribute][0], one, value_of(one, attribute))
    if value_of(one, attribute) == value_of(two, attribute):
        return f"{first} The same is true of {two.name}."
    return f"{first[:-1]}, but {fill(FACTS[attribute][0], two, value_of(two, attribute))}"


def inference(rng: random.Random, world: World) -> str:
    """Premises and their conclusions, without those that are withheld for the questions."""
    lines = []
    for person in rng.sample(world.people, rng.randint(2, 4)):
        kind, (premise, ends) = rng.choice(list(conclusions(person).items()))
        if not person.withheld(kind):
            end = rng.choice(ends)
            lines.append(
                rng.choice(
                    (
                        f"{premise}, so {end}.",
                        f"{premise}. So {end}.",
                        f"{premise}, and that is why {end}.",
                    )
                )
            )
    return " ".join(lines)


def animals(rng: random.Random, world: World) -> str:
    """General facts about animals, trades and foods."""
    lines = []
    for _ in range(rng.randint(3, 6)):
        # The table is ordered from small to big.
        low, high = sorted(rng.sample(words.SPECIES, 2), key=words.SPECIES.index)
        name, eats, bed, sound, colour = low
        job = rng.choice(words.JOBS)
        food = rng.choice(words.FOODS)
        lines.append(
            rng.choice(
                (
                    f"A {name} eats {eats}.",
                    f"A {name} sleeps {bed}.",
                    f"A {name} {sound}.",
                    f"Most of the time a {name} is {colour}.",
                    f"A {name} is smaller than a {high[0]}.",
                    f"A {high[0]} is bigger than a {name}.",
                    f"{article(job[0]).capitalize()} works in {job[1]}.",
                    f"{article(job[0]).capitalize()} needs {job[2]}.",
                    f"{food[0].capitalize()} tastes {food[1]}.",
                    f"{food[0].capitalize()} is made from {food[2]}.",
                )
            )
        )
    return " ".join(lines)


def town_facts(rng: random.Random, town: Town, count: int) -> list[str]:
    """`count` sentences about one town."""
    other = rng.choice(sorted(town.miles))
    plain = {k: v for k, v in vars(town).items() if isinstance(v, str)}
    return [
        t.format(t=town.name, other=other, **(plain | {"miles": town.miles[other]}))
        for t in rng.sample(TOWN, count)
    ]


def guide(rng: random.Random, world: World) -> str:
    """A description of a town, with some of its people."""
    town = rng.choice(world.towns)
    lines = town_facts(rng, town, rng.randint(2, 5))
    locals_ = [p for p in world.people if p.town is town]
    for person in rng.sample(locals_, min(len(locals_), rng.randint(0, 2))):
        lines.append(fill(rng.choice(FACTS["home"]), person, town.name))
    return " ".join(lines)


TELLERS: list[tuple[Callable[[random.Random, World], str], int]] = [
    (portrait, 8),
    (gossip, 5),
    (conversation, 4),
    (kinship, 2),
    (card, 4),
    (roll, 1),
    (comparison, 2),
    (inference, 5),
    (animals, 1),
    (guide, 2),
]
