"""Short stories whose endings follow from the story, from the world's facts, or from common sense.

A story has a body, the ending that follows, endings that do not follow, and an optional sentence
after the ending. The training text joins body and ending; the questions ask for the ending.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import words
from telling import fill, value_of
from world import Person, World, article


@dataclass
class Story:
    """A story. Body and ending form one text; `others` are endings of the same form that do not
    follow.
    """

    body: str
    ending: str
    others: list[str]
    after: str = ""

    def text(self) -> str:
        """The whole story, as in the training text."""
        return (
            f"{self.body} {self.ending}{'.' if not self.ending.endswith('.') else ''} {self.after}"
        ).strip()


OPENINGS = [
    "One morning",
    "One day",
    "Last week",
    "Long ago",
    "On a cold evening",
    "In spring",
    "One afternoon",
    "After dinner",
    "Early one day",
    "On a quiet Sunday",
]
ERRANDS = [
    "went to the river",
    "slept for an hour",
    "talked to a neighbour",
    "walked to the market",
    "fed the hens",
    "worked until noon",
    "took a long walk",
    "swept the floor",
    "waited for the rain to stop",
    "read an old letter",
]
MOODS = [
    "It was a good day.",
    "Everyone laughed.",
    "The sun went down.",
    "Then it was time for bed.",
    "Nobody said a word.",
    "That was that.",
    "The neighbours talk about it still.",
    "And so the day ended.",
]
# event : consequence
EVENTS = words.rows(
    """It rained all day and {n} had no coat: {n} came home wet and cold;
    {n} forgot the bread in the oven: the bread was burnt and black;
    {n} worked all night without sleep: {n} was very tired;
    {n} ate nothing from morning to night: {n} was terribly hungry;
    {n} walked in the sun without water: {n} was terribly thirsty;
    {n} dropped the glass jar on the stones: the jar broke into pieces;
    {n} left the gate of the yard open: the animals ran out into the road;
    {n} planted seeds and watered them every day: green plants came up from the ground;
    {n} touched the hot stove: {n} burned a finger;
    {n} left the butter in the sun: the butter melted;
    {n} let the fire go out: the room grew cold;
    {n} put the wet shirts on the line in the wind: the shirts were soon dry;
    {n} left the milk standing for two weeks: the milk turned sour;
    {n} forgot to shut the window in the snow storm: there was snow on the floor;
    {n} told the funniest joke of the year: everyone laughed and laughed;
    {n} stepped on the thin ice of the pond: the ice cracked and broke;
    {n} pulled the cat by the tail: the cat scratched {n};
    {n} blew out the only candle: it was completely dark;
    {n} found the lost purse and gave it back: the owner thanked {n};
    {n} lost the key to the house: {n} could not open the door;
    {n} poured too much salt into the soup: nobody wanted to eat the soup;
    {n} practised the song every day for a year: {n} sang it without a mistake;
    {n} sharpened the old knife: the knife cut very well;
    {n} painted the bench and sat down too soon: there was paint on the trousers"""
)


def _pair(rng: random.Random, world: World) -> tuple[Person, Person]:
    """Two people with different first names, so that a first name identifies one of them."""
    one, two = rng.sample(world.people, 2)
    while one.first == two.first:
        two = rng.choice(world.people)
    return one, two


def hiding(rng: random.Random, world: World) -> Story:
    """Two things are put away, and one is taken from its place again."""
    hero = rng.choice(world.people)
    (first, second), (here, there, nowhere) = (
        rng.sample(words.THINGS, 2),
        rng.sample(words.SPOTS, 3),
    )
    wanted, spot, wrong = rng.choice(((first, here, there), (second, there, here)))
    body = (
        f"{rng.choice(OPENINGS)} {hero.name} put the {first} in {here} and the {second} in "
        f"{there}. Then {hero.he} {rng.choice(ERRANDS)}. "
        + rng.choice(
            (
                f"Later {hero.first} needed the {wanted}. {hero.he.capitalize()} found the "
                f"{wanted} in",
                f"When {hero.he} came back, {hero.he} wanted the {wanted}, so {hero.he} looked in",
                f"In the evening {hero.first} took the {wanted} out of",
            )
        )
    )
    return Story(body, spot, [wrong, nowhere], rng.choice(MOODS))


def meeting(rng: random.Random, world: World) -> Story:
    """Somebody meets the thing that they fear, or another thing. The story states the fear only
    sometimes.
    """
    hero = rng.choice(world.people)
    fear = hero.values["fear"]
    afraid = rng.random() < 0.5
    met = fear if afraid else rng.choice([f for f in words.FEARS if f != fear])
    told = f"{hero.first} was afraid of {fear}. " if rng.random() < 0.6 else ""
    body = (
        f"{rng.choice(OPENINGS)} {hero.name} "
        f"{rng.choice(('was walking home', 'went for a walk', 'was on the road'))}. {told}"
        f"{rng.choice(('Suddenly', 'Behind a tree', 'At the corner'))} {hero.he} saw {met}. "
        f"{hero.first}"
    )
    ends = ["ran away as fast as possible", "walked on without any fear"]
    return Story(body, ends[0 if afraid else 1], [ends[1 if afraid else 0]], rng.choice(MOODS))


def present(rng: random.Random, world: World) -> Story:
    """A birthday, and the favourite food of the host."""
    hero, guest = _pair(rng, world)
    food = hero.food[0]
    told = rng.choice(
        (
            "",
            f"Everyone knew that {hero.first} loved {food}. ",
            f'"Bring me {food}," said {hero.first}. ',
        )
    )
    body = (
        f"It was {hero.values['month']}, and {hero.name} had {hero.his} birthday. {told}"
        f"{guest.name} wanted to bring the food that "
        f"{hero.first} likes best. So {guest.first} made"
    )
    others = rng.sample([f[0] for f in words.FOODS if f[0] != food], 3)
    return Story(
        body,
        food,
        others,
        f"{hero.first} {rng.choice(('was happy', 'ate it all', 'said thank you'))}.",
    )


def journey(rng: random.Random, world: World) -> Story:
    """A journey to another town and home again."""
    hero = rng.choice(world.people)
    home = hero.town
    away = rng.choice([t for t in world.towns if t is not home])
    told = rng.choice(("", f"of {home.name} "))
    body = (
        f"{rng.choice(OPENINGS)} {hero.name} {told}went to {away.name} to buy {away.goods}. "
        f"{rng.choice(('The day was long.', 'It was far.', ''))} "
        f"At night {hero.first} "
        f"{rng.choice(('went back home to', 'came home again to', 'slept at home in'))}"
    ).replace("  ", " ")
    others = [away.name, *rng.sample([t.name for t in world.towns if t not in (home, away)], 2)]
    return Story(body, home.name, others, rng.choice(MOODS))


def event(rng: random.Random, world: World) -> Story:
    """A cause and its effect."""
    hero = rng.choice(world.people)
    chosen = rng.sample(EVENTS, 4)
    cause, effect = (part.format(n=hero.first) for part in chosen[0])
    body = (
        f"{rng.choice(OPENINGS)} {hero.name} {rng.choice(ERRANDS)}. "
        f"{rng.choice(('Then', 'After that', 'Later'))} something happened. {cause}. "
        f"{rng.choice(('In the end', 'So', 'Because of that'))}"
    )
    return Story(
        body, effect, [other[1].format(n=hero.first) for other in chosen[1:]], rng.choice(MOODS)
    )


def race(rng: random.Random, world: World) -> Story:
    """A race: one does badly and the other wins, or one does well and wins."""
    one, two = _pair(rng, world)
    what = rng.choice(
        ("a race", "a swimming race", "a game of cards", "a boat race", "a game of chess")
    )
    actor, other = rng.choice(((one, two), (two, one)))
    lost = rng.random() < 0.5
    happening = rng.choice(
        (
            "made a bad mistake",
            "fell asleep",
            "gave up too early",
            "got very sick",
            "forgot the rules",
        )
        if lost
        else (
            "had trained all year",
            "was much better",
            "had all the luck",
            "made no mistake",
            "was never so good before",
        )
    )
    winner, loser = (other, actor) if lost else (actor, other)
    body = (
        f"{rng.choice(OPENINGS)} {one.name} and {two.name} had {what}. {actor.first} {happening}. "
        f"{rng.choice(('So the winner was', 'The prize went to'))}"
    )
    return Story(body, winner.first, [loser.first], rng.choice(MOODS))


def trade(rng: random.Random, world: World) -> Story:
    """Two people trade two things."""
    one, two = _pair(rng, world)
    first, second, third = (
        f"{rng.choice(words.THING_LOOKS)} {thing}" for thing in rng.sample(words.THINGS, 3)
    )
    asked, got, gave = rng.choice(((one, second, first), (two, first, second)))
    body = (
        f"{rng.choice(OPENINGS)} {one.name} had {article(first)} and {two.name} had "
        f"{article(second)}. "
        f"{rng.choice(('They traded the two things', 'They changed with each other', 'They made a trade'))}. {rng.choice(('Now', 'Since then', 'After that'))} "
        f"{asked.first} had the"
    )
    return Story(body, got, [gave, third], rng.choice(MOODS))


def lost_pet(rng: random.Random, world: World) -> Story:
    """A pet is lost, called by its name, and answers in its own way."""
    hero = rng.choice(world.people)
    kind, _, bed, sound = hero.pet[:4]
    body = (
        f"{rng.choice(OPENINGS)} the pet of {hero.name} was gone. "
        f"{hero.first} looked everywhere and called: {hero.values['pet_name']}! "
        f"At last {hero.he} heard how something {sound}. It was {hero.his}"
    )
    others = rng.sample([s[0] for s in words.SPECIES if s[0] != kind], 3)
    return Story(body, kind, others, rng.choice((f"It was {bed}.", *MOODS)))


def day(rng: random.Random, world: World) -> Story:
    """A person's day, according to the facts."""
    hero = rng.choice(world.people)
    values = hero.values
    place = hero.job[1]
    lines = [
        f"{hero.name} got up early in {values['home']}.",
        f"{hero.he.capitalize()} drank {values['drink']} and fed {hero.his} {values['pet']} "
        f"{values['pet_name']}.",
        f"Then {hero.he} worked in {place}, for {hero.he} is {article(values['job'])}."
        if not hero.withheld("place")
        else "",
        fill("At noon there was {v}, and {N} was happy.", hero, values["food"], hero.first),
        f"{rng.choice(('In the afternoon', 'Later'))} {hero.he} met {hero.his} friend "
        f"{value_of(hero, 'friend')}.",
    ]
    kept = [line for line in lines if line and rng.random() < 0.7]
    return Story(
        " ".join(kept) + f" In the evening {hero.name} spent {hero.his} time",
        values["hobby"],
        [],
        rng.choice(MOODS),
    )


STORIES: list[Callable[[random.Random, World], Story]] = [
    hiding,
    meeting,
    present,
    journey,
    event,
    race,
    trade,
    lost_pet,
    day,
]


def story(rng: random.Random, world: World) -> str:
    """One whole story."""
    return rng.choice(STORIES)(rng, world).text()


def document(
    rng: random.Random,
    world: World,
    tellers: list[tuple[Callable[[random.Random, World], str], int]],
) -> str:
    """One document: one kind of text, a story in a third of all cases."""
    kinds = [*(teller for teller, _ in tellers), story]
    weights = [*(weight for _, weight in tellers), sum(weight for _, weight in tellers) // 2]
    return rng.choices(kinds, weights)[0](rng, world)
