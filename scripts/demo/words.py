"""The words of the demo world: names, trades, animals, foods, things.

Every table is a string with entries separated by `;`, so that words can be added without changing
code. Names are common first names, or combinations of invented parts; nothing here is taken from
any text.
"""

from __future__ import annotations


def rows(table: str) -> list[tuple[str, ...]]:
    """Split `a:b:c; d:e:f` into tuples, whatever the line breaks."""
    return [
        tuple(" ".join(cell.split()) for cell in entry.split(":"))
        for entry in table.split(";")
        if entry.strip()
    ]


def _names(table: str) -> list[str]:
    return [row[0] for row in rows(table.replace(",", ";"))]


WOMEN = _names("""
    Ada, Alma, Anna, Bella, Berta, Cora, Clara, Dina, Dora, Edith, Ella, Emma, Fanny, Flora, Greta, Hanna, Hilda,
    Ida, Ines, Iris, Jana, Julia, Karin, Klara, Lena, Lisa, Lotte, Lucy, Mara, Maria, Martha, Mina, Nadia, Nell,
    Nina, Nora, Olga, Paula, Petra, Rita, Rosa, Ruth, Sara, Selma, Sofia, Tessa, Thea, Tilda, Ursula, Vera, Wanda,
    Zora""")
MEN = _names("""
    Adam, Albert, Anton, Arno, Basil, Ben, Boris, Carl, Conrad, Daniel, David, Edgar, Emil, Erik, Felix, Frank,
    Georg, Gustav, Hans, Hugo, Igor, Ivan, Jakob, Jan, Jonas, Josef, Karl, Klaus, Leo, Lukas, Magnus, Marco, Martin,
    Max, Milo, Niklas, Noah, Olaf, Oscar, Otto, Paul, Peter, Ralf, Robert, Rudi, Samuel, Simon, Stefan, Theo, Tomas,
    Viktor, Walter""")
FAMILY_STARTS = _names("Bram, Cal, Dor, Fen, Gar, Hol, Kel, Lar, Mor, Nor, Pel, Ros, Tam, Ves")
FAMILY_ENDS = _names("wick, bury, stone, ley, ridge, well, mond, den, berg, sby")
TOWN_STARTS = _names(
    "Alder, Birch, Cran, Elder, Frost, Gull, Hazel, Iron, Larks, Mill, Otter, "
    "Quill, Raven, Salt, Thorn, Wind"
)
TOWN_ENDS = _names("mouth, ham, bridge, hollow, cross, haven, mere, gate")
PET_NAMES = _names("""
    Pip, Biscuit, Shadow, Button, Pepper, Clover, Ginger, Nutmeg, Rusty, Snowball, Tinker, Velvet, Whisper, Ziggy,
    Bramble, Cinder, Dusty, Ember, Fidget, Gizmo, Hopper, Jingle, Kipper, Lucky, Muffin, Noodle, Olive, Patches,
    Quick, Rascal, Sooty, Thimble, Turnip, Waffle, Acorn, Bubbles, Crumb, Domino, Echo, Freckle""")

# trade : its place : its tool
JOBS = rows("""
    baker:the bakery:a rolling pin; smith:the smithy:a hammer; miller:the mill:a flour sack; teacher:the school:a
    piece of chalk; fisher:the harbour:a net; farmer:the fields:a plough; shepherd:the meadow:a crook; weaver:the
    weaving room:a loom; potter:the pottery:a potter's wheel; tailor:the tailor shop:a needle; cobbler:the shoe
    shop:an awl; carpenter:the workshop:a saw; doctor:the hospital:a thermometer; judge:the courthouse:a gavel;
    gardener:the garden:a spade; painter:the studio:a brush; barber:the barber shop:a pair of scissors; butcher:the
    butcher shop:a cleaver; cook:the kitchen:a ladle; clerk:the town hall:a stamp; sailor:the ship:a rope; miner:the
    mine:a pickaxe; printer:the print house:a press; librarian:the library:a card box; beekeeper:the bee yard:a
    smoker; brewer:the brewery:a barrel; glazier:the glass house:a blowpipe; mason:the quarry:a chisel; postman:the
    post office:a mail bag; ranger:the forest:an axe; organist:the church:an organ; innkeeper:the inn:a big key;
    groom:the stable:a saddle; astronomer:the tower:a telescope; chemist:the laboratory:a flask; tinker:the market:a
    soldering iron""")

