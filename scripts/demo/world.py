"""The facts of the demo world: towns, families, and the attributes of each person.

The world is drawn once from a seed and never changes; texts and questions only describe it. So a
fact is the same in every document, and a model can learn it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import words

Cells = tuple[str, ...]
KINDRED = {
    True: ("mother", "daughter", "sister", "wife"),
    False: ("father", "son", "brother", "husband"),
}


@dataclass(eq=False)
class Town:
    """A town: its surroundings, its goods, and the distances to its neighbours in miles."""

    name: str
    terrain: str
    goods: str
    weather: str
    landmark: str
    size: str
    colour: str
    market: str
    miles: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Person:
    """One of the world's people. `values` maps an attribute's name to the words that state it."""

    first: str
    family: str
    woman: bool
    town: Town
    job: Cells
    pet: Cells
    food: Cells
    values: dict[str, str]
    kin: dict[str, Person] = field(default_factory=dict)
    friend: Person | None = None

    @property
    def name(self) -> str:
        return f"{self.first} {self.family}"

    @property
    def he(self) -> str:
        return "she" if self.woman else "he"

    @property
    def him(self) -> str:
        return "her" if self.woman else "him"

    @property
    def his(self) -> str:
        return "her" if self.woman else "his"

    def withheld(self, inference: str) -> bool:
        """Whether the training text never states this conclusion about this person, so that a
        question may ask for it.
        """
        return random.Random(f"{self.name}/{inference}").random() < 0.25


@dataclass(eq=False)
class World:
    """All towns and people of one world."""

    towns: list[Town]
    people: list[Person]


def article(noun: str) -> str:
    """The noun with its indefinite article: `article("owl") == "an owl"`."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def build_towns(rng: random.Random, count: int) -> list[Town]:
    """Draw the towns. Each has distances to at least two others, the same in both directions."""
    names = rng.sample([a + b for a in words.TOWN_STARTS for b in words.TOWN_ENDS], count)
    towns = []
    for name in names:
        terrain, goods, weather = (
            rng.choice(kind) for kind in (words.TERRAINS, words.GOODS, words.WEATHERS)
        )
        landmark = rng.choice(words.LANDMARKS)
        size = rng.choice(words.SIZES)
        towns.append(
            Town(
                name,
                terrain,
                goods,
                weather,
                landmark,
                size,
                rng.choice(words.COLOURS),
                rng.choice(words.DAYS),
            )
        )
    for town in towns:
        for other in rng.sample([t for t in towns if t is not town], 2):
            town.miles[other.name] = other.miles[town.name] = rng.choice(words.MILES)
    return towns


def _person(rng: random.Random, first: str, family: str, woman: bool, town: Town) -> Person:
    job = rng.choice(words.JOBS)
    pet = rng.choice(words.SPECIES)
    food = rng.choice(words.FOODS)
    values = {
        "home": town.name,
        "job": job[0],
        "pet": pet[0],
        "pet_name": rng.choice(words.PET_NAMES),
        "food": food[0],
        "colour": rng.choice(words.COLOURS),
        "hobby": rng.choice(words.HOBBIES),
        "fear": rng.choice(words.FEARS),
        "drink": rng.choice(words.DRINKS),
        "month": rng.choice(words.MONTHS),
        "thing": f"{rng.choice(words.THING_LOOKS)} {rng.choice(words.THINGS)}",
    }
    return Person(first, family, woman, town, job, pet, food, values)


def _relate(members: list[Person]) -> None:
    """Give a family its kinship words: the first two are wife and husband, the rest their grown
    children.
    """
    parents = members[:2]
    children = members[2:]
    for one, other in (parents, parents[::-1]):
        one.kin[KINDRED[other.woman][3]] = other
    for child in children:
        for parent in parents:
            child.kin[KINDRED[parent.woman][0]] = parent
    # only where the word names one person: someone with two brothers has no "the brother"
    for woman in (True, False):
        same = [child for child in children if child.woman is woman]
        if len(same) == 1:
            for parent in parents:
                parent.kin[KINDRED[woman][1]] = same[0]
            for sibling in children:
                if sibling is not same[0]:
                    sibling.kin[KINDRED[woman][2]] = same[0]


def build_world(seed: int, people: int = 300, towns: int = 48) -> World:
    """Draw a world of about `people` people, in families of two to five, and `towns` towns."""
    rng = random.Random(seed)
    places = build_towns(rng, towns)
    families = [a + b for a in words.FAMILY_STARTS for b in words.FAMILY_ENDS]
    rng.shuffle(families)
    everyone: list[Person] = []
    for family in families:
        if len(everyone) >= people:
            break
        home = rng.choice(places)
        women = rng.sample(words.WOMEN, 4)
        men = rng.sample(words.MEN, 4)
        members = [
            _person(rng, women.pop(), family, True, home),
            _person(rng, men.pop(), family, False, home),
        ]
        for _ in range(rng.randint(0, 3)):
            woman = rng.random() < 0.5
            first = (women if woman else men).pop()
            members.append(_person(rng, first, family, woman, rng.choice(places)))
        _relate(members)
        everyone += members
    for person in everyone:
        person.friend = rng.choice([p for p in everyone if p.family != person.family])
    return World(places, everyone)


def derived(person: Person) -> dict[str, str]:
    """The conclusions from a person's facts, in the words of the choices of a question."""
    place, tool = person.job[1:]
    eats, bed, sound = person.pet[1:4]
    return {
        "place": place,
        "tool": tool,
        "eats": eats,
        "bed": bed,
        "sound": sound,
        "taste": person.food[1],
        "terrain": person.town.terrain,
        "landmark": person.town.landmark,
    }