# animal : its food : its sleeping place : its sound : its colour   (from the smallest to the
# biggest)
SPECIES = rows("""
    cricket:leaves:under a stone:chirps:green; mouse:crumbs:in a hole:squeaks:grey; canary:seeds:on a
    perch:sings:yellow; frog:flies:under a leaf:croaks:green; hamster:nuts:in a wheel:squeals:golden;
    sparrow:worms:in a hedge:twitters:brown; squirrel:acorns:in a hollow tree:chatters:red; pigeon:peas:on the
    roof:coos:grey; crow:scraps:on the chimney:caws:black; hedgehog:beetles:under the leaves:snuffles:brown;
    duck:duckweed:by the pond:quacks:white; rabbit:carrots:in a hutch:thumps:white; hen:corn:in the
    coop:clucks:brown; cat:fish:by the stove:meows:black; parrot:fruit:in a cage:talks:green; goose:grass:in the
    yard:honks:white; fox:eggs:in a den:yelps:red; dog:bones:on the mat:barks:brown; pig:potatoes:in the
    sty:grunts:pink; goat:thistles:in the shed:bleats:white; donkey:straw:in the barn:brays:grey; pony:oats:in the
    stall:neighs:brown; cow:hay:in the byre:moos:brown; bear:honey:in a cave:growls:black""")

# food : taste : main ingredient
FOODS = rows("""
    plum cake:sweet:plums; onion soup:salty:onions; apple pie:sweet:apples; lemon ice:sour:lemons; pepper
    stew:spicy:peppers; cheese bread:salty:cheese; honey buns:sweet:honey; pickled beets:sour:beets; bean
    stew:mild:beans; fried fish:salty:fish; nut cake:sweet:nuts; potato pancakes:mild:potatoes; cherry
    jam:sweet:cherries; cabbage rolls:sour:cabbage; mushroom pie:mild:mushrooms; ginger biscuits:spicy:ginger;
    carrot soup:mild:carrots; radish salad:spicy:radishes; pear tart:sweet:pears; smoked ham:salty:ham; rice
    pudding:sweet:rice; mustard eggs:spicy:eggs; berry porridge:sour:berries; pumpkin bread:mild:pumpkins; roast
    goose:salty:a goose; fig rolls:sweet:figs; turnip mash:mild:turnips; leek pie:mild:leeks""")

COLOURS = _names(
    "red, blue, green, yellow, black, white, brown, purple, orange, grey, pink, golden"
)
HOBBIES = _names("""
    playing the flute, playing the violin, playing the drum, carving spoons, painting boats, flying kites, knitting
    socks, growing roses, telling jokes, singing songs, dancing, swimming, climbing trees, picking mushrooms,
    reading maps, writing letters, playing chess, playing cards, watching birds, collecting shells, collecting
    coins, pressing flowers, building clocks, skating, riding, baking bread, drawing faces, juggling, fishing,
    rowing""")
FEARS = _names("""
    a bull, a snake, a big spider, a swan, a wolf, a bat, a ladder, a scarecrow, a deep well, a dark cellar, a rat,
    a wasp, a ghost, a mask, a narrow bridge, a storm cloud, a black dog, a windmill, an empty house, an old mirror""")
DRINKS = _names(
    """mint tea, black coffee, cold milk, apple juice, hot cocoa, spring water, berry juice, ginger beer,
    barley beer, rose tea"""
)
MONTHS = _names(
    "January, February, March, April, May, June, July, August, September, October, "
    "November, December"
)
THING_LOOKS = _names("silver, brass, wooden, glass, old, painted, tiny, heavy")
THINGS = _names("whistle, compass, lamp, box, bell, ring, clock, cup, mirror, key, drum, book")

TERRAINS = _names("the sea, a lake, a river, the forest, the hills, the marsh")
GOODS = _names("""
    pots, shoes, cheese, rope, honey, candles, knives, apples, wool, salt, bells, baskets, hats, carpets, paper,
    soap, glass, nails, herbs, barrels, ribbons, toys, pipes, boats""")
WEATHERS = _names("rainy, foggy, windy, snowy, sunny, stormy, mild, dry")
LANDMARKS = _names("""
    a clock tower, a stone bridge, a round mill, a white church, a lighthouse, an old castle, a tall oak, a
    fountain, a bronze statue, a windmill, a glass house, a great gate""")
SIZES = _names("a hamlet, a village, a small town, a large town, a city")
DAYS = _names("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday")
MILES = _names(
    "two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, fifteen, twenty, thirty"
)
SPOTS = _names("""
    the chest, the drawer, the basket, the cupboard, the barrel, the cart, the boat, the sack, the trunk, the oven,
    the shed, the bucket, the cellar, the attic""")
